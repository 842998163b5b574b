"""A slot of this agent: its policy, its meter and whether its engine is ready."""

from __future__ import annotations

from controlplane.agent.meters import MeteredSlot
from controlplane.core.slot_states import Band
from controlplane.wire.policy import SlotPolicy

READY = "ready"
WARMING = "warming"
BROKEN = "broken"
DRAINING = "draining"


class AgentSlot:
    """One engine replica."""

    __slots__ = ("band", "metered", "policy", "state")

    def __init__(self, policy: SlotPolicy, now_us: int) -> None:
        self.policy = policy
        self.band = Band(policy.band)
        self.metered = MeteredSlot(policy.id, now_us)
        self.state = READY


def take_slots(
    present: dict[str, AgentSlot], own: list[SlotPolicy], now_us: int
) -> tuple[dict[str, AgentSlot], list[AgentSlot]]:
    """Slots by name as a revision has them, and those that it took away; a slot that stays keeps its meter."""
    kept: dict[str, AgentSlot] = {}
    for policy in own:
        slot = present.get(policy.name)
        if slot is None or slot.policy.id != policy.id:
            slot = AgentSlot(policy, now_us)
        slot.policy = policy
        kept[policy.name] = slot
    return kept, [slot for name, slot in present.items() if kept.get(name) is not slot]
