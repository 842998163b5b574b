"""What time does to batches and files: expiry, assembly that is due, retention. Safe to run any number of times."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Q

from controlplane.jobs import storage
from controlplane.jobs.item_partitions import create_days_ahead, drop_purged_days
from controlplane.jobs.models import Batch, Job, StoredFile

BATCHES_MOST: Final = 100
FILES_MOST: Final = 500
UPLOAD_MOST: Final = timedelta(hours=6)
PURGE_LINES: Final = 50_000


def expire(now: datetime) -> int:
    """Ends the jobs of batches whose time is over; what was done until then is assembled."""
    due = Batch.objects.filter(state=Batch.State.IN_PROGRESS, expires_at__lte=now, job__state=Job.State.RUNNING)
    jobs = list(due.order_by("pk").values_list("job_id", flat=True)[:BATCHES_MOST])
    return Job.objects.filter(pk__in=jobs, state=Job.State.RUNNING).update(
        state=Job.State.EXPIRED, finished_at=now, version=F("version") + 1
    )


def end_cancelled_imports(now: datetime) -> int:
    """Ends batches that were cancelled before their import: there is nothing to assemble."""
    rows = Batch.objects.filter(state=Batch.State.CANCELLING).filter(
        Q(job__isnull=True) | Q(in_progress_at__isnull=True)
    )
    return rows.update(state=Batch.State.CANCELLED, cancelled_at=now)


def to_import() -> list[int]:
    """Batches whose import is due: a lost ring, or a worker that was killed."""
    return list(_open(Batch.State.VALIDATING))


def to_assemble() -> list[int]:
    """Batches whose job ended and whose files are not there."""
    rows = Batch.objects.filter(state__in=(Batch.State.IN_PROGRESS, Batch.State.FINALIZING, Batch.State.CANCELLING))
    ended = (Job.State.COMPLETED, Job.State.CANCELLED, Job.State.EXPIRED)
    return list(rows.filter(job__state__in=ended).order_by("pk").values_list("pk", flat=True)[:BATCHES_MOST])


def _open(state: Batch.State) -> list[int]:
    return list(Batch.objects.filter(state=state).order_by("pk").values_list("pk", flat=True)[:BATCHES_MOST])


def erase_files(now: datetime) -> int:
    """Erases the bytes of files that were deleted or whose time is over, and of uploads that never ended."""
    read = Batch.objects.filter(state=Batch.State.VALIDATING).values("input_file")
    rows = StoredFile.objects.filter(erased_at__isnull=True).exclude(pk__in=read)
    gone = Q(deleted_at__isnull=False) | Q(expires_at__lte=now)
    gone |= Q(ready_at__isnull=True, created_at__lte=now - UPLOAD_MOST)
    erased = 0
    for row in rows.filter(gone).order_by("pk")[:FILES_MOST]:
        storage.erase(row.path)
        StoredFile.objects.filter(pk=row.pk).update(erased_at=now, deleted_at=row.deleted_at or now)
        erased += 1
    return erased


def purge_rows(now: datetime) -> int:
    """Removes the rows of jobs that ended JOB_ROW_DAYS ago, and of imports that failed; drops days that are empty."""
    old = now - timedelta(days=settings.JOB_ROW_DAYS)
    ended = Job.objects.filter(has_items=True, rows_purged_at__isnull=True)
    assembled = (Batch.State.COMPLETED, Batch.State.CANCELLED, Batch.State.EXPIRED)
    due = ended.filter(
        Q(state=Job.State.FAILED)
        | Q(batch__state=Batch.State.CANCELLED, batch__in_progress_at__isnull=True)
        | Q(batch__state__in=assembled, finished_at__lte=old)
    )
    purged = sum(_purge(job, now) for job in due.order_by("pk")[:BATCHES_MOST])
    with connection.cursor() as cursor:
        drop_purged_days(cursor)
        create_days_ahead(cursor, now)
    return purged


_PURGE_SQL: Final = (
    "DELETE FROM {table} WHERE day = %(day)s AND job_id = %(job)s AND line IN (SELECT line FROM {table}"
    " WHERE day = %(day)s AND job_id = %(job)s ORDER BY line LIMIT %(most)s)"
)


def _purge(job: Job, now: datetime) -> bool:
    """False: the job runs again, or somebody else is at it."""
    # said before it is done: nobody makes items run again whose bodies go; what a kill leaves goes with its day
    if not Job.objects.filter(pk=job.pk, state=job.state, rows_purged_at__isnull=True).update(rows_purged_at=now):
        return False
    for table in ("jobs_itemresult", "jobs_itembody", "jobs_item"):
        removed = PURGE_LINES
        while removed >= PURGE_LINES:
            with transaction.atomic(), connection.cursor() as cursor:
                given = {"day": job.day, "job": job.pk, "most": PURGE_LINES}
                cursor.execute(_PURGE_SQL.format(table=table), given)
                removed = cursor.rowcount
    return True
