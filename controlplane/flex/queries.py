"""What pages, REST and the exchange read of flex bands; returns typed values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection
from django.db.models import Avg, Count, Q, QuerySet
from psycopg import Cursor

from controlplane.contracts.models import WorkloadClass
from controlplane.core import flex_review
from controlplane.core.drain_claim import DrainClaim, LoanEnd, drain_claim
from controlplane.core.flex import decide
from controlplane.core.flex_decision import FlexDecision
from controlplane.core.flex_policy import FlexPolicy
from controlplane.core.flex_review import FlexReview, FlexWeek, SlotWeek
from controlplane.core.period import to_us
from controlplane.core.slot_states import BORROWED, SlotState
from controlplane.fleet.models import Pool, Slot, SlotInterval
from controlplane.flex import evidence, telemetry
from controlplane.flex.models import Decision, Grant, Lend, PoolSample
from controlplane.flex.samples import sample_at
from controlplane.flex.terms import safe_rate_of
from controlplane.usage.queries import breakdown
from controlplane.wire.report import Grant as GrantMessage

WEEK = timedelta(days=7)

# ---- answers to reports ----

# What is left of a loan is by the database's clock: when no controller renews, answers give less and less, then none.
_GRANTS_SQL = """
SELECT s.agent_id, g.slot_id, g.fence, g.action, g.reason,
       greatest(0, floor(extract(epoch FROM g.expires_at - clock_timestamp()) * 1000000))::bigint AS left_us
