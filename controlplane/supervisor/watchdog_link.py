"""The supervisor's end of the pipe to its watchdog."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from controlplane.embedded.processes import start_mark

SCRIPT = Path(__file__).with_name("watchdog.py")


class WatchdogLink:
    """Keeps a watchdog running and told of every child. All calls come from one thread."""

    def __init__(self, lock_descriptor: int) -> None:
        self._lock_descriptor = lock_descriptor
        self._entries: dict[int, dict[str, Any]] = {}
        self._process = self._spawn()

    def add(self, pid: int, *, order: tuple[int, int], stop_signal: int, stop_timeout_s: float) -> None:
        """Register a child; `order` sorts the stops."""
        entry = {
            "add": pid,
            "mark": start_mark(pid),
            "order": order,
            "signal": int(stop_signal),
            "timeout_s": stop_timeout_s,
        }
        self._entries[pid] = entry
        self._send(entry)

    def remove(self, pid: int) -> None:
        """Forget a child that has ended."""
        if self._entries.pop(pid, None) is not None:
            self._send({"remove": pid})

    def keep_alive(self) -> None:
        """Start another watchdog when the last one was killed."""
        if self._process.poll() is not None:
            self._process = self._spawn()
            for entry in self._entries.values():
                self._send(entry)

    def close(self) -> None:
        """Everything was stopped: let the watchdog go."""
        self._send({"bye": True})
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            pass_fds=(self._lock_descriptor,),
        )

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it was killed: keep_alive sends everything again
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()
