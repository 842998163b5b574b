"""The shell around the decisions of `core`: what is admitted runs, and ends exactly once, whatever happens.

Everything here runs on one event loop and nothing waits: arrivals, tokens, disconnects, the control plane's answers and
a timer are calls into this object. Money, places and memory that a call took are given back in `close`, the only place
where a call ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from controlplane.agent.agent_slot import READY, AgentSlot, take_slots
from controlplane.agent.attempt import Attempt
from controlplane.agent.backends.base import Backend
from controlplane.agent.backends.request import BackendRequest, Failure, TokenUsage
from controlplane.agent.batching import BatchingBackend
from controlplane.agent.call import Call
from controlplane.agent.clock import Clock, boot_us
from controlplane.agent.flex_agent import FlexBand
from controlplane.agent.flex_host import EngineFlexHost
from controlplane.agent.front_desk import FrontDesk
from controlplane.agent.item_calls import unusable
from controlplane.agent.items import ItemRunner
from controlplane.agent.journal_entries import Entry, ItemEnd, Mark
from controlplane.agent.latency_totals import LatencyTotals
from controlplane.agent.learning import learn
from controlplane.agent.live_figures import Figures
from controlplane.agent.objectives import MINUTE_US, ObjectiveLedger
from controlplane.agent.policy_state import LiveList
from controlplane.agent.purses import LeaseBook
from controlplane.agent.readiness import SENTENCES, closed
from controlplane.agent.registry import Registry
from controlplane.agent.replies import answer_client, status_of
from controlplane.agent.rescheduling import build, move, same_shape
from controlplane.agent.safe_rate import own_safe_rate
from controlplane.agent.settlement import Settled, begun, closed_entry, is_charged, measured, settle
from controlplane.agent.slot_readiness import SlotReadiness
from controlplane.agent.spool import EpochSpool
from controlplane.agent.tracing import Tracer
from controlplane.core.admission import AdmissionDecision, reserve
from controlplane.core.admission_snapshot import Snapshot
from controlplane.core.flex_policy import FlexPolicy
from controlplane.core.queued_request import Phase, QueuedRequest
from controlplane.core.reasons import Outcome
from controlplane.core.retry_budget import RetryBudget
from controlplane.core.scheduling import Scheduler
from controlplane.core.slots import Isolation, RunningSlot
from controlplane.wire.policy import PolicyDocument

log = logging.getLogger(__name__)

STEP_S: Final = 0.05
ADJUST_EVERY_US: Final = 1_000_000
ATTEMPTS_MAX: Final = 3


class Engine:
    """One agent's admission, queues, slots and records."""

    def __init__(self, *, clock: Clock, backend: Backend, agent_id: int, state_dir: Path) -> None:
        self.clock = clock
        self.backend = BatchingBackend(backend, clock.now_us)
        self.agent_id = agent_id
        self.registry = Registry()
        self.objectives = ObjectiveLedger()
        self.leases = LeaseBook()
        self.figures = Figures()
        self.latencies = LatencyTotals()
        self.tracer: Tracer | None = None
        self.desk = FrontDesk(self)
        self.items = ItemRunner(self)
        self.flex = FlexBand(state_dir, EngineFlexHost(self), clock.now_us, boot_us)
        self.scheduler = Scheduler([], [], Isolation.RESERVED)
        self.spool: EpochSpool | None = None
        self.slots: dict[str, AgentSlot] = {}
        self.leaving: list[AgentSlot] = []
        """Slots that a revision took away, until what they used is reported."""
        self.calls: dict[int, Call] = {}
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.offered = 0
        """Requests that had a known key: each counts once, when it is refused or admitted."""
        self.draining = False
        self.disk_problem = ""
        self.revision = 0
        self.drain_bound_us = FlexPolicy().drain_bound_us
        self.readiness = SlotReadiness(self)
        self._model_id = 0
        self.next_serial = itertools.count(1).__next__
        """Numbers of calls and of their attempts: none comes twice."""
        self._retries = RetryBudget()
        self._pumping = False
        self._finishing: list[tuple[Call, Outcome, bytes, Failure | None]] = []
        self._flush_due = False
        self._adjusted_us = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, spool: EpochSpool) -> None:
        """Begin to take requests: an epoch was issued."""
        self.spool = spool
        self.leases.begin_epoch(spool.epoch, self.clock.now_us())
        self.items.new_epoch()
        if self._timer is None:
            self._timer = self._loop.call_later(STEP_S, self._tick)

    def stop(self) -> None:
        """No more steps; what is buffered is written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flush()

    def closed_because(self) -> str:
        """Why no request is taken now; empty when they are."""
        reason = closed(self)
        return "" if reason is None else SENTENCES[reason]

    def apply_policy(self, document: PolicyDocument, live: LiveList) -> None:
        """Put a verified revision in force, whole: nothing can fail from here on."""
        now_us = self.clock.now_us()
        own = [slot for slot in document.pool.slots if slot.agent_id == self.agent_id]
        scheduler = build(document, own)
        self.slots, left = take_slots(self.slots, own, now_us)
        self.leaving += left
        self.registry.apply_policy(document, live, now_us)
        self.objectives.apply_policy(document)
        self.revision, self._model_id = document.revision, document.pool.model_id
        flex = document.pool.flex
        self.drain_bound_us = flex.drain_bound_s * 1_000_000
        old = self.scheduler
        if not same_shape(old, scheduler):
            self.scheduler = scheduler
            moved = move(old, scheduler, now_us)
            for request in moved.homeless:
                self.close(self.calls[int(request.id)], Outcome.DISPLACED)
        for tenant in document.tenants:
            for slug in tenant.classes:
                if slug in self.registry.classes:
                    self.scheduler.set_weight(slug, tenant.slug, tenant.weight)
        self.backend.set_slots({slot.id: slot.kv_tokens for slot in own})
        self.backend.take_policy(document)
        self.flex.configure(own, FlexPolicy(lend_p95_us=flex.lend_p95_ms * 1000, drain_bound_us=self.drain_bound_us))
        self.follow_safe_rate(now_us)
        self.readiness.apply()

    def apply_live(self, live: LiveList) -> None:
        """Keys, suspensions and freezes: in force from the next decision on."""
        self.registry.apply_live(live, self.clock.now_us())

    # -- a request's way -----------------------------------------------------------------------------------------------

    def admit(self, call: Call, snapshot: Snapshot, answer: AdmissionDecision, now_us: int) -> None:
        """Take what the decision promised, write the request down, and let it run as soon as it may."""
        call.reservation = reserve(snapshot, answer)
        call.bound_nanos = answer.charge_upper_bound_nanos
        call.estimated_wait_us = answer.estimated_wait_us
        call.admitted_us = now_us = self.clock.now_us()
        displaced = self.calls.get(int(answer.displaces)) if answer.displaces is not None else None
        call.queued = QueuedRequest(
            call.serial,
            call.tenant.policy.slug,
            call.klass.policy.slug,
            call.arrived_us,
            prompt_tokens=call.prompt_tokens,
            output_tokens=call.n * call.expected_output,
            kv_tokens=call.kv_tokens,
            gpu_us=call.gpu_us,
            deadline_us=call.deadline_us,
            preemptible=call.preemptible,
            fits_drain=call.fits_drain,
            streamed=call.stream,
            batch_shape=self.backend.shape_of(call.body, call.path) if call.one_shot else "",
        )
        self.calls[call.serial] = call
        # The asked class's contract judges a downgraded request.
        tenant_id, class_id = call.tenant.policy.id, call.asked.policy.id
        call.judges = self.objectives.judges(tenant_id, class_id, streamed=call.stream, now_us=call.arrived_us)
        self.objectives.admitted(call.judges, call.arrived_us)
        minute_us = call.arrived_us - call.arrived_us % MINUTE_US
        marks = [Mark(judge.version_id, minute_us) for judge in call.judges]
        call.opened = begun(call, self._model_id, call.exchange.job, marks)
        if self.spool is not None:
            self.spool.begun(call.opened)
            if not self._flush_due:
                self._flush_soon()
        self.offered += 1
        self.figures.admitted(call, now_us)
        self._retries.count_request(now_us)
        if displaced is not None:
            self.close(displaced, Outcome.DISPLACED)
        if not self._start_at_once(call, call.queued, now_us):
            self.scheduler.offer(call.queued, now_us)
            self.pump(now_us)

    def _start_at_once(self, call: Call, request: QueuedRequest, now_us: int) -> bool:
        """Start a call that waits for nobody; False where it has to queue."""
        if self._pumping or self.flex.any_lent or self.flex.any_draining:
            return False
        if not self.scheduler.start_at_once(request, now_us):
            return False
        self._pumping = True
        try:
            self._dispatch(call, request, now_us)
        finally:
            self._pumping = False
        if self.scheduler.anything_queued():
            self.pump(now_us)
        return True

    def pump(self, now_us: int) -> None:
        """Start everything that may start at this instant."""
        if self._pumping:
            return
        self._pumping = True
        try:
            scheduler = self.scheduler
            if self.flex.any_lent or self.flex.any_draining:
                self.flex.step()
            while scheduler.anything_queued():
                request = scheduler.next_dispatch(now_us)
                if request is not None:
                    self._dispatch(self.calls[int(request.id)], request, now_us)
                    continue
                victims = scheduler.victims(now_us)
                if not victims:
                    return
                for victim in victims:
                    self.requeue(self.calls[int(victim.id)])
                now_us = self.clock.now_us()
        finally:
            self._pumping = False

    def _dispatch(self, call: Call, request: QueuedRequest, now_us: int) -> None:
        slot = self.slots[self.scheduler.slots[request.slot_index].spec.name]
        call.slot, call.dispatched_us = slot, now_us
        if call.reservation is not None:
            call.reservation.start()
        if not call.first_dispatch_us:
            call.first_dispatch_us = now_us
            waited_us = now_us - call.arrived_us
            self.figures.of_class(call.klass.policy.id, now_us).wait.record(waited_us if waited_us > 0 else 0, now_us)
        serial = self.next_serial()
        attempt = call.attempt = Attempt(self, call, serial)
        call.gathers = call.one_shot and self.backend.gathers(call.path)
        if call.gathers:
            self.scheduler.slots[request.slot_index].open_batches.add(request.batch_shape)
        else:
            slot.metered.start(serial, call.tenant.policy.id, call.klass.policy.id, now_us)
        backend = self.backend if call.one_shot else self.backend.inner
        attempt.run = backend.start(
            BackendRequest(
                call.request_id,
                call.path,
                call.body,
                call.model,
                slot.policy.id,
                call.stream,
                call.wants_usage,
                call.prompt_tokens,
                call.max_output_tokens,
                call.n,
                call.klass.policy.priority,
                call.ignore_eos,
                traceparent=b"" if call.trace is None else call.trace.dispatched(slot.policy.name, now_us),
                one_shot=call.one_shot,
            ),
            attempt,
        )
        if call.item is not None:
            self.items.dispatched(call.item, now_us)

    def batch_closed(self, call: Call, serial: int) -> None:
        """A call that waited for others to run with: only from here on it uses its slot."""
        assert call.slot is not None and call.queued is not None
        self.scheduler.batch_closed(call.slot.policy.name, call.queued.batch_shape)
        call.batched_us = now_us = self.clock.now_us()
        call.slot.metered.start(serial, call.tenant.policy.id, call.klass.policy.id, now_us)

    def fail(self, call: Call, failure: Failure) -> None:
        """The backend failed: tried again where that is safe, within the retry budget; else the client is told."""
        now_us = self.clock.now_us()
        request = call.queued
        again = failure.retryable and not call.head_sent and request is not None and request.attempt < ATTEMPTS_MAX
        if again and call.serial in self.scheduler.requests and self._retries.try_retry(now_us):
            self.requeue(call, "failed")
            self.pump(self.clock.now_us())
        else:
            log.warning("request %s failed: %s", call.request_id, failure.detail)
            self.close(call, Outcome.UPSTREAM_ERROR, failure=failure)

    def requeue(self, call: Call, ended_by: str = "preempted") -> None:
        """End an attempt and put its request back to the head of its queue."""
        now_us = self.clock.now_us()
        attempt, slot = call.attempt, call.slot
        assert attempt is not None and slot is not None and call.reservation is not None
        call.attempt, call.slot = None, None
        attempt.cancel()
        slot.metered.end(attempt.serial, now_us, charged=False)
        self.scheduler.requeue(call.serial, now_us)
        call.reservation.requeue()
        if call.item is not None:
            self.items.requeued(call.item)
        if call.trace is not None:
            call.trace.attempt_ended(call, now_us, ended_by)
        call.dispatched_us = call.batched_us = call.prefill_us = call.first_us = call.last_us = call.output_tokens = 0

    def client_gone(self, call: Call) -> None:
        """The client disconnected: its request is cancelled upstream and closed at once."""
        if not call.closed and not self.desk.client_gone(call):
            self.close(call, Outcome.CANCELLED_BY_CLIENT)

    def close(
        self,
        call: Call,
        outcome: Outcome,
        *,
        usage: TokenUsage | None = None,
        body: bytes = b"",
        failure: Failure | None = None,
    ) -> None:
        """End a call: the one place. A second end of the same call does nothing."""
        if call.closed:
            return
        call.closed = True
        now_us = self.clock.now_us()
        if call.item is not None and outcome is Outcome.COMPLETED and (failure := unusable(body)) is not None:
            outcome, body = Outcome.UPSTREAM_ERROR, b""
        attempt, slot, gpu_us = call.attempt, call.slot, 0
        charged = is_charged(call, outcome)
        if attempt is not None and slot is not None:
            if self.flex.any_draining:
                self.flex.token_seen(slot.policy.name)
            if outcome is not Outcome.COMPLETED and failure is None:
                attempt.cancel()
            gpu_us = slot.metered.end(attempt.serial, now_us, charged=charged)
            if usage is None and attempt.run is not None:
                usage = attempt.run.usage_so_far()
        settled = settle(call, usage, gpu_us, charged=charged)
        self._leave_scheduler(call, settled.usage, gpu_us, now_us)
        if call.reservation is not None:
            used = settled.usage.prompt_tokens + settled.usage.output_tokens
            call.reservation.settle(settled.lines.total_nanos, used)
            if settled.excess_nanos:
                over = "request %s produced %d nanos over its reservation, which the platform bears: check the engine"
                log.error(over, call.request_id, settled.excess_nanos)
        status = 200 if outcome is Outcome.COMPLETED else status_of(outcome, failure)
        end = None if call.item is None else self.items.ended(call.item, outcome, body, failure, gpu_us)
        self._record(call, outcome, status, settled, gpu_us, now_us, slot, end)
        self.figures.departed(call, now_us)
        if outcome is Outcome.COMPLETED:
            learn(call, settled.usage, gpu_us, self.registry.tokenless_time)
        self.outcomes[outcome] += 1
        del self.calls[call.serial]
        # Nothing of an ended call holds another part of it: it is gone with its answer, without the collector.
        call.slot = call.attempt = None
        if attempt is not None:
            attempt.run = None
        self._finishing.append((call, outcome, body, failure))
        if not self._flush_due:
            self._flush_soon()
        if call.item is not None:
            self.items.after_end(now_us)
        if self.flex.any_lent or self.flex.any_draining or self.scheduler.anything_queued():
            self.pump(now_us)

    def _leave_scheduler(self, call: Call, usage: TokenUsage, gpu_us: int, now_us: int) -> None:
        request = self.scheduler.requests.get(call.serial)
        if request is None:
            return
        if request.phase is Phase.RUNNING:
            self.scheduler.release(
                call.serial,
                now_us,
                prompt_tokens=usage.prompt_tokens,
                output_tokens=usage.output_tokens,
                gpu_us=gpu_us,
            )
        else:
            self.scheduler.cancel(call.serial, now_us)

    def _record(
        self,
        call: Call,
        outcome: Outcome,
        status: int,
        settled: Settled,
        gpu_us: int,
        now_us: int,
        slot: AgentSlot | None,
        end: ItemEnd | None,
    ) -> None:
        verdicts = self.objectives.closed(call.judges, call.arrived_us, measured(call, outcome, now_us))
        slot_id = -1 if slot is None else slot.policy.id
        entry = closed_entry(
            call, outcome, status, settled, verdicts, end, gpu_us=gpu_us, ended_us=now_us, slot_id=slot_id
        )
        row = entry.row
        if self.spool is not None:
            self.spool.closed(entry)
            if not self._flush_due:
                self._flush_soon()
        self.latencies.note(row)
        if self.tracer is not None:
            self.tracer.ended(call, row, outcome)
        if row.ttft_us >= 0:
            self.figures.of_class(call.klass.policy.id, now_us).ttft.record(row.ttft_us, now_us)

    # -- the journal ---------------------------------------------------------------------------------------------------

    def note(self, entry: Entry) -> None:
        """Journal an entry; it is written at the end of this turn of the loop."""
        if self.spool is not None:
            self.spool.append(entry)
            if not self._flush_due:
                self._flush_soon()

    def _flush_soon(self) -> None:
        self._flush_due = True
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write the journal, then hand out the last bytes of what ended."""
        self._flush_due = False
        if self.spool is not None:
            try:
                self.spool.flush()
                self.disk_problem = ""
            except OSError as error:
                if not self.disk_problem:
                    log.critical("records cannot be written (%s): no request is taken until they can", error)
                self.disk_problem = str(error)
                # Last bytes wait too: what was answered to the end is on disk.
                return
        finishing, self._finishing = self._finishing, []
        for call, outcome, body, failure in finishing:
            answer_client(call, outcome, body, failure)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(STEP_S, self._tick)
        try:
            self.step()
        except Exception:
            log.exception("a step failed; the next one comes in %d ms", STEP_S * 1000)

    def step(self) -> None:
        """What time alone brings: timeouts, lapsed loans, drains, aged requests."""
        now_us = self.clock.now_us()
        if now_us - self._adjusted_us >= ADJUST_EVERY_US:
            self._adjusted_us = now_us
            self.clock.adjust(idle=not self.calls)
        for request in self.scheduler.timed_out(now_us):
            self.close(self.calls[int(request.id)], Outcome.QUEUE_TIMEOUT)
        running = [call for call in self.calls.values() if call.slot is not None]
        for call in running:
            if now_us - call.dispatched_us >= call.klass.stage_timeout_us:
                self.close(call, Outcome.STAGE_TIMEOUT)
        self.desk.expire(now_us)
        self.items.step(now_us)
        self.flex.step()
        if self.disk_problem and not self._flush_due:
            self._flush_soon()
        self.pump(now_us)

    def cancel_all(self, outcome: Outcome) -> int:
        """End everything that is still here; returns how many."""
        self.items.give_back_waiting("The agent is shutting down.")
        calls = list(self.calls.values())
        for call in calls:
            self.close(call, outcome)
        for tenant_id in list(self.desk.waiting):
            self.desk.lease_answered(tenant_id)
        return len(calls)

    def follow_safe_rate(self, now_us: int) -> None:
        document = self.registry.document
        if document is not None:
            rate = own_safe_rate(document, self.agent_id, self.flex.states(), now_us)
            self.registry.set_safe_rate(rate, now_us)

    def scheduled_slot(self, name: str) -> RunningSlot:
        return next(slot for slot in self.scheduler.slots if slot.spec.name == name)

    def all_slots(self) -> Iterable[AgentSlot]:
        """Slots of the policy and those that left with time still to report."""
        return [*self.slots.values(), *self.leaving]

    @property
    def ready(self) -> bool:
        return not self.closed_because() and any(slot.state == READY for slot in self.slots.values())