FROM flex_grant g JOIN fleet_slot s ON s.id = g.slot_id
WHERE s.agent_id = ANY(%s) AND g.fence > 0
ORDER BY g.slot_id
"""


def grants_for(cursor: Cursor, agent_ids: Sequence[int]) -> dict[int, list[GrantMessage]]:
    """Every grant of every flex slot of these agents, recalls among them; a loan that ran out is left out."""
    cursor.execute(_GRANTS_SQL, (list(agent_ids),))
    grants: dict[int, list[GrantMessage]] = defaultdict(list)
    for agent_id, slot_id, fence, action, reason, left_us in cursor.fetchall():
        if action == "recall":
            grants[agent_id].append(GrantMessage(slot_id, fence, action, 0, reason))
        elif left_us:
            grants[agent_id].append(GrantMessage(slot_id, fence, action, left_us, reason))
    return dict(grants)


# ---- the band now ----


@dataclass(frozen=True)
class BandSlot:
    """One slot of a pool as it stands; `clock_us` of `bound_us` is how long a drain has taken."""

    slot_id: int
    name: str
    band: str
    agent: str
    state: str
    owner_class: str
    fence: int
    since: datetime | None
    reason: str
    expires_at: datetime | None
    recalled_at: datetime | None
    stop_admit_at: datetime | None
    manual_recall_by: str


def band(pool_id: int) -> list[BandSlot]:
    """Every slot of a pool in the fleet, by band and name."""
    slots = (
        Slot.objects.filter(pool_id=pool_id)
        .filter(Q(agent__isnull=False) | Q(tenures__ended_at__isnull=True, tenures__isnull=False))
        .select_related("agent", "grant")
        .distinct()
        .order_by("band", "name")
    )
    open_now = {row.slot_id: row for row in SlotInterval.objects.filter(slot__pool_id=pool_id, ended_at__isnull=True)}
    return [_band_slot(slot, open_now.get(slot.pk)) for slot in slots]


def _band_slot(slot: Slot, interval: SlotInterval | None) -> BandSlot:
    grant: Grant | None = getattr(slot, "grant", None)
    flex = grant is not None and (slot.band == Slot.Band.FLEX or grant.state in BORROWED)
    state = grant.state if flex and grant is not None else (interval.state if interval else SlotState.HOME.value)
    return BandSlot(
        slot_id=slot.pk,
        name=slot.name,
        band=slot.band,
        agent=slot.agent.name if slot.agent else "",
        state=state,
        owner_class=interval.owner_class if interval else "",
        fence=grant.fence if grant else 0,
        since=interval.started_at if interval else None,
        reason=interval.reason if interval else "",
        expires_at=grant.expires_at if grant else None,
        recalled_at=grant.recalled_at if grant else None,
        stop_admit_at=grant.stop_admit_at if grant else None,
        manual_recall_by=grant.manual_recall_by if grant else "",
    )


@dataclass(frozen=True)
class Freeze:
    """Who or what froze a pool, since when and until when."""

    since: datetime
    until: datetime | None
    by: str
    reason: str


def freeze_of(pool: Pool, now: datetime) -> Freeze | None:
    """The freeze in force; None when there is none or its time is over."""
    if pool.frozen_since is None or (pool.frozen_until is not None and pool.frozen_until <= now):
        return None
    return Freeze(pool.frozen_since, pool.frozen_until, pool.frozen_by, pool.freeze_reason)


def lost_slots() -> list[BandSlot]:
    """Slots whose agents are silent, over all pools: each is an open incident."""
    rows = (
        SlotInterval.objects.filter(ended_at__isnull=True, state=SlotState.LOST)
        .select_related("slot__agent", "slot__grant")
        .order_by("started_at", "slot_id")
    )
    return [_band_slot(row.slot, row) for row in rows]


def overdue_slots() -> list[BandSlot]:
    """Slots past their drain bound whose work cannot be cancelled or did not obey: each is an alert."""
    rows = (
        SlotInterval.objects.filter(ended_at__isnull=True, state=SlotState.OVERDUE)
        .select_related("slot__agent", "slot__grant")
        .order_by("started_at", "slot_id")
    )
    return [_band_slot(row.slot, row) for row in rows]


# ---- the strip ----


@dataclass(frozen=True)
class Span:
    """One interval of a slot, cut to the strip; `ended_at` is None while it lasts."""

    state: str
    owner_class: str
    fence: int
    started_at: datetime
    ended_at: datetime | None
    reason: str


@dataclass(frozen=True)
class Lane:
    slot_id: int
    name: str
    band: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Loan:
    """One line of the lend ledger; the drain as measured by the agent, None until home or when it did not say."""

    lend_id: int
    slot_id: int
    slot: str
    pool: str
    fence: int
    lent_at: datetime
    lend_decision_id: int
    recalled_at: datetime | None
    recall_reason: str
    recall_decision_id: int | None
    home_at: datetime | None
    stop_admit_at: datetime | None
    last_token_at: datetime | None
    drained_at: datetime | None
    drain_us: int | None
    overdue: bool
    lost: bool

    @property
    def last_token_us(self) -> int | None:
        """Between the last instant of admitting and the last token."""
        if self.stop_admit_at is None or self.last_token_at is None:
            return None
        return to_us(self.last_token_at) - to_us(self.stop_admit_at)


@dataclass(frozen=True)
class Strip:
    """Who held each slot of a pool from `since` to `until`, and the loans that touch it."""

    since: datetime
    until: datetime
    lanes: tuple[Lane, ...]
    loans: tuple[Loan, ...]


def strip(pool_id: int, since: datetime, until: datetime) -> Strip:
    """Lanes by band and name (interactive, flex, batch); spans tile each slot's tenure within the strip."""
    rows = (
        SlotInterval.objects.filter(slot__pool_id=pool_id, started_at__lt=until)
        .filter(Q(ended_at__isnull=True) | Q(ended_at__gt=since))
        .select_related("slot")
        .order_by("slot_id", "started_at")
    )
    spans: dict[int, list[Span]] = defaultdict(list)
    slots: dict[int, Slot] = {}
    for row in rows:
        slots[row.slot_id] = row.slot
        ended_at = row.ended_at if row.ended_at is None or row.ended_at <= until else until
        spans[row.slot_id].append(
            Span(row.state, row.owner_class, row.fence, max(row.started_at, since), ended_at, row.reason)
        )
    order = {"interactive": 0, "flex": 1, "batch": 2}
    ordered = sorted(slots.values(), key=lambda slot: (order.get(slot.band, 3), slot.name))
    lanes = tuple(Lane(slot.pk, slot.name, slot.band, tuple(spans[slot.pk])) for slot in ordered)
    touching = _loans(pool_id).filter(lent_at__lt=until).filter(Q(home_at__isnull=True) | Q(home_at__gt=since))
    return Strip(since, until, lanes, tuple(_loan(row) for row in touching))


