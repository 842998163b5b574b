"""Reading jobs: the door by person, what remains of each, and the backlog that the flex band is judged by."""

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from fractions import Fraction
from math import isfinite
from typing import Final, NamedTuple

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Count, F, Q, QuerySet
from django.http import Http404

from controlplane.core.estimate import WorkRates, raw_gpu_us
from controlplane.core.flex_demand import demand
from controlplane.core.flex_policy import exact
from controlplane.core.flex_snapshot import BatchJob, FlexSlot
from controlplane.core.period import to_us
from controlplane.core.slot_states import Band, SlotState
from controlplane.fleet.models import Pool, Slot, SlotInterval
from controlplane.jobs.batch_capacity import efficiencies
from controlplane.jobs.direct_work import direct_work
from controlplane.jobs.models import Job
from controlplane.jobs.paid_work import Payment, Priced, item_bound_nanos, payments
from controlplane.tenants.queries import of_visible_tenants
from controlplane.web.numerals import duration

# From so many completed items on, what they took is a better estimate than tokens times constants.
LEARNT_FROM_ITEMS = 20
MISSED_GRACE = timedelta(minutes=30)


def visible_jobs(user: User | AnonymousUser) -> QuerySet[Job]:
    """All jobs for staff, those of the own tenant for a tenant's member."""
    files = (f"batch__{name}_file" for name in ("input", "output", "error"))
    rows = Job.objects.select_related("tenant", "workload_class", "pool__model", *files)
    return of_visible_tenants(user, rows)


def job_for(user: User | AnonymousUser, job_uuid: uuid.UUID) -> Job:
    """The only door to a job. Not allowed and not existing look the same: Http404."""
    job = visible_jobs(user).select_related("key").filter(uuid=job_uuid).first()
    if job is None:
        raise Http404("There is no such job.")
    return job


class Estimate(NamedTuple):
    """GPU time of one item: from what the completed ones took (`learnt`), or from tokens times the pool's constants."""

    gpu_us_per_item: int
    learnt: bool


def estimate_of(job: Job, pool: Pool) -> Estimate:
    """The job's current estimate. GPU time of failed requests counts too: the items took it."""
    if job.items_completed >= LEARNT_FROM_ITEMS and job.gpu_us_done > 0:
        return Estimate(max(1, round(job.gpu_us_done / job.items_completed)), learnt=True)
    rates = WorkRates(pool.prefill_us_per_token, pool.decode_us_per_token)
    return Estimate(max(1, raw_gpu_us(rates, job.prompt_tokens, job.expected_output_tokens)), learnt=False)


def unfinished_items(job: Job) -> int:
    """Items that have not completed; one that failed may be retried, so it is still to be done. Parked ones are not."""
    return max(job.items - job.items_completed - job.items_parked - job.items_cancelled, 0)


def priced(job: Job) -> Priced:
    """The job as far as money goes."""
    return Priced(job.pk, job.uuid, job.tenant_id, item_bound_nanos(job), unfinished_items(job))


def remaining_gpu_us(job: Job, pool: Pool) -> int:
    """Unfinished items x current estimate; 0 for a job that ended."""
    if job.state != Job.State.RUNNING:
        return 0
    return unfinished_items(job) * estimate_of(job, pool).gpu_us_per_item


def demanded_gpu_us(job: Job, pool: Pool, efficiency: float, payable: int | None = None) -> int:
    """Remaining work at the pool's rates, which slots of this batch efficiency get done.

    What was learnt from completed items is slot time as it went, their efficiency included: it is turned into work.
    Of a job that money does not wholly pay for, only `payable` items can run (`paid_work.payable`).
    """
    if job.state != Job.State.RUNNING:
        return 0
    estimate, items = estimate_of(job, pool), unfinished_items(job)
    remaining_us = (items if payable is None else min(items, payable)) * estimate.gpu_us_per_item
    if efficiency == 1.0 or not remaining_us or not estimate.learnt:
        return remaining_us
    return max(1, round(remaining_us * efficiency))


def counted_by_deadline(jobs: Iterable[Job], now: datetime) -> list[Job]:
    """Those that are backlog, in the order in which money is theirs; without a deadline they come last."""
    last = datetime.max.replace(tzinfo=now.tzinfo)
    counted = (job for job in jobs if job.deadline is None or now - job.deadline < MISSED_GRACE)
    return sorted(counted, key=lambda job: (job.deadline or last, job.pk))


def backlog(pool_id: int, now: datetime) -> list[tuple[int, datetime | None]]:
    """(remaining GPU time in us, deadline) of every job of the pool that still counts, in order of its deadline, and
    after them of batch requests that clients sent without a job.

    A job without a deadline is best effort: it is listed with None and is never a reason to lend. A job that missed
    its deadline counts for MISSED_GRACE and then leaves. Items that a hard budget does not pay for are no backlog.
    """
    jobs = [(remaining_us, job.deadline) for job, remaining_us in backlog_jobs([pool_id], now)]
    return jobs + direct_backlog(pool_id, now)


