"""One pool, one tick: observe, decide, and say what is to be written. No input, no output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from controlplane.core.flex import decide, elapsed_us
from controlplane.core.flex_decision import (
    EVENT_OF_ACTION,
    FlexAction,
    FlexActionKind,
    FlexDecision,
    next_turn_us,
    worth_a_row,
)
from controlplane.core.flex_demand import Demand, demand_of
from controlplane.core.flex_marks import FlexMarks, observe, remember
from controlplane.core.flex_policy import SECOND_US
from controlplane.core.flex_snapshot import FlexSnapshot
from controlplane.core.period import from_us
from controlplane.core.slot_states import BORROWED, SlotEvent, SlotState, admits_interactive, apply_event
from controlplane.fleet.band_report import ReportedSlot
from controlplane.flex import evidence
from controlplane.flex.applying import Changes, Sample, grant_row
from controlplane.flex.observing import Observed, grant_after, observe_slots
from controlplane.flex.reading import Grant, PoolReading, SlotRow, snapshot_of

DAY_US = 24 * 3600 * SECOND_US

_EVENT_REASONS = {
    SlotEvent.VANISH: "agent_silent",
    SlotEvent.RETURN_IDLE: "agent_back",
    SlotEvent.RETURN_BUSY: "agent_back",
    SlotEvent.DRAINED: "drained",
    SlotEvent.LEND: "lend",
    SlotEvent.CANCEL: "drain_bound",
    SlotEvent.OVERDUE: "drain_bound",
}


@dataclass(frozen=True)
class Memory:
    """What is kept of a pool between ticks; it outlives a restart in the pool's last sample."""

    marks: FlexMarks = field(default_factory=FlexMarks)
    #: The last decision that was written down, with the limits it was made under.
    recorded: FlexDecision | None = None
    limits: tuple[Any, ...] = ()
    #: When a sample was written last that is kept for long.
    kept_us: int | None = None


@dataclass(frozen=True, kw_only=True)
class Nudged:
    """An agent to be told ahead of its next report."""

    kind: str
    pool: str
    agent: str
    slot_id: int
    fence: int


@dataclass(frozen=True)
class PoolTick:
    """The outcome for one pool: memory to keep once it is written, and whom to nudge."""

    memory: Memory
    #: What was decided on, with the marks filled in; `decision` is None in a pool without a flex band.
    snapshot: FlexSnapshot
    decision: FlexDecision | None
    #: By slot id, as they are once this is written.
    grants: Mapping[int, Grant]
    #: The memory that goes with the sample.
    marks: FlexMarks
    #: Nothing was observed and nothing done but renewals: the same inputs a second later say the same.
    settled: bool
    nudges: tuple[Nudged, ...] = ()


def tick_pool(
    reading: PoolReading,
    memory: Memory,
    changes: Changes,
    *,
    now_us: int,
    leading_since_us: int,
    interactive_classes: frozenset[int],
) -> PoolTick:
    """Observes and decides one pool and adds its rows to `changes`."""
    seen = observe_slots(reading, now_us=now_us, leading_since_us=leading_since_us)
    observed = {slot.slot_id: slot for slot in reading.slots}
    grants = {
        slot.slot_id: grant_after(slot.grant, seen[slot.slot_id], now_us)
        for slot in reading.slots
        if slot.grant is not None and slot.is_flex
    }
    happened = len([one for one in seen.values() if one.event is not None]) > 0
    if happened:
        reading = replace(reading, slots=[_as_seen(slot, seen[slot.slot_id]) for slot in reading.slots])
    events = changes.events
    kept = memory.kept_us is None or now_us >= next_turn_us(memory.kept_us, reading.pool.turn_us)
    if kept:
        memory = replace(memory, kept_us=now_us)
    snapshot = snapshot_of(reading, grants, now_us, interactive_classes)
    changes.trips.extend(trip.trip_id for trip in reading.trips)
    if not reading.flex:
        marks = FlexMarks(ticked_at_us=now_us)
        _sample(changes, reading, snapshot, evidence.snapshot_text(snapshot), demand_of(snapshot), marks, kept=kept)
        _moves(changes, reading, observed, seen, {}, {})
        return PoolTick(memory, snapshot, None, {}, marks, settled=changes.events == events)
    backlog = demand_of(snapshot)
    marks, snapshot = observe(memory.marks, snapshot, backlog)
    decision = decide(snapshot, backlog)
    marks = remember(marks, decision)
    by_name = {slot.name: slot for slot in reading.slots}
    actions = {by_name[action.slot].slot_id: action for action in decision.actions}
    after = {
        slot_id: _grant_after_action(grant, actions.get(slot_id), reading, now_us) for slot_id, grant in grants.items()
    }
    said = evidence.snapshot_text(snapshot)
    recorded = record(changes, reading, snapshot, said, decision, memory)
    _grants(changes, reading, observed, after, actions, before=memory.marks, marks=marks)
    _loans(changes, reading, observed, seen, actions, after, now_us)
    _moves(changes, reading, observed, seen, actions, after)
    _sample(changes, reading, snapshot, said, decision.demand, marks, kept=kept)
    if recorded:
        after_it = Memory(marks, decision, (snapshot.policy, snapshot.safe_rate), memory.kept_us)
    else:
        after_it = replace(memory, marks=marks)
    settled = changes.events == events and not decision.acts and not happened
    return PoolTick(after_it, snapshot, decision, after, marks, settled, tuple(_nudges(reading, actions)))