def lend_ledger(pool_id: int | None = None, *, limit: int = 50) -> list[Loan]:
    """The latest loans, newest first, of one pool or of all."""
    return [_loan(row) for row in _loans(pool_id)[:limit]]


def loans_of(row: Decision) -> list[Loan]:
    """The loans that a decision began or recalled, by slot."""
    touched = _loans(row.pool_id).filter(Q(lend_decision=row) | Q(recall_decision=row))
    return sorted((_loan(loan) for loan in touched), key=lambda loan: loan.slot)


def loans() -> QuerySet[Lend]:
    """Every loan with its slot and pool, newest first."""
    return _loans(None)


def _loans(pool_id: int | None) -> QuerySet[Lend]:
    rows = Lend.objects.select_related("slot", "pool").order_by("-lent_at", "-id")
    return rows if pool_id is None else rows.filter(pool_id=pool_id)


def _loan(row: Lend) -> Loan:
    return Loan(
        lend_id=row.pk,
        slot_id=row.slot_id,
        slot=row.slot.name,
        pool=row.pool.slug,
        fence=row.fence,
        lent_at=row.lent_at,
        lend_decision_id=row.lend_decision_id,
        recalled_at=row.recalled_at,
        recall_reason=row.recall_reason,
        recall_decision_id=row.recall_decision_id,
        home_at=row.home_at,
        stop_admit_at=row.stop_admit_at,
        last_token_at=row.last_token_at,
        drained_at=row.drained_at,
        drain_us=row.drain_us,
        overdue=row.overdue,
        lost=row.lost,
    )


# ---- decisions ----


def decisions(pool_id: int | None = None, *, acting: bool = False) -> QuerySet[Decision]:
    """Decisions newest first; `acting` leaves out those that only watched or renewed."""
    rows = Decision.objects.select_related("pool").order_by("-at", "-id")
    if pool_id is not None:
        rows = rows.filter(pool_id=pool_id)
    if acting:
        kinds = ("lend", "recall", "cancel", "overdue")
        wanted = Q()
        for kind in kinds:
            wanted |= Q(actions__contains=[{"kind": kind}])
        rows = rows.filter(wanted)
    return rows


def decision(decision_id: int) -> Decision:
    """One decision with its evidence. Raises Decision.DoesNotExist."""
    return Decision.objects.select_related("pool").get(pk=decision_id)


def recompute(row: Decision) -> FlexDecision:
    """The core's answer to the stored evidence, made again now."""
    return decide(evidence.read_snapshot(row.snapshot))


def recomputes(row: Decision) -> bool:
    """Does the core answer the stored evidence as it did then: same checks, same actions?"""
    again = recompute(row)
    return bool(evidence.checks_as_json(again) == row.checks and evidence.actions_as_json(again) == row.actions)


def decision_at(pool_id: int, at: datetime) -> FlexDecision | None:
    """What the tick at or before an instant decided, recomputed from its sample under the limits of the row before.

    None when no sample is kept for it: the flex band had not begun, or it is older than 48 h.
    """
    sample = sample_at(pool_id, at)
    if sample is None:
        return None
    row = Decision.objects.filter(pool_id=pool_id, at__lte=sample.at).order_by("-at", "-id").first()
    if row is None or "seen" not in sample.figures:
        return None
    return decide(evidence.read_snapshot(sample.figures["seen"], row.snapshot))


def lends_this_week(pool_id: int, now: datetime) -> int:
    """Loans begun since Monday 00:00 in the billing zone."""
    monday = telemetry.week_start(now)
    return Lend.objects.filter(pool_id=pool_id, lent_at__gte=monday, lent_at__lte=now).count()


# ---- the weekly review ----


@dataclass(frozen=True)
class Review:
    """The trailing seven days of a pool's band beside the seven before, and what they say."""

    week: FlexWeek
    found: FlexReview
    overdue: int
    by_reason: dict[str, int]
    claim: DrainClaim


