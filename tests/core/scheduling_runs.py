"""A world with a virtual clock around the production scheduler: slots that share their time, and things that go wrong.

A request of gpu_us g is done when its even share of its slot's time has added up to g; a streamed one reports its
output on the way. Slots die and come back, are lent and recalled, attempts fail and are tried again within a retry
budget, clients go away. Everything that a promise is checked against (who runs where, what memory is taken, what was
delivered) is kept here, from what the scheduler answered, and not read from its books.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.core.class_queue import SchedulingClass
from controlplane.core.queued_request import Phase, QueuedRequest
from controlplane.core.retry_budget import RetryBudget
from controlplane.core.scheduling import Scheduler
from controlplane.core.slot_states import Band, SlotState
from controlplane.core.slots import ClassKind, Isolation, SlotSpec

ATTEMPTS_MAX = 3


@dataclass(frozen=True)
class Fleet:
    """A pool: its classes, slots and isolation design, and how long a head may be passed."""

    classes: tuple[SchedulingClass, ...]
    slots: tuple[SlotSpec, ...]
    isolation: Isolation
    reserve_after_us: int = 2_000_000

    def scheduler(self) -> Scheduler:
        return Scheduler(self.classes, self.slots, self.isolation, reserve_after_us=self.reserve_after_us)

    @property
    def places(self) -> int:
        return sum(spec.places for spec in self.slots)

    def workload_class(self, slug: str) -> SchedulingClass:
        return next(spec for spec in self.classes if spec.slug == slug)


@dataclass(frozen=True)
class Incident:
    """Something that goes wrong at an instant; `pick` chooses whom it hits."""

    at_us: int
    kind: str
    pick: int


@dataclass
class SlotView:
    """A slot as the world sees it."""

    spec: SlotSpec
    state: SlotState = SlotState.HOME
    ready: bool = True
    running: dict[int, QueuedRequest] = field(default_factory=dict)

    @property
    def free_kv_tokens(self) -> int:
        total = 1 << 62 if self.spec.kv_tokens is None else self.spec.kv_tokens
        return total - sum(request.kv_tokens for request in self.running.values())

    @property
    def outstanding_us(self) -> int:
        return sum(request.gpu_us for request in self.running.values())


@dataclass(frozen=True)
class Before:
    """What the scheduler could choose from just before it started a request."""

    queued: tuple[QueuedRequest, ...]
    outstanding_us: tuple[int, ...]
    free_kv_tokens: tuple[int, ...]
    free_places: tuple[int, ...]
    reserved_for: tuple[int | None, ...]


class Invariant:
    """Watches a run; each method raises AssertionError when a promise is broken."""

    def started(self, run: Run, request: QueuedRequest, before: Before) -> None: ...

    def preempted(self, run: Run, request: QueuedRequest) -> None: ...

    def settled(self, run: Run) -> None:
        """Nothing more can start at this instant."""


class Run:
    """One run of a fleet."""

    def __init__(self, fleet: Fleet, invariants: Sequence[Invariant] = ()) -> None:
        self.fleet = fleet
        self.invariants = invariants
        self.scheduler = fleet.scheduler()
        self.now_us = 0
        self.slots = [SlotView(spec) for spec in fleet.slots]
        self.offered: dict[int, QueuedRequest] = {}
        self.queued: dict[int, QueuedRequest] = {}
        self.left_us: dict[int, float] = {}
        self.sent_tokens: dict[int, int] = {}
        self.starts: list[tuple[int, int]] = []
        self.ended: dict[int, str] = {}
        self.delivered_us: dict[str, float] = {spec.slug: 0.0 for spec in fleet.classes}
        self.samples: list[tuple[int, dict[str, float]]] = []
        self.preempted: list[int] = []
        self.work: dict[str, float] = {}
        """Work done per tenant in the unit of its class, prompts at dispatch, the rest as it is done."""
        self.retries = RetryBudget()

    def play(self, arrivals: Sequence[QueuedRequest], incidents: Sequence[Incident] = (), *, until_us: int) -> None:
        """Run arrivals and incidents, both in order of time, to `until_us`."""
        seen = hit = 0
        while True:
            while hit < len(incidents) and incidents[hit].at_us <= self.now_us:
                self._happen(incidents[hit])
                hit += 1
            while seen < len(arrivals) and arrivals[seen].arrival_us <= self.now_us:
                self.offer(arrivals[seen])
                seen += 1
            for late in self.scheduler.timed_out(self.now_us):
                self._end(late.id, "timed out")
            self.settle()
            instants = [arrivals[seen].arrival_us] if seen < len(arrivals) else []
            if hit < len(incidents):
                instants.append(incidents[hit].at_us)
            following = min((*instants, *self._ends()), default=None)
            if following is None or following > until_us:
                return
            self._advance(following - self.now_us)

    def drain(self) -> None:
        """Everything is well again: run until nothing is left that could run."""
        for index, slot in enumerate(self.slots):
            self._set(index, state=SlotState.HOME, ready=True)
            assert slot.ready
        self.play((), until_us=1 << 60)

    def offer(self, request: QueuedRequest) -> None:
        self.offered[request.id] = self.queued[request.id] = request
        self.retries.count_request(self.now_us)
        self.scheduler.offer(request, self.now_us)

    def settle(self) -> None:
        """Dispatch and preempt until nothing more can start."""
        while True:
            before = self._before()
            request = self.scheduler.next_dispatch(self.now_us)
            if request is not None:
                self._start(request, before)
                continue
            victims = self.scheduler.victims(self.now_us)
            if not victims:
                break
            for victim in victims:
                for invariant in self.invariants:
                    invariant.preempted(self, victim)
                self.preempted.append(victim.id)
                self._back(victim)
        for invariant in self.invariants:
            invariant.settled(self)

    # -- what happens to requests

    def _start(self, request: QueuedRequest, before: Before) -> None:
        assert request.id in self.queued, "started what does not wait"
        assert all(request.id not in slot.running for slot in self.slots), "runs twice"
        del self.queued[request.id]
        self.slots[request.slot_index].running[request.id] = request
        self.left_us[request.id] = float(request.gpu_us)
        self.sent_tokens[request.id] = 0
        self.starts.append((self.now_us, request.id))
        self._count(request, prompt=True)
        for invariant in self.invariants:
            invariant.started(self, request, before)

    def _back(self, request: QueuedRequest) -> None:
        self._forget(request)
        self.scheduler.requeue(request.id, self.now_us)
        self.queued[request.id] = request

    def _fail(self, request: QueuedRequest) -> None:
        """An attempt failed: again where nothing was sent and the budget allows it."""
        again = not self.sent_tokens[request.id] and request.attempt < ATTEMPTS_MAX
        if again and self.retries.try_retry(self.now_us):
            self._back(request)
        else:
            self._forget(request)
            self.scheduler.release(request.id, self.now_us)
            self._end(request.id, "failed")

    def _end(self, request_id: int, how: str) -> None:
        assert request_id not in self.ended, "ended twice"
        self.queued.pop(request_id, None)
        self.ended[request_id] = how

    def _forget(self, request: QueuedRequest) -> None:
        del self.slots[request.slot_index].running[request.id]
        del self.left_us[request.id], self.sent_tokens[request.id]

    def _happen(self, incident: Incident) -> None:
        index = incident.pick % len(self.slots)
        slot = self.slots[index]
        held = sorted({**self.queued, **{id: r for view in self.slots for id, r in view.running.items()}})
        if incident.kind == "die":
            self._set(index, ready=False)
            for request in list(slot.running.values()):
                self._fail(request)
        elif incident.kind == "recover":
            self._set(index, ready=True)
        elif incident.kind in ("lend", "recall", "home"):
            states = {"lend": SlotState.LENT, "recall": SlotState.DRAINING, "home": SlotState.HOME}
            flex = [at for at, view in enumerate(self.slots) if view.spec.band is Band.FLEX]
            if flex and self.fleet.isolation is Isolation.RESERVED:
                self._set(flex[incident.pick % len(flex)], state=states[incident.kind])
        elif held:
            request = self.offered[held[incident.pick % len(held)]]
            if incident.kind == "cancel":
                if request.phase is Phase.RUNNING:
                    self._forget(request)
                self.scheduler.cancel(request.id, self.now_us)
                self._end(request.id, "cancelled")
            elif request.phase is Phase.RUNNING:
                self._fail(request)

    def _set(self, index: int, *, state: SlotState | None = None, ready: bool | None = None) -> None:
        slot = self.slots[index]
        slot.state = slot.state if state is None else state
        slot.ready = slot.ready if ready is None else ready
        self.scheduler.set_slot(slot.spec.name, self.now_us, state=state, ready=ready)

    # -- time

    def _ends(self) -> list[int]:
        return [
            self.now_us + max(1, -int(-min(self.left_us[id] for id in slot.running) * len(slot.running) // 1))
            for slot in self.slots
            if slot.running
        ]

    def _advance(self, elapsed_us: int) -> None:
        for slot in self.slots:
            share = elapsed_us / max(1, len(slot.running))
            for request in slot.running.values():
                done = min(self.left_us[request.id], share)
                self.left_us[request.id] -= done
                self.delivered_us[request.class_slug] += done
                self._count(request, done_us=done)
        self.now_us += elapsed_us
        for slot in self.slots:
            for request in list(slot.running.values()):
                self._report(request)
        self.samples.append((self.now_us, dict(self.delivered_us)))

    def _report(self, request: QueuedRequest) -> None:
        left = self.left_us[request.id]
        done = left <= 1e-6
        tokens = request.output_tokens if done else int(request.output_tokens * (1 - left / request.gpu_us))
        new = tokens - self.sent_tokens[request.id]
        if request.streamed and new:
            self.scheduler.produced(request.id, new)
            self.sent_tokens[request.id] = tokens
        if done:
            figures = {"output_tokens": request.output_tokens, "gpu_us": request.gpu_us}
            self._forget(request)
            self.scheduler.release(request.id, self.now_us, **figures)
            self._end(request.id, "completed")

    def _count(self, request: QueuedRequest, *, prompt: bool = False, done_us: float = 0.0) -> None:
        work = self.fleet.workload_class(request.class_slug).work
        if prompt:
            amount = float(work.at_dispatch(request.prompt_tokens))
        else:
            amount = work.afterwards(request.output_tokens, request.gpu_us) * done_us / request.gpu_us
        self.work[request.tenant] = self.work.get(request.tenant, 0.0) + amount

    def _before(self) -> Before:
        return Before(
            tuple(self.queued.values()),
            tuple(slot.outstanding_us for slot in self.slots),
            tuple(slot.free_kv_tokens for slot in self.slots),
            tuple(slot.spec.places - len(slot.running) for slot in self.slots),
            tuple(None if s.reserved_for is None else s.reserved_for.id for s in self.scheduler.slots),
        )

    def serves(self, index: int, workload_class: SchedulingClass) -> bool:
        """Whether a slot admits a class now, by the design's own words."""
        slot = self.slots[index]
        if not slot.ready or slot.state not in (SlotState.HOME, SlotState.LENT):
            return False
        if self.fleet.isolation is Isolation.SHARED:
            return True
        if self.fleet.isolation is Isolation.DEDICATED and slot.spec.home_class is not None:
            return slot.spec.home_class == workload_class.slug
        wants = workload_class.kind
        if slot.spec.band is Band.FLEX:
            if self.fleet.isolation is Isolation.DEDICATED:
                return False
            return wants is (ClassKind.BATCH if slot.state is SlotState.LENT else ClassKind.INTERACTIVE)
        return slot.spec.band.value == wants.value
