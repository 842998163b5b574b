"""`python -m tests`: the whole suite in two passes, the second for what needs the machine for itself.

Side by side runs everything that keeps to its own database; alone run real processes, sockets that share Valkey's
channels and whatever measures a promised deadline. The exit status is the worse of the two.
"""

import subprocess
import sys

PASSES = (
    ("side by side", ["-n", "2", "--dist", "loadfile", "-m", "not alone"]),
    ("alone", ["-m", "alone"]),
)


def main(arguments: list[str]) -> int:
    worst = 0
    for name, selection in PASSES:
        sys.stdout.write(f"\n== {name}\n")
        sys.stdout.flush()
        command = [sys.executable, "-m", "pytest", "-q", *selection, *arguments]
        worst = max(worst, subprocess.run(command, check=False).returncode)
    return worst


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
