"""Slots that come late: what the core's scaling signal asks for, ordered, and ready after the start-up lag.

The signal is that of `core.capacity`, asked of one class kind's arrivals, slot time and backlog. Slots on standby are
interactive ones of the pool that are not ready until then; one that runs nothing is given back when fewer were enough
for a while.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Final

import msgspec

from controlplane.core.capacity import TREND_US, DemandSample, ScalingInput, scaling_signal
from controlplane.core.idle_time import IdleCause
from controlplane.core.slots import ClassKind
from controlplane.lab.faults import Elastic
from controlplane.lab.simulator import Simulator
from controlplane.lab.timeline import ABSENT
from controlplane.wire.policy import PolicyDocument

STANDBY: Final = "X"
WINDOW_US: Final = 60_000_000
LEARNT_ENDS: Final = 20
SAMPLES_SHOWN: Final = 2_000


def with_standby(document: PolicyDocument, slots: int) -> PolicyDocument:
    """The policy with so many interactive slots more, like its first interactive one."""
    pool = document.pool
    like = next((slot for slot in pool.slots if slot.band == "interactive"), pool.slots[0])
    first = max(slot.id for slot in pool.slots) + 1
    more = [
        msgspec.structs.replace(like, id=first + number, name=f"{STANDBY}{number + 1:02}", band="interactive")
        for number in range(slots)
    ]
    return msgspec.structs.replace(document, pool=msgspec.structs.replace(pool, slots=[*pool.slots, *more]))


class Autoscaler:
    """Looks at the signal every so often. Make it before the simulation runs, on a policy with its standby slots."""

    def __init__(self, simulator: Simulator, elastic: Elastic) -> None:
        self._simulator, self._elastic = simulator, elastic
        self._slots = [slot for slot in simulator.scheduler.slots if slot.spec.name.startswith(STANDBY)][
            -elastic.slots :
        ]
        self._ordered: set[str] = set()
        self._history: list[DemandSample] = []
        self._enough_since_us: int | None = None
        self.orders: list[tuple[int, int, str]] = []
        """(ordered, ready, slot)"""
        self.returned = 0
        self.samples: list[tuple[int, int, int]] = []
        """(instant, slots needed, slots ready)"""
        work, classes = simulator.workload, simulator.registry.classes
        batch = [classes[slug].is_batch for slug in work.classes]
        self._rows = [row for row, index in enumerate(work.class_of) if not batch[index]]
        self._arrivals_us = [work.at_us[row] for row in self._rows]
        self._learnt = self._learnt_us = self._looked = 0
        for slot in self._slots:
            simulator.timeline.away(slot.index, ABSENT, simulator.start_us)
            simulator.scheduler.set_slot(slot.spec.name, simulator.start_us, ready=False)
        simulator.at(simulator.start_us + elastic.every_us, self._look)

    def _look(self) -> None:
        simulator, elastic = self._simulator, self._elastic
        if simulator.all_arrived and not simulator.scheduler.requests:
            return
        now_us = simulator.now_us()
        simulator.at(now_us + elastic.every_us, self._look)
        signal = scaling_signal(self._input(now_us))
        self._history.append(DemandSample(now_us, signal.demand_now_slots))
        self._history = [sample for sample in self._history if sample.at_us >= now_us - TREND_US]
        ready = self._ready()
        self.samples.append((now_us, signal.needed_slots, ready))
        lacking = signal.needed_slots - ready - len(self._ordered)
        for slot in [one for one in self._slots if simulator.timeline.cause_away(one.index) is ABSENT][
            : max(0, lacking)
        ]:
            self._order(slot.spec.name, slot.index, now_us)
        self._give_back(signal.needed_slots, ready, now_us)

    def _input(self, now_us: int) -> ScalingInput:
        simulator, elastic = self._simulator, self._elastic
        at_us = now_us - simulator.start_us
        arrived = bisect_right(self._arrivals_us, at_us) - bisect_right(self._arrivals_us, at_us - WINDOW_US)
        backlog_us = sum(queue.queued_gpu_us for queue in self._queues())
        return ScalingInput(
            now_us=now_us, arrival_rate_per_s=arrived / (min(WINDOW_US, max(1, at_us)) / 1e6),
            mean_service_us=self._mean_us(at_us), backlog_gpu_us=backlog_us, target_drain_us=elastic.drain_us,
            target_utilisation=elastic.utilisation, start_up_lag_us=elastic.lag_us, history=self._history,
        )  # fmt: skip

    def _mean_us(self, at_us: int) -> float:
        """Slot time of a request: the mean of those that ended, else what the service model says of the first ones."""
        simulator, seen = self._simulator, self._simulator.rows
        arrived = bisect_right(self._arrivals_us, at_us)
        while self._looked < arrived and seen.ended_us[self._rows[self._looked]] >= 0:
            gpu_us = seen.gpu_us[self._rows[self._looked]]
            self._looked += 1
            if gpu_us > 0:
                self._learnt += 1
                self._learnt_us += gpu_us
        if self._learnt >= LEARNT_ENDS:
            return self._learnt_us / self._learnt
        work, places = simulator.workload, max(slot.places for slot in simulator.scheduler.slots)
        few = self._rows[: max(1, min(arrived, LEARNT_ENDS))]
        times = [sum(simulator.service.parts(work.prompt[row], work.output[row], places)) for row in few]
        return sum(times) / len(times) / places if times else 0.0

    def _queues(self) -> list[Any]:
        return [queue for queue in self._simulator.scheduler.classes if queue.spec.kind is ClassKind.INTERACTIVE]

    def _ready(self) -> int:
        return max((queue.serving_slots for queue in self._queues()), default=0)

    def _order(self, name: str, index: int, now_us: int) -> None:
        simulator, ready_us = self._simulator, now_us + self._elastic.lag_us
        self._ordered.add(name)
        self.orders.append((now_us, ready_us, name))
        simulator.timeline.away(index, IdleCause.WARMING, now_us)
        simulator.at(ready_us, lambda: self._arrive(name, index))

    def _arrive(self, name: str, index: int) -> None:
        simulator, now_us = self._simulator, self._simulator.now_us()
        self._ordered.discard(name)
        simulator.timeline.away(index, None, now_us)
        simulator.scheduler.set_slot(name, now_us, ready=True)
        simulator.pump(now_us)

    def _give_back(self, needed: int, ready: int, now_us: int) -> None:
        simulator = self._simulator
        if needed >= ready or self._ordered:
            self._enough_since_us = None
            return
        if self._enough_since_us is None:
            self._enough_since_us = now_us
        if now_us - self._enough_since_us < self._elastic.idle_us:
            return
        for slot in reversed(self._slots):
            if slot.ready and not slot.running:
                simulator.scheduler.set_slot(slot.spec.name, now_us, ready=False)
                simulator.timeline.away(slot.index, ABSENT, now_us)
                self.returned += 1
                self._enough_since_us = now_us
                return

    def told(self) -> dict[str, Any]:
        """For a report."""
        start_us = self._simulator.start_us
        return {
            "orders": [
                {"slot": name, "ordered_s": (ordered_us - start_us) / 1e6, "ready_s": (ready_us - start_us) / 1e6}
                for ordered_us, ready_us, name in self.orders
            ],
            "returned": self.returned,
            "samples": [
                {"at_s": (at_us - start_us) / 1e6, "needed": needed, "ready": ready}
                for at_us, needed, ready in self.samples[:SAMPLES_SHOWN]
            ],
        }  # fmt: skip
