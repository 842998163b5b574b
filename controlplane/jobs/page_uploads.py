"""A file that a person hands over on a page: stored as uploads of the API are, then submitted by the same action."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import datetime

from django.db import transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.jobs import storage
from controlplane.jobs.batch_actions import BatchOrder, file_expiry, submit_batch
from controlplane.jobs.models import Batch, StoredFile
from controlplane.tenants.models import Tenant

FILENAME_MOST = 200


def store(*, tenant: Tenant, name: str, pieces: Iterable[bytes], actor: Actor, now: datetime) -> StoredFile:
    """Writes the file and enters it. A process that is killed leaves a row without `ready_at`, which is erased."""
    file_uuid = uuid.uuid4()
    row = StoredFile.objects.create(
        uuid=file_uuid, tenant=tenant, purpose=StoredFile.Purpose.BATCH, filename="",
        path=f"{tenant.pk}/in/{file_uuid}", created_by=actor.name, created_at=now, expires_at=file_expiry(now),
    )  # fmt: skip
    with storage.Writing(row.path) as writing:
        for piece in pieces:
            writing.write(piece)
        written = writing.finish()
    row.size_bytes, row.digest, row.lines = written.size_bytes, written.digest, written.lines
    row.filename, row.ready_at = name.replace("\x00", "")[-FILENAME_MOST:] or "upload.jsonl", now
    with transaction.atomic():
        row.save(update_fields=["size_bytes", "digest", "lines", "filename", "ready_at"])
        record(
            actor=actor, action="file.upload", noun="file", object_id=row.uuid, now=now, tenant_slug=tenant.slug,
            after={"filename": row.filename, "size_bytes": row.size_bytes, "digest": row.digest},
        )  # fmt: skip
    return row


def submit(
    *, tenant: Tenant, file: StoredFile, endpoint: str, metadata: dict[str, str], actor: Actor, now: datetime
) -> Batch:
    """The batch of a stored file, as the API would make it. Raises ValidationError by field."""
    order = BatchOrder(input_file_id=f"file-{file.uuid.hex}", endpoint=endpoint, metadata=metadata)
    return submit_batch(tenant=tenant, key=None, order=order, actor=actor, now=now)
