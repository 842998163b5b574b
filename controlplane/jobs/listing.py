"""The list of jobs: who needs attention first, how much room each has to its deadline, and files without a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Final

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Case, DateTimeField, F, IntegerField, Q, QuerySet, Value, When
from django.db.models.functions import Coalesce

from controlplane.core.flex_demand import Room, available_slots, dues_of, room_at
from controlplane.core.flex_snapshot import BatchJob, FlexSlot
from controlplane.core.period import to_us
from controlplane.jobs import queries
from controlplane.jobs.direct_work import direct_work
from controlplane.jobs.models import Batch, Job
from controlplane.jobs.queries import JobStatus
from controlplane.tenants.queries import of_visible_tenants

ORDER: Final = ("attention", "due", "-id")
OPEN: Final = (Job.State.IMPORTING, Job.State.RUNNING)
LAST: Final = datetime(9999, 1, 1, tzinfo=UTC)
UPLOADS_SHOWN: Final = 10
UPLOADS_SINCE: Final = timedelta(days=2)


def by_attention(rows: QuerySet[Job], now: datetime) -> QuerySet[Job]:
    """Annotated for ORDER: deadline missed and still open, then by deadline, best effort, and what ended, newest first.

    Parked items do not overtake: what is late decides, what is parked waits for a person.
    """
    late = Q(state__in=OPEN, deadline__lt=now)
    return rows.annotate(
        attention=Case(
            When(late, then=Value(0)),
            When(state__in=OPEN, deadline__isnull=False, then=Value(1)),
            When(state__in=OPEN, then=Value(2)),
            default=Value(3),
            output_field=IntegerField(),
        ),
        due=Case(
            When(state__in=OPEN, then=Coalesce(F("deadline"), Value(LAST))),
            default=Value(LAST),
            output_field=DateTimeField(),
        ),
    )


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A row: `slack` is that of its pool at this job's deadline, with all work due by then; None where it has none."""

    status: JobStatus
    slack: float | None
    slack_known: bool
    finish_at: datetime | None

    @property
    def finish_grade(self) -> str:
        """`bad` where the estimate lies past the deadline."""
        deadline = self.status.job.deadline
        return "bad" if self.finish_at and deadline and self.finish_at > deadline else ""


def listed(jobs: Sequence[Job], now: datetime, *, with_slack: bool) -> list[ListedJob]:
    """The rows of a page. `with_slack` False leaves out what other tenants' work goes into."""
    slack = slack_at_deadlines(jobs, now) if with_slack else {}
    return [
        ListedJob(
            status=queries.status_of(job, now),
            slack=slack.get(job.pk),
            slack_known=job.pk in slack,
            finish_at=queries.estimated_finish(job, now),
        )
        for job in jobs
    ]


def slack_at_deadlines(
    jobs: Iterable[Job], now: datetime, *, slots: Mapping[int, Sequence[FlexSlot]] | None = None
) -> dict[int, float | None]:
    """Job id -> 1 - required / available at its deadline, for running jobs that have one ahead; over the slots of now,
    or over those given by pool id. None: nothing serves batch, so no number.
    """
    wanted = with_deadline_ahead(jobs, now)
    pools = {job.pool_id for job in wanted}
    if not pools:
        return {}
    found = rooms(wanted, queries.backlog_jobs(pools, now), now)
    return slack_over(found, queries.slots_of(pools, now) if slots is None else slots)


def with_deadline_ahead(jobs: Iterable[Job], now: datetime) -> list[Job]:
    """The running ones that have a deadline ahead."""
    return [job for job in jobs if job.state == Job.State.RUNNING and job.deadline and job.deadline > now]


@dataclass(frozen=True, slots=True)
class JobRoom:
    """A job's room: all paid work of its pool that is due by its deadline, over the time until then."""

    job_id: int
    pool_id: int
    room: Room


def rooms(jobs: Iterable[Job], backlog: Iterable[tuple[Job, int]], now: datetime) -> list[JobRoom]:
    """Of jobs `with_deadline_ahead`, given the backlog of their pools; each pool's is walked once."""
    wanted, now_us = list(jobs), to_us(now)
    work: dict[int, list[BatchJob]] = {job.pool_id: [] for job in wanted}
    for row, us in backlog:
        if row.deadline is not None and row.pool_id in work:
            work[row.pool_id].append(BatchJob(name="", remaining_gpu_us=us, deadline_us=to_us(row.deadline)))
    for pool_id, rows in direct_work(list(work), now).items():
        work[pool_id] += [BatchJob(name="", remaining_gpu_us=us, deadline_us=to_us(due)) for us, due in rows]
    dues = {pool_id: dues_of(rows, now_us=now_us) for pool_id, rows in work.items()}
    found = []
    for job in wanted:
        assert job.deadline is not None
        room = room_at(dues[job.pool_id], to_us(job.deadline), now_us=now_us)
        found.append(JobRoom(job.pk, job.pool_id, room))
    return found


def slack_over(found: Iterable[JobRoom], slots: Mapping[int, Sequence[FlexSlot]]) -> dict[int, float | None]:
    """Job id -> slack over the slots of its pool; None where none of them serves batch and there is work."""
    available = {pool_id: available_slots(own) for pool_id, own in slots.items()}
    return {one.job_id: one.room.slack(available.get(one.pool_id, Fraction(0))) for one in found}


def visible_batches(user: User | AnonymousUser) -> QuerySet[Batch]:
    """All batches for staff, those of the own tenant for a tenant's member, none for anybody else."""
    return of_visible_tenants(user, Batch.objects.select_related("tenant", "input_file", "job"))


def uploads(user: User | AnonymousUser, now: datetime) -> list[Batch]:
    """Files of the last days that are being checked or were refused: they are no running job, and easily overlooked."""
    shown = Q(state=Batch.State.VALIDATING) | Q(state=Batch.State.FAILED, created_at__gt=now - UPLOADS_SINCE)
    return list(visible_batches(user).filter(shown).order_by("-id")[:UPLOADS_SHOWN])