def _as_seen(slot: SlotRow, seen: Observed) -> SlotRow:
    """A floor slot's state lives in its interval; a flex slot's in the grants that go beside it."""
    if slot.is_flex or slot.interval is None or seen.event is None:
        return slot
    return replace(slot, interval=replace(slot.interval, state=seen.state.value))


def _grant_after_action(grant: Grant, action: FlexAction | None, reading: PoolReading, now_us: int) -> Grant:
    if action is None:
        return grant
    ttl_us = reading.pool.policy.grant_ttl_us
    if action.kind is FlexActionKind.RENEW:
        if action.grant_expires_at_us == grant.expires_at_us:
            return grant
        return grant.renewed(now_us, action.grant_expires_at_us, ttl_us)
    state = apply_event(grant.state, EVENT_OF_ACTION[action.kind])
    if action.kind is FlexActionKind.LEND:
        return Grant(
            fence=action.fence, action="lend", ttl_us=ttl_us, state=state, lent_at_us=now_us, renewed_at_us=now_us,
            expires_at_us=action.grant_expires_at_us,
        )  # fmt: skip
    if action.kind is FlexActionKind.RECALL:
        return replace(
            grant, fence=action.fence, action="recall", reason=str(action.reason), ttl_us=0, state=state,
            recalled_at_us=now_us, expires_at_us=None,
        )  # fmt: skip
    if action.kind is FlexActionKind.CANCEL:
        return replace(grant, state=state, cancelled_at_us=now_us)
    return replace(grant, state=state)


def record(
    changes: Changes, reading: PoolReading, snapshot: FlexSnapshot, seen: str, decision: FlexDecision, memory: Memory
) -> bool:
    """Writes the decision down when it acts, when a check or the limits changed, and once a minute."""
    due = worth_a_row(decision, memory.recorded, turn_us=reading.pool.turn_us)
    if not due and (snapshot.policy, snapshot.safe_rate) == memory.limits:
        return False
    changes.decisions.append(
        {
            "pool_id": reading.pool.pool_id,
            "snapshot": evidence.with_limits_text(seen, snapshot.policy, snapshot.safe_rate),
            "required": evidence.finite(decision.required),
            "available": evidence.finite(decision.available),
            "slack": evidence.finite(decision.slack),
            "missed": decision.missed,
            "checks": evidence.checks_text(decision),
            "actions": evidence.as_text(evidence.actions_as_json(decision)),
        }
    )
    return True


def _grants(
    changes: Changes,
    reading: PoolReading,
    observed: Mapping[int, SlotRow],
    after: Mapping[int, Grant],
    actions: Mapping[int, FlexAction],
    *,
    before: FlexMarks,
    marks: FlexMarks,
) -> None:
    for slot in reading.slots:
        stored, now = observed[slot.slot_id].grant, after.get(slot.slot_id)
        if stored is None or now is None or (stored == now and slot.slot_id not in actions):
            continue
        action, since_us = actions.get(slot.slot_id), marks.slack_above_since_us.get(slot.name)
        goes_on = action is not None and action.kind is FlexActionKind.RENEW
        if goes_on and since_us == before.slack_above_since_us.get(slot.name):
            if stored != now:
                changes.renewals.add(slot.slot_id, now.fence, now.ttl_us)
            continue
        changes.grants.append(
            grant_row(
                slot.slot_id,
                stored,
                now,
                lend=action is not None and action.kind is FlexActionKind.LEND,
                answered=slot.manual_recall and now.state is not SlotState.LENT,
                slack_since_us=since_us,
            )
        )


def _loans(
    changes: Changes,
    reading: PoolReading,
    observed: Mapping[int, SlotRow],
    seen: Mapping[int, Observed],
    actions: Mapping[int, FlexAction],
    after: Mapping[int, Grant],
    now_us: int,
) -> None:
    """New loans, and what happened to those that run: one row a slot."""
    for slot_id in after:
        slot, action, event = observed[slot_id], actions.get(slot_id), seen[slot_id].event
        kind = None if action is None else action.kind
        if event is None and (kind is None or kind is FlexActionKind.RENEW):
            continue
        home = event in (SlotEvent.DRAINED, SlotEvent.RETURN_IDLE)
        facts = {
            "recalled": kind is FlexActionKind.RECALL,
            "reason": str(action.reason) if action is not None and action.reason is not None else "",
            "home": home,
            **(measured_drain(reading.reported(slot), reading, slot, now_us) if home else {}),
            "overdue": kind is FlexActionKind.OVERDUE,
            "lost": event is SlotEvent.VANISH,
        }
        if facts["recalled"] or home or facts["overdue"] or facts["lost"]:
            changes.loans.append({"pool_id": reading.pool.pool_id, "slot_id": slot_id, **facts})
        if kind is FlexActionKind.LEND:
            changes.lends.append({"pool_id": reading.pool.pool_id, "slot_id": slot_id, "fence": after[slot_id].fence})


