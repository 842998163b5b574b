"""`manage.py controller` as real processes: one leads, a killed leader is replaced within five seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connection

from controlplane.flex.models import ControllerTerm
from tests import factories

ROOT = Path(__file__).resolve().parents[2]
START_S = 60


@pytest.fixture
def start(transactional_db, tmp_path) -> Iterator:
    factories.installation()
    started: list[subprocess.Popen] = []
    values = connection.settings_dict
    url = f"postgresql://{values['USER']}:{values['PASSWORD'] or ''}@{values['HOST']}:{values['PORT']}/{values['NAME']}"
    environment = {
        **os.environ,
        "DATABASE_URL": url.replace(":@", "@"),
        "FLEXBAND_SIGNING_KEYS": str(tmp_path / "keys"),
        "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
    }

    def run(*options: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "controller", "--json", *options], cwd=ROOT, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate(timeout=20)


def event(process: subprocess.Popen) -> dict:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def until(condition, seconds: float) -> float:
    """Waits for a condition; returns how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.processes
@pytest.mark.slow
def test_leading_standing_by_and_taking_over(start):
    first = start()
    assert event(first)["event"] == "leads"
    second = start()
    assert event(second)["event"] == "stands by"
    term = ControllerTerm.objects.get().term
    first.send_signal(signal.SIGSTOP)
    took = until(lambda: ControllerTerm.objects.get().term > term, START_S)
    assert took < 5
    led = event(second)
    assert (led["event"], led["term"]) == ("leads", term + 1)
    first.send_signal(signal.SIGCONT)
    assert event(first)["event"] == "stands by"
    second.send_signal(signal.SIGTERM)
    assert event(second)["event"] == "stopped"
    assert second.wait(timeout=60) == 0
    assert event(first)["event"] == "leads", "a controller that ends hands over at once"
    first.send_signal(signal.SIGTERM)
    assert event(first)["event"] == "stopped"
    assert first.wait(timeout=60) == 0


@pytest.mark.processes
@pytest.mark.slow
def test_a_shard_that_there_is_not_is_refused(start):
    process = start("--shard", "west")
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 2
    assert "is no shard" in errors
