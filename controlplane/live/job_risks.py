"""Jobs that will miss their deadline as things stand, jobs that missed it, and items that three failures parked.

Slots or money may be what a job is short of. Items that no hard budget pays for wait for its next window: a job is at
risk when that begins too late for them.

Short at this instant is no risk yet: the band may lend, and does so after its hold time. A job is at risk when all the
loans that the policy allows are too few, or when it stayed short for longer than a loan takes to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Final

from django.db import connection
from django.db.models import Q

from controlplane.core.batch_items import ItemState
from controlplane.core.period import to_us
from controlplane.fleet.models import Pool
from controlplane.jobs.listing import JobRoom, rooms, with_deadline_ahead
from controlplane.jobs.models import Job
from controlplane.jobs.paid_work import Payment
from controlplane.jobs.queries import backlog_of, estimate_of, remaining_gpu_us, slots_worth, unfinished_items
from controlplane.tenants.models import Tenant

#: Beyond the hold time: a loan comes with a decision interval, and its slack with a tick.
LOAN_TAKES: Final = timedelta(seconds=60)
#: What ended or was due longer ago has been seen by whoever it concerns.
LOOKED_BACK: Final = timedelta(hours=24)
#: So many are looked at, by deadline: with more of them the first say enough.
JOBS_MOST: Final = 500


@dataclass(frozen=True, slots=True)
class JobRisk:
    """A job short of time. `slack` is at its deadline over the present slots, None where nothing serves batch;
    `missed`: the deadline has passed; `unpaid`: what money there is for it, where that is what it is short of.
    """

    job: Job
    slack: float | None
    remaining_us: int
    missed: bool
    short_of_slots: bool = False
    unpaid: Payment | None = None


@dataclass(frozen=True, slots=True)
class ParkedItems:
    """A job with parked items, and the reason that parked most of the first ones."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class JobRisks:
    """By pool id."""

    short: Mapping[int, list[JobRisk]]
    parked: Mapping[int, list[ParkedItems]]


NONE: Final = JobRisks({}, {})

# What a job's row and its arithmetic ask for: with all columns, its admission among them, five hundred take five times
# as long.
_NAMED: Final = (
    "uuid", "name", "state", "deadline", "items", "items_completed", "items_parked", "items_cancelled", "gpu_us_done",
    "prompt_tokens", "expected_output_tokens", "pool_id", "tenant_id", "admission",
)  # fmt: skip


def read(pools: Iterable[Pool], now: datetime) -> JobRisks:
    """All pools at once; as many statements for many as for one."""
    by_id = {pool.pk: pool for pool in pools}
    return JobRisks(_short(by_id, now), _parked(by_id, now))


def _short(pools: Mapping[int, Pool], now: datetime) -> dict[int, list[JobRisk]]:
    rows = Job.objects.filter(pool__in=list(pools), state=Job.State.RUNNING)
    # All that run, for each is backlog of the others: those that are late, or due first, are looked at.
    running = list(rows.only(*_NAMED))
    for job in running:
        job.pool = pools[job.pool_id]
    dated = [job for job in running if job.deadline is not None and job.deadline > now - LOOKED_BACK]
    jobs = sorted(dated, key=lambda job: (job.deadline, job.pk))[:JOBS_MOST]
    if not jobs:
        return {}
    worth, backlog = slots_worth(pools, now), backlog_of(running, now)
    asked = rooms(with_deadline_ahead(jobs, now), backlog.jobs, now)
    available = {pool_id: own.now for pool_id, own in worth.items()}
    present = _slack(asked, available)
    most = _slack(asked, {pool_id: own.all_lent for pool_id, own in worth.items()})
    lasting = _short_for_long({job.pool_id for job in jobs if _is_short(present, job)}, now)
    found: dict[int, list[JobRisk]] = {}
    for job in jobs:
        assert job.deadline is not None
        remaining_us = remaining_gpu_us(job, job.pool)
        missed = job.deadline <= now
        short = _is_short(present, job) and (_is_short(most, job) or job.pool_id in lasting)
        unpaid = backlog.unpaid.get(job.pk)
        if unpaid is not None and not _paid_too_late(job, unpaid, available.get(job.pool_id, Fraction(0))):
            unpaid = None
        if remaining_us and (missed or short or unpaid):
            risk = JobRisk(job, present.get(job.pk), remaining_us, missed, short, unpaid)
            found.setdefault(job.pool_id, []).append(risk)
    _name_tenants(risk.job for risks in found.values() for risk in risks)
    return found


