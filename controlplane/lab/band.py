"""The agent's own flex band in a simulation: the same grants, tripwire and drains, without a file and without a log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from controlplane.agent.flex_agent import FlexBand, StoredSlot
from controlplane.agent.flex_host import EngineFlexHost
from controlplane.core.slot_states import SlotState

if TYPE_CHECKING:
    from controlplane.agent.engine import Engine
    from controlplane.lab.simulator import Simulator


class SimulatedBand(FlexBand):
    """`FlexBand` of a process that begins with the simulation and never restarts."""

    log = logging.getLogger(f"{__name__}.quiet")

    def __init__(self, simulator: Simulator, now_us: Callable[[], int]) -> None:
        # The host asks of an engine no more than a simulator has too.
        host = LoggingHost(cast("Engine", simulator), simulator)
        super().__init__(Path(), host, now_us, now_us)
        self._simulator = simulator

    def _follow(self) -> None:
        super()._follow()
        self._simulator.slots_away = self.any_lent or self.any_draining

    def _load(self) -> dict[str, StoredSlot]:
        return {}

    def _save(self) -> bool:
        return True


SimulatedBand.log.disabled = True


class LoggingHost(EngineFlexHost):
    """The engine's host; each change of a slot's state is also kept for the timeline."""

    def __init__(self, engine: Engine, simulator: Simulator) -> None:
        super().__init__(engine)
        self._simulator = simulator

    def set_slot_state(self, name: str, state: SlotState) -> None:
        self._simulator.timeline.note(name, state, self._simulator.now_us())
        super().set_slot_state(name, state)
