"""Batch jobs in a simulation: items leased with the agent's reports and run as requests of their class.

The agent's side follows `agent.items`: what waits stands in a queue of its own, earliest deadline first, and two of
each tenant are in the queue of the class. Leases do not lapse here, for the agent never falls silent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from controlplane.agent.item_calls import unbounded_queue
from controlplane.agent.item_room import NONE, Held, Room, ServiceRate, room_of
from controlplane.agent.items import HEADS, QUEUED_MAX, REPORT_EVERY_US, RETRY_US
from controlplane.core.admission import Decision, decide
from controlplane.core.admission_snapshot import ClassView, KeyView
from controlplane.core.batch_items import FAILURES_MOST
from controlplane.core.estimate import raw_gpu_us
from controlplane.core.flex_snapshot import BatchJob
from controlplane.core.reasons import Outcome
from controlplane.core.slots import ClassKind
from controlplane.lab.calls import Call, Columns, Rows

if TYPE_CHECKING:
    from controlplane.lab.pool_control import PoolControl
    from controlplane.lab.simulator import Simulator

BEST_EFFORT_US: Final = 1 << 61
LEARNT_ENDS: Final = 20
"""So many items have to end before what they cost is believed."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as it is submitted; instants count from the start of the simulation, None is best effort."""

    name: str
    tenant: str
    class_slug: str
    prompts: Sequence[int]
    outputs: Sequence[int]
    submitted_us: int = 0
    deadline_us: int | None = None

    def __post_init__(self) -> None:
        if not self.prompts or len(self.prompts) != len(self.outputs):
            raise ValueError(f"job {self.name} needs items, each with a prompt and an output")


class SimulatedJob:
    """A job with what has become of its items."""

    def __init__(self, spec: JobSpec, start_us: int) -> None:
        self.spec = spec
        self.deadline_us = None if spec.deadline_us is None else start_us + spec.deadline_us
        self.waiting: deque[int] = deque(range(len(spec.prompts)))
        self.rows = Rows(len(spec.prompts))
        self.failures = bytearray(len(spec.prompts))
        self.done = self.parked = 0
        self.learnt = self.learnt_us = 0
        self.finished_us: int | None = None
        self._mean_prompt = sum(spec.prompts) // len(spec.prompts)
        self._mean_output = sum(spec.outputs) // len(spec.outputs)

    @property
    def columns(self) -> Columns:
        """What became of its items so far."""
        return self.rows.columns()

    @property
    def unfinished(self) -> int:
        return len(self.spec.prompts) - self.done - self.parked

    def item_us(self, simulator: Simulator) -> int:
        """Present estimate of one item's GPU time: the mean of those that ended, once there are some."""
        if self.learnt >= LEARNT_ENDS:
            return max(1, self.learnt_us // self.learnt)
        return max(1, raw_gpu_us(simulator.registry.rates, self._mean_prompt, self._mean_output))

    def backlog(self, simulator: Simulator) -> BatchJob:
        """The job as the flex decision sees it."""
        remaining_us = self.unfinished * self.item_us(simulator)
        return BatchJob(name=self.spec.name, remaining_gpu_us=remaining_us, deadline_us=self.deadline_us)


class LeasedItem:
    """One item on the agent."""

    __slots__ = ("items", "job", "lane", "row")

    def __init__(self, items: LabItems, job: SimulatedJob, row: int, lane: Lane) -> None:
        self.items, self.job, self.row, self.lane = items, job, row, lane

    def dispatched(self, now_us: int) -> None:
        """It runs; the next one of its tenant takes its place in the queue before anybody else is chosen."""
        self.items.left_queue(self.lane)
        if self.lane.heap:
            self.items.feed_lane(self.lane, now_us)

    def requeued(self) -> None:
        self.items.entered_queue(self.lane)

    def ended(self, outcome: Outcome, gpu_us: int, now_us: int, *, ran: bool) -> None:
        self.items.ended(self, outcome, gpu_us, now_us, ran=ran)


class Lane:
    """What waits of one tenant: (deadline, fence, item)."""

    __slots__ = ("heap", "queued", "retry_us")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, LeasedItem]] = []
        self.queued = 0
        self.retry_us = 0


