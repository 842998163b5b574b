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
