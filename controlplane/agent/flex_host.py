"""What the flex band sees and moves of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.agent.flex_agent import InteractiveSigns
from controlplane.agent.live_figures import waiting_ages
from controlplane.core.histogram import Histogram
from controlplane.core.slot_states import SlotState
from controlplane.core.slots import ClassKind

if TYPE_CHECKING:
    from controlplane.agent.engine import Engine


class EngineFlexHost:
    """`flex_agent.FlexHost` over an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def set_slot_state(self, name: str, state: SlotState) -> None:
        now_us = self._engine.clock.now_us()
        if any(slot.spec.name == name for slot in self._engine.scheduler.slots):
            self._engine.scheduler.set_slot(name, now_us, state=state)
            self._engine.follow_safe_rate(now_us)

    def batch_running(self, name: str) -> int:
        running = self._engine.scheduled_slot(name).running
        return sum(self._engine.registry.is_batch(request.class_slug) for request in running.values())

    def cancel_batch(self, name: str) -> int:
        stuck = 0
        for request in list(self._engine.scheduled_slot(name).running.values()):
            if self._engine.registry.is_batch(request.class_slug):
                if request.preemptible and not request.bytes_sent:
                    self._engine.requeue(self._engine.calls[int(request.id)])
                else:
                    stuck += 1
        return stuck

    def interactive_signs(self, *, with_p95: bool) -> InteractiveSigns:
        now_us = self._engine.clock.now_us()
        oldest_us, waits = None, Histogram()
        for queue in self._engine.scheduler.classes:
            if queue.spec.kind is not ClassKind.INTERACTIVE:
                continue
            arrival_us = queue.oldest_arrival_us()
            if arrival_us is not None:
                oldest_us = max(oldest_us or 0, now_us - arrival_us)
            if with_p95:
                class_id = self._engine.registry.class_id(queue.spec.slug)
                waits.merge(self._engine.figures.of_class(class_id, now_us).wait.snapshot(now_us))
                waits.record_all(waiting_ages(queue, now_us))
        # One quantile over all interactive classes, as the control plane makes it of a pool's reports.
        return InteractiveSigns(oldest_us, waits.quantile_us(0.95))
