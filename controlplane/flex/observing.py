"""What reports and silence do to slots before anything is decided: home again, lost, back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from controlplane.core.flex_policy import SECOND_US, FlexPolicy
from controlplane.core.slot_states import BORROWED, SlotEvent, SlotState, apply_event
from controlplane.fleet.band_report import ReportedSlot
from controlplane.flex.reading import AgentRow, Grant, PoolReading, SlotRow

#: An agent that says nothing for this long has vanished; its slots are unobserved until it reports again.
LOST_AFTER_US = 15 * SECOND_US

_COMING_HOME = BORROWED - {SlotState.LENT}


@dataclass(frozen=True, slots=True)
class Observed:
    """One slot after this tick's observations; `event` is what happened, if anything did."""

    state: SlotState
    event: SlotEvent | None = None


def observe_slots(reading: PoolReading, *, now_us: int, leading_since_us: int) -> dict[int, Observed]:
    """`observe_slot` of each slot by its id. Nothing happens to one that is home or lent while its agent reports."""
    limit_us = min(LOST_AFTER_US, reading.pool.policy.telemetry_stale_us)
    heard = {
        agent_id
        for agent_id, agent in reading.agents.items()
        if _silence_us(agent, now_us, leading_since_us) < limit_us
    }
    return {
        slot.slot_id: _QUIET[slot.state]
        if slot.agent_id in heard and slot.state in _STAYS
        else observe_slot(slot, reading, now_us=now_us, leading_since_us=leading_since_us)
        for slot in reading.slots
    }


def observe_slot(slot: SlotRow, reading: PoolReading, *, now_us: int, leading_since_us: int) -> Observed:
    """The event that a slot's agent, or its silence, stands for.

    A lent slot is recalled before it is lost, so that its grant ends under a fence of its own.
    """
    agent = reading.agents.get(slot.agent_id) if slot.agent_id is not None else None
    if agent is None and slot.state not in BORROWED:
        return _QUIET[slot.state]
    silent_us = _silence_us(agent, now_us, leading_since_us)
    event = _event(slot, reading.reported(slot), silent_us, reading.pool.policy, now_us)
    return _QUIET[slot.state] if event is None else Observed(apply_event(slot.state, event), event)


_QUIET = {state: Observed(state) for state in SlotState}
_STAYS = frozenset({SlotState.HOME, SlotState.LENT})


def _silence_us(agent: AgentRow | None, now_us: int, leading_since_us: int) -> int:
    """The table of last reports does not outlive a crash of the database, so without a row the count starts afresh."""
    if agent is None:
        return LOST_AFTER_US
    return now_us - (leading_since_us if agent.reported_at_us is None else agent.reported_at_us)


def _event(
    slot: SlotRow, said: ReportedSlot | None, silent_us: int, policy: FlexPolicy, now_us: int
) -> SlotEvent | None:
    state = slot.state
    if state is SlotState.LOST:
        return _return(slot, said) if silent_us < policy.telemetry_stale_us and said is not None else None
    if state is not SlotState.LENT and _has_vanished(slot, silent_us, policy, now_us):
        return SlotEvent.VANISH
    if state in _COMING_HOME and said is not None and slot.grant is not None and _is_home(said, slot.grant):
        return SlotEvent.DRAINED
    return None


def _return(slot: SlotRow, said: ReportedSlot) -> SlotEvent:
    busy = slot.is_flex and slot.grant is not None and (said.running_batch > 0 or said.flex in _BORROWED_WORDS)
    return SlotEvent.RETURN_BUSY if busy else SlotEvent.RETURN_IDLE


_BORROWED_WORDS = frozenset(state.value for state in BORROWED)


def _has_vanished(slot: SlotRow, silent_us: int, policy: FlexPolicy, now_us: int) -> bool:
    """Silent for long; or silent at all when its drain is past the bound, for nobody can say that it went on."""
    if silent_us >= LOST_AFTER_US:
        return True
    if slot.state not in _COMING_HOME or slot.grant is None or slot.grant.recalled_at_us is None:
        return False
    return silent_us >= policy.telemetry_stale_us and now_us - slot.grant.recalled_at_us >= policy.drain_bound_us


def _is_home(said: ReportedSlot, grant: Grant) -> bool:
    """The agent took the recall and runs no batch there any more."""
    return said.fence >= grant.fence and said.flex == SlotState.HOME and said.running_batch == 0


def grant_after(grant: Grant, seen: Observed, now_us: int) -> Grant:
    """The stored grant after an observation."""
    if seen.event is None:
        return grant
    if seen.event is SlotEvent.RETURN_BUSY:
        return replace(grant, state=seen.state, recalled_at_us=now_us, cancelled_at_us=None)
    if seen.state is SlotState.HOME:
        return replace(grant, state=seen.state, expires_at_us=None, cancelled_at_us=None)
    return replace(grant, state=seen.state)
