"""One child's life: prepared, spawned, ready, ended, started again, stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from controlplane.embedded.processes import Command, spawn
from controlplane.embedded.state import tail
from controlplane.supervisor.child import Child, is_ready

PROBE_INTERVAL_S = 0.1
SETTLE_S = 0.3  # a child that cannot be asked counts as ready when it has lived this long


class State(Enum):
    """Where a child is in its life."""

    WAITING = "waiting"  # for its turn to be started
    PREPARING = "preparing"  # before_start runs
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"  # because we said so, or a task that is done
    FAILED = "failed"


ENDED = frozenset({State.STOPPED, State.FAILED})
ALIVE = frozenset({State.STARTING, State.READY, State.STOPPING})


class Background(threading.Thread):
    """A blocking call on a thread of its own: `done` with `result`, or `error`."""

    def __init__(self, call: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.cancelled = threading.Event()
        self.result = False
        self.error: Exception | None = None
        self.start()

    @property
    def done(self) -> bool:
        """True once the call has ended."""
        return not self.is_alive()

    def run(self) -> None:
        """Run the call."""
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error


class RunningChild:
    """A child with its process. Changed only by the supervising thread, under the supervisor's lock."""

    def __init__(self, child: Child, log: Path, *, batch: int, is_task: bool) -> None:
        self.child = child
        self.log = log
        self.batch = batch
        self.is_task = is_task
        self.state = State.WAITING
        self.process: subprocess.Popen[bytes] | None = None
        self.background: Background | None = None
        self.restarts = 0
        self.was_ready = False
        self.due_s = 0.0
        self.began_s = time.monotonic()
        self.ready_s = 0.0
        self.deadline_s = 0.0
        self.log_start = 0
        self.failure = ""

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the stops: lower first."""
        return (self.child.stop_order, -self.batch)

    @property
    def words(self) -> str:
        """The last lines of the log since the last start."""
        return tail(self.log, start=self.log_start)

    def prepare(self) -> None:
        """Run what has to run before the start."""
        self.state = State.PREPARING
        self.began_s = time.monotonic()
        before_start = self.child.before_start
        self.background = Background(lambda: True if before_start is None else before_start() is None)

    def spawn(self) -> None:
        """Start the process and begin to ask whether it is ready."""
        child = self.child
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        env = dict(os.environ if child.env is None else child.env)
        command = Command(tuple(child.argv), env, child.run_as, child.cwd or Path.cwd())
        self.process = spawn(command, self.log, bound_to_parent=True, stop_signal=child.stop_signal)
        self.state = State.STARTING
        self.deadline_s = time.monotonic() + child.ready_timeout_s
        self.background = None if self.is_task else Background(self._probe)

    def send_stop(self) -> None:
        """Ask the process to stop; its time runs from now."""
        self._cancel()
        self.deadline_s = time.monotonic() + self.child.stop_timeout_s
        if self.process is None:
            self.state = State.STOPPED
            return
        self.state = State.STOPPING
        with contextlib.suppress(OSError):
            self.process.send_signal(self.child.stop_signal)

    def kill(self) -> None:
        """Kill the process and its whole group."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """The return code when the process has ended, after killing what it left in its group; else None.

        The group is killed while the dead leader still holds its number, so that nobody else's can be hit.
        """
        process = self.process
        if process is None:
            return 0
        if not hasattr(os, "waitid"):
            returncode = process.poll()
        elif os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        else:
            self.kill()
            returncode = process.wait()
        if returncode is not None:
            self._cancel()
            self.process = None
        return returncode

    def _probe(self) -> bool:
        probe = threading.current_thread()
        assert isinstance(probe, Background)
        if self.child.ready is None:
            return not probe.cancelled.wait(SETTLE_S)
        while not probe.cancelled.is_set():
            if is_ready(self.child.ready, self.log, self.log_start):
                return True
            probe.cancelled.wait(PROBE_INTERVAL_S)
        return False

    def _cancel(self) -> None:
        if self.background is not None:
            self.background.cancelled.set()
            self.background = None
