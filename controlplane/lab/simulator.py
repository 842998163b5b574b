"""Discrete events on a virtual clock, decided by the production core: one agent with all slots of its pool.

Admission, fair queues, size classes, preemption, the flex band with its tripwire, learning and metering are the objects
that an agent runs, called in the same order: a test drives an agent's engine with the same events and compares. What is
simulated is the model server (`service`) and what is between the agent and the control plane (`pool_control`).

At one instant: ends first, then arrivals in the workload's order, then the agent's own step, then the control plane.
Time is integer microseconds; nothing is random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final, cast

from controlplane.agent.live_figures import ADMITTED, ClassFigures, Figures
from controlplane.agent.registry import ClassEntry, Registry, TenantEntry
from controlplane.agent.rescheduling import build
from controlplane.agent.safe_rate import own_safe_rate
from controlplane.core.admission import WAIT_REASONS, AdmissionDecision, Decision, decide, reserve
from controlplane.core.admission_snapshot import KeyView, Overload, Snapshot
from controlplane.core.estimate import raw_gpu_us, rounded
from controlplane.core.flex_policy import FlexPolicy
from controlplane.core.grants import BatchAttempt, fits_loan
from controlplane.core.native import i64
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.reasons import OUTCOME_CODES, Outcome, Reason
from controlplane.core.slot_meter import SlotMeter
from controlplane.core.slots import RunningSlot
from controlplane.lab.band import SimulatedBand
from controlplane.lab.calls import Call, Columns, Rows
from controlplane.lab.ends import Ends
from controlplane.lab.prefills import Prefills
from controlplane.lab.service import Constants, ServiceModel
from controlplane.lab.timeline import Timeline
from controlplane.lab.workload import Workload
from controlplane.wire.policy import PolicyDocument

NEVER_US: Final = 1 << 61
STEP_US: Final = 50_000
"""Between an agent's steps, as `agent.engine` has it."""
START_US: Final = 1_800_000_000_000_000
"""Unix time at which a simulation begins unless it is told another: some Friday in 2027."""
COMPLETED_CODE: Final = OUTCOME_CODES[Outcome.COMPLETED]
REJECT: Final = Decision.REJECT
MAY_DOWNGRADE: Final = Overload.DOWNGRADE


