"""Progress of jobs over time: their counts once a minute, kept as long as files are; pages draw their lines from it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.conf import settings
from django.db import connection

from controlplane.jobs.models import Job, JobProgress

POINTS_MOST: Final = 240
PURGE_ROWS: Final = 50_000

_SAMPLE_SQL = """
INSERT INTO jobs_jobprogress
    (job_id, minute, at, items_completed, items_failed, items_parked, items_cancelled, gpu_us_done)
SELECT id, date_trunc('minute', %(now)s), %(now)s, items_completed, items_failed, items_parked, items_cancelled,
       gpu_us_done
FROM jobs_job WHERE state = 'running'
ON CONFLICT (job_id, minute) DO NOTHING
"""


def sample(now: datetime) -> int:
    """Notes the counts of every running job, at most once a minute; how many were noted."""
    with connection.cursor() as cursor:
        cursor.execute(_SAMPLE_SQL, {"now": now})
        return cursor.rowcount


def purge(now: datetime) -> int:
    """Removes samples that are older than files are kept, a bounded number at a time."""
    old = JobProgress.objects.filter(minute__lt=now - timedelta(days=settings.JOB_FILE_DAYS))
    keys = list(old.order_by("pk").values_list("pk", flat=True)[:PURGE_ROWS])
    return JobProgress.objects.filter(pk__in=keys).delete()[0]


@dataclass(frozen=True, slots=True)
class Point:
    """Counts of a job at an instant; `parked` and `cancelled` items are neither done nor open."""

    at: datetime
    completed: int
    parked: int
    cancelled: int
    failed: int
    gpu_us: int


_POINTS_SQL = """
SELECT DISTINCT ON (date_bin(%(step)s, at, %(start)s)) at, items_completed, items_parked, items_cancelled,
       items_failed, gpu_us_done
FROM jobs_jobprogress WHERE job_id = %(job)s ORDER BY date_bin(%(step)s, at, %(start)s), at DESC
"""


def points(job: Job, now: datetime) -> list[Point]:
    """The job's line: nothing at its submission, at most POINTS_MOST samples, and where it stands (or ended)."""
    start, end = job.created_at, job.finished_at or now
    step = max(timedelta(minutes=1), (end - start) / POINTS_MOST)
    given: dict[str, Any] = {"job": job.pk, "step": step, "start": start}
    with connection.cursor() as cursor:
        cursor.execute(_POINTS_SQL, given)
        seen = [Point(*row) for row in cursor.fetchall()]
    last = Point(end, job.items_completed, job.items_parked, job.items_cancelled, job.items_failed, job.gpu_us_done)
    inside = [point for point in seen if start < point.at < end]
    return [Point(start, 0, 0, 0, 0, 0), *inside, last]
