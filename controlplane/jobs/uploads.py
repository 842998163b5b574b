"""Files that are handed over, by the API, on a page or inside a request: a row first, then bytes, then who sent them.

What never ends is found by its row, and erased.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final

from django.conf import settings
from django.db import transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.jobs.models import StoredFile
from controlplane.jobs.storage import Writing, Written
from controlplane.tenants.models import Tenant

FILENAME_MOST: Final = 200


def file_expiry(now: datetime) -> datetime:
    """Until when a file that is made now is kept."""
    return now + timedelta(days=settings.JOB_FILE_DAYS)


def begin(*, tenant: Tenant, actor: Actor, now: datetime, name: uuid.UUID | None = None) -> StoredFile:
    """The row of an upload that begins; its bytes go to `path`. One of this name that is gone begins anew."""
    name = name or uuid.uuid4()
    values: dict[str, Any] = {
        "filename": "", "created_by": actor.name, "created_at": now, "expires_at": file_expiry(now),
    }  # fmt: skip
    row, fresh = StoredFile.objects.get_or_create(
        uuid=name,
        defaults={
            "tenant": tenant, "purpose": StoredFile.Purpose.BATCH, "path": f"{tenant.pk}/in/{name}", **values,
        },
    )  # fmt: skip
    if not fresh and (row.deleted_at is not None or row.expires_at <= now):
        StoredFile.objects.filter(pk=row.pk).update(ready_at=None, deleted_at=None, erased_at=None, **values)
    return row


def store(
    *,
    tenant: Tenant,
    filename: str,
    pieces: Iterable[bytes],
    actor: Actor,
    now: datetime,
    name: uuid.UUID | None = None,
) -> StoredFile:
    """A file of these bytes; `name` as in `begin`. Raises StorageError."""
    row = begin(tenant=tenant, actor=actor, now=now, name=name)
    with Writing(row.path) as writing:
        for piece in pieces:
            writing.write(piece)
        written = writing.finish()
    return publish(row, written, filename=filename, actor=actor, now=now)


def publish(row: StoredFile, written: Written, *, filename: str, actor: Actor, now: datetime) -> StoredFile:
    """Shows a file whose bytes are complete to its tenant, and enters who sent it. Once: again it changes nothing."""
    row.size_bytes, row.digest, row.lines = written.size_bytes, written.digest, written.lines
    row.filename, row.ready_at = filename.replace("\x00", "")[-FILENAME_MOST:] or "upload.jsonl", now
    with transaction.atomic():
        fresh = StoredFile.objects.filter(pk=row.pk, ready_at__isnull=True).update(
            size_bytes=row.size_bytes, digest=row.digest, lines=row.lines, filename=row.filename, ready_at=now
        )
        if fresh:
            record(
                actor=actor, action="file.upload", noun="file", object_id=row.uuid, now=now,
                tenant_slug=row.tenant.slug,
                after={"filename": row.filename, "size_bytes": row.size_bytes, "digest": row.digest},
            )  # fmt: skip
    return row