class LabItems:
    """The jobs, and the items of them that the agent holds."""

    def __init__(self, simulator: Simulator, control: PoolControl, jobs: Sequence[JobSpec]) -> None:
        self.simulator, self._control = simulator, control
        self.jobs = [SimulatedJob(spec, simulator.start_us) for spec in jobs]
        self._submitted: list[SimulatedJob] = []
        self._lanes: dict[str, Lane] = {}
        self._views: dict[str, ClassView] = {}
        self._key = KeyView()
        self._rate = ServiceRate()
        self._fence = 0
        self._held = 0
        self._held_gpu_us = 0
        self._waiting = 0
        self._more = False
        self._reported_us = 0
        for job in self.jobs:
            simulator.at(simulator.start_us + job.spec.submitted_us, partial(self._submitted.append, job))

    @property
    def unfinished(self) -> bool:
        return any(job.finished_us is None for job in self.jobs)

    def backlog(self) -> tuple[BatchJob, ...]:
        """What the flex decision is told."""
        return tuple(job.backlog(self.simulator) for job in self._submitted if job.unfinished)

    # -- leases --------------------------------------------------------------------------------------------------------

    def room(self, now_us: int) -> Room:
        """How many more items the agent takes."""
        self._reported_us, self._more = now_us, False
        if not self.jobs:
            return NONE
        slots, places = self._capacity()
        if self.simulator.flex.any_draining:
            places = 0
        held = Held(self._held, self._held_gpu_us, 0)
        return room_of(held, slots=slots, places=places, per_place_s=self._rate.per_place_s)

    def lease(self, room: Room, now_us: int) -> None:
        """The control plane leases what there is room for, the earliest deadline first."""
        if not self.jobs:
            return
        left, gpu_us = room.items, room.gpu_us
        ordered = sorted(
            self._submitted, key=lambda job: BEST_EFFORT_US if job.deadline_us is None else job.deadline_us
        )
        for job in ordered:
            item_us = job.item_us(self.simulator)
            while job.waiting and left and (gpu_us < 0 or gpu_us >= item_us):
                self._take(job, job.waiting.popleft(), item_us)
                left -= 1
                gpu_us -= item_us if gpu_us >= 0 else 0
                self._more = True
        self.feed(now_us)

    def _take(self, job: SimulatedJob, row: int, item_us: int) -> None:
        lane = self._lanes.setdefault(job.spec.tenant, Lane())
        self._fence += 1
        due_us = BEST_EFFORT_US if job.deadline_us is None else job.deadline_us
        heappush(lane.heap, (due_us, self._fence, LeasedItem(self, job, row, lane)))
        self._waiting += 1
        self._held += 1
        self._held_gpu_us += item_us
        self.simulator.items_step = self.step

    def _capacity(self) -> tuple[int, int]:
        """(slots that serve batch now, their places)"""
        slots: set[int] = set()
        places = 0
        for queue in self.simulator.scheduler.classes:
            if queue.spec.kind is ClassKind.BATCH:
                slots.update(slot.index for slot in queue.slots)
                places = max(places, queue.serving_places)
        return len(slots), places

    # -- starting ------------------------------------------------------------------------------------------------------

    def feed(self, now_us: int) -> None:
        """Queue in the class what should be there."""
        for lane in self._lanes.values():
            self.feed_lane(lane, now_us)

    def feed_lane(self, lane: Lane, now_us: int) -> None:
        simulator = self.simulator
        while lane.heap and lane.queued < HEADS and simulator.items_queued < QUEUED_MAX and now_us >= lane.retry_us:
            if not self._try(lane, now_us):
                lane.retry_us = now_us + RETRY_US

    def _try(self, lane: Lane, now_us: int) -> bool:
        """Admit the first item of a lane as a request of its class."""
        simulator, due_us, item = self.simulator, lane.heap[0][0], lane.heap[0][2]
        spec, row = item.job.spec, item.row
        klass = simulator.registry.classes[spec.class_slug]
        tenant = simulator.tenant(spec.tenant)
        counter = tenant.view.concurrency
        if counter is not None and not counter.has_room():
            return False
        output = spec.outputs[row]
        asked = min(output, klass.max_output_tokens)
        rows = item.job.rows
        call = Call(simulator.next_serial(), rows, row, klass, tenant, spec.prompts[row], output, asked, item)
        if rows.arrived_us[row] < 0:
            rows.arrived_us[row] = now_us
            rows.changed()
        snapshot = simulator.snapshot(call, klass, now_us)
        view = self._views.get(spec.class_slug)
        if view is None:
            view = self._views[spec.class_slug] = unbounded_queue(klass.view)
        snapshot.key, snapshot.workload_class = self._key, view
        answer = decide(snapshot)
        if answer.decision is Decision.REJECT:
            if answer.reason is not None and not answer.retry_after_s:
                self._give_up(lane, item)
                return True
            return False
        heappop(lane.heap)
        self._waiting -= 1
        self.entered_queue(lane)
        call.deadline_us = None if due_us == BEST_EFFORT_US else due_us
        simulator.admit(call, snapshot, answer, now_us)
        return True

    def _give_up(self, lane: Lane, item: LeasedItem) -> None:
        """It can never run: parked without another attempt."""
        heappop(lane.heap)
        self._waiting -= 1
        self._let_go(item.job)
        item.job.parked += 1
        self._finish(item.job, self.simulator.now_us())

    def entered_queue(self, lane: Lane) -> None:
        lane.queued += 1
        self.simulator.items_queued += 1

    def left_queue(self, lane: Lane) -> None:
        lane.queued -= 1
        self.simulator.items_queued -= 1

    # -- ends ----------------------------------------------------------------------------------------------------------

    def ended(self, item: LeasedItem, outcome: Outcome, gpu_us: int, now_us: int, *, ran: bool) -> None:
        """Its request ended: done, tried again, or parked; its place is filled, and more is asked for in time."""
        job, lane = item.job, item.lane
        if not ran:
            self.left_queue(lane)
        lane.retry_us = 0
        if outcome in (Outcome.DISPLACED, Outcome.QUEUE_TIMEOUT):
            self._fence += 1
            due_us = BEST_EFFORT_US if job.deadline_us is None else job.deadline_us
            heappush(lane.heap, (due_us, self._fence, item))
            self._waiting += 1
            return
        self._let_go(job)
        self._advance(now_us, busy=True)
        self._rate.ended()
        if outcome is Outcome.COMPLETED:
            job.done += 1
            job.learnt += 1
            job.learnt_us += gpu_us
        else:
            job.failures[item.row] += 1
            if job.failures[item.row] >= FAILURES_MOST:
                job.parked += 1
            else:
                job.waiting.append(item.row)
        self._finish(job, now_us)
        self.feed(now_us)
        if self._runs_out() and now_us - self._reported_us >= REPORT_EVERY_US:
            self._reported_us, self._more = now_us, False
            self._control.report_soon()

    def _let_go(self, job: SimulatedJob) -> None:
        self._held -= 1
        self._held_gpu_us = max(0, self._held_gpu_us - job.item_us(self.simulator))
        if not self._held:
            self._held_gpu_us = 0
            self.simulator.items_step = None

    def _finish(self, job: SimulatedJob, now_us: int) -> None:
        if not job.unfinished and job.finished_us is None:
            job.finished_us = now_us

    def _runs_out(self) -> bool:
        """Whether what is held ends before the next report, while the control plane may have more."""
        if not self._more:
            return False
        rate = self._rate.per_place_s
        _, places = self._capacity()
        soon = 0.0 if rate is None else rate * places * self._control.interval_us / 1e6
        return self._waiting <= soon

    def step(self, now_us: int) -> None:
        """What time alone brings: limits give room again."""
        self._advance(now_us, busy=bool(self._held))
        self.feed(now_us)

    def _advance(self, now_us: int, *, busy: bool) -> None:
        _, places = self._capacity()
        self._rate.advance(now_us, places=places, busy=busy)