def direct_backlog(pool_id: int, now: datetime) -> list[tuple[int, datetime | None]]:
    """What of the backlog is no job's."""
    return [*direct_work([pool_id], now).get(pool_id, ())]


def backlog_jobs(pool_ids: Collection[int], now: datetime, *, instead: Job | None = None) -> list[tuple[Job, int]]:
    """The jobs in the `backlog` of these pools, each with its remaining work in us of a slot that is worth one.

    `instead` stands for the row of the same job: what an action would make of it.
    """
    # Prefetched: a pool is one object for its jobs, joined it would be read and made for each of thousands.
    rows = Job.objects.filter(pool_id__in=pool_ids, state=Job.State.RUNNING).prefetch_related("pool")
    jobs = list(rows if instead is None else rows.exclude(pk=instead.pk))
    if instead is not None and instead.state == Job.State.RUNNING:
        jobs.append(instead)
    return backlog_of(jobs, now).jobs


@dataclass(frozen=True, slots=True)
class Backlog:
    """Jobs with their remaining work in us, in order of their deadlines, and the jobs that money does not wholly pay
    for, by id.
    """

    jobs: list[tuple[Job, int]]
    unpaid: Mapping[int, Payment]


def backlog_of(running: Sequence[Job], now: datetime) -> Backlog:
    """Of all running jobs of some pools."""
    counted = counted_by_deadline(running, now)
    pools = {job.pool_id for job in running}
    worth, unpaid = efficiencies(pools, now), _unpaid(counted, pools, now)
    pairs = []
    for job in counted:
        paid = unpaid[job.pk].items if job.pk in unpaid else None
        pairs.append((job, demanded_gpu_us(job, job.pool, worth.get(job.pool_id, 1.0), paid)))
    return Backlog([(job, remaining_us) for job, remaining_us in pairs if remaining_us > 0], unpaid)


def _unpaid(counted: Sequence[Job], pools: Collection[int], now: datetime) -> dict[int, Payment]:
    """A budget has no pool: jobs of other pools that are due before these have the first claim on what is left."""
    if not any(item_bound_nanos(job) and unfinished_items(job) for job in counted):
        return {}
    others = Job.objects.filter(state=Job.State.RUNNING, admission__bound_nanos__gt=0).exclude(pool_id__in=pools)
    ordered = counted_by_deadline([*counted, *others.only(*_PRICED)], now)
    return payments([priced(job) for job in ordered], now)


_PRICED: Final = (
    "uuid", "tenant_id", "deadline", "admission", "items", "items_completed", "items_parked", "items_cancelled",
)  # fmt: skip


STANDINGS: Final = (
    "importing", "waiting", "running", "completed", "cancelled", "missed", "best_effort", "failed", "expired",
)  # fmt: skip
"""Where a job stands: `failed` is one that was not taken, of which nothing ran."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job with its arithmetic. `required_slots` is what its own deadline asks for, None without one or past it.

    `standing` is one of STANDINGS.
    """

    job: Job
    estimate: Estimate
    unfinished: int
    remaining_us: int
    time_left_us: int | None
    required_slots: float | None
    standing: str

    @property
    def done_ratio(self) -> float:
        return self.job.items_completed / self.job.items

    @property
    def short_id(self) -> str:
        return str(self.job.uuid)[:8]

    @property
    def done_text(self) -> str:
        """Per cent, cut down: 100 only when nothing is left."""
        return f"{int(self.done_ratio * 100)} %"

    @property
    def meter(self) -> str:
        return "bad" if self.standing == "missed" else "ok"

    @property
    def left(self) -> str:
        """Time to the deadline, or since it, in words; empty for a job that ended or has none."""
        if self.time_left_us is None or self.job.state != Job.State.RUNNING:
            return ""
        if self.time_left_us <= 0:
            return f"{duration(-self.time_left_us)} ago"
        return f"in {duration(self.time_left_us)}"

    @property
    def grade(self) -> str:
        """How a chip shows it."""
        neutral = dict.fromkeys(("importing", "waiting", "cancelled", "expired"), "neutral")
        return {**neutral, "missed": "bad", "failed": "bad"}.get(self.standing, "ok")

    @property
    def word(self) -> str:
        words = {"missed": "Deadline missed", "best_effort": "Best effort", "failed": "Refused"}
        return words.get(self.standing, self.standing.capitalize())


def status_of(job: Job, now: datetime) -> JobStatus:
    remaining_us = remaining_gpu_us(job, job.pool)
    left_us = None if job.deadline is None else (job.deadline - now) // timedelta(microseconds=1)
    required = remaining_us / left_us if left_us is not None and left_us > 0 and remaining_us else None
    return JobStatus(
        job=job,
        estimate=estimate_of(job, job.pool),
        unfinished=unfinished_items(job),
        remaining_us=remaining_us,
        time_left_us=left_us,
        required_slots=required,
        standing=_standing(job, now),
    )


def estimated_finish(job: Job, now: datetime) -> datetime | None:
    """When a running job will be done at the pace it had since its first attempt; None while nothing is known of it."""
    started, done = job.first_attempt_at, job.items_completed + job.items_parked
    if job.state != Job.State.RUNNING or started is None or not done or now <= started:
        return None
    return now + (now - started) * unfinished_items(job) / done