def _slack(asked: Iterable[JobRoom], available: Mapping[int, Fraction]) -> dict[int, float | None]:
    return {one.job_id: one.room.slack(available.get(one.pool_id, Fraction(0))) for one in asked}


def _name_tenants(jobs: Iterable[Job]) -> None:
    wanted = list(jobs)
    tenants = Tenant.objects.only("slug").in_bulk({job.tenant_id for job in wanted})
    for job in wanted:
        job.tenant = tenants[job.tenant_id]


def _paid_too_late(job: Job, payment: Payment, available: Fraction) -> bool:
    """Whether what the budget does not pay for cannot be done from the window's end to the deadline."""
    assert job.deadline is not None
    unpaid_us = (unfinished_items(job) - payment.items) * estimate_of(job, job.pool).gpu_us_per_item
    left_us = to_us(job.deadline) - payment.window.ends_at_us
    return left_us <= 0 or unpaid_us > available * left_us


def _is_short(slack: Mapping[int, float | None], job: Job) -> bool:
    if job.pk not in slack:
        return False
    value = slack[job.pk]
    return value is None or value < 0


_LASTING_SQL = """
SELECT pool.id FROM fleet_pool pool
 CROSS JOIN LATERAL (SELECT %(now)s - make_interval(secs => pool.lend_hold_s + %(takes)s) AS since) own
 WHERE pool.id = ANY(%(pools)s)
   AND EXISTS (SELECT 1 FROM flex_poolsample
                WHERE pool_id = pool.id AND at <= own.since AND at > own.since - interval '30 seconds')
   AND NOT EXISTS (SELECT 1 FROM flex_poolsample WHERE pool_id = pool.id AND at > own.since AND slack >= 0)
"""


def _short_for_long(pool_ids: Iterable[int], now: datetime) -> set[int]:
    """Pools whose slack was negative in every sample of their hold time and a loan's time beyond it."""
    wanted = sorted(pool_ids)
    if not wanted:
        return set()
    with connection.cursor() as cursor:
        cursor.execute(_LASTING_SQL, {"pools": wanted, "now": now, "takes": LOAN_TAKES.total_seconds()})
        return {pool_id for (pool_id,) in cursor.fetchall()}


_REASONS_SQL = """
SELECT job_id, reason FROM (
    SELECT wanted.id AS job_id, item.reason, count(*) AS items,
           row_number() OVER (PARTITION BY wanted.id ORDER BY count(*) DESC, item.reason) AS place
      FROM unnest(%(jobs)s::bigint[], %(days)s::date[]) AS wanted (id, day)
     CROSS JOIN LATERAL (
           SELECT reason FROM jobs_item WHERE day = wanted.day AND job_id = wanted.id AND state = %(parked)s
            ORDER BY line LIMIT 1000) item
     GROUP BY wanted.id, item.reason
) counted WHERE place = 1
"""


def _parked(pools: Mapping[int, Pool], now: datetime) -> dict[int, list[ParkedItems]]:
    """Jobs that run, or ended lately, with parked items that nobody tried again."""
    lately = Q(state=Job.State.RUNNING) | Q(state=Job.State.COMPLETED, finished_at__gt=now - LOOKED_BACK)
    rows = Job.objects.filter(lately, pool__in=list(pools), items_parked__gt=0).select_related("pool", "tenant")
    jobs = list(rows.order_by("-items_parked", "pk")[:JOBS_MOST])
    reasons = _reasons([job for job in jobs if job.has_items])
    found: dict[int, list[ParkedItems]] = {}
    for job in jobs:
        found.setdefault(job.pool_id, []).append(ParkedItems(job, reasons.get(job.pk, "")))
    return found


def _reasons(jobs: list[Job]) -> dict[int, str]:
    if not jobs:
        return {}
    with connection.cursor() as cursor:
        cursor.execute(
            _REASONS_SQL,
            {"jobs": [job.pk for job in jobs], "days": [job.day for job in jobs], "parked": int(ItemState.PARKED)},
        )
        return dict(cursor.fetchall())
