"""This agent's part of the pool's tested interactive rate."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.agent.policy_state import instant_us
from controlplane.core.flex_policy import SafeRate, safe_rate_share
from controlplane.core.slot_states import Band, SlotState, admits_interactive
from controlplane.core.slots import Isolation
from controlplane.wire.policy import PolicyDocument


def own_safe_rate(
    document: PolicyDocument, agent_id: int, own_states: Mapping[str, SlotState], now_us: int
) -> float | None:
    """Requests per second that this agent may admit for the interactive class; None where nothing was tested.

    Flex slots of other agents count as home: the control plane's share, where it sends one, knows better. An expired
    table lends nothing, but what it says of the rate still holds.
    """
    pool = document.pool
    if not pool.safe_rate.entries:
        return None
    valid_until = pool.safe_rate.valid_until
    table = SafeRate(
        entries=tuple((int(slots), rate) for slots, rate in pool.safe_rate.entries.items()),
        valid_until_us=instant_us(valid_until) if valid_until else None,
    )
    shared = pool.isolation == Isolation.SHARED
    own = total = 0
    for slot in pool.slots:
        mine = slot.agent_id == agent_id
        state = own_states.get(slot.name, SlotState.HOME) if mine else SlotState.HOME
        if slot.agent_id is not None and (shared or admits_interactive(Band(slot.band), state)):
            total += 1
            own += mine
    return safe_rate_share(table, pool_slots=total, own_slots=own)
