"""Stops what a killed supervisor left behind (run as a script: `python -I -S watchdog.py`).

The supervisor writes one JSON line per change to our standard input. When the input ends without "bye", it was killed:
every process that it had registered is told to stop, in order, and after its time its whole group is killed. While we
run we hold the supervisor's lock, so that the next one waits for us.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any


def main() -> None:
    """Follow the supervisor's lines to their end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    registered: dict[int, dict[str, Any]] = {}
    for line in sys.stdin:
        with contextlib.suppress(ValueError, KeyError):
            message = json.loads(line)
            if message.get("bye"):
                return
            if "add" in message:
                registered[message["add"]] = message
            else:
                registered.pop(message["remove"], None)
    for order in sorted({tuple(entry["order"]) for entry in registered.values()}):
        stop([entry for entry in registered.values() if tuple(entry["order"]) == order])


def stop(entries: list[dict[str, Any]]) -> None:
    """Tell the processes of `entries` to stop, wait for them, then kill what is left of their groups."""
    began = time.monotonic()
    for entry in entries:
        if running(entry):
            with contextlib.suppress(OSError):
                os.kill(entry["add"], entry["signal"])
    for entry in entries:
        while running(entry) and time.monotonic() < began + entry["timeout_s"]:
            time.sleep(0.05)
        if running(entry) or not mark(entry["add"]):  # the group's number is not given to others while it has members
            with contextlib.suppress(OSError):
                os.killpg(entry["add"], signal.SIGKILL)


def running(entry: dict[str, Any]) -> bool:
    """True while the process of `entry` lives, and is not a later one with the same number."""
    try:
        os.kill(entry["add"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return mark(entry["add"]) in (entry["mark"], None)


def mark(pid: int) -> str | None:
    """Start time of `pid`, "" when it is gone or a zombie, None where the system does not tell."""
    if not os.path.isdir("/proc/self"):
        return None
    try:
        with open(f"/proc/{pid}/stat") as handle:
            fields = handle.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


if __name__ == "__main__":
    main()