def week_review(pool: Pool, now: datetime) -> Review:
    """Lends against the weekly budget, p99 queue and slack against the week before, slots that settled."""
    since, before = now - WEEK, now - 2 * WEEK
    lends = Lend.objects.filter(pool=pool, lent_at__gte=since, lent_at__lte=now)
    week = FlexWeek(
        lends=lends.count(),
        spillover_per_week=pool.spillover_per_week,
        queue_p99_us=_queue_p99_us(pool, since, now),
        queue_p99_before_us=_queue_p99_us(pool, before, since),
        mean_slack=_mean_slack(pool.pk, since, now),
        mean_slack_before=_mean_slack(pool.pk, before, since),
        interactive_floor=_slots_of(pool, Slot.Band.INTERACTIVE),
        batch_floor=_slots_of(pool, Slot.Band.BATCH),
        flex_slots=tuple(_slot_weeks(pool, since, now)),
        peak_admitted_per_s=_peak(pool.pk, since, now),
        load_limit=pool.load_limit,
        safe_rate=safe_rate_of(pool.safe_rate),
    )
    reasons = lends.exclude(recall_reason="").values_list("recall_reason").annotate(n=Count("id"))
    return Review(
        week=week,
        found=flex_review.review(week),
        overdue=lends.filter(overdue=True).count(),
        by_reason=dict(reasons.order_by("recall_reason")),
        claim=_claim(lends, pool),
    )


def _claim(lends: QuerySet[Lend], pool: Pool) -> DrainClaim:
    """How fast loans came home, each against the bound of the policy that recalled it."""
    cancel_us = FlexPolicy().cancel_bound_us
    rows = lends.order_by("lent_at", "id").values_list(
        "slot__name", "fence", "home_at", "drain_us", "overdue",
        "recall_decision__snapshot__policy__drain_bound_us",
    )  # fmt: skip
    return drain_claim(
        LoanEnd(
            name=f"{slot} under fence {fence}",
            bound_us=(bound_us or pool.drain_bound_s * 1_000_000) + cancel_us,
            drain_us=drain_us,
            home=home_at is not None,
            overdue=overdue,
        )
        for slot, fence, home_at, drain_us, overdue, bound_us in rows
    )


def _slots_of(pool: Pool, band: str) -> int:
    return Slot.objects.filter(pool=pool, band=band, agent__isnull=False).count()


def _queue_p99_us(pool: Pool, since: datetime, until: datetime) -> int | None:
    """p99 queue wait of the pool's interactive class; None without a request."""
    class_id = WorkloadClass.objects.filter(slug=pool.interactive_class).values_list("pk", flat=True).first()
    if class_id is None:
        return None
    return breakdown(pool.pk, since, until, class_id=class_id).stages["queue"].quantile_us(0.99)


def _mean_slack(pool_id: int, since: datetime, until: datetime) -> float | None:
    samples = PoolSample.objects.filter(pool_id=pool_id, at__gte=since, at__lt=until)
    mean: float | None = samples.aggregate(mean=Avg("slack"))["mean"]
    return mean


_PEAK_SQL = """
SELECT coalesce(max(mean), 0) FROM (
    SELECT avg(admitted_per_s) AS mean FROM flex_poolsample
    WHERE pool_id = %s AND at >= %s AND at < %s GROUP BY date_trunc('minute', at)
) minutes
"""


def _peak(pool_id: int, since: datetime, until: datetime) -> float:
    """Highest admitted interactive rate of any minute."""
    with connection.cursor() as cursor:
        cursor.execute(_PEAK_SQL, (pool_id, since, until))
        return float(cursor.fetchone()[0])


def _slot_weeks(pool: Pool, since: datetime, until: datetime) -> list[SlotWeek]:
    held: dict[str, list[int]] = {}
    rows = SlotInterval.objects.filter(slot__pool=pool, slot__band=Slot.Band.FLEX, started_at__lt=until).filter(
        Q(ended_at__isnull=True) | Q(ended_at__gt=since)
    )
    for name, state, started_at, ended_at in rows.values_list("slot__name", "state", "started_at", "ended_at"):
        us = to_us(min(ended_at or until, until)) - to_us(max(started_at, since))
        times = held.setdefault(name, [0, 0])
        if state in BORROWED:
            times[1] += us
        elif state == SlotState.HOME:
            times[0] += us
    return [SlotWeek(slot=name, interactive_us=home, batch_us=batch) for name, (home, batch) in sorted(held.items())]