class Simulator:
    """One run of one workload under one policy. `run` once; then read the columns, the timeline and the counts."""

    def __init__(
        self, document: PolicyDocument, workload: Workload, service: ServiceModel, *, start_us: int = START_US
    ) -> None:
        self.document, self.workload, self.service = document, workload, service
        self.start_us = self._now_us = start_us
        own = [slot for slot in document.pool.slots if slot.agent_id is not None]
        self.agent_id = own[0].agent_id if own else 0
        self.registry = Registry()
        self.registry.take(document)
        self.scheduler = build(document, own)
        for tenant in document.tenants:
            for slug in tenant.classes:
                if slug in self.registry.classes:
                    self.scheduler.set_weight(slug, tenant.slug, tenant.weight)
        self.key = KeyView()
        self.figures = Figures()
        self.timeline = Timeline([(slot.name, slot.band) for slot in own], start_us)
        self.meters = [SlotMeter(by_minute=False) for _ in own]
        self.rows = Rows(len(workload))
        self.refused: Counter[tuple[str, str, Reason]] = Counter()
        """By tenant, class and reason."""
        self._ended = [0] * (max(OUTCOME_CODES.values()) + 1)
        """Ends by the code of their outcome."""
        self.preempted = 0
        self.items_queued = 0
        """Items of jobs in the queue of their class."""
        by_slug = {tenant.slug: tenant for tenant in self.registry.tenants.values()}
        self._tenant_by_slug = by_slug
        self._class_of, self._tenant_of = workload.class_of, workload.tenant_of
        self._prompt, self._output, self._asked = workload.prompt, workload.output, workload.asked
        self._tenants = [by_slug[slug] for slug in workload.tenants]
        self._classes = [self.registry.classes[slug] for slug in workload.classes]
        self._class_index = {queue.spec.slug: queue.index for queue in self.scheduler.classes}
        self._serial = self._run = self._agenda_number = 0
        self._ends = Ends()
        """What runs, in the order in which it ends."""
        self._constants = service if isinstance(service, Constants) else None
        """The service model where it is the plain one: compiled code calls it without asking what it is."""
        self._prefills = Prefills(len(own)) if service.prefill_stalls else None
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._agenda_us: i64 = NEVER_US
        """Instant of the first of them."""
        self._stage_due_us = NEVER_US
        """No running request is past its stage timeout before this instant."""
        self._pumping = False
        flex = document.pool.flex
        self.drain_bound_us = flex.drain_bound_s * 1_000_000
        self.slots_away = False
        """Whether a flex slot is lent or on its way home; the band sets it."""
        self.flex = SimulatedBand(self, self.now_us)
        self.flex.configure(own, FlexPolicy(lend_p95_us=flex.lend_p95_ms * 1000, drain_bound_us=self.drain_bound_us))
        self._watched = bool(self.flex.slots)
        """Whether anybody reads the figures that lending depends on."""
        self._figured: ClassEntry | None = None
        self._class_figures = ClassFigures(start_us)
        """Those of that class, so that many of one class in a row need not be looked up."""
        self.items_step: Callable[[int], None] | None = None
        self.on_start: Callable[[int, int, int], None] | None = None
        """Told of each attempt: instant, row, slot."""
        self.on_admitted: Callable[[int], None] | None = None
        """Told the instant of each request that is admitted."""
        self.follow_safe_rate(start_us)

    # -- the clock -----------------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        return self._now_us

    @property
    def clock(self) -> Simulator:
        """As the agent's objects ask for the time."""
        return self

    def at(self, at_us: int, event: Callable[[], None]) -> None:
        """Call at an instant, after everything else of it; of one instant in the order of these calls."""
        self._agenda_number += 1
        heappush(self._agenda, (at_us, self._agenda_number, event))
        self._agenda_us = self._agenda[0][0]

    def run(self, until_us: int | None = None) -> None:
        """Until nothing is left to do, or to an instant (counted from the start) which is not passed.

        The clock stays at the last thing that was done: what nobody waits for any more is no idle time.
        """
        arrivals, start_us, rows = self.workload.at_us, self.start_us, len(self.workload)
        ends, agenda = self._ends.calls, self._agenda
        last_us: i64 = NEVER_US if until_us is None else start_us + until_us
        row: i64 = 0
        step_us: i64 = start_us + STEP_US
        next_arrival_us: i64 = start_us + arrivals[0] if rows else NEVER_US
        while True:
            end_us: i64 = NEVER_US
            if ends:
                end_us = ends[0].ends_us
            is_end = end_us <= next_arrival_us
            at_us = end_us if is_end else next_arrival_us
            agenda_us = self._agenda_us
            if step_us < at_us and step_us <= agenda_us:
                due_us = agenda_us if agenda_us < at_us else at_us
                if due_us == NEVER_US and (self._is_over() or self._is_quiet(due_us)):
                    return
                if self._is_quiet(due_us):
                    # Steps with nothing to do are passed over; the grid stays.
                    step_us += -(-(due_us - step_us) // STEP_US) * STEP_US or STEP_US
                    continue
                if step_us > last_us:
                    break
                self._now_us = step_us
                step_us += STEP_US
                self._step(step_us - STEP_US)
                continue
            if agenda_us < at_us:
                if agenda_us > last_us:
                    break
                self._now_us = agenda_us
                event = heappop(agenda)[2]
                self._agenda_us = agenda[0][0] if agenda else NEVER_US
                event()
                continue
            if at_us > last_us:
                break
            self._now_us = at_us
            if is_end:
                self._end(ends[0], at_us)
            else:
                self._arrive(row, at_us)
                row += 1
                next_arrival_us = start_us + arrivals[row] if row < rows else NEVER_US
        if last_us < NEVER_US:
            self._now_us = last_us

    def _is_over(self) -> bool:
        return not self.scheduler.requests and not self.slots_away and self.items_step is None

    def _is_quiet(self, until_us: int) -> bool:
        """Whether no step before an instant would do anything."""
        return (
            self._stage_due_us >= until_us
            and not self.slots_away
            and self.items_step is None
            and not self.scheduler.anything_queued()
        )

    def _step(self, now_us: int) -> None:
        """What time alone brings, in the order of `agent.engine`."""
        for request in self.scheduler.timed_out(now_us):
            self.close(cast(Call, request.call), Outcome.QUEUE_TIMEOUT)
        if now_us >= self._stage_due_us:
            self._time_stages_out(now_us)
        if self.items_step is not None:
            self.items_step(now_us)
        if self.slots_away:
            self.flex.step()
        self.pump(now_us)

    def _time_stages_out(self, now_us: int) -> None:
        for call in sorted(self._ends.calls, key=lambda call: call.serial):
            if now_us - call.dispatched_us >= call.klass.stage_timeout_us:
                self.close(call, Outcome.STAGE_TIMEOUT)
        self._stage_due_us = min(
            (call.dispatched_us + call.klass.stage_timeout_us for call in self._ends.calls), default=NEVER_US
        )

    # -- a request's way -----------------------------------------------------------------------------------------------

    def _arrive(self, row: int, now_us: int) -> None:
        klass, asked = self._classes[self._class_of[row]], self._asked[row]
        if asked > (limit := klass.max_output_tokens):
            # A client that knows what its class allows.
            asked = limit
        self._serial += 1
        call = Call(
            self._serial, self.rows, row, klass, self._tenants[self._tenant_of[row]], self._prompt[row],
            self._output[row], asked,
        )  # fmt: skip
        self.rows.arrived_us[row] = now_us
        snapshot = self.snapshot(call, klass, now_us)
        if klass.view.overload is MAY_DOWNGRADE:
            answer = self._decide_with_fallback(call, snapshot, now_us)
        else:
            answer = decide(snapshot)
        if answer.decision is REJECT:
            self._refuse(call, answer, now_us)
        else:
            self.admit(call, snapshot, answer, now_us)

    def _decide_with_fallback(self, call: Call, snapshot: Snapshot, now_us: int) -> AdmissionDecision:
        return decide(snapshot, lambda: self._fallback(call, now_us))

    def _fallback(self, call: Call, now_us: int) -> Snapshot | None:
        slug = call.klass.policy.downgrade_to
        entry = None if slug is None else self.registry.classes.get(slug)
        return None if entry is None else self.snapshot(call, entry, now_us)

    def snapshot(self, call: Call, klass: ClassEntry, now_us: int) -> Snapshot:
        """As `agent.front_desk` takes it; leaves on the call what follows from the class."""
        tenant, prompt, is_batch = call.tenant, call.prompt, klass.is_batch
        estimate = self.registry.estimate_for(tenant, klass)
        max_output = call.asked or klass.output_tokens
        expected = estimate.output_tokens(max_output)
        raw_us = raw_gpu_us(self.registry.rates, prompt, expected)
        gpu_us = rounded(estimate.bias * raw_us)
        call.estimate, call.raw_us, call.gpu_us, call.expected_output = estimate, raw_us, gpu_us, expected
        call.max_output, call.kv_tokens = max_output, prompt + expected
        may_run_lent, deadline_us = klass.safe_to_repeat, None
        if is_batch:
            may_run_lent = may_run_lent or self._fits(call)
            deadline_us = now_us + klass.deadline_us
        call.deadline_us, call.may_run_lent = deadline_us, may_run_lent
        snapshot = Snapshot(
            now_us, self.key, tenant.view, klass.view, self.registry.card_at(klass.slug, now_us), None, None, prompt,
            prompt, max_output, expected, 1, klass.stage_timeout_us,
        )  # fmt: skip
        self.scheduler.observe(
            snapshot, kv_tokens=call.kv_tokens, gpu_us=gpu_us, deadline_us=deadline_us, may_run_lent=may_run_lent
        )
        if is_batch:
            # The first of the agent's own items stand there beside the bound that others have.
            snapshot.queue_depth -= self.items_queued
        return snapshot

    def _refuse(self, call: Call, answer: AdmissionDecision, now_us: int) -> None:
        reason, klass, rows, row = answer.reason, call.klass, call.rows, call.row
        assert reason is not None
        self.refused[call.tenant.slug, klass.slug, reason] += 1
        rows.code[row] = reason.code
        rows.ended_us[row] = now_us
        if answer.estimated_wait_us is not None:
            rows.wait_estimate_us[row] = answer.estimated_wait_us
        if answer.retry_after_s is not None:
            rows.retry_s[row] = answer.retry_after_s
        rows.changed()
        if self._watched:
            figures = self.figures.of_class(klass.id, now_us)
            if reason in WAIT_REASONS and klass.view.max_wait_us is not None:
                figures.wait.record(klass.view.max_wait_us, now_us)
            if not klass.is_batch:
                self.flex.refused(reason.value)

    def admit(self, call: Call, snapshot: Snapshot, answer: AdmissionDecision, now_us: int) -> None:
        """Take what the decision promised, and let it run as soon as it may."""
        klass = call.klass
        if answer.served_snapshot is not None:
            klass = call.klass = self.registry.classes[answer.served_snapshot.workload_class.slug]
        call.reservation = reserve(snapshot, answer)
        if answer.estimated_wait_us is not None:
            call.rows.wait_estimate_us[call.row] = answer.estimated_wait_us
        call.rows.changed()
        call.queued = queued = QueuedRequest(
            call.request_id, call.tenant.slug, klass.slug, now_us, prompt_tokens=call.prompt,
            output_tokens=call.expected_output, kv_tokens=call.kv_tokens, gpu_us=call.gpu_us,
            deadline_us=call.deadline_us, preemptible=klass.safe_to_repeat,
            fits_drain=klass.is_batch and call.may_run_lent, streamed=False,
        )  # fmt: skip
        queued.call = call
        if self.on_admitted is not None:
            self.on_admitted(now_us)
        if self._watched:
            if klass is not self._figured:
                self._figured, self._class_figures = klass, self.figures.of_class(klass.id, now_us)
            call.figures = figures = self._class_figures
            figures.recent.add(ADMITTED, now_us)
        if answer.displaces is not None and (displaced := self.scheduler.requests.get(answer.displaces)) is not None:
            self.close(cast(Call, displaced.call), Outcome.DISPLACED)
        if not self._start_at_once(queued, now_us):
            self.scheduler.offer(queued, now_us)
            self.pump(now_us)

    def _start_at_once(self, queued: QueuedRequest, now_us: int) -> bool:
        """Start a request that waits for nobody, as the engine does; False where it has to queue."""
        if self._pumping or self.slots_away:
            return False
        if not self.scheduler.start_at_once(queued, now_us):
            return False
        self._pumping = True
        self._dispatch(queued, now_us)
        self._pumping = False
        if self.scheduler.anything_queued():
            self.pump(now_us)
        return True

    def _fits(self, call: Call) -> bool:
        attempt = BatchAttempt(
            stay_us=call.raw_us * self.flex.places_most, retry_safe=False, cancels_promptly=True, byte_sent=False
        )
        return fits_loan(attempt, drain_bound_us=self.drain_bound_us)

    def pump(self, now_us: int) -> None:
        """Start everything that may start at this instant."""
        if self._pumping:
            return
        self._pumping = True
        scheduler = self.scheduler
        if self.slots_away:
            self.flex.step()
        while scheduler.anything_queued():
            request = scheduler.next_dispatch(now_us)
            if request is not None:
                self._dispatch(request, now_us)
                continue
            victims = scheduler.victims(now_us)
            if not victims:
                break
            for victim in victims:
                self.requeue(cast(Call, victim.call))
        self._pumping = False

    def _dispatch(self, request: QueuedRequest, now_us: int) -> None:
        call, slot_index = cast(Call, request.call), request.slot_index
        rows, row, klass = call.rows, call.row, call.klass
        self._run = run = self._run + 1
        if self.on_start is not None:
            self.on_start(now_us, row, slot_index)
        call.run, call.slot_index, call.dispatched_us = run, slot_index, now_us
        call.reservation.start()
        if not call.waited:
            call.waited = True
            rows.started_us[row] = now_us
            rows.changed()
            if self._watched:
                call.figures.wait.record(now_us - rows.arrived_us[row], now_us)
        self.meters[slot_index].begin(call, now_us)
        if call.output > call.max_output:
            call.output = call.max_output
        running = len(self.scheduler.slots[slot_index].running)
        if running == 1:
            self.timeline.began(slot_index, now_us)
        constants = self._constants
        if constants is not None:
            first_us, rest_us = constants.parts(call.prompt, call.output, running)
        else:
            first_us, rest_us = self.service.parts(call.prompt, call.output, running)
        if self._prefills is not None:
            first_us = self._prefills.begin(call, first_us, now_us)
        call.first_us = now_us + first_us
        call.ends_us = now_us + first_us + rest_us
        self._ends.add(call)
        timeout_us = now_us + klass.stage_timeout_us
        if timeout_us < self._stage_due_us:
            self._stage_due_us = timeout_us
        if call.item is not None:
            call.item.dispatched(now_us)

    def requeue(self, call: Call, *, preempted: bool = True) -> None:
        """End an attempt, preempted or failed, and put its request back to the head of its queue."""
        now_us = self._now_us
        self.preempted += preempted
        self.meters[call.slot_index].end_stay(call, now_us)
        self._ends.remove(call)
        call.run = 0
        self.scheduler.requeue(call.serial, now_us)
        if not self.scheduler.slots[call.slot_index].running:
            self.timeline.stopped(call.slot_index, now_us)
        call.reservation.requeue()
        if call.item is not None:
            call.item.requeued()

    def _end(self, call: Call, now_us: int) -> None:
        prefills = self._prefills
        if prefills is not None and (late_us := prefills.late_us(call)):
            self._ends.remove(call)
            call.ends_us = now_us + late_us
            self._ends.add(call)
            return
        self.close(call, Outcome.COMPLETED)

    def close(self, call: Call, outcome: Outcome) -> None:
        """End a call: the one place, in the order of `agent.engine`."""
        now_us, request, rows, row = self._now_us, call.queued, call.rows, call.row
        scheduler, completed, gpu_us = self.scheduler, outcome is Outcome.COMPLETED, 0
        if call.run:
            slot_index = call.slot_index
            self._ends.remove(call)
            if self.slots_away and self.flex.any_draining:
                self.flex.token_seen(scheduler.slots[slot_index].spec.name)
            gpu_us = self.meters[slot_index].end_stay(call, now_us)
            # An attempt that was begun has its prompt behind it.
            prompt, output = call.prompt, call.output if completed else 0
            rows.slot[row] = slot_index
            scheduler.finish(request, now_us, prompt, output, gpu_us)
            if not scheduler.slots[slot_index].running:
                self.timeline.stopped(slot_index, now_us)
        else:
            prompt = output = 0
            if request.id in scheduler.requests:
                scheduler.cancel(request.id, now_us)
        call.reservation.settle(0, prompt + output)
        if completed:
            rows.first_us[row] = call.first_us
            rows.output[row] = output
            call.estimate.learn_gpu_us(call.raw_us, gpu_us)
            call.estimate.learn_output(output)
        rows.ended_us[row] = now_us
        rows.gpu_us[row] = gpu_us
        code = COMPLETED_CODE if completed else OUTCOME_CODES[outcome]
        rows.code[row] = code
        rows.served[row] = request.class_index
        rows.attempts[row] = request.attempt
        rows.changed()
        ended = self._ended
        ended[code] = ended[code] + 1
        request.call = None
        if call.item is not None:
            call.item.ended(outcome, gpu_us, now_us, ran=call.run > 0)
        if self.slots_away or scheduler.anything_queued():
            self.pump(now_us)

    # -- what came of them ---------------------------------------------------------------------------------------------

    @property
    def columns(self) -> Columns:
        """What became of the workload's requests so far."""
        return self.rows.columns()

    @property
    def outcomes(self) -> Counter[Outcome]:
        """Ends so far, by outcome."""
        return Counter({outcome: self._ended[code] for outcome, code in OUTCOME_CODES.items() if self._ended[code]})

    @property
    def calls(self) -> dict[int, Call]:
        """Those that wait or run, by serial."""
        return {int(request.id): cast(Call, request.call) for request in self.scheduler.requests.values()}

    # -- what the agent's own objects ask ------------------------------------------------------------------------------

    def follow_safe_rate(self, now_us: int) -> None:
        rate = own_safe_rate(self.document, self.agent_id or 0, self.flex.states(), now_us)
        self.registry.set_safe_rate(rate, now_us)

    def scheduled_slot(self, name: str) -> RunningSlot:
        return next(slot for slot in self.scheduler.slots if slot.spec.name == name)

    # -- what the control plane's side asks ----------------------------------------------------------------------------

    @property
    def all_arrived(self) -> bool:
        """Whether the workload's last request has arrived."""
        return not self.workload.at_us or self._now_us >= self.start_us + self.workload.at_us[-1]

    def tenant(self, slug: str) -> TenantEntry:
        """Raises KeyError for one that the policy does not have."""
        return self._tenant_by_slug[slug]

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial
