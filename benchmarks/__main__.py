"""`make bench` runs every benchmark one after the other; `make bench ARGS="ingest --quick"` one of them.

Each prints its figures as ratios beside their goals and exits 1 when a goal is missed; so does this.
"""

import importlib.util
import subprocess
import sys

COMPILED_TOO = {"core", "agent", "lab"}
"""What runs compiled where there is a compiler: it compiles first, a minute or two."""
BENCHMARKS = ("ingest", "policy_push", "controller", "core", "agent", "jobs", "money", "ledger", "lab", "live", "pages",
              "browser")  # fmt: skip


def main(arguments: list[str]) -> int:
    names = [name for name in arguments if not name.startswith("-")] or list(BENCHMARKS)
    options = [option for option in arguments if option.startswith("-")]
    known = [name for name in BENCHMARKS if importlib.util.find_spec(f"benchmarks.{name}")]
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        sys.stderr.write(f"there is no benchmark {', '.join(unknown)}; known are {', '.join(known)}\n")
        return 2
    worst = 0
    if COMPILED_TOO & set(names):
        # Without a compiler it says so, and what follows is measured interpreted.
        subprocess.run([sys.executable, "-m", "controlplane.compiled"], check=False)
    for name in names:
        if name not in known:
            continue
        sys.stdout.write(f"\n== {name}\n")
        sys.stdout.flush()
        worst = max(
            worst, subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], check=False).returncode
        )
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
