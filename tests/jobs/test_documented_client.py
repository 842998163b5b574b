"""The examples of docs/tenant.md are run as they stand, with the address of the test's server in them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from django.utils import timezone

from controlplane.jobs import assembly, batch_import
from controlplane.jobs.models import Batch, ItemHolder, Job
from controlplane.tenants import key_actions
from tests.jobs.batches import ADA, empty_items, jsonl, line
from tests.jobs.settling import run_all
from tests.jobs.web_server import serving
from tests.world import build_world

CLIENT_SLEEPS_S = 30
BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/tenant.md").read_text(), flags=re.S)
FILES = next(block for block in BLOCKS if "batches.create" in block)
LOOP = next(block for block in BLOCKS if "x-flexband-job" in block)


@pytest.fixture
def world(transactional_db, settings, tmp_path, monkeypatch):
    settings.JOB_STORAGE = str(tmp_path / "files")
    settings.INSECURE_LOOPBACK = True
    settings.SECURE_SSL_REDIRECT = False
    empty_items()
    ItemHolder.objects.all().delete()
    world = build_world()
    secret = key_actions.create_key(
        tenant_id=world.tenant.pk, name="nightly", classes=["bulk"], default_class="bulk", actor=ADA,
        now=timezone.now(),
    ).secret  # fmt: skip
    monkeypatch.setenv("FLEXBAND_KEY", secret)
    monkeypatch.chdir(tmp_path)
    return world


def run(example: str, monkeypatch, waits: Callable[[], None] | None = None) -> dict:
    """What the example leaves behind; `waits` is what happens while it sleeps."""
    with serving() as address:
        if waits is not None:
            sleep = time.sleep
            monkeypatch.setattr("time.sleep", lambda seconds: waits() if seconds == CLIENT_SLEEPS_S else sleep(seconds))
        text = example.replace("https://flexband.example", address)
        assert address in text
        names: dict = {}
        exec(compile(text, "docs/tenant.md", "exec"), names)
    return names


def test_files_go_in_and_answers_come_back(world, tmp_path, monkeypatch):
    (tmp_path / "night.jsonl").write_bytes(jsonl([line(n) for n in (1, 2, 3)]))

    def waits() -> None:
        """What a worker and an agent do while the client sleeps."""
        batch = Batch.objects.get()
        if batch.state == Batch.State.VALIDATING:
            batch_import.import_batch(batch.pk, timezone.now())
            run_all(world, parked={2: "the prompt is too long"})
        assembly.begin(batch.pk, timezone.now())
        assembly.assemble(batch.pk, timezone.now())

    run(FILES, monkeypatch, waits)
    answers = [json.loads(text) for text in (tmp_path / "answers.jsonl").read_text().splitlines()]
    (failure,) = [json.loads(text) for text in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in answers] == ["doc-1", "doc-3"]
    assert (failure["custom_id"], failure["error"]["message"]) == ("doc-2", "the prompt is too long")
    assert Batch.objects.get().metadata["deadline"] == "06:00 Europe/Berlin"


def test_a_bad_file_is_told_with_its_lines(world, tmp_path, monkeypatch, capsys):
    (tmp_path / "night.jsonl").write_bytes(jsonl([line(1), "not json"]))
    run(FILES, monkeypatch, lambda: batch_import.import_batch(Batch.objects.get().pk, timezone.now()) and None)
    assert capsys.readouterr().out.startswith("2 The line is not a JSON object")
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_loop_of_ones_own_declares_its_job(world, monkeypatch):
    """Up to its first request: agents serve the rest, and their own tests send the header."""
    declaration, _, rest = LOOP.partition("client = AsyncOpenAI")
    assert '"x-flexband-job": job["uuid"]' in rest
    names = run(declaration.replace("[...]", "['a', 'b', 'c']"), monkeypatch)
    job = Job.objects.get()
    assert (str(job.uuid), job.items, job.name, job.has_items) == (names["job"]["uuid"], 3, "nightly summaries", False)
    again = run(declaration.replace("[...]", "['a', 'b', 'c']"), monkeypatch)
    assert again["job"]["uuid"] == names["job"]["uuid"], "a loop that is started again goes on with its job"
