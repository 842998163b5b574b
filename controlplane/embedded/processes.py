"""Processes by number: is it alive, end it, start one that outlives its caller or dies with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCH = Path(__file__).with_name("launch.py")

# Kept for the life of the interpreter, so that a detached server that ends is reaped and not reported as leaked.
_detached: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class RunAs:
    """The unprivileged user that a program runs as when its parent is root."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Command:
    """A program in the foreground, ready to be spawned: arguments, environment, user and working folder."""

    argv: tuple[str, ...]
    env: dict[str, str]
    run_as: RunAs | None = None
    cwd: Path = Path("/")


def process_alive(pid: int) -> bool:
    """True while `pid` runs; a zombie counts as gone."""
    for process in _detached:
        if process.pid == pid:
            return process.poll() is None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return True


def start_mark(pid: int) -> str:
    """What tells this process from a later one with the same number: its start time; empty when it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    if sys.platform == "linux":
        return ""
    answer = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def command_line(pid: int) -> str:
    """The arguments of `pid`, joined by spaces; empty when it is gone."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return ""
    answer = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Wait until `pid` has ended; False when it still runs after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while process_alive(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def end_process(pid: int, signals: Sequence[tuple[signal.Signals, float]]) -> bool:
    """Send each signal in turn, waiting its seconds, until `pid` has ended; True when it has."""
    for number, timeout_s in signals:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if wait_gone(pid, timeout_s):
            return True
    return not process_alive(pid)


def bound_argv(command: Command, *, stop_signal: signal.Signals) -> list[str]:
    """The arguments that run `command` bound to this process: it gets `stop_signal` when this process dies."""
    user = [] if command.run_as is None else [f"--uid={command.run_as.uid}", f"--gid={command.run_as.gid}"]
    own = [sys.executable, "-I", "-S", str(LAUNCH), f"--parent={os.getpid()}", f"--signal={int(stop_signal)}"]
    return [*own, *user, "--", *command.argv]


def spawn(
    command: Command, log: Path, *, bound_to_parent: bool, stop_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own with both outputs appended to `log`.

    Never a pipe: a server that outlives its caller would keep the pipe open and the caller would wait for ever.
    """
    with open(log, "ab") as output:
        if bound_to_parent:
            argv, user = bound_argv(command, stop_signal=stop_signal), None
        else:
            argv, user = list(command.argv), command.run_as
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=command.cwd,
            env=command.env,
            start_new_session=True,
            user=None if user is None else user.uid,
            group=None if user is None else user.gid,
            extra_groups=None if user is None else [],
        )


def spawn_server(
    command: Command, log: Path, *, bound_to_parent: bool, stop_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    """Like `spawn`, for a server that nobody supervises."""
    process = spawn(command, log, bound_to_parent=bound_to_parent, stop_signal=stop_signal)
    _detached.append(process)
    return process
