"""Starts child processes, keeps them running and leaves none behind.

    with Supervisor(var_dir) as supervisor:
        supervisor.start(database, cache)        # at once; returns when both are ready
        supervisor.run("migrate", [...])         # to its end
        supervisor.start(web)
        supervisor.wait()                        # until Ctrl-C or SIGTERM

The block is left in order, against the order of the starts, whatever the reason. Should this process be killed, the
kernel and a watchdog stop the children. Children live in sessions of their own, so a Ctrl-C reaches only us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from controlplane.supervisor import runlock
from controlplane.supervisor.child import NEVER, Child
from controlplane.supervisor.diagnosis import ADVICE, Cause, cause_of, ending
from controlplane.supervisor.logs import rotate_if_large
from controlplane.supervisor.running import ALIVE, ENDED, RunningChild, State
from controlplane.supervisor.watchdog_link import WatchdogLink

TICK_S = 0.05
ROTATE_EVERY_S = 5.0
NOT_RUNNABLE = 127  # as shells say it: there is no such program, or it may not be run
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SupervisorError(RuntimeError):
    """A child that the run cannot do without has given up, or a task failed. The message was already said."""


class StopRequested(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP: raised once in the main thread, wherever it is, and swallowed by the block's end."""


def say_line(line: str) -> None:
    """Print a line for the person at the terminal; a closed terminal is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)


class Supervisor:
    """Supervises children on behalf of one folder. Enter it in the main thread; its methods are for that thread.

    var_dir: logs go to var_dir/log, the lock to var_dir/run. say: takes each line of progress. Entering raises
    AlreadyRunningError when another supervisor works on the folder.
    """

    def __init__(self, var_dir: Path, *, say: Callable[[str], None] = say_line) -> None:
        self.var_dir = var_dir.resolve()
        self.log_dir = self.var_dir / "log"
        self.stopped_by_signal = False
        self._say = say
        self._children: dict[str, RunningChild] = {}
        self._changed = threading.Condition(threading.RLock())
        self._failure: str | None = None
        self._leaving = False
        self._hurry = False
        self._finished = threading.Event()
        self._batch = 0
        self._rotate_due_s = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Supervisor:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._lock_descriptor = runlock.acquire(self.var_dir)
        self._watchdog = WatchdogLink(self._lock_descriptor)
        self._monitor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._monitor.start()
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._leaving = True
        try:
            self._stop_all()
        finally:
            self._finished.set()
            self._monitor.join()
            self._watchdog.close()
            os.close(self._lock_descriptor)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        return isinstance(error, StopRequested)

    def start(self, *children: Child) -> None:
        """Start `children` side by side and return when all are ready; raises SupervisorError."""
        entries = self._add(children, is_task=False)
        self._await(lambda: all(entry.state is State.READY or entry.state in ENDED for entry in entries))

    def run(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        cwd: Path | None = None,
    ) -> None:
        """Run a task to its end; raises SupervisorError when it fails or takes longer than `timeout_s`."""
        task = Child(name, argv, env=env, ready_timeout_s=timeout_s, restart=NEVER, cwd=cwd)
        (entry,) = self._add([task], is_task=True)
        self._await(lambda: entry.state in ENDED)

    def wait(self, seconds: float | None = None, *, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for `seconds` (None: for ever) or until `until()`, asked twice a second; raises SupervisorError."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not until():
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            if left <= 0:
                return
            self.check()
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, left)
        self.check()

    def check(self) -> None:
        """Raise SupervisorError when an essential child has given up since; for long work between waits."""
        if self._failure is not None and not self._leaving:
            raise SupervisorError(self._failure)

    def stop(self, *names: str) -> None:
        """Stop the named children side by side and return when they have ended."""
        with self._changed:
            entries = [self._children[name] for name in names]
            for entry in entries:
                if entry.state not in ENDED:
                    entry.send_stop()
        self._await(lambda: all(entry.state in ENDED for entry in entries))

    def pids(self) -> dict[str, int]:
        """The pid of each child that runs now, by name."""
        with self._changed:
            return {name: entry.process.pid for name, entry in self._children.items() if entry.process is not None}

    def states(self) -> dict[str, str]:
        """Where each child is: waiting, preparing, starting, ready, stopping, stopped or failed."""
        with self._changed:
            return {name: entry.state.value for name, entry in self._children.items()}

    def _add(self, children: Sequence[Child], *, is_task: bool) -> list[RunningChild]:
        self.check()
        with self._changed:
            self._batch += 1
            entries = []
            for child in children:
                present = self._children.get(child.name)
                if present is not None and present.state not in ENDED:
                    raise ValueError(f"there is already a child named {child.name!r}")
                log = self.log_dir / child.log_name
                entries.append(RunningChild(child, log, batch=self._batch, is_task=is_task))
            self._children |= {entry.child.name: entry for entry in entries}
        return entries

    def _await(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            while not reached():
                self.check()
                self._changed.wait(0.5)
        self.check()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._leaving:
            if not self._hurry:
                self._say("killing what has not stopped yet")
            self._hurry = True
            return
        self._leaving = self.stopped_by_signal = True
        raise StopRequested(signal.Signals(number).name)

    def _stop_all(self) -> None:
        began_s = time.monotonic()
        with self._changed:
            live = [entry for entry in self._children.values() if entry.state not in ENDED]
        if not live:
            return
        self._say("stopping " + ", ".join(entry.child.name for entry in sorted(live, key=lambda e: e.order)))
        for order in sorted({entry.order for entry in live}):
            self.stop(*[entry.child.name for entry in live if entry.order == order])
        self._say(f"everything stopped in {time.monotonic() - began_s:.1f} s")

    def _supervise(self) -> None:
        while not self._finished.wait(TICK_S):
            with self._changed:
                try:
                    self._tick(time.monotonic())
                except Exception as error:  # whatever it is, the others still have to be stopped in order
                    self._fail(f"the supervisor failed: {type(error).__name__}: {error}")
                self._changed.notify_all()

    def _tick(self, now_s: float) -> None:
        self._watchdog.keep_alive()
        for entry in list(self._children.values()):
            self._advance(entry, now_s)
        if now_s >= self._rotate_due_s:
            self._rotate_due_s = now_s + ROTATE_EVERY_S
            for entry in self._children.values():
                with contextlib.suppress(OSError):  # no room for old lines, or somebody removed the folder
                    if rotate_if_large(entry.log):
                        entry.log_start = 0

    def _advance(self, entry: RunningChild, now_s: float) -> None:
        if entry.state is State.WAITING and now_s >= entry.due_s and not self._leaving:
            entry.prepare()
        if entry.state is State.PREPARING:
            self._advance_preparing(entry)
        elif entry.state in ALIVE:
            pid = entry.process.pid if entry.process is not None else 0
            returncode = entry.reap()
            if returncode is not None:
                self._watchdog.remove(pid)
                self._ended(entry, returncode, now_s)
            elif entry.state is State.STARTING:
                self._advance_starting(entry, now_s)
            elif entry.state is State.STOPPING and (now_s >= entry.deadline_s or self._hurry):
                if not self._hurry:
                    self._say(f"{entry.child.name} did not stop within {entry.child.stop_timeout_s:g} s; killed")
                entry.kill()
                entry.deadline_s = now_s + 1.0

    def _advance_preparing(self, entry: RunningChild) -> None:
        background = entry.background
        if background is None or not background.done:
            return
        if background.error is not None:
            self._give_up(entry, f"{entry.child.name} cannot be started: {background.error}")
            return
        try:
            entry.spawn()
        except OSError as error:
            self._give_up(entry, f"{entry.child.name} cannot be started: {error}")
        if entry.process is not None:
            self._watchdog.add(
                entry.process.pid,
                order=entry.order,
                stop_signal=entry.child.stop_signal,
                stop_timeout_s=entry.child.stop_timeout_s,
            )

    def _advance_starting(self, entry: RunningChild, now_s: float) -> None:
        background = entry.background
        if background is not None and background.done:
            if background.error is None and background.result:
                entry.state, entry.ready_s, entry.background = State.READY, now_s, None
                again = "again " if entry.was_ready else ""
                entry.was_ready = True
                self._say(f"{entry.child.name} {again}ready in {now_s - entry.began_s:.1f} s")
                return
            entry.failure = f"could not be asked whether it is ready ({background.error})"
            entry.kill()
        elif now_s >= entry.deadline_s:
            verb = "finished" if entry.is_task else "ready"
            entry.failure = f"was not {verb} after {entry.child.ready_timeout_s:g} s"
            entry.kill()

    def _ended(self, entry: RunningChild, returncode: int, now_s: float) -> None:
        name, policy = entry.child.name, entry.child.restart
        if entry.state is State.STOPPING:
            entry.state = State.STOPPED
            return
        if entry.is_task and returncode == 0:
            entry.state = State.STOPPED
            self._say(f"{name} finished in {now_s - entry.began_s:.1f} s")
            return
        if returncode in entry.child.over:
            entry.state = State.STOPPED
            self._say("\n    ".join([f"{name} has ended for good", *entry.words.splitlines()[-1:]]))
            return
        what = entry.failure or ending(returncode)
        entry.failure = ""
        cause = cause_of(entry.words)
        if cause is Cause.DISK_FULL or (cause is not None and not entry.was_ready):
            self._give_up(entry, f"{name} {what}: {ADVICE[cause]}")
            return
        if entry.state is State.READY and now_s - entry.ready_s >= policy.healthy_after_s:
            entry.restarts = 0
        if entry.restarts >= policy.limit or returncode == NOT_RUNNABLE:
            self._give_up(entry, self._last_words(entry, what))
            return
        entry.restarts += 1
        entry.due_s = now_s + policy.pause_s(entry.restarts)
        entry.state = State.WAITING
        self._say(f"{name} {what}; starting it again ({entry.restarts} of {policy.limit})")

    def _last_words(self, entry: RunningChild, what: str) -> str:
        given_up = f"; giving up after {entry.restarts} new starts" if entry.restarts else ""
        words = "".join(f"\n    {line}" for line in entry.words.splitlines())
        return f"{entry.child.name} {what}{given_up}. Its log {entry.log} ends with:{words or ' nothing'}"

    def _give_up(self, entry: RunningChild, message: str) -> None:
        entry.state = State.FAILED
        if entry.child.essential:
            self._fail(message)
        else:
            self._say(message)

    def _fail(self, message: str) -> None:
        if self._failure is None and not self._leaving:
            self._failure = message
            self._say(message)


def exit_status(error: SupervisorError | runlock.AlreadyRunningError) -> int:
    """Say why there is no run (a supervisor's own failures were said before) and return the exit status."""
    if isinstance(error, runlock.AlreadyRunningError):
        print(error, file=sys.stderr)
    return 1
