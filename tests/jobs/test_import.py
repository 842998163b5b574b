"""Import and assembly: whatever dies in between, every line becomes one item and every item one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings as django_settings
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.utils import timezone

from controlplane.agent.api_body import OUTPUTS_MAX
from controlplane.jobs import assembly, batch_import, batch_sweep, storage
from controlplane.jobs.batch_actions import retry_parked
from controlplane.jobs.batch_lines import LINE_BYTES_MOST, split
from controlplane.jobs.item_queries import items_page
from controlplane.jobs.models import Batch, Item, ItemBody, Job, StoredFile
from tests.jobs.batches import ADA, empty_items, jsonl, line, running, submit
from tests.jobs.settling import run_all
from tests.threads import at_once
from tests.world import build_world

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def world(transactional_db, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    empty_items()
    return build_world()


def test_an_import_goes_on_where_the_last_commit_stands(world, monkeypatch):
    monkeypatch.setattr(batch_import, "CHUNK_LINES", 10)
    batch = submit(world.tenant, 95)
    more = batch_import.import_batch(batch.pk, timezone.now(), chunks_most=3)
    batch.refresh_from_db()
    assert (more, batch.imported_items, batch.job.state) == (True, 30, "importing")
    assert not batch_import.import_batch(batch.pk, timezone.now())
    batch.refresh_from_db()
    assert (batch.state, batch.job.state, batch.job.items) == ("in_progress", "running", 95)
    assert list(Item.objects.order_by("line").values_list("line", flat=True)) == list(range(1, 96))
    assert not batch_import.import_batch(batch.pk, timezone.now())
    assert ItemBody.objects.count() == 95


def test_a_chunk_that_another_process_took_is_not_taken_again(world, monkeypatch):
    monkeypatch.setattr(batch_import, "CHUNK_LINES", 10)
    batch = submit(world.tenant, 30)
    stale = Batch.objects.select_related("input_file", "tenant").get(pk=batch.pk)
    batch_import.import_batch(batch.pk, timezone.now(), chunks_most=1)
    with pytest.raises(batch_import._Elsewhere):
        batch_import._import(stale, world.bulk, timezone.now(), 10)
    assert Item.objects.count() == 10


def test_two_workers_at_one_batch_import_every_line_once(world, monkeypatch):
    monkeypatch.setattr(batch_import, "CHUNK_LINES", 20)
    batch = submit(world.tenant, 400)

    at_once([lambda: batch_import.import_batch(batch.pk, timezone.now())] * 4)
    batch.refresh_from_db()
    assert (batch.state, Item.objects.count(), ItemBody.objects.count()) == ("in_progress", 400, 400)


IMPORTER = """
import django
django.setup()
from django.utils import timezone
from controlplane.jobs import batch_import
batch_import.CHUNK_LINES = 200
print("begins", flush=True)
batch_import.import_batch({batch}, timezone.now())
"""


@pytest.mark.processes
def test_an_importer_that_is_killed_leaves_whole_chunks_and_the_next_one_finishes(world):
    batch = submit(world.tenant, 6_000)
    url = "postgresql://{USER}@{HOST}:{PORT}/{NAME}".format(**connection.settings_dict)
    environment = {
        **os.environ, "DATABASE_URL": url, "FLEXBAND_JOB_STORAGE": django_settings.JOB_STORAGE,
        "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
    }  # fmt: skip
    if password := connection.settings_dict["PASSWORD"]:
        environment["PGPASSWORD"] = password
    kills = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", IMPORTER.format(batch=batch.pk)], cwd=ROOT, env=environment, stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"begins\n"
        before = Item.objects.count()
        deadline = time.monotonic() + 60
        while Item.objects.count() == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait(60)
        process.stdout.close()
        assert Item.objects.count() % 200 == 0 and Item.objects.count() == ItemBody.objects.count()
    deadline = time.monotonic() + 60
    batch.refresh_from_db()
    while batch.state == "validating" and time.monotonic() < deadline:
        # the turn of the one that was killed ends with its connection
        batch_import.import_batch(batch.pk, timezone.now())
        batch.refresh_from_db()
    assert kills > 0
    assert (batch.state, Item.objects.count(), ItemBody.objects.count()) == ("in_progress", 6_000, 6_000)


def test_lines_are_split_at_any_piece_and_numbered_with_the_empty_ones():
    content = b"one\n\ntwo\r\n   \nthree"
    for size in range(1, len(content) + 1):
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        found = list(split(pieces))
        assert [(each.number, each.text.strip()) for each in found] == [(1, b"one"), (3, b"two"), (5, b"three")]
        assert [content[: each.end].count(b"\n") for each in found] == [1, 3, 4]
        for each in found:
            rest = list(split([content[each.end :]], number=each.number, offset=each.end))
            assert [one.number for one in rest] == [number for number in (1, 3, 5) if number > each.number]


@pytest.mark.parametrize("ends", [b"\r\n", b"\n"])
@pytest.mark.parametrize("size", [1, 2, 1_000])
def test_a_file_may_begin_with_a_byte_order_mark(world, monkeypatch, ends, size):
    monkeypatch.setattr(batch_import, "CHUNK_LINES", size)
    content = b"\xef\xbb\xbf" + jsonl([line(n) for n in range(1, 5)]).replace(b"\n", ends)
    batch = submit(world.tenant, content)
    while batch_import.import_batch(batch.pk, timezone.now(), chunks_most=1):
        pass
    batch.refresh_from_db()
    assert (batch.state, batch.imported_bytes, batch.imported_items) == ("in_progress", len(content), 4)
    unended = submit(world.tenant, b"\xef\xbb\xbf" + jsonl([line(1)]).strip())
    batch_import.import_batch(unended.pk, timezone.now())
    only_mark = submit(world.tenant, b"\xef\xbb\xbf\n")
    batch_import.import_batch(only_mark.pk, timezone.now())
    only_mark.refresh_from_db()
    assert Batch.objects.get(pk=unended.pk).imported_items == 1
    assert [error["code"] for error in only_mark.errors] == ["empty_file"]


def test_a_line_without_end_is_not_held(world):
    huge = b"x" * (LINE_BYTES_MOST * 3)
    (only,) = split([huge[at : at + 65_536] for at in range(0, len(huge), 65_536)])
    assert (len(only.text), only.end) == (LINE_BYTES_MOST + 1, len(huge))
    batch = submit(world.tenant, jsonl([line(1)]) + huge + b"\n" + jsonl([line(3)]))
    batch_import.import_batch(batch.pk, timezone.now())
    batch.refresh_from_db()
    assert [(error["line"], error["code"]) for error in batch.errors] == [(2, "line_too_long")]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\xff\xfe\n", "invalid_encoding"),
        (b"[1]\n", "invalid_request"),
        (b"{\n", "invalid_json_line"),
        (b"[" * 5_000 + b"\n", "invalid_request"),
        (jsonl([line(1, custom_id="")]), "invalid_custom_id"),
        (jsonl([line(1, custom_id="x" * 300)]), "invalid_custom_id"),
        (jsonl([{**line(1), "body": 7}]), "invalid_request"),
        (jsonl([line(1, body={"messages": None, "model": 3})]), "invalid_request"),
        (jsonl([line(1, body={"n": 0})]), "invalid_request"),
        (jsonl([line(1, body={"max_tokens": 0})]), "output_too_long"),
        (jsonl([line(1, body={"n": OUTPUTS_MAX + 1})]), "too_many_outputs"),
        (jsonl([line(1, body={"n": 2, "prompt": ["a"] * (OUTPUTS_MAX // 2 + 1)})]), "too_many_outputs"),
        (b"\xef\xbb\xbf" + jsonl([line(1)]), "invalid_json_line"),
        (jsonl([{**line(1), "body": {"model": "llama-70b"}}]), "invalid_request"),
    ],
)
def test_every_bad_line_is_told_with_its_number(world, content, code):
    batch = submit(world.tenant, jsonl([line(0)]) + content)
    batch_import.import_batch(batch.pk, timezone.now())
    batch.refresh_from_db()
    assert (batch.state, [(error["line"], error["code"]) for error in batch.errors]) == ("failed", [(2, code)])
    assert (batch.job, Item.objects.count()) == (None, 0)


def test_errors_after_chunks_that_were_stored_leave_no_rows(world, monkeypatch):
    monkeypatch.setattr(batch_import, "CHUNK_LINES", 5)
    batch = submit(world.tenant, jsonl([line(n) for n in range(1, 12)]) + b"no\n")
    batch_import.import_batch(batch.pk, timezone.now())
    batch.refresh_from_db()
    assert (batch.state, batch.job.state, Item.objects.count()) == ("failed", "failed", 10)
    assert batch_sweep.purge_rows(timezone.now()) == 1
    assert (Item.objects.count(), ItemBody.objects.count()) == (0, 0)


def test_every_doubled_custom_id_is_told_with_its_number_in_good_and_in_bad_files(world):
    doubled = [line(1), line(2), line(1), line(3), line(2), line(1)]
    for lines, found in (
        (doubled, [(3, "duplicate_custom_id"), (5, "duplicate_custom_id"), (6, "duplicate_custom_id")]),
        (
            ["no", *doubled, line(4, method="GET")],
            [
                (1, "invalid_json_line"),
                *((number, "duplicate_custom_id") for number in (4, 6, 7)),
                (8, "invalid_method"),
            ],
        ),
    ):
        batch = submit(world.tenant, jsonl(lines))
        batch_import.import_batch(batch.pk, timezone.now())
        batch.refresh_from_db()
        assert [(error["line"], error["code"]) for error in batch.errors] == found
        assert batch.state == "failed"
    assert batch.errors[1]["message"] == "The custom_id 'doc-1' stands on line 2 already."


def test_what_was_never_run_has_an_id_of_its_own_that_stays(world):
    job = running(world.tenant, 4)
    batch, now = Batch.objects.get(job=job), timezone.now()
    Item.objects.filter(job_id=job.pk).update(state=3, reason="Its lease lapsed 20 times.")
    Job.objects.filter(pk=job.pk).update(state="completed", items_parked=4, finished_at=now)
    ids = []
    for _ in range(2):
        Batch.objects.filter(pk=batch.pk).update(state="in_progress")
        assert assembly.begin(batch.pk, now) and assembly.assemble(batch.pk, now)
        batch.refresh_from_db()
        lines = b"".join(storage.read(batch.error_file.path)).splitlines()
        ids.append([json.loads(text)["id"] for text in lines])
    assert ids[0] == ids[1] and len(set(ids[0])) == 4 and all(one.startswith("batch_req_") for one in ids[0])


def test_errors_are_cut_at_a_hundred(world):
    batch = submit(world.tenant, b"no\n" * 500)
    batch_import.import_batch(batch.pk, timezone.now())
    batch.refresh_from_db()
    assert (batch.state, len(batch.errors), batch.errors[-1]["line"]) == ("failed", 100, 100)


def test_assembly_again_writes_the_same_and_is_never_half_visible(world, monkeypatch):
    job = running(world.tenant, 120)
    run_all(world, parked={3: "no"})
    batch = job.batch
    assert assembly.begin(batch.pk, timezone.now())
    pages = []

    def dies(rows, *_):
        pages.append(rows)
        raise RuntimeError("the worker is killed here")

    with monkeypatch.context() as broken:
        broken.setattr(assembly, "_failure", dies)
        with pytest.raises(RuntimeError):
            assembly.assemble(batch.pk, timezone.now())
    batch.refresh_from_db()
    assert (batch.state, batch.output_file_id) == ("finalizing", None)
    visible = [path.name for path in Path(django_settings.JOB_STORAGE).rglob("*output.jsonl")]
    assert not visible
    assert assembly.assemble(batch.pk, timezone.now())
    assert not assembly.assemble(batch.pk, timezone.now())
    batch.refresh_from_db()
    text = b"".join(storage.read(batch.output_file.path))
    assert [json.loads(each)["custom_id"] for each in text.splitlines()] == [
        f"doc-{n}" for n in range(1, 121) if n != 3
    ]
    assert (batch.output_file.lines, batch.output_file.size_bytes) == (119, len(text))
    assert StoredFile.objects.filter(purpose="batch_output").count() == 2


def test_rows_are_kept_for_a_while_and_a_day_is_dropped_when_all_its_jobs_are(world):
    job = running(world.tenant, 3)
    run_all(world)
    assembly.begin(job.batch.pk, timezone.now())
    assembly.assemble(job.batch.pk, timezone.now())
    assert batch_sweep.purge_rows(timezone.now()) == 0
    later = timezone.now() + timedelta(days=django_settings.JOB_ROW_DAYS, seconds=1)
    assert batch_sweep.purge_rows(later) == 1
    assert (Item.objects.count(), ItemBody.objects.count()) == (0, 0)
    with connection.cursor() as cursor:
        cursor.execute("SELECT jobs_create_partition('2020-01-01')")
        Job.objects.filter(pk=job.pk).update(day="2020-01-01", rows_purged_at=None)
        cursor.execute("SELECT jobs_drop_partition('2020-01-01')")
        assert cursor.fetchone() == (False,)
        Job.objects.filter(pk=job.pk).update(rows_purged_at=later)
        cursor.execute("SELECT jobs_drop_partition('2020-01-01')")
        assert cursor.fetchone() == (True,)


def test_rows_that_are_being_removed_run_no_more(world):
    """Bodies go before items: one that was tried again meanwhile would have nothing to run."""
    job = running(world.tenant, 3)
    run_all(world, parked={2: "bad"})
    assembly.begin(job.batch.pk, timezone.now())
    assembly.assemble(job.batch.pk, timezone.now())
    later = timezone.now() + timedelta(days=django_settings.JOB_ROW_DAYS, seconds=1)
    with transaction.atomic():
        list(Item.objects.filter(job_id=job.pk, line=1).select_for_update())
        removing = threading.Thread(target=_purge, args=(later,))
        removing.start()
        until = time.monotonic() + 60
        while ItemBody.objects.filter(job_id=job.pk).exists() and time.monotonic() < until:
            time.sleep(0.02)
        with pytest.raises(ValidationError, match="no longer kept"):
            retry_parked(job_uuid=job.uuid, actor=ADA, now=later)
    removing.join(60)
    assert (Item.objects.count(), ItemBody.objects.count()) == (0, 0)


def test_a_job_that_runs_again_keeps_its_rows(world):
    job = running(world.tenant, 3)
    run_all(world, parked={2: "bad"})
    assembly.begin(job.batch.pk, timezone.now())
    assembly.assemble(job.batch.pk, timezone.now())
    ended = Job.objects.get(pk=job.pk)
    assert retry_parked(job_uuid=job.uuid, actor=ADA, now=timezone.now()) == 1
    assert not batch_sweep._purge(ended, timezone.now()), "it was due when the sweep read it"
    assert Item.objects.count() == 3 and Job.objects.get().rows_purged_at is None


def _purge(now) -> None:
    try:
        batch_sweep.purge_rows(now)
    finally:
        connection.close()


def test_items_are_paged_by_line_and_by_state(world):
    job = running(world.tenant, 120)
    run_all(world, parked={7: "no such tool", 90: "too long"})
    assert [row.line for row in items_page(job, after=100, limit=5)] == [101, 102, 103, 104, 105]
    from controlplane.core.batch_items import ItemState

    parked = items_page(job, state=ItemState.PARKED)
    assert [(row.line, row.custom_id, row.reason, row.status) for row in parked] == [
        (7, "doc-7", "no such tool", 400), (90, "doc-90", "too long", 400),
    ]  # fmt: skip
