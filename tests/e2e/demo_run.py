"""One headless demo as a subprocess on a folder of its own, with its summary and its children's process ids."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from controlplane.embedded.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
SERVERS = ("DATABASE_URL", "DATABASE_OWNER_URL", "REDIS_URL", "CELERY_BROKER_URL", "FLEXBAND_AS_OWNER")


class DemoRun:
    """`start`, then `wait_for` lines of its output, `kill` children, `finish`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.json = folder / "summary.json"
        self.output = folder / "output.txt"
        environment = {name: value for name, value in os.environ.items() if name not in SERVERS}
        environment["FLEXBAND_VAR"] = str(folder / "var")
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "manage.py", "demo", "--port", str(self.port), *arguments]
        if "--headless" in arguments:
            command += ["--json", str(self.json)]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.seen: dict[int, psutil.Process] = {}

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str, timeout_s: float = 120.0) -> str:
        """The text that matches; fails with the output when it does not come."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.children()
            if found := re.search(pattern, self.text()):
                return found.group(0)
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise AssertionError(f"{pattern!r} did not come:\n{self.text()}")

    def children(self) -> list[psutil.Process]:
        """Every process below the demo now; remembered, so that `left_behind` knows them all."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(child.pid, child)
        return [child for child in self.seen.values() if child.is_running()]

    def child(self, matches: Callable[[list[str]], bool]) -> psutil.Process:
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            for child in self.children():
                with contextlib.suppress(psutil.Error):
                    if child.status() != psutil.STATUS_ZOMBIE and matches(child.cmdline()):
                        return child
            time.sleep(0.2)
        raise AssertionError(f"no such child:\n{self.text()}")

    def kill(self, *words: str) -> int:
        """SIGKILL to the child whose command line has all the words; its former pid."""
        child = self.child(lambda line: all(any(word in part for part in line) for word in words))
        child.kill()
        return child.pid

    def finish(self, timeout_s: float) -> int:
        while self.process.poll() is None and timeout_s > 0:
            self.children()
            time.sleep(0.5)
            timeout_s -= 0.5
        if self.process.poll() is None:
            self.stop()
            raise AssertionError(f"the demo did not end:\n{self.text()}")
        return self.process.returncode

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_s: float = 60.0) -> int:
        self.children()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def left_behind(self, timeout_s: float = 15.0) -> list[str]:
        """What still runs of all that it ever started."""
        deadline = time.monotonic() + timeout_s
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return alive

    def _alive(self) -> list[str]:
        names = []
        for child in self.seen.values():
            with contextlib.suppress(psutil.Error):
                if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                    names.append(" ".join(child.cmdline())[:120])
        return names

    def summary(self) -> dict[str, Any]:
        return json.loads(self.json.read_text())

    def log(self, name: str) -> str:
        return (self.folder / "var" / "log" / f"{name}.log").read_text(errors="replace")
