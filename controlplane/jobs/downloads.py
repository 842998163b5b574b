"""The files of a job for people: what was sent, its results and its errors, and who took them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db import transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.jobs.models import Batch, Job, StoredFile


@dataclass(frozen=True, slots=True)
class JobFile:
    """`row` None: there is none, and `why` says the reason."""

    which: str
    label: str
    row: StoredFile | None
    why: str


def batch_of(job: Job) -> Batch | None:
    """The batch that a job came from; None for one whose client has a loop of its own."""
    return getattr(job, "batch", None)


def files_of(job: Job, now: datetime) -> list[JobFile]:
    """Results and errors of a job that came from a file; none for other jobs."""
    batch = batch_of(job)
    if batch is None:
        return []
    return [
        _file("results", "Results", batch, batch.output_file, now),
        _file("errors", "Errors", batch, batch.error_file, now),
    ]


def _file(which: str, label: str, batch: Batch, row: StoredFile | None, now: datetime) -> JobFile:
    if row is not None and row.deleted_at is None and row.expires_at > now:
        return JobFile(which, label, row, "")
    if row is not None:
        return JobFile(which, label, None, "no longer kept")
    ended = batch.state in (Batch.State.COMPLETED, Batch.State.CANCELLED, Batch.State.EXPIRED, Batch.State.FAILED)
    return JobFile(which, label, None, "none: nothing to write" if ended else "written when the job ends")


def note(row: StoredFile, job: Job, actor: Actor, now: datetime) -> None:
    """Enters who took a tenant's file."""
    with transaction.atomic():
        record(
            actor=actor, action="file.download", noun="file", object_id=row.uuid, now=now,
            tenant_slug=job.tenant.slug, after={"filename": row.filename, "job": str(job.uuid)},
        )  # fmt: skip
