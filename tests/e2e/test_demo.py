"""The first command a person types: the whole system under traffic, its sums, its ends."""

import shutil
import signal
import socket
import subprocess
import sys

import pytest

from tests.e2e.demo_run import ROOT, DemoRun

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def demo(tmp_path):
    runs = []

    def start(*arguments: str, folder: str = "demo") -> DemoRun:
        runs.append(DemoRun(tmp_path / folder, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.stop(signal.SIGTERM)


def test_a_headless_run_adds_up_and_lends_and_recalls(demo):
    run = demo("--headless", "--seconds", "100")
    code = run.finish(300)
    assert code == 0, run.text() + run.log("summary")
    summary = run.summary()
    assert {check["name"]: (check["left"], check["right"]) for check in summary["checks"] if not check["held"]} == {}
    requests = summary["requests"]
    rejected = sum(requests["rejected_by_reason"].values())
    assert requests["offered"] == requests["admitted"] + rejected > 100
    assert requests["admitted"] == requests["completed"] + requests["cancelled"] + requests["failed"]
    assert summary["cost_nanos"]["fleet"] == summary["cost_nanos"]["attributed"] > 0
    assert summary["policy"]["acked"] == summary["policy"]["agents"] == 3
    assert summary["flex"]["lends"] >= 1 and summary["flex"]["recalls"] >= 1, summary["flex"]
    assert sum(job["completed"] for job in summary["jobs"]) > 50, summary["jobs"]
    assert summary["live"]["frames"] > 20
    assert run.left_behind() == []


def test_ctrl_c_stops_everything_and_the_next_start_goes_on_with_the_data(demo):
    run = demo()
    run.wait_for(r"Flexband is up: http://127\.0\.0\.1:\d+/")
    assert run.stop(signal.SIGINT) in (0, -signal.SIGINT, 130), run.text()
    assert run.left_behind() == []
    again = demo("--headless", "--seconds", "8")
    assert again.finish(180) == 0, again.text() + again.log("summary")
    assert again.summary()["policy"]["revision"] == 2, "a second start pushes nothing when nothing changed"
    assert again.left_behind() == []


def test_agents_of_a_database_that_is_gone_enrol_anew(demo):
    run = demo()
    run.wait_for(r"Flexband is up")
    run.stop(signal.SIGINT)
    for part in ("postgres", "valkey"):
        shutil.rmtree(run.folder / "var" / part)
    again = demo()
    again.wait_for(r"gpu-1-1, gpu-2-1, gpu-3-1 set aside, this database does not know these agents; enrolling anew")
    again.wait_for(r"Flexband is up")


def test_a_port_in_use_is_said_in_one_line_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "manage.py", "demo", "--port", str(port)],
            cwd=ROOT, env={"PATH": "/usr/bin:/bin", "FLEXBAND_VAR": str(tmp_path)}, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
    assert done.returncode != 0
    lines = (done.stdout + done.stderr).strip().splitlines()
    assert len(lines) == 1 and str(port) in lines[0] and "--port" in lines[0], lines


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--agents", "2"], "--agents"),
        (["--speed", "0"], "--speed"),
        (["--seconds", "-1"], "--seconds"),
        (["--trace", "no-such-file.csv"], "--trace"),
        (["--json", "/no/such/folder/x.json"], "--json"),
    ],
)
def test_unusable_options_exit_2_with_one_line(tmp_path, arguments, word):
    done = subprocess.run(
        [sys.executable, "manage.py", "demo", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "FLEXBAND_VAR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert word in done.stderr and "Traceback" not in done.stderr
