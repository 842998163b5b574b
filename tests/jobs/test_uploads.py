"""Files that are handed over: whatever breaks off is found by its row and erased, and nobody ever saw it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.jobs import batch_sweep, storage, uploads
from controlplane.jobs.batch_actions import submit_rest
from controlplane.jobs.models import StoredFile
from tests import factories
from tests.jobs.batches import ADA, line

NAME = uuid.UUID("0192f0a4-0000-7000-8000-000000000001")


@pytest.fixture
def tenant(installation, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    return factories.tenant("acme", classes=["bulk"])


def store(tenant, pieces, now=None) -> StoredFile:
    return uploads.store(
        tenant=tenant, filename="a\x00.jsonl", pieces=pieces, actor=ADA, now=now or timezone.now(), name=NAME
    )


def breaks_off() -> Iterator[bytes]:
    yield b"half a li"
    raise RuntimeError("the process ends")


def on_disk(settings) -> list[Path]:
    return [path for path in Path(settings.JOB_STORAGE).rglob("*") if path.is_file()]


def test_a_file_is_seen_when_it_is_whole_and_its_sender_is_entered_once(tenant, settings):
    row = store(tenant, [b'{"a":1}\n', b"\n", b'{"a":2}\n'])
    row.refresh_from_db()
    assert (row.filename, row.size_bytes, row.lines, row.created_by) == ("a.jsonl", 17, 2, "ada")
    assert b"".join(storage.read(row.path)) == b'{"a":1}\n\n{"a":2}\n'
    again = store(tenant, [b'{"a":1}\n', b"\n", b'{"a":2}\n'])
    assert again.pk == row.pk and len(on_disk(settings)) == 1
    entry = AuditEntry.objects.get(action="file.upload")
    assert (entry.actor_name, entry.tenant_slug, entry.after["digest"]) == ("ada", "acme", row.digest)


def test_what_breaks_off_is_never_seen_is_erased_and_can_be_sent_again(tenant, settings):
    long_ago = timezone.now() - batch_sweep.UPLOAD_MOST - timedelta(seconds=1)
    with pytest.raises(RuntimeError):
        store(tenant, breaks_off(), now=long_ago)
    row = StoredFile.objects.get()
    assert row.ready_at is None and on_disk(settings) == [] and not AuditEntry.objects.exists()
    assert batch_sweep.erase_files(timezone.now()) == 1
    assert store(tenant, [b"{}\n"]).pk == row.pk
    row.refresh_from_db()
    assert (row.lines, row.deleted_at, row.erased_at) == (1, None, None) and row.ready_at is not None
    assert batch_sweep.erase_files(timezone.now()) == 0 and len(on_disk(settings)) == 1


def test_requests_under_a_key_find_their_file_again(tenant, settings):
    factories.workload_class("bulk", "batch")
    settings.JOB_FILE_DAYS = 1

    def send(now, name: str) -> StoredFile:
        values = {"class": "bulk", "name": name, "requests": [line(1)]}
        return submit_rest(tenant=tenant, key=None, values=values, actor=ADA, now=now, idempotency_key=name).input_file

    now = timezone.now()
    first = send(now, "night")
    assert send(now, "night").pk == first.pk and StoredFile.objects.count() == 1
    StoredFile.objects.filter(pk=first.pk).update(expires_at=now)
    assert batch_sweep.erase_files(now) == 0, "a batch reads it"
    assert send(now, "other").pk != first.pk
    assert AuditEntry.objects.filter(action="file.upload").count() == 2
    again = send(now, "night")
    assert again.pk == first.pk and again.expires_at == now + timedelta(days=1), "one that is over begins anew"
    assert AuditEntry.objects.filter(action="file.upload").count() == 3
