"""The list of jobs: who needs attention first, how much room each has to its deadline, and files without a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Case, DateTimeField, F, IntegerField, Q, QuerySet, Value, When
from django.db.models.functions import Coalesce

from controlplane.core.flex_snapshot import FlexSlot
from controlplane.jobs import queries
from controlplane.jobs.batch_capacity import efficiencies
from controlplane.jobs.direct_work import direct_work
from controlplane.jobs.models import Batch, Job
from controlplane.jobs.queries import JobStatus
from controlplane.tenants.access import member_of
from controlplane.tenants.queries import visible_tenants
from controlplane.tenants.roles import Role

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
    or over those given by pool id.

    Required is all work of its pool due by then, over the time until then. None: nothing serves batch, so no number.
    """
    wanted = [job for job in jobs if job.state == Job.State.RUNNING and job.deadline and job.deadline > now]
    pools = {job.pool_id for job in wanted}
    if not pools:
        return {}
    slots = queries.slots_of(pools, now) if slots is None else slots
    worth = efficiencies(pools, now)
    work: dict[int, list[tuple[datetime, int]]] = {pool: [] for pool in pools}
    for row in Job.objects.filter(pool__in=pools, state=Job.State.RUNNING, deadline__gt=now).select_related("pool"):
        assert row.deadline is not None
        demanded_us = queries.demanded_gpu_us(row, row.pool, worth.get(row.pool_id, 1.0))
        work[row.pool_id].append((row.deadline, demanded_us))
    for pool_id, rows in direct_work(pools, now).items():
        work[pool_id] += [(due, us) for us, due in rows if due > now]
    found: dict[int, float | None] = {}
    for job in wanted:
        assert job.deadline is not None
        due = [(us, job.deadline) for deadline, us in work[job.pool_id] if deadline <= job.deadline]
        found[job.pk] = queries.slack_for(due, slots.get(job.pool_id, []), now).slack
    return found


def visible_batches(user: User | AnonymousUser) -> QuerySet[Batch]:
    """All batches for staff, those of the own tenant for a tenant's member, none for anybody else."""
    member = member_of(user)
    rows = Batch.objects.select_related("tenant", "input_file", "job")
    if member is None:
        return rows.none()
    return rows.filter(tenant__in=visible_tenants(user)) if member.role == Role.TENANT else rows


def uploads(user: User | AnonymousUser, now: datetime) -> list[Batch]:
    """Files of the last days that are being checked or were refused: they are no running job, and easily overlooked."""
    shown = Q(state=Batch.State.VALIDATING) | Q(state=Batch.State.FAILED, created_at__gt=now - UPLOADS_SINCE)
    return list(visible_batches(user).filter(shown).order_by("-id")[:UPLOADS_SHOWN])
