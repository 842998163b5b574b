"""Batch items on an agent: leased with reports, run as requests of their class, their results reported with the usage.

What waits stands in a queue of its own, the earliest deadline first; of each tenant and key two are in the queue of
the class, so that fair order there sees a tenant with work, and the class's bounds are left to those who wait on a
connection. Everything runs on the event loop, as the engine does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from controlplane.agent.api_body import BadBody
from controlplane.agent.backends.request import Failure
from controlplane.agent.call import Call
from controlplane.agent.clock import boot_us
from controlplane.agent.held_items import HeldItem, HeldItems, ItemPhase, Lane, due_of
from controlplane.agent.item_calls import (
    REASON_CHARS,
    STOPPED,
    VERDICTS,
    admitted_key,
    call_of,
    class_of,
    key_of,
    parse,
    reason_of,
    response_of,
    unbounded_queue,
    verdict_of,
)
from controlplane.agent.item_ends import NO_RESPONSE
from controlplane.agent.item_room import HELD_MAX, Held, ServiceRate, room_of
from controlplane.agent.journal_entries import ItemEnd
from controlplane.agent.request_ids import new_request_id
from controlplane.core.admission import AdmissionDecision, Decision, decide
from controlplane.core.admission_snapshot import Snapshot
from controlplane.core.batch_items import UNPAID
from controlplane.core.estimate import raw_gpu_us
from controlplane.core.reasons import Outcome, Reason, answer_for
from controlplane.core.slots import ClassKind
from controlplane.wire.report import Answer, Item, ItemDone, ItemJob, ItemRoom, ItemsCancelled

if TYPE_CHECKING:
    from controlplane.agent.engine import Engine

log = logging.getLogger(__name__)

HEADS: Final = 2
"""Items of a tenant and key in the queue of their class: with one, the tenant would leave fair order at each start."""
QUEUED_MAX: Final = 64
"""Items in the queue of their class in all."""
RETRY_US: Final = 50_000
MONEY_RETRY_US: Final = 500_000
SWEEP_EVERY_US: Final = 1_000_000
REPORT_EVERY_US: Final = 100_000
"""Between reports that are sent early for want of work."""
RESPONSES_HELD_MAX: Final = 64 * 1024 * 1024
"""Responses that wait for a report: over that no item begins."""
RECORDS_WAITING: Final = 4_000
MONEY: Final = frozenset({Reason.NO_LEASE, Reason.BUDGET_EXHAUSTED})
UNPAID_US: Final = 5_000_000
"""So long items wait for a budget that is used up; then others get their room."""


class ItemRunner:
    """The items of one agent."""

    def __init__(self, engine: Engine, boot_clock: Callable[[], int] = boot_us) -> None:
        self._engine = engine
        self._boot_us = boot_clock
        self.held = HeldItems()
        self.through = 0
        """The highest fence that this epoch received."""
        self.interval_us = 1_000_000
        """Between reports, as the control plane last said."""
        self.report_soon: Callable[[], None] = lambda: None
        self.done: Counter[tuple[int, Outcome]] = Counter()
        """Items that ended here, by class id; those handed back are `displaced` and `cancelled_by_drain`."""
        self.lapsed = 0
        """Items dropped because their lease ended before they began."""
        self._rate = ServiceRate()
        self._ends: list[ItemDone] = []
        self.queued = 0
        """Items in the queue of their class."""
        self._more = False
        """The last answer brought items: there may be more."""
        self._reported_us = 0
        self._swept_us = 0

    # -- what the control plane says -----------------------------------------------------------------------------------

    def answered(self, answer: Answer, *, sent_boot_us: int) -> None:
        """The answer to the report that was sent at that instant of the boot clock."""
        self.take(answer.item_jobs, answer.items, answer.items_cancelled, sent_boot_us=sent_boot_us)
        if answer.items_give_back:
            self.give_back(answer.items_give_back)

    def take(
        self,
        jobs: Iterable[ItemJob],
        items: Iterable[Item],
        cancelled: Iterable[ItemsCancelled],
        *,
        sent_boot_us: int,
    ) -> None:
        """What an answer to the report that was sent at that instant of the boot clock leases and cancels."""
        for job in jobs:
            self.held.know(job)
        fresh = 0
        for item in items:
            if item.fence <= self.through:
                # Listed again by an answer to a report that was cut before it was received.
                continue
            self.through = item.fence
            fresh += 1
            held = self.held.take(item, sent_boot_us=sent_boot_us)
            if held is None:
                log.error("item %d of job %d was leased without its job: it is left to lapse", item.line, item.job_id)
            elif len(self.held.by_fence) > HELD_MAX:
                self._hand_back(held, "The agent holds as many items as it can.")
        self._more = self._more or fresh > 0
        for row in cancelled:
            self._cancel(row)
        self.feed(self._engine.clock.now_us())

    def _cancel(self, row: ItemsCancelled) -> None:
        job = self.held.jobs.get(row.job_id)
        if job is None:
            return
        fences = [fence for fence in row.fences if fence in job.items] if row.fences else list(job.items)
        begun: list[Call] = []
        for item in [job.items[fence] for fence in fences]:
            item.cancelled = True
            if item.call is not None:
                begun.append(item.call)
            else:
                self._hand_back(item, "The job was cancelled, or the item's lease ended.")
        # What waited is gone by now: the end of one makes no room for another.
        for call in begun:
            self._engine.close(call, Outcome.CANCELLED_BY_CLIENT)

    def give_back(self, count: int) -> None:
        """So many of those that have not begun, the last first: other agents have nothing left to run."""
        waiting = self.held.of_phase(ItemPhase.WAITING)
        waiting.sort(key=lambda item: (due_of(item), item.fence), reverse=True)
        for item in waiting[:count]:
            self._hand_back(item, "Another agent has room for it now.")

    def new_epoch(self) -> None:
        """Leases of the epoch before end with it: what has not begun is handed back, what runs goes on."""
        self.through = 0
        self.give_back_waiting("The agent began another epoch.")

    # -- what a report says --------------------------------------------------------------------------------------------

    def take_ends(self) -> list[ItemDone]:
        """Ends of items for which no request was made since the last report."""
        ends, self._ends = self._ends, []
        return ends

    def room(self, now_us: int) -> list[ItemRoom]:
        """How many more items this agent takes; 0 while it should take none."""
        engine = self._engine
        document = engine.registry.document
        slug = "" if document is None else document.pool.batch_class
        klass = engine.registry.classes.get(slug)
        if klass is None:
            return []
        self._reported_us, self._more = now_us, False
        slots, places = self._capacity()
        if not engine.ready or engine.flex.any_draining:
            places = 0
        held = Held(len(self.held.by_fence), self._held_gpu_us(), self.held.bytes)
        room = room_of(held, slots=slots, places=places, per_place_s=self._rate.per_place_s)
        return [ItemRoom(klass.policy.id, room.items, room.gpu_us)]

    def _capacity(self) -> tuple[int, int]:
        """(slots that serve batch now, their places)"""
        slots: set[int] = set()
        places = 0
        for queue in self._engine.scheduler.classes:
            if queue.spec.kind is ClassKind.BATCH:
                slots.update(slot.index for slot in queue.slots)
                places = max(places, queue.serving_places)
        return len(slots), places

    def _held_gpu_us(self) -> int:
        rates = self._engine.registry.rates
        total = 0
        for job in self.held.jobs.values():
            mean_us = job.mean_gpu_us
            if mean_us is not None:
                total += len(job.items) * mean_us
            else:
                output = job.job.expected_output_tokens
                total += sum(raw_gpu_us(rates, item.prompt_tokens, output) for item in job.items.values())
        return total

    # -- starting ------------------------------------------------------------------------------------------------------

    def feed(self, now_us: int) -> None:
        """Queue in the class what should be there."""
        if not self.held.by_fence or self._engine.closed_because() or self._too_much_unreported():
            return
        for lane in list(self.held.lanes.values()):
            self._feed_lane(lane, now_us)

    def _too_much_unreported(self) -> bool:
        spool = self._engine.spool
        return spool is None or spool.state.responses_bytes > RESPONSES_HELD_MAX

    def _feed_lane(self, lane: Lane, now_us: int) -> None:
        while lane.waiting and lane.queued < HEADS and self.queued < QUEUED_MAX and now_us >= lane.retry_us:
            item = lane.first()
            if item is None:
                return
            if not item.may_begin(self._boot_us()):
                self._hand_back(item, "Its lease was about to end before it could begin.")
                continue
            why = self._try(item, now_us)
            if why is None:
                continue
            if isinstance(why, BadBody) or why in VERDICTS:
                status, response, reason = verdict_of(why)
                self._end(item, Outcome.UPSTREAM_ERROR, status, response, reason)
            elif why in STOPPED:
                self._hand_back(item, f"It may not run now: {why.value}.")
            elif why is Reason.BUDGET_EXHAUSTED and self._unpaid_too_long(item, now_us):
                self._hand_back_unpaid(item)
            else:
                lane.retry_us = now_us + (MONEY_RETRY_US if why in MONEY else RETRY_US)

    @staticmethod
    def _unpaid_too_long(item: HeldItem, now_us: int) -> bool:
        job = item.job
        if job.unpaid_since_us is None:
            job.unpaid_since_us = now_us
        return now_us - job.unpaid_since_us >= UNPAID_US

    def _hand_back_unpaid(self, item: HeldItem) -> None:
        """Nothing pays for the items of a job: those that have not begun make room for others, and cost no attempt."""
        job = item.job
        job.unpaid_since_us = None
        window = self._engine.leases.exhausted_window(job.job.tenant_id)
        for waiting in [each for each in job.items.values() if each.phase is ItemPhase.WAITING]:
            self._hand_back(waiting, f"{UNPAID}: the budget {window} is used up.")

    def _try(self, item: HeldItem, now_us: int) -> Reason | BadBody | None:
        """Admit an item as a request of its class; else why not."""
        engine, job = self._engine, item.job.job
        registry = engine.registry
        tenant, klass = registry.tenants.get(job.tenant_id), class_of(registry, job.class_id)
        if tenant is None or klass is None:
            return Reason.CLASS_NOT_ALLOWED
        key = key_of(registry, job, klass)
        if key is None:
            return Reason.KEY_REVOKED
        counter = tenant.view.concurrency
        if counter is not None and not counter.has_room():
            return Reason.CONCURRENCY_LIMIT
        try:
            item.parsed = parsed = item.parsed or parse(item)
        except BadBody as error:
            return error
        call = call_of(engine, item, parsed, key, tenant, klass)
        snapshot = engine.desk.snapshot(call, klass, now_us)
        snapshot.key, snapshot.workload_class = admitted_key(key.view), unbounded_queue(klass.view)
        answer = decide(snapshot)
        if answer.decision is Decision.REJECT:
            assert answer.reason is not None
            if answer.reason is Reason.NO_LEASE:
                engine.desk.ask_lease(job.tenant_id, answer.charge_upper_bound_nanos, job.uuid)
            return answer.reason
        self._admit(item, call, snapshot, answer, now_us)
        return None

    def _admit(self, item: HeldItem, call: Call, snapshot: Snapshot, answer: AdmissionDecision, now_us: int) -> None:
        engine = self._engine
        item.job.unpaid_since_us = None
        item.lane.pop()
        item.lane.queued += 1
        self.queued += 1
        item.phase, item.call = ItemPhase.QUEUED, call
        call.deadline_us = item.job.job.deadline_us
        tenant_id, bound_nanos = call.tenant.policy.id, answer.charge_upper_bound_nanos
        engine.admit(call, snapshot, answer, now_us)
        uuid = item.job.job.uuid
        if snapshot.budget is not None and engine.leases.runs_low(tenant_id, bound_nanos, now_us, uuid):
            engine.desk.ask_lease(tenant_id, bound_nanos, uuid)

    # -- what the engine tells -----------------------------------------------------------------------------------------

    def dispatched(self, item: HeldItem, now_us: int) -> None:
        """It runs; the next one of its tenant takes its place in the queue before anybody else is chosen."""
        self._leave_queue(item)
        item.phase = ItemPhase.RUNNING
        if item.lane.waiting and not self._engine.closed_because():
            self._feed_lane(item.lane, now_us)

    def requeued(self, item: HeldItem) -> None:
        """Preempted, or tried again: at the head of its class's queue."""
        item.phase = ItemPhase.QUEUED
        item.lane.queued += 1
        self.queued += 1

    def ended(
        self, item: HeldItem, outcome: Outcome, body: bytes, failure: Failure | None, gpu_us: int
    ) -> ItemEnd | None:
        """Its request ended: what the report says of the item; None when it goes on here as another request."""
        if item.phase is ItemPhase.QUEUED:
            self._leave_queue(item)
        lane, item.call = item.lane, None
        lane.retry_us = 0
        if outcome in (Outcome.DISPLACED, Outcome.QUEUE_TIMEOUT) and not item.cancelled:
            if item.may_begin(self._boot_us()):
                item.phase = ItemPhase.WAITING
                lane.push(item)
            else:
                item.phase = ItemPhase.GONE
                self._hand_back(item, "Its lease was about to end before it could begin.")
            return None
        item.phase = ItemPhase.GONE
        self.held.let_go(item)
        self.done[item.job.job.class_id, outcome] += 1
        if outcome is Outcome.COMPLETED:
            item.job.learn(gpu_us)
        self._advance(busy=True)
        self._rate.ended()
        return ItemEnd(
            item.job.job.job_id,
            item.line,
            item.attempt,
            item.fence,
            response_of(outcome, body, failure),
            reason_of(outcome, failure),
        )

    def after_end(self, now_us: int) -> None:
        """A request of an item was closed: fill its place, and report early when the work runs out."""
        self.feed(now_us)
        engine = self._engine
        full = engine.spool is not None and engine.spool.state.closed_over(RECORDS_WAITING)
        if (full or self._runs_out()) and now_us - self._reported_us >= REPORT_EVERY_US:
            self._reported_us, self._more = now_us, False
            self.report_soon()

    def _runs_out(self) -> bool:
        """Whether what is held ends before the next report, while the control plane may have more."""
        if not self._more:
            return False
        rate = self._rate.per_place_s
        _, places = self._capacity()
        soon = 0.0 if rate is None else rate * places * self.interval_us / 1e6
        return self.held.waiting <= soon

    def _leave_queue(self, item: HeldItem) -> None:
        item.lane.queued -= 1
        self.queued -= 1

    # -- time ----------------------------------------------------------------------------------------------------------

    def step(self, now_us: int) -> None:
        """What time alone brings: leases end, limits give room again."""
        self._advance(busy=bool(self.held.by_fence))
        if not self.held.by_fence:
            return
        if self._engine.draining:
            self.give_back_waiting("The agent is shutting down.")
        if now_us - self._swept_us >= SWEEP_EVERY_US:
            self._swept_us = now_us
            self._sweep()
        self.feed(now_us)

    def _advance(self, *, busy: bool) -> None:
        _, places = self._capacity()
        self._rate.advance(self._boot_us(), places=places, busy=busy)

    def _sweep(self) -> None:
        boot_now_us = self._boot_us()
        for item in self.held.of_phase(ItemPhase.WAITING, ItemPhase.QUEUED):
            # The end of one that was queued gives others their turn, which may be found too late as well.
            if item.phase is ItemPhase.GONE or item.may_begin(boot_now_us):
                continue
            if item.call is not None:
                self._engine.close(item.call, Outcome.DISPLACED)
            else:
                self._hand_back(item, "Its lease was about to end before it could begin.")
        self.held.forget_ended_jobs()

    # -- ends without a request ----------------------------------------------------------------------------------------

    def give_back_waiting(self, reason: str) -> None:
        """Hand back everything that has not begun and is not queued."""
        for item in self.held.of_phase(ItemPhase.WAITING):
            self._hand_back(item, reason)

    def _hand_back(self, item: HeldItem, reason: str) -> None:
        """Give an item back unrun; after the end of its lease it is nobody's to give."""
        if self._boot_us() >= item.expires_us:
            self.held.let_go(item)
            self.lapsed += 1
        else:
            self._end(item, Outcome.CANCELLED_BY_DRAIN, answer_for(Outcome.CANCELLED_BY_DRAIN).status, b"", reason)

    def _end(self, item: HeldItem, outcome: Outcome, status: int, response: bytes, reason: str) -> None:
        self.held.let_go(item)
        self.done[item.job.job.class_id, outcome] += 1
        self._ends.append(
            ItemDone(
                item.job.job.job_id,
                item.line,
                item.attempt,
                item.fence,
                new_request_id(self._engine.clock.now_us()),
                outcome.code,
                status,
                Raw(response or NO_RESPONSE),
                reason[:REASON_CHARS],
            )
        )

    # -- what metrics and health ask -----------------------------------------------------------------------------------

    def counts(self) -> Counter[tuple[int, ItemPhase]]:
        """Items held here, by class id and phase."""
        return Counter(self.held.counts())
