"""The supervisor, run as a real process with real children."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from controlplane.embedded.postgres import find_running_postgres
from controlplane.embedded.processes import process_alive
from controlplane.embedded.valkey import find_running_valkey
from controlplane.supervisor import runlock

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = Path(__file__).with_name("scenario.py")
PATIENCE_S = 60.0
pytestmark = pytest.mark.processes


class Run:
    """A running scenario: its lines as they come, its processes found by a mark in their environment."""

    def __init__(self, var_dir: Path, scenario: str) -> None:
        self.mark = f"run-{os.getpid()}-{time.monotonic_ns()}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "FLEXBAND_TEST_RUN": self.mark}
        self.process = subprocess.Popen(
            [sys.executable, str(SCENARIO), str(var_dir), scenario],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for a line that matches."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            time.sleep(0.02)
        pytest.fail(f"no line like {pattern!r} in {self.lines}")

    def finish(self) -> tuple[int, str]:
        """Wait for the end; exit status and all lines."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status, "\n".join(self.lines)

    def alive(self) -> list[psutil.Process]:
        """Every process that was started by this run and lives: children, grandchildren, the watchdog, itself."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FLEXBAND_TEST_RUN") == self.mark and process.status() != "zombie":
                    found.append(process)
        return found

    def watchdogs(self) -> list[psutil.Process]:
        return [one for one in self.alive() if one.cmdline()[-1].endswith("watchdog.py")]

    def wait_nothing_left(self, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while self.alive():
            assert time.monotonic() < deadline, f"still alive: {[p.cmdline() for p in self.alive()]}"
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    runs: list[Run] = []

    def begin(scenario: str) -> Run:
        runs.append(Run(tmp_path / "var", scenario))
        return runs[-1]

    yield begin
    for run in runs:
        for process in run.alive():
            process.kill()
        run.process.wait(PATIENCE_S)


def test_says_when_a_child_is_ready_and_leaves_nothing_after_ctrl_c(start, tmp_path):
    run = start("family")
    pids = [int(pid) for pid in run.expect(r"^pids (.+)").group(1).split()]
    assert len(run.alive()) >= 6  # supervisor, watchdog, three children, one grandchild
    run.process.send_signal(signal.SIGINT)
    status, text = run.finish()
    assert status == 0
    assert re.search(r"^stopping (agent gpu-1, stubborn|stubborn, agent gpu-1), first$", text, re.M)
    assert re.search(r"^agent gpu-1 ready in \d+\.\d s$", text, re.M)
    assert "stubborn did not stop within 1 s; killed" in text
    assert "left by signal True" in text
    assert not any(process_alive(pid) for pid in pids)
    assert run.alive() == []
    assert (tmp_path / "var/log/agent-gpu-1.log").read_text() == "up\n"


def test_starts_a_killed_child_again(start):
    run = start("family")
    pids = run.expect(r"^pids (.+)").group(1).split()
    os.kill(int(pids[1]), signal.SIGKILL)
    run.expect(r"^agent gpu-1 was killed by signal 9; starting it again \(1 of 2\)$")
    run.expect(r"^agent gpu-1 again ready in \d+\.\d s$")
    grandchildren = [p for p in run.alive() if p.cmdline()[-1] == "import time; time.sleep(600)"]
    assert len(grandchildren) == 1, "the first agent's own child outlived it"


def test_gives_up_a_crash_loop_and_stops_the_others(start):
    run = start("crash-loop")
    status, text = run.finish()
    assert status == 1
    assert "web exited with status 3; starting it again (2 of 2)" in text
    assert "web exited with status 3; giving up after 2 new starts" in text
    assert "no such table: tenants" in text
    assert "stopping first" in text
    assert run.alive() == []


def test_goes_on_without_a_child_that_is_not_essential(start):
    status, text = start("optional-crash").finish()
    assert status == 0
    assert "extra exited with status 4; giving up" in text
    assert "went on" in text


def test_goes_on_without_a_child_that_has_nothing_more_to_do(start):
    status, text = start("over").finish()
    assert status == 0
    assert "agent has ended for good\n    retired" in text
    assert "'agent': 'stopped'" in text and "starting it again" not in text


def test_does_not_retry_what_a_new_start_cannot_cure(start):
    status, text = start("port-in-use").finish()
    assert status == 1
    assert "web exited with status 1: its port is in use by another program; stop that program" in text
    assert "starting it again" not in text


def test_runs_tasks_to_their_end(start):
    status, text = start("task").finish()
    assert status == 1
    assert re.search(r"^migrate finished in \d+\.\d s$", text, re.M)
    assert "broken task exited with status 5. Its log" in text
    assert "bad row 7" in text


def test_names_a_program_that_is_missing(start):
    status, text = start("missing-program").finish()
    assert status == 1
    assert "cannot run /no/such/program: No such file or directory" in text


def test_a_child_that_never_gets_ready_is_a_failure(start):
    status, text = start("never-ready").finish()
    assert status == 1
    assert "slow was not ready after 0.4 s; giving up after 2 new starts" in text


def test_stops_one_child_and_keeps_the_rest(start):
    status, text = start("stop-one").finish()
    assert status == 0
    assert "'first': 'ready', 'second': 'stopped'" in text


def test_waits_for_a_time(start):
    status, text = start("timed").finish()
    assert (status, "waited 1 s" in text) == (0, True)


def test_a_second_supervisor_is_refused_by_name(start):
    first = start("family")
    first.expect("^pids")
    status, text = start("family").finish()
    assert status == 1
    assert f"(pid {first.process.pid})" in text
    assert "already running" in text


def test_nothing_outlives_a_killed_supervisor(start, tmp_path):
    run = start("family")
    run.expect("^pids")
    run.process.kill()
    run.process.wait()
    run.wait_nothing_left()
    os.close(runlock.acquire(tmp_path / "var"))


def test_direct_children_end_even_when_the_watchdog_is_killed_too(start):
    run = start("ordinary")
    run.expect("^pids")
    for process in run.alive():
        if process.cmdline()[-1].endswith("watchdog.py"):
            os.kill(run.process.pid, signal.SIGSTOP)  # so that it cannot start another
            process.kill()
    run.process.kill()
    run.process.wait()
    run.wait_nothing_left()


def test_sigterm_stops_like_ctrl_c(start):
    run = start("ordinary")
    run.expect("^pids")
    run.process.terminate()
    status, text = run.finish()
    assert (status, run.alive()) == (0, [])
    assert "everything stopped in" in text


def test_servers_come_back_after_a_kill_and_stop_in_order(start, tmp_path):
    run = start("servers")
    _, postgres, valkey = map(int, run.expect(r"^pids (.+)").group(1).split())
    os.kill(postgres, signal.SIGKILL)
    os.kill(valkey, signal.SIGKILL)
    for name in ("postgres", "valkey"):
        run.expect(f"^{name} was killed by signal 9; starting it again")
        run.expect(f"^{name} again ready")
    assert find_running_postgres(tmp_path / "var").pid != postgres
    assert find_running_valkey(tmp_path / "var").pid != valkey
    run.process.send_signal(signal.SIGINT)
    status, text = run.finish()
    assert (status, run.alive()) == (0, [])
    assert find_running_postgres(tmp_path / "var") is None
    assert "database system is shut down" in (tmp_path / "var/log/postgres.log").read_text()
    assert re.search(r"^stopping first, (postgres, valkey|valkey, postgres)$", text, re.M)


def test_servers_stop_when_the_supervisor_is_killed(start, tmp_path):
    run = start("servers")
    run.expect("^pids")
    run.process.kill()
    run.process.wait()
    os.close(runlock.acquire(tmp_path / "var"))
    run.wait_nothing_left()
    assert find_running_postgres(tmp_path / "var") is None
    assert find_running_valkey(tmp_path / "var") is None


def test_a_killed_watchdog_is_replaced(start):
    run = start("family")
    run.expect("^pids")
    (watchdog,) = run.watchdogs()
    watchdog.kill()
    deadline = time.monotonic() + PATIENCE_S
    while not [one for one in run.watchdogs() if one.pid != watchdog.pid]:
        assert time.monotonic() < deadline, "no other watchdog came"
        time.sleep(0.05)
    run.process.kill()
    run.process.wait()
    run.wait_nothing_left()
