"""A flex band over a real scheduler, on clocks that a test moves, and a control plane that keeps the fencing rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from controlplane.agent.flex_agent import FlexBand, InteractiveSigns
from controlplane.core.class_queue import SchedulingClass
from controlplane.core.flex_policy import FlexPolicy
from controlplane.core.queued_request import Phase, QueuedRequest
from controlplane.core.scheduling import Scheduler
from controlplane.core.slot_states import BORROWED, Band, SlotState
from controlplane.core.slots import ClassKind, Isolation, SlotSpec
from controlplane.wire.policy import SlotPolicy
from controlplane.wire.report import Grant

TTL_US, DRAIN_US, LEND_P95_US = 15_000_000, 30_000_000, 200_000
FLEX = {"f1": 1, "f2": 2}
BANDS = {"i1": Band.INTERACTIVE, "b1": Band.BATCH, "f1": Band.FLEX, "f2": Band.FLEX}


def slot_policies() -> list[SlotPolicy]:
    return [
        SlotPolicy(id=FLEX.get(name, 10), agent_id=1, name=name, band=band.value, places=2, kv_tokens=0)
        for name, band in BANDS.items()
    ]


class SchedulerHost:
    """`FlexHost` over a scheduler alone."""

    def __init__(self, scheduler: Scheduler, world: World) -> None:
        self._scheduler = scheduler
        self._world = world

    def slot(self, name: str):
        return next(slot for slot in self._scheduler.slots if slot.spec.name == name)

    def set_slot_state(self, name: str, state: SlotState) -> None:
        self._world.log.append((name, state))
        self._scheduler.set_slot(name, self._world.work_us, state=state)

    def batch_running(self, name: str) -> int:
        return sum(request.class_slug == "bulk" for request in self.slot(name).running.values())

    def cancel_batch(self, name: str) -> int:
        stuck = 0
        for request in list(self.slot(name).running.values()):
            if request.class_slug != "bulk":
                continue
            if request.preemptible:
                self._scheduler.requeue(request.id, self._world.work_us)
            else:
                stuck += 1
        return stuck

    def interactive_signs(self, *, with_p95: bool) -> InteractiveSigns:
        arrival_us = self._scheduler.class_queue("chat").oldest_arrival_us()
        return InteractiveSigns(None if arrival_us is None else self._world.work_us - arrival_us, None)


@dataclass
class Word:
    """What the control plane says of a slot: its fence, and whether it is lent."""

    fence: int = 0
    lent: bool = False


@dataclass
class Answer:
    """An answer under way: it may come late, twice or never."""

    grants: list[Grant]
    sent_boot_us: int


@dataclass
class World:
    """One agent's clocks, its band and scheduler, and the control plane's word on each slot."""

    state_dir: Path
    boot_us: int = 1_000_000_000
    wall_shift_us: int = 1_700_000_000_000_000
    words: dict[str, Word] = field(default_factory=lambda: {name: Word() for name in FLEX})
    answers: list[Answer] = field(default_factory=list)
    #: (slot, fence) -> until when the answers that arrived let batch start, on the boot clock.
    granted_until: dict[tuple[str, int], int] = field(default_factory=dict)
    #: Fences that a trip or a restart ended for good.
    ended: set[tuple[str, int]] = field(default_factory=set)
    log: list[tuple[str, SlotState]] = field(default_factory=list)
    #: Slot, fence and instant of each start of batch, and whether the fence was over by then.
    started: list[tuple[str, int, int, bool]] = field(default_factory=list)
    serial: int = 0

    def __post_init__(self) -> None:
        self.begin()

    @property
    def work_us(self) -> int:
        return self.boot_us

    def begin(self) -> None:
        """A process begins: nothing but its directory is left of the one before."""
        classes = [
            SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE),
            SchedulingClass(slug="bulk", kind=ClassKind.BATCH),
        ]
        self.scheduler = Scheduler(
            classes, [SlotSpec(name, 2, band) for name, band in BANDS.items()], Isolation.RESERVED
        )
        self.host = SchedulerHost(self.scheduler, self)
        self.log.clear()
        self.band = FlexBand(self.state_dir, self.host, lambda: self.boot_us + self.wall_shift_us, lambda: self.boot_us)
        self.band.configure(slot_policies(), FlexPolicy(lend_p95_us=LEND_P95_US, drain_bound_us=DRAIN_US))
        self._note_trips()

    def kill(self, *, reboot: bool) -> None:
        """kill -9; after a reboot the boot clock starts afresh. Answers to the dead process reach nobody."""
        for name, slot in self.band.slots.items():
            if slot.grant.fence and slot.grant.kind == "lent":
                self.ended.add((name, slot.grant.fence))
        self.answers.clear()
        if reboot:
            self.boot_us = 5_000_000
        self.granted_until.clear()
        self.begin()

    # The control plane

    def lend(self, name: str) -> None:
        word = self.words[name]
        if not word.lent and self.band.slots[name].state is SlotState.HOME:
            self.words[name] = Word(word.fence + 1, True)

    def recall(self, name: str) -> None:
        word = self.words[name]
        if word.lent:
            self.words[name] = Word(word.fence + 1, False)

    def report(self) -> None:
        """A report is sent; its answer is on its way."""
        grants = [
            Grant(FLEX[name], word.fence, "lend" if word.lent else "recall", TTL_US if word.lent else 0)
            for name, word in self.words.items()
            if word.fence
        ]
        self.answers.append(Answer(grants, self.boot_us))

    def deliver(self, answer: Answer) -> None:
        for grant in answer.grants:
            if grant.action == "lend":
                name = next(name for name, slot_id in FLEX.items() if slot_id == grant.slot_id)
                key = (name, grant.fence)
                self.granted_until[key] = max(self.granted_until.get(key, 0), answer.sent_boot_us + TTL_US)
        self.band.apply(answer.grants, sent_boot_us=answer.sent_boot_us)
        self.pump()

    # Work

    def _offer(self, class_slug: str, *, preemptible: bool = False, fits: bool = False) -> None:
        self.serial += 1
        request = QueuedRequest(
            self.serial, "acme", class_slug, self.work_us, prompt_tokens=1, output_tokens=1, gpu_us=1_000,
            preemptible=preemptible, fits_drain=fits,
        )  # fmt: skip
        self.scheduler.offer(request, self.work_us)

    def interactive_waits(self, us: int) -> None:
        """More interactive than there are places, for so long; then all of it is done."""
        for _ in range(2 * len(BANDS) + 1):
            self._offer("chat")
        self.pump()
        self.boot_us += us
        self.pump()
        while chats := [r.id for r in self.scheduler.requests.values() if r.class_slug == "chat"]:
            for request_id in chats:
                self._end(request_id)
        self.pump()

    def _end(self, request_id: int) -> None:
        if self.scheduler.requests[request_id].phase is Phase.RUNNING:
            self.scheduler.release(request_id, self.work_us, prompt_tokens=1, output_tokens=1, gpu_us=1_000)
        else:
            self.scheduler.cancel(request_id, self.work_us)

    def finish(self, name: str) -> None:
        """The oldest request on a slot ends."""
        running = self.host.slot(name).running
        if running:
            self._end(next(iter(running)))
        self.pump()

    def refuse(self, reason: str) -> None:
        self.band.refused(reason)
        self._note_trips()
        self.pump()

    def pump(self) -> None:
        """A scheduling step, as the engine takes one: the band first, then everything that may start.

        Batch always waits, of both kinds, so that a slot that admits it starts some.
        """
        while self.scheduler.class_queue("bulk").queued < 4:
            self._offer("bulk", preemptible=self.serial % 4 > 0, fits=True)
        self.band.step()
        self._note_trips()
        while (request := self.scheduler.next_dispatch(self.work_us)) is not None:
            name = self.scheduler.slots[request.slot_index].spec.name
            if request.class_slug == "bulk":
                fence = self.band.slots[name].grant.fence if name in FLEX else 0
                self.started.append((name, fence, self.boot_us, (name, fence) in self.ended))

    def _note_trips(self) -> None:
        names = {slot_id: name for name, slot_id in FLEX.items()}
        self.ended |= {(names[trip.slot_id], trip.fence) for trip in self.band.trips}

    # What must be true

    def admitting_batch(self) -> Iterator[str]:
        bulk = self.scheduler.class_queue("bulk")
        return (slot.spec.name for slot in bulk.slots)

    def borrowed(self) -> set[str]:
        return {name for name, slot in self.band.slots.items() if slot.state in BORROWED}
