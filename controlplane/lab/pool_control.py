"""The control plane of one simulated pool: reports, decisions of the flex band each second, grants and leased items.

What the controller knows is what the last report said; what it decides reaches the agent with the answer to a report,
or ahead of it by a nudge. Observation, decision and the memory between ticks are the core's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from controlplane.agent.item_room import Room
from controlplane.agent.live_figures import ADMITTED, waiting_ages
from controlplane.core.flex import decide, has_nothing_to_do
from controlplane.core.flex_decision import EVENT_OF_ACTION, FlexAction, FlexActionKind, RecallReason
from controlplane.core.flex_marks import FlexMarks, at_rest, observe, remember
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.histogram import Histogram
from controlplane.core.slot_states import BORROWED, Band, SlotEvent, SlotState, apply_event
from controlplane.core.slots import ClassKind
from controlplane.lab.items import JobSpec, LabItems
from controlplane.lab.policies import core_flex_policy, core_safe_rate
from controlplane.lab.simulator import Simulator
from controlplane.lab.watching import Watch
from controlplane.wire.report import Grant as GrantMessage

SECOND_US: Final = 1_000_000
TICK_OFFSET_US: Final = 500_000
"""The controller's ticks against the agent's reports: between two of them."""
WEEK_US: Final = 7 * 86_400 * SECOND_US


@dataclass(frozen=True, slots=True)
class Wire:
    """What lies between agent and control plane. `nudge_us` None is no broker: reports alone carry everything.

    A share `loss` of the reports, drawn with `seed`, never arrives; in the spans `silent_us` from the start nothing
    does.
    """

    interval_us: int = SECOND_US
    latency_us: int = 20_000
    nudge_us: int | None = 50_000
    loss: float = 0.0
    seed: int = 0
    silent_us: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Loan:
    """One loan from its grant to the slot's return; None is not yet. `reason` is why it was recalled."""

    slot: str
    fence: int
    lent_us: int
    recalled_us: int | None = None
    reason: RecallReason | None = None
    stopped_us: int | None = None
    home_us: int | None = None
    overdue: bool = False

    @property
    def drain_us(self) -> int | None:
        """From the last instant of admitting to home, by the agent's clock."""
        return None if self.stopped_us is None or self.home_us is None else self.home_us - self.stopped_us


@dataclass(slots=True)
class HeldGrant:
    """The control plane's word on one flex slot."""

    slot_id: int
    fence: int = 0
    lent: bool = False
    state: SlotState = SlotState.HOME
    lent_at_us: int | None = None
    expires_at_us: int | None = None
    recalled_at_us: int | None = None
    cancelled_at_us: int | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """A report as the controller reads it."""

    at_us: int
    admitted_per_s: float
    waits: Histogram
    slots: dict[str, tuple[SlotState, int, int, int]]
    """State, fence, running batch requests and their GPU time."""


