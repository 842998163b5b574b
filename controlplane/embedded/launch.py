"""Become another program that ends when its parent does (run as a script: `python -I -S launch.py ... -- argv`).

The kernel is asked for a signal at the parent's death before the program starts, so there is no moment at which a
SIGKILL of the parent leaves the program behind. It is a program of its own because code between fork and exec is not
safe in a parent with threads. Privileges are dropped here, first, because dropping them clears that request.
On systems without PR_SET_PDEATHSIG only the rest is done.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Drop privileges, ask for the signal, replace this process; returns only when that failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--signal", type=int, required=True)
    parser.add_argument("--uid", type=int)
    parser.add_argument("--gid", type=int)
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args(arguments)
    if options.uid is not None:
        os.setgroups([])
        os.setgid(options.gid)
        os.setuid(options.uid)
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, options.signal, 0, 0, 0)
    if os.getppid() != options.parent:
        return 1  # the parent died before the request was in place
    try:
        os.execvp(options.argv[0], options.argv)
    except OSError as error:
        print(f"cannot run {options.argv[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