def _standing(job: Job, now: datetime) -> str:
    ended = job.finished_at or now
    missed = job.deadline is not None and ended > job.deadline
    if job.state in (Job.State.CANCELLED, Job.State.FAILED):
        return str(job.state)
    if missed:
        return "missed"
    if job.state != Job.State.RUNNING:
        return str(job.state)
    if job.deadline is None:
        return "best_effort"
    return "waiting" if job.first_attempt_at is None else "running"


def missed(rows: QuerySet[Job], now: datetime) -> QuerySet[Job]:
    """Those of the jobs that did not finish by their deadline; cancelled ones are not counted as missed, nor what was
    never taken.
    """
    late = Q(finished_at__gt=F("deadline")) | Q(finished_at__isnull=True, deadline__lt=now)
    return rows.filter(late).exclude(state__in=(Job.State.CANCELLED, Job.State.FAILED))


@dataclass(frozen=True, slots=True)
class PoolSlack:
    """What the deadlines of a pool ask for and what serves batch now: slack = 1 - required / available.

    `slack` None: no number of the present slots is enough. `direct_us` of the backlog is requests without a job.
    """

    jobs: int
    backlog_us: int
    required: float | None
    available: float
    slack: float | None
    missed: int
    direct_us: int = 0


def pool_slack(pool: Pool, now: datetime) -> PoolSlack:
    """The arithmetic behind lending, by the same core that decides it; lent slots are read from the ownership books."""
    work = [(us, job.deadline) for job, us in backlog_jobs([pool.pk], now)]
    direct = direct_backlog(pool.pk, now)
    found = slack_for(work + direct, slots_of([pool.pk], now).get(pool.pk, []), now)
    return replace(found, jobs=len(work), direct_us=sum(us for us, _ in direct))


def slots_of(pool_ids: Iterable[int], now: datetime) -> dict[int, list[FlexSlot]]:
    """Pool id -> its observed slots, each lent or at home, with what it is worth for batch."""
    worth = efficiencies(pool_ids, now)
    open_spans = SlotInterval.objects.filter(
        slot__pool__in=list(pool_ids), slot__removed_at__isnull=True, ended_at__isnull=True
    )
    found: dict[int, list[FlexSlot]] = {}
    columns = open_spans.order_by("slot__name").values_list("slot__pool_id", "slot__name", "slot__band", "state")
    for pool_id, name, band, kept in columns:
        state = SlotState.LENT if band == Slot.Band.FLEX and kept == "lent" else SlotState.HOME
        found.setdefault(pool_id, []).append(
            FlexSlot(name=name, band=Band(band), state=state, batch_efficiency=worth.get(pool_id, 1.0))
        )
    return found


@dataclass(frozen=True, slots=True)
class SlotsWorth:
    """What a pool's slots of `slots_of` are worth together for batch: `now`, and with every loan that the saved policy
    allows, where a frozen band stays as it is.
    """

    now: Fraction
    all_lent: Fraction


def slots_worth(pools: Mapping[int, Pool], now: datetime) -> dict[int, SlotsWorth]:
    """Of pools by id; one that has no observed slot is missing. Counted in the database: a fleet has thousands."""
    worth = efficiencies(pools, now)
    kinds = (
        SlotInterval.objects.filter(slot__pool__in=list(pools), slot__removed_at__isnull=True, ended_at__isnull=True)
        .values_list("slot__pool_id")
        .annotate(
            batch=Count("pk", filter=Q(slot__band=Slot.Band.BATCH)),
            lent=Count("pk", filter=Q(slot__band=Slot.Band.FLEX, state="lent")),
            flex=Count("pk", filter=Q(slot__band=Slot.Band.FLEX)),
        )
    )
    found = {}
    for pool_id, batch, lent, flex in kinds:
        each, pool = exact(worth.get(pool_id, 1.0)), pools[pool_id]
        most = lent if _is_frozen(pool, now) else flex if pool.max_lent is None else min(flex, max(lent, pool.max_lent))
        found[pool_id] = SlotsWorth((batch + lent) * each, (batch + most) * each)
    return found


def _is_frozen(pool: Pool, now: datetime) -> bool:
    return pool.frozen_since is not None and (pool.frozen_until is None or pool.frozen_until > now)


def slack_for(work: Sequence[tuple[int, datetime | None]], slots: Sequence[FlexSlot], now: datetime) -> PoolSlack:
    """Required, available and slack of (remaining GPU time in us, deadline) over these slots."""
    found = demand(
        [
            BatchJob(name=str(number), remaining_gpu_us=us, deadline_us=to_us(deadline) if deadline else None)
            for number, (us, deadline) in enumerate(work)
        ],
        slots,
        now_us=to_us(now),
        missed_grace_us=int(MISSED_GRACE.total_seconds() * 1_000_000),
    )
    return PoolSlack(
        jobs=len(work),
        backlog_us=sum(us for us, _ in work),
        required=found.required if isfinite(found.required) else None,
        available=found.available,
        slack=None if found.missed else found.slack,
        missed=len(found.missed_now),
    )
