"""The flex-band decision: lend a slot to batch while interactive has room, and take it back in time.

``decide`` is pure: one frozen ``FlexSnapshot`` in, one frozen ``FlexDecision`` out. The controller calls it each tick,
the laboratory on a virtual clock, and an operator to ask "what would happen if".

Bounds are inclusive where time has to pass (held for, cooldown over, drain bound, stale, expired) and strict where a
guard has to be under a limit (p95, load, slack).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from controlplane.core.flex_decision import (
    Check,
    CheckUse,
    FlexAction,
    FlexActionKind,
    FlexDecision,
    FlexNote,
    RecallReason,
)
from controlplane.core.flex_demand import Demand, demand_of
from controlplane.core.flex_policy import Ratio, SafeRate, SpilloverAction, exact
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot
from controlplane.core.slot_states import BORROWED, Band, SlotEvent, SlotState, fence_after


def decide(snapshot: FlexSnapshot, backlog: Demand | None = None) -> FlexDecision:
    """At most one action per slot: lend, renew, recall with its reason, cancel, overdue.

    A tick that recalls lends nothing, and slots that are on their way home are not recalled again. ``backlog`` is the
    snapshot's demand where it is known already.
    """
    pool = _read_pool(snapshot, demand_of(snapshot) if backlog is None else backlog)
    lent = [slot for slot in snapshot.slots if slot.state is SlotState.LENT]
    pool_checks = _pool_recall_checks(snapshot, pool)
    slot_checks = [check for slot in lent for check in _slot_recall_checks(snapshot, slot)]
    reasons = _reasons_but_batch(lent, pool_checks, slot_checks)
    returning, return_checks = _batch_return(snapshot, pool.demand, lent, reasons)
    if returning is not None:
        reasons[returning.name] = RecallReason.BATCH_SLACK

    actions = [_recall(snapshot, slot, reasons[slot.name]) for slot in lent if slot.name in reasons]
    stay = [slot for slot in lent if slot.name not in reasons]
    if stay:
        expires_us = renewed_until_us([slot.grant_expires_at_us for slot in stay], snapshot)
        actions += [_renew(slot, expires_us) for slot in stay]
    drain_actions, drain_checks = _drains(snapshot)
    actions += drain_actions

    candidate = _candidate(snapshot)
    lend_checks = _lend_checks(snapshot, pool, candidate, recalls=bool(reasons))
    if candidate is not None and all(check.held for check in lend_checks):
        actions.append(_lend(snapshot, candidate))
    ordered = tuple(sorted(actions, key=lambda action: action.slot))
    return FlexDecision(
        at_us=snapshot.now_us,
        actions=ordered,
        demand=pool.demand,
        checks=(*lend_checks, *pool_checks, *slot_checks, *return_checks, *drain_checks),
        notes=_notes(snapshot, pool, ordered),
    )


def has_nothing_to_do(states: Iterable[SlotState], jobs: Iterable[BatchJob]) -> bool:
    """Every slot is home and no job needs one by a deadline: then `decide` acts on nothing, whatever else it sees.

    Slack is 1 without required slots, and no policy lends at that.
    """
    for state in states:
        if state is not SlotState.HOME:
            return False
    return not any(job.deadline_us is not None and job.remaining_gpu_us for job in jobs)


class _Pool(NamedTuple):
    """Figures that several rules share. A load of ``None`` is not known."""

    load: Ratio | None
    load_with_one_slot_less: Ratio | None
    telemetry_age_us: int | None
    telemetry_known: bool
    demand: Demand


def _read_pool(snapshot: FlexSnapshot, backlog: Demand) -> _Pool:
    figures, policy = snapshot.interactive, snapshot.policy
    serving, lost = 0, False
    for slot in snapshot.slots:
        if slot.band is not Band.BATCH:
            serving += slot.state is SlotState.HOME
            lost = lost or slot.state is SlotState.LOST
    age_us = elapsed_us(figures.telemetry_at_us, snapshot.now_us)
    fresh = age_us is not None and 0 <= age_us < policy.telemetry_stale_us
    complete = figures.p95_queue_us is not None and figures.admitted_per_s is not None
    # What silent agents still serve nobody can say: an old rate over the slots that are left is no load.
    admitted_per_s = None if lost and not fresh else figures.admitted_per_s
    return _Pool(
        load_of(admitted_per_s, snapshot.safe_rate, serving),
        load_of(admitted_per_s, snapshot.safe_rate, serving - 1),
        age_us,
        fresh and complete,
        backlog,
    )


def load_of(admitted_per_s: float | None, table: SafeRate | None, slots: int) -> Ratio | None:
    """Admitted rate over the tested safe rate; infinite where no slot serves, ``None`` where a term is not known."""
    if admitted_per_s is None or table is None:
        return None
    safe = table.at(slots)
    return exact(admitted_per_s) / safe if safe else math.inf


def elapsed_us(since_us: int | None, now_us: int) -> int | None:
    """Time since an instant; ``None`` when there is none, negative when it lies ahead."""
    return None if since_us is None else now_us - since_us


def _has_lasted(since_us: int | None, now_us: int, hold_us: int) -> bool:
    """Unknown and future starts have not lasted at all, whatever the hold."""
    return since_us is not None and now_us - since_us >= max(hold_us, 0)


def _is_over(last_us: int | None, now_us: int, pause_us: int) -> bool:
    """A pause after something that may never have happened."""
    return last_us is None or now_us - last_us >= pause_us


def _number(value: Ratio | None) -> float | None:
    return None if value is None else float(value)


# Recalls


def _pool_recall_checks(snapshot: FlexSnapshot, pool: _Pool) -> tuple[Check, ...]:
    """The reasons that bring every lent slot home. Not knowing the load for want of a table counts as too much."""
    policy, p95_us = snapshot.policy, snapshot.interactive.p95_queue_us
    too_loaded = snapshot.safe_rate is None or (pool.load is not None and pool.load >= exact(policy.load_limit))
    return (
        Check(
            RecallReason.INTERACTIVE_P95,
            p95_us,
            policy.lend_p95_us,
            p95_us is not None and p95_us >= policy.lend_p95_us,
            CheckUse.RECALL,
        ),
        Check(RecallReason.INTERACTIVE_LOAD, _number(pool.load), policy.load_limit, too_loaded, CheckUse.RECALL),
        Check(
            RecallReason.TELEMETRY_STALE,
            pool.telemetry_age_us,
            policy.telemetry_stale_us,
            not pool.telemetry_known,
            CheckUse.RECALL,
        ),
    )


def _slot_recall_checks(snapshot: FlexSnapshot, slot: FlexSlot) -> tuple[Check, ...]:
    """The reasons that concern one lent slot. A grant without a known end has ended."""
    left_us = None if slot.grant_expires_at_us is None else slot.grant_expires_at_us - snapshot.now_us
    tripped, asked_back = slot.name in snapshot.trips, slot.name in snapshot.manual_recalls
    return (
        Check(RecallReason.TRIPWIRE, tripped, None, tripped, CheckUse.RECALL, slot.name),
        Check(RecallReason.GRANT_EXPIRED, left_us, 0, left_us is None or left_us <= 0, CheckUse.RECALL, slot.name),
        Check(RecallReason.MANUAL, asked_back, None, asked_back, CheckUse.RECALL, slot.name),
    )


def _reasons_but_batch(
    lent: Sequence[FlexSlot], pool_checks: Iterable[Check], slot_checks: Iterable[Check]
) -> dict[str, RecallReason]:
    """Per lent slot the first reason that holds; slots without one are absent."""
    for_all = {check.name for check in pool_checks if check.held}
    own: dict[str | None, set[str]] = {}
    for check in slot_checks:
        if check.held:
            own.setdefault(check.slot, set()).add(check.name)
    reasons = {}
    for slot in lent:
        holding = for_all | own.get(slot.name, set())
        if holding:
            reasons[slot.name] = next(reason for reason in RecallReason if reason in holding)
    return reasons


def _batch_return(
    snapshot: FlexSnapshot, backlog: Demand, lent: Sequence[FlexSlot], reasons: dict[str, RecallReason]
) -> tuple[FlexSlot | None, tuple[Check, ...]]:
    """The one slot that batch no longer needs, if any: of those that may go, the one with the least running work.

    Slots that leave in this tick for another reason are counted as gone, so that two returns never add up to a loan.
    """
    policy, now_us = snapshot.policy, snapshot.now_us
    leaving = sum([exact(slot.batch_efficiency) for slot in lent if slot.name in reasons], Fraction(0))
    limit = exact(policy.return_slack)
    may_go: list[FlexSlot] = []
    checks: list[Check] = []
    for slot in lent:
        if slot.name in reasons:
            continue
        worth = exact(slot.batch_efficiency)
        without = backlog.slack_without(worth + leaving if leaving else worth)
        since_us = slot.slack_above_return_since_us
        if since_us is None:
            since_us = snapshot.slack_above_return_since_us
        verdicts = (
            Check(
                "slack_without_slot",
                _number(without),
                policy.return_slack,
                without > limit,
                CheckUse.RECALL,
                slot.name,
            ),
            Check(
                "slack_above_return_us",
                elapsed_us(since_us, now_us),
                policy.return_hold_us,
                _has_lasted(since_us, now_us, policy.return_hold_us),
                CheckUse.RECALL,
                slot.name,
            ),
            Check(
                "min_hold_us",
                elapsed_us(slot.lent_at_us, now_us),
                policy.min_hold_us,
                _has_lasted(slot.lent_at_us, now_us, policy.min_hold_us),
                CheckUse.RECALL,
                slot.name,
            ),
        )
        checks.extend(verdicts)
        if all(check.held for check in verdicts):
            may_go.append(slot)
    least = min(may_go, key=lambda slot: (slot.running_batch_gpu_us, slot.name), default=None)
    return least, tuple(checks)


def _recall(snapshot: FlexSnapshot, slot: FlexSlot, reason: RecallReason) -> FlexAction:
    return FlexAction(
        kind=FlexActionKind.RECALL,
        slot=slot.name,
        reason=reason,
        fence=fence_after(slot.fence, SlotEvent.RECALL),
        overrides_min_hold=not _has_lasted(slot.lent_at_us, snapshot.now_us, snapshot.policy.min_hold_us),
    )


def renewed_until_us(expires_us: Sequence[int | None], snapshot: FlexSnapshot) -> int:
    """When a pool's loans that go on end: as they did until a third of their TTL has passed, then a TTL from now.

    All of them end together: each renewal costs a write, and one instant is told of all.
    """
    now_us, ttl_us = snapshot.now_us, snapshot.policy.grant_ttl_us
    first_us, *others = expires_us
    if first_us is None or any(other_us != first_us for other_us in others):
        return now_us + ttl_us
    return first_us if lasts(first_us, now_us=now_us, ttl_us=ttl_us) else now_us + ttl_us


def lasts(expires_us: int, *, now_us: int, ttl_us: int) -> bool:
    """Whether a grant need not be renewed yet; one that ends later than its TTL allows by now has to be."""
    return 2 * ttl_us < 3 * (expires_us - now_us) <= 3 * ttl_us


def _renew(slot: FlexSlot, expires_us: int) -> FlexAction:
    return FlexAction(kind=FlexActionKind.RENEW, slot=slot.name, fence=slot.fence, grant_expires_at_us=expires_us)


# Drains


def _drains(snapshot: FlexSnapshot) -> tuple[list[FlexAction], list[Check]]:
    """What is due to slots that drain or cancel: cancel where that is possible, else say that they are overdue."""
    actions, checks = [], []
    for slot in snapshot.slots:
        if slot.state is SlotState.DRAINING:
            name, since_us, bound_us = "drain_bound_us", slot.recalled_at_us, snapshot.policy.drain_bound_us
        elif slot.state is SlotState.CANCELLING and slot.cancelled_at_us is not None:
            name, since_us, bound_us = "cancel_bound_us", slot.cancelled_at_us, snapshot.policy.cancel_bound_us
        else:
            continue
        past = _has_lasted(since_us, snapshot.now_us, bound_us)
        checks.append(Check(name, elapsed_us(since_us, snapshot.now_us), bound_us, past, CheckUse.DRAIN, slot.name))
        if past:
            cancel = slot.cancellable and slot.state is SlotState.DRAINING
            kind = FlexActionKind.CANCEL if cancel else FlexActionKind.OVERDUE
            actions.append(FlexAction(kind=kind, slot=slot.name, fence=slot.fence))
    return actions, checks


# Loans


def _candidate(snapshot: FlexSnapshot) -> FlexSlot | None:
    """The first flex slot by name that is home, and that nobody has just asked back."""
    return next(
        (
            slot
            for slot in snapshot.slots
            if slot.band is Band.FLEX and slot.state is SlotState.HOME and slot.name not in snapshot.manual_recalls
        ),
        None,
    )


def _away(snapshot: FlexSnapshot) -> int:
    """Flex slots that are not home: a lost one may still be with the borrower."""
    flex = [slot.state for slot in snapshot.slots if slot.band is Band.FLEX]
    return sum([state in BORROWED or state is SlotState.LOST for state in flex])


def _lend_checks(
    snapshot: FlexSnapshot, pool: _Pool, candidate: FlexSlot | None, *, recalls: bool
) -> tuple[Check, ...]:
    """Every guard of a new loan, all of which must hold."""
    return (
        *_interactive_guards(snapshot, pool),
        _slack_guard(snapshot, pool.demand),
        *_standing_guards(snapshot),
        *_slot_guards(snapshot, candidate, recalls=recalls),
    )


def _interactive_guards(snapshot: FlexSnapshot, pool: _Pool) -> tuple[Check, ...]:
    policy, figures, now_us = snapshot.policy, snapshot.interactive, snapshot.now_us
    p95_us, below_since_us = figures.p95_queue_us, figures.p95_below_since_us
    limit = exact(policy.load_limit)
    table = snapshot.safe_rate
    usable = table is not None and not table.expired(now_us)

    def under(load: Ratio | None) -> bool:
        return load is not None and load < limit

    return (
        Check(
            "p95_queue_us",
            p95_us,
            policy.lend_p95_us,
            p95_us is not None and p95_us < policy.lend_p95_us,
            CheckUse.LEND,
        ),
        Check(
            "p95_below_for_us",
            elapsed_us(below_since_us, now_us),
            policy.lend_hold_us,
            _has_lasted(below_since_us, now_us, policy.lend_hold_us),
            CheckUse.LEND,
        ),
        Check(
            "safe_rate_valid_us",
            None if table is None or table.valid_until_us is None else table.valid_until_us - now_us,
            0,
            usable,
            CheckUse.LEND,
        ),
        Check("load", _number(pool.load), policy.load_limit, under(pool.load), CheckUse.LEND),
        Check(
            "load_with_one_slot_less",
            _number(pool.load_with_one_slot_less),
            policy.load_limit,
            under(pool.load_with_one_slot_less),
            CheckUse.LEND,
        ),
        Check(
            "telemetry_age_us",
            pool.telemetry_age_us,
            policy.telemetry_stale_us,
            pool.telemetry_known,
            CheckUse.LEND,
        ),
    )


def _slack_guard(snapshot: FlexSnapshot, backlog: Demand) -> Check:
    limit = snapshot.policy.lend_slack
    return Check("slack", backlog.slack, limit, backlog.slack_exact < exact(limit), CheckUse.LEND)


def _standing_guards(snapshot: FlexSnapshot) -> tuple[Check, ...]:
    """What decides new loans only and never touches one that runs."""
    policy, now_us = snapshot.policy, snapshot.now_us
    budget = policy.spillover_per_week
    within = budget is None or snapshot.lends_this_week < budget
    return (
        Check("frozen", snapshot.frozen, False, not snapshot.frozen, CheckUse.LEND),
        Check(
            "since_recall_us",
            elapsed_us(snapshot.last_recall_at_us, now_us),
            policy.cooldown_us,
            _is_over(snapshot.last_recall_at_us, now_us, policy.cooldown_us),
            CheckUse.LEND,
        ),
        Check(
            "since_lend_us",
            elapsed_us(snapshot.last_lend_at_us, now_us),
            policy.decision_interval_us,
            _is_over(snapshot.last_lend_at_us, now_us, policy.decision_interval_us),
            CheckUse.LEND,
        ),
        Check(
            "lends_this_week",
            snapshot.lends_this_week,
            budget,
            within or policy.spillover_action is SpilloverAction.WARN,
            CheckUse.LEND,
        ),
    )


def _slot_guards(snapshot: FlexSnapshot, candidate: FlexSlot | None, *, recalls: bool) -> tuple[Check, ...]:
    """A trip starts the cooldown as a recall does, also where the slot was on its way home already."""
    flex = len([slot for slot in snapshot.slots if slot.band is Band.FLEX])
    max_lent = flex if snapshot.policy.max_lent is None else min(snapshot.policy.max_lent, flex)
    away = _away(snapshot)
    recalling = recalls or bool(snapshot.trips)
    return (
        Check("slots_away", away, max_lent, away < max_lent, CheckUse.LEND),
        Check("slot_at_home", candidate.name if candidate else None, None, candidate is not None, CheckUse.LEND),
        Check("recall_in_this_tick", recalling, False, not recalling, CheckUse.LEND),
    )


def _lend(snapshot: FlexSnapshot, slot: FlexSlot) -> FlexAction:
    return FlexAction(
        kind=FlexActionKind.LEND,
        slot=slot.name,
        fence=fence_after(slot.fence, SlotEvent.LEND),
        grant_expires_at_us=snapshot.now_us + snapshot.policy.grant_ttl_us,
    )


def _notes(snapshot: FlexSnapshot, pool: _Pool, actions: Sequence[FlexAction]) -> tuple[FlexNote, ...]:
    table, budget = snapshot.safe_rate, snapshot.policy.spillover_per_week
    holding = (
        (FlexNote.SPILLOVER_BUDGET_USED, budget is not None and snapshot.lends_this_week >= budget),
        (FlexNote.SAFE_RATE_EXPIRED, table is not None and table.expired(snapshot.now_us)),
        (FlexNote.SAFE_RATE_MISSING, table is None),
        (FlexNote.MIN_HOLD_OVERRIDDEN, any(action.overrides_min_hold for action in actions)),
        (FlexNote.JOBS_MISSED, bool(pool.demand.missed_now or pool.demand.missed_before)),
    )
    return tuple([note for note, holds in holding if holds])