class PoolControl:
    """Begin with `start`; it ends by itself when nothing is left to do, or at the simulation's end."""

    def __init__(
        self, simulator: Simulator, jobs: Sequence[JobSpec] = (), wire: Wire | None = None, watch: Watch | None = None
    ) -> None:
        pool = simulator.document.pool
        self.simulator, self.wire, self._watch = simulator, wire or Wire(), watch
        self.policy, self.safe_rate = core_flex_policy(pool.flex), core_safe_rate(pool)
        self.items = LabItems(simulator, self, jobs)
        self.bands = {slot.name: Band(slot.band) for slot in pool.slots}
        lends = pool.isolation == "reserved"
        self.grants = {slot.name: HeldGrant(slot.id) for slot in pool.slots if lends and slot.band == Band.FLEX}
        self._told: dict[str, FlexSlot] = {}
        self._lent: dict[str, Loan] = {}
        self.marks = FlexMarks()
        self.loans: list[Loan] = []
        self.frozen_us: Sequence[tuple[int, int]] = ()
        """Spans from the start in which nothing new is lent."""
        self.trips: list[tuple[int, str, str]] = []
        """(instant, slot, cause)"""
        self.samples: list[tuple[int, float, int, int]] = []
        """Each minute: instant, slack (or -1e9 for none), slots lent, interactive p95 wait."""
        self._said: Said | None = None
        self._pending_trips: set[tuple[str, int]] = set()
        self._reports = 0
        self._losses = Random(self.wire.seed)  # noqa: S311  a simulation
        self.reports_lost = 0
        self._cancellable = any(
            klass.slug == pool.batch_class and klass.retry_safe and klass.cancellable
            for klass in simulator.document.classes
        )
        simulator.flex.on_trip = self.report_soon

    @property
    def interval_us(self) -> int:
        return self.wire.interval_us

    def start(self) -> None:
        """Report for the first time, and tick from then on."""
        self.simulator.at(self.simulator.start_us, self._report)
        if self.grants:
            self.simulator.at(self.simulator.start_us + TICK_OFFSET_US, self._tick)

    def finished(self) -> bool:
        """Nothing arrives, waits or runs any more."""
        return self.simulator.all_arrived and not self.simulator.scheduler.requests and not self.items.unfinished

    # -- reports and answers -------------------------------------------------------------------------------------------

    def report_soon(self) -> None:
        """Ahead of its time; the rhythm goes on from this one."""
        self.simulator.at(self.simulator.now_us(), self._report)

    def _report(self, number: int | None = None) -> None:
        if number is not None and number != self._reports:
            # An earlier one was sent meanwhile.
            return
        if self.finished():
            return
        simulator, now_us = self.simulator, self.simulator.now_us()
        self._reports = sent = self._reports + 1
        if self._watch is not None:
            self._watch.at(now_us - simulator.start_us)
        if self._is_lost(now_us):
            # Its trips and what it asked for come with the next one.
            self.reports_lost += 1
            simulator.at(now_us + self.wire.interval_us, lambda: self._report(sent))
            return
        if self.grants:
            said = self._read(now_us)
            simulator.at(now_us + self.wire.latency_us // 2, lambda: self._received(said))
            for trip in simulator.flex.take_trips():
                name = next(name for name, grant in self.grants.items() if grant.slot_id == trip.slot_id)
                self._pending_trips.add((name, trip.fence))
                self.trips.append((now_us, name, trip.reason))
        room = self.items.room(now_us)
        simulator.at(now_us + self.wire.latency_us, lambda: self._answered(room, now_us))
        simulator.at(now_us + self.wire.interval_us, lambda: self._report(sent))

    def _is_lost(self, now_us: int) -> bool:
        return self._is_silent(now_us) or (self.wire.loss > 0 and self._losses.random() < self.wire.loss)

    def _is_silent(self, now_us: int) -> bool:
        at_us = now_us - self.simulator.start_us
        return any(begin <= at_us < end for begin, end in self.wire.silent_us)

    def _received(self, said: Said) -> None:
        self._said = said

    def _answered(self, room: Room, sent_us: int) -> None:
        simulator, ttl_us = self.simulator, self.policy.grant_ttl_us
        messages = [
            GrantMessage(grant.slot_id, grant.fence, "lend" if grant.lent else "recall", ttl_us if grant.lent else 0)
            for grant in self.grants.values()
            if grant.fence
        ]
        if messages:
            simulator.flex.apply(messages, sent_boot_us=sent_us)
        self.items.lease(room, simulator.now_us())
        simulator.pump(simulator.now_us())

    def _read(self, now_us: int) -> Said:
        """What `agent.live_figures` says of classes and slots."""
        simulator, admitted = self.simulator, 0.0
        waits: Histogram | None = None
        for queue in simulator.scheduler.classes:
            if queue.spec.kind is ClassKind.INTERACTIVE:
                figures = simulator.figures.of_class(simulator.registry.class_id(queue.spec.slug), now_us)
                recent = figures.wait.snapshot(now_us)
                if waits is None:
                    waits = recent
                else:
                    waits.merge(recent)
                waits.record_all(waiting_ages(queue, now_us))
                admitted += figures.recent.per_s(ADMITTED, now_us)
        slots = {}
        for name in self.grants:
            held, running = simulator.flex.slots[name], simulator.scheduled_slot(name).running.values()
            batch = [request for request in running if simulator.registry.is_batch(request.class_slug)]
            slots[name] = (held.state, held.grant.fence, len(batch), sum(request.gpu_us for request in batch))
            instants = simulator.flex.drain_instants(name)
            loan = self._lent.get(name)
            if loan is not None and instants.home_us is not None and held.grant.fence >= loan.fence:
                loan.stopped_us, loan.home_us = instants.stop_admit_us, instants.home_us
        return Said(now_us, admitted, Histogram() if waits is None else waits, slots)

    # -- the controller ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.finished():
            return
        simulator, now_us = self.simulator, self.simulator.now_us()
        simulator.at(now_us + SECOND_US, self._tick)
        if self._said is None:
            return
        self._observe_returns()
        said, jobs, slack = self._said, self.items.backlog(), 1.0
        p95_us = said.waits.quantile_us(0.95) or 0
        if has_nothing_to_do([grant.state for grant in self.grants.values()], jobs):
            # A trip is told of what is lent or on its way home.
            self.marks = at_rest(
                self.marks, self.policy, now_us=now_us, p95_queue_us=p95_us, telemetry_at_us=said.at_us
            )
        else:
            self.marks, snapshot = observe(self.marks, self._snapshot(now_us, said, jobs, p95_us))
            decision = decide(snapshot)
            self.marks = remember(self.marks, decision)
            for action in decision.actions:
                self._apply(action, now_us)
            slack = max(-1e9, decision.slack)
        self._pending_trips.clear()
        if now_us - (self.samples[-1][0] if self.samples else 0) >= 60 * SECOND_US:
            away = sum(grant.state in BORROWED for grant in self.grants.values())
            self.samples.append((now_us, slack, away, p95_us))

    def _observe_returns(self) -> None:
        assert self._said is not None
        for name, grant in self.grants.items():
            state, fence, running, _ = self._said.slots[name]
            home = fence >= grant.fence and state is SlotState.HOME and not running
            if grant.state in BORROWED and grant.state is not SlotState.LENT and home:
                grant.state = apply_event(grant.state, SlotEvent.DRAINED)
                grant.expires_at_us = grant.cancelled_at_us = None

    def _snapshot(self, now_us: int, said: Said, jobs: tuple[BatchJob, ...], p95_us: int) -> FlexSnapshot:
        since_us = now_us - WEEK_US
        return FlexSnapshot(
            now_us=now_us,
            policy=self.policy,
            safe_rate=self.safe_rate,
            slots=tuple([self._flex_slot(name, band, said) for name, band in self.bands.items()]),
            interactive=InteractiveFigures(
                admitted_per_s=said.admitted_per_s,
                p95_queue_us=p95_us,
                p95_below_since_us=None,
                telemetry_at_us=said.at_us,
            ),
            jobs=jobs,
            lends_this_week=sum(loan.lent_us > since_us for loan in self.loans),
            frozen=any(begin <= now_us - self.simulator.start_us < end for begin, end in self.frozen_us),
            trips=frozenset(name for name, fence in self._pending_trips if self._is_present(name, fence)),
        )

    def _is_present(self, name: str, fence: int) -> bool:
        """A trip of the loan that runs, or of the one whose recall crossed it."""
        grant = self.grants[name]
        if grant.state is SlotState.LENT:
            return fence == grant.fence
        return grant.state in BORROWED and fence == grant.fence - 1

    def _flex_slot(self, name: str, band: Band, said: Said) -> FlexSlot:
        """The one told last time, where nothing about it is new."""
        grant, known = self.grants.get(name), self._told.get(name)
        if grant is None:
            if known is None:
                known = self._told[name] = FlexSlot(name=name, band=band)
            return known
        running_us = said.slots[name][3]
        if (
            known is not None
            and known.state is grant.state
            and known.fence == grant.fence
            and known.lent_at_us == grant.lent_at_us
            and known.grant_expires_at_us == grant.expires_at_us
            and known.recalled_at_us == grant.recalled_at_us
            and known.cancelled_at_us == grant.cancelled_at_us
            and known.running_batch_gpu_us == running_us
        ):
            return known
        made = self._told[name] = FlexSlot(
            name=name,
            band=band,
            state=grant.state,
            fence=grant.fence,
            lent_at_us=grant.lent_at_us,
            grant_expires_at_us=grant.expires_at_us,
            recalled_at_us=grant.recalled_at_us,
            cancelled_at_us=grant.cancelled_at_us,
            running_batch_gpu_us=running_us,
            cancellable=self._cancellable,
        )
        return made

    def _apply(self, action: FlexAction, now_us: int) -> None:
        grant = self.grants[action.slot]
        if action.kind is FlexActionKind.RENEW:
            grant.expires_at_us = action.grant_expires_at_us
            return
        grant.state = apply_event(grant.state, EVENT_OF_ACTION[action.kind])
        if action.kind is FlexActionKind.LEND:
            grant.fence, grant.lent, grant.lent_at_us = action.fence, True, now_us
            grant.expires_at_us, grant.recalled_at_us = action.grant_expires_at_us, None
            loan = self._lent[action.slot] = Loan(action.slot, action.fence, now_us)
            self.loans.append(loan)
            self._nudge(self.report_soon)
        elif action.kind is FlexActionKind.RECALL:
            grant.fence, grant.lent, grant.recalled_at_us, grant.expires_at_us = action.fence, False, now_us, None
            loan = self._lent[action.slot]
            loan.recalled_us, loan.reason = now_us, action.reason
            slot_id, fence = grant.slot_id, action.fence
            self._nudge(lambda: self._recall(slot_id, fence))
        elif action.kind is FlexActionKind.CANCEL:
            grant.cancelled_at_us = now_us
        else:
            self._lent[action.slot].overdue = True

    def _recall(self, slot_id: int, fence: int) -> None:
        self.simulator.flex.recall(slot_id, fence)
        self.simulator.pump(self.simulator.now_us())

    def _nudge(self, event: Callable[[], None]) -> None:
        if self.wire.nudge_us is not None and not self._is_silent(self.simulator.now_us()):
            self.simulator.at(self.simulator.now_us() + self.wire.nudge_us, event)
