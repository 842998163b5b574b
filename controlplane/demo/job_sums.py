"""What the jobs of a run add up to: items, results, and the charges on the jobs beside those of their records."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection

from controlplane.core.batch_items import ItemState
from controlplane.core.reasons import Outcome
from controlplane.jobs.models import Job
from controlplane.jobs.queries import status_of
from controlplane.wire.report import FLAG_NOT_CHARGED


@dataclass(frozen=True, slots=True)
class JobEnd:
    """A job as the run left it; `repeats` are the attempts of its items after the first of each."""

    name: str
    state: str
    standing: str
    items: int
    completed: int
    parked: int
    cancelled: int
    repeats: int
    deadline: str | None
    finished_at: str | None


@dataclass(frozen=True, slots=True)
class JobSums:
    """`charge_nanos` is what the jobs say, `record_nanos` what their usage records do."""

    jobs: list[JobEnd]
    results: int
    charged_results: int
    charge_nanos: int
    record_nanos: int

    @property
    def items(self) -> int:
        return sum(job.items for job in self.jobs)

    @property
    def completed(self) -> int:
        return sum(job.completed for job in self.jobs)

    @property
    def ended(self) -> int:
        return sum(job.completed + job.parked + job.cancelled for job in self.jobs)


def items_open() -> bool:
    """Whether any item waits or is held by an agent."""
    return bool(_row("SELECT EXISTS (SELECT 1 FROM jobs_item WHERE state = ANY(%s))", [_OPEN])[0])


_OPEN = [int(ItemState.WAITING), int(ItemState.LEASED)]
_CHARGE = "charge_prompt_nanos + charge_cached_nanos + charge_output_nanos + charge_gpu_nanos"


def job_sums(since: datetime, now: datetime) -> JobSums:
    """The jobs with items that were submitted since an instant; call it when nothing of them is under way."""
    rows = Job.objects.filter(has_items=True, created_at__gte=since)
    jobs = list(rows.exclude(state=Job.State.FAILED).select_related("pool", "workload_class").order_by("pk"))
    ids = [job.pk for job in jobs]
    results = _row("SELECT count(*) FROM jobs_itemresult WHERE job_id = ANY(%s) AND outcome = %s", [ids, _COMPLETED])
    charged = _row(
        "SELECT count(*) FROM usage_record u JOIN jobs_itemresult r ON r.request_id = u.request_id"
        " WHERE u.job_id = ANY(%s) AND r.job_id = u.job_id AND u.outcome = %s AND u.flags & %s = 0",
        [ids, _COMPLETED, FLAG_NOT_CHARGED],
    )
    nanos = _row(f"SELECT coalesce(sum({_CHARGE}), 0) FROM usage_record WHERE job_id = ANY(%s)", [ids])
    return JobSums(
        jobs=[_end(job, now) for job in jobs],
        results=int(results[0]),
        charged_results=int(charged[0]),
        charge_nanos=sum(job.charge_nanos for job in jobs),
        record_nanos=int(nanos[0]),
    )


_COMPLETED = Outcome.COMPLETED.code


def _end(job: Job, now: datetime) -> JobEnd:
    repeats = _row("SELECT coalesce(sum(attempt - 1), 0) FROM jobs_item WHERE job_id = %s", [job.pk])
    return JobEnd(
        name=job.name,
        state=job.state,
        standing=str(status_of(job, now).standing),
        items=job.items,
        completed=job.items_completed,
        parked=job.items_parked,
        cancelled=job.items_cancelled,
        repeats=int(repeats[0]),
        deadline=None if job.deadline is None else job.deadline.isoformat(),
        finished_at=None if job.finished_at is None else job.finished_at.isoformat(),
    )


def _row(sql: str, values: list[Any]) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        row: tuple[Any, ...] = cursor.fetchone()
    return row