def measured_drain(said: ReportedSlot | None, reading: PoolReading, slot: SlotRow, now_us: int) -> dict[str, Any]:
    """The instants of a drain and how long it took, all by the agent's own clock; empty when it did not say.

    A clock that is off by more than a day, or instants out of order, say nothing.
    """
    if said is None or said.stop_admit_us is None or said.home_us is None:
        return {}
    instants = [us for us in (said.stop_admit_us, said.last_token_us, said.home_us) if us is not None]
    lent_at_us = now_us if slot.grant is None or slot.grant.lent_at_us is None else slot.grant.lent_at_us
    if instants != sorted(instants) or instants[0] < lent_at_us - DAY_US or instants[-1] > now_us + DAY_US:
        return {}
    return {
        "stop_admit_at": from_us(said.stop_admit_us),
        "last_token_at": None if said.last_token_us is None else from_us(said.last_token_us),
        "drained_at": from_us(said.home_us),
        "drain_us": said.home_us - said.stop_admit_us,
    }


def _moves(
    changes: Changes,
    reading: PoolReading,
    observed: Mapping[int, SlotRow],
    seen: Mapping[int, Observed],
    actions: Mapping[int, FlexAction],
    after: Mapping[int, Grant],
) -> None:
    """Intervals that no longer say what is so: closed, and the next opened, at this instant."""
    for slot in reading.slots:
        open_now = observed[slot.slot_id].interval
        if open_now is None:
            continue
        grant = after.get(slot.slot_id)
        state = seen[slot.slot_id].state if grant is None else grant.state
        owner = owner_class(reading, slot, state)
        if open_now.state == state and open_now.owner_class == owner:
            continue
        changes.moves.append(
            {
                "slot_id": slot.slot_id,
                "state": state.value,
                "owner_class": owner,
                "fence": 0 if grant is None else grant.fence,
                "reason": _reason(open_now.state, state, actions.get(slot.slot_id), seen[slot.slot_id]),
                "starts_at": from_us(open_now.started_at_us) if open_now.state is None else None,
                "follows_grant": grant is not None and grant != observed[slot.slot_id].grant,
            }
        )


def owner_class(reading: PoolReading, slot: SlotRow, state: SlotState) -> str:
    """The class whose time it is: the borrower's from loan to home; nobody's while unobserved or where all share."""
    if reading.pool.shared or state is SlotState.LOST:
        return ""
    batch = slot.band == "batch" or state in BORROWED
    return reading.pool.batch_class if batch else reading.pool.interactive_class


def _reason(was: str | None, state: SlotState, action: FlexAction | None, seen: Observed) -> str:
    if was is None:
        return "enrolled"
    if action is not None and action.kind is not FlexActionKind.RENEW:
        return str(action.reason) if action.reason is not None else _EVENT_REASONS[EVENT_OF_ACTION[action.kind]]
    if seen.event is not None:
        return _EVENT_REASONS[seen.event]
    return "class_changed" if was == state else "caught_up"


def _sample(
    changes: Changes,
    reading: PoolReading,
    snapshot: FlexSnapshot,
    seen: str,
    backlog: Demand,
    marks: FlexMarks,
    *,
    kept: bool,
) -> None:
    figures, table = snapshot.interactive, snapshot.safe_rate
    serving = sum(admits_interactive(slot.band, slot.state) for slot in snapshot.slots)
    changes.samples.append(
        Sample(
            reading.pool.pool_id,
            figures.p95_queue_us,
            figures.admitted_per_s,
            None if table is None else float(table.at(serving)),
            evidence.finite(backlog.required),
            evidence.finite(backlog.available),
            evidence.finite(backlog.slack),
            elapsed_us(figures.telemetry_at_us, snapshot.now_us),
            None,
            kept,
            evidence.figures_text(seen, marks),
        )
    )


def _nudges(reading: PoolReading, actions: Mapping[int, FlexAction]) -> list[Nudged]:
    kinds = {FlexActionKind.LEND: "grant", FlexActionKind.RECALL: "recall"}
    nudges: list[Nudged] = []
    if not any(action.kind in kinds for action in actions.values()):
        return nudges
    for slot in reading.slots:
        action = actions.get(slot.slot_id)
        agent = reading.agents.get(slot.agent_id) if slot.agent_id is not None else None
        if action is None or agent is None or action.kind not in kinds:
            continue
        nudges.append(
            Nudged(
                kind=kinds[action.kind],
                pool=reading.pool.slug,
                agent=agent.uuid,
                slot_id=slot.slot_id,
                fence=action.fence,
            )
        )
    return nudges
