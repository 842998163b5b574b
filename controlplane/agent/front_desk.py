"""Where requests are offered: key, body, snapshot, decision. Refusals are answered here, the rest is the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from controlplane.agent.answers import bad_request, error_body, refusal_answer
from controlplane.agent.api_body import CHAT_PATH, TOKEN_PATHS, BadBody, read_body
from controlplane.agent.call import Call, Exchange
from controlplane.agent.call_headers import class_headers, id_headers
from controlplane.agent.journal_entries import Mark, Turned
from controlplane.agent.objectives import MINUTE_US
from controlplane.agent.one_shot_body import read_one_shot
from controlplane.agent.outage_log import OutageLog
from controlplane.agent.purses import SlicePurse
from controlplane.agent.refusal_log import RefusalLog, decision_sample
from controlplane.agent.registry import ClassEntry, KeyEntry, TenantEntry
from controlplane.agent.request_ids import new_request_id
from controlplane.core.admission import AdmissionDecision, Decision, decide, explain_checks
from controlplane.core.admission_snapshot import BudgetView, Overload, Snapshot
from controlplane.core.estimate import prompt_tokens_bound, raw_gpu_us
from controlplane.core.grants import BatchAttempt, fits_loan
from controlplane.core.pricing import charge_upper_bound_nanos
from controlplane.core.reasons import Reason
from controlplane.wire.policy import ClassPolicy, TenantPolicy

if TYPE_CHECKING:
    from controlplane.agent.engine import Engine

LEASE_WAIT_US: Final = 250_000
LEASE_WAITING_MAX: Final = 1_024
"""Requests of one tenant that wait for a lease at a time."""
WAIT_REASONS: Final = frozenset({Reason.QUEUE_FULL, Reason.WAIT_TOO_LONG})
PREFIX_CHARS: Final = 12


class FrontDesk:
    """Admission of one agent."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.log = RefusalLog()
        self.outage = OutageLog()
        self.waiting: dict[int, list[Call]] = {}
        """By tenant, calls that wait for a lease."""
        self.ask_lease: Callable[[int, int, str], None] = lambda tenant_id, need_nanos, job: None
        """Asks the control plane for a tenant's lease; coalesced there, answered by `lease_answered`."""

    def offer(self, exchange: Exchange) -> None:
        """A request arrived with its last byte."""
        engine = self._engine
        now_us = engine.clock.now_us()
        closed = engine.closed_because()
        if closed:
            body = error_body(closed, "server_error", "unavailable")
            exchange.respond(503, body, b"retry-after: 1\r\n")
            return
        request_id = new_request_id(now_us)
        key = engine.registry.key_of(exchange.bearer, now_us)
        if key is None:
            self._refuse_unknown(exchange, request_id)
            return
        try:
            path = exchange.path
            parsed = read_body(exchange.body, path) if path in TOKEN_PATHS else read_one_shot(exchange.body, path)
        except BadBody as error:
            exchange.respond(
                400,
                bad_request(str(error), error.param),
                id_headers(request_id, exchange) + b"x-should-retry: false\r\n",
            )
            return
        slug = exchange.asked_class or key.live.default_class
        call = Call(
            engine.next_serial(),
            request_id,
            exchange,
            parsed,
            key=key,
            tenant=engine.registry.tenants.get(key.live.tenant_id) or stranger(key),
            klass=engine.registry.classes.get(slug) or _unserved(slug),
            arrived_us=now_us,
        )
        prompt = parsed.messages if path == CHAT_PATH else parsed.prompt
        serialised = bytes(prompt)
        call.prompt_bytes = len(serialised)
        call.prompt_tokens = (engine.backend.count_prompt(serialised) or 0) if serialised else 0
        call.revision = engine.revision
        if engine.tracer is not None:
            call.trace = engine.tracer.begin(request_id, exchange.traceparent)
        call.parsed_us = engine.clock.now_us()
        exchange.call = call
        self._consider(call, call.parsed_us)

    def _consider(self, call: Call, now_us: int) -> None:
        snapshot = self.snapshot(call, call.klass, now_us)
        if call.klass.view.overload is Overload.DOWNGRADE:
            answer = decide(snapshot, lambda: self._fallback(call, now_us))
        else:
            answer = decide(snapshot)
        if answer.decision is not Decision.REJECT:
            self._admit(call, snapshot, answer, now_us)
        elif answer.reason is Reason.NO_LEASE and self._may_wait(call, now_us):
            tenant_id = call.tenant.policy.id
            call.bound_nanos = answer.charge_upper_bound_nanos
            self.waiting.setdefault(tenant_id, []).append(call)
            self.ask_lease(tenant_id, answer.charge_upper_bound_nanos, call.exchange.job)
        else:
            self._refuse(call, snapshot, answer, now_us)

    def _may_wait(self, call: Call, now_us: int) -> bool:
        """Whether a request without a lease waits: 250 ms from its first decision, while somebody may answer."""
        tenant_id = call.tenant.policy.id
        if call.lease_deadline_us:
            return now_us < call.lease_deadline_us and tenant_id not in self._engine.leases.unanswered
        call.lease_deadline_us = now_us + LEASE_WAIT_US
        return len(self.waiting.get(tenant_id, ())) < LEASE_WAITING_MAX

    def _fallback(self, call: Call, now_us: int) -> Snapshot | None:
        """The snapshot of the class to fall back to."""
        slug = call.klass.policy.downgrade_to
        entry = None if slug is None else self._engine.registry.classes.get(slug)
        return None if entry is None else self.snapshot(call, entry, now_us)

    def snapshot(self, call: Call, klass: ClassEntry, now_us: int) -> Snapshot:
        """What the decision looks at for one class; leaves on the call what follows from that class."""
        engine = self._engine
        registry, tenant = engine.registry, call.tenant
        estimate = registry.estimate_of(tenant.id, klass.id)
        prompt_tokens = call.prompt_tokens or estimate.prompt_tokens(call.prompt_bytes)
        max_output = call.asked_output or klass.output_tokens
        if call.one_shot:
            max_output = 0
        expected = estimate.output_tokens(max_output)
        raw_us = raw_gpu_us(registry.rates, prompt_tokens, call.n * expected)
        if call.one_shot and call.tokenless:
            raw_us = registry.tokenless_time.mean_us
        gpu_us = round(estimate.bias * raw_us)
        call.prompt_tokens, call.max_output_tokens, call.expected_output = prompt_tokens, max_output, expected
        call.estimate, call.raw_gpu_us, call.gpu_us = estimate, raw_us, gpu_us
        call.kv_tokens = prompt_tokens + call.n * expected
        call.card = registry.card_at(klass.slug, now_us)
        call.preemptible = klass.safe_to_repeat and engine.backend.cancels_promptly and not call.stream
        call.fits_drain = klass.is_batch and fits_loan(
            BatchAttempt(
                stay_us=raw_us * engine.flex.places_most + (engine.backend.wait_us(call.path) if call.one_shot else 0),
                retry_safe=klass.safe_to_repeat,
                cancels_promptly=engine.backend.cancels_promptly,
                byte_sent=call.stream,
            ),
            drain_bound_us=engine.drain_bound_us,
        )
        call.deadline_us = call.arrived_us + klass.deadline_us if klass.is_batch else None
        snapshot = Snapshot(
            now_us,
            call.key.view,
            tenant.view,
            klass.view,
            call.card,
            self._budget(call, klass, now_us) if tenant.hard_budget else None,
            call.model,
            prompt_tokens,
            prompt_tokens_bound(call.prompt_bytes, klass.policy.template_allowance_tokens),
            max_output,
            expected,
            call.n,
            klass.stage_timeout_us,
        )
        if klass.slug in registry.classes:
            engine.scheduler.observe(
                snapshot,
                kv_tokens=call.kv_tokens,
                gpu_us=gpu_us,
                deadline_us=call.deadline_us,
                may_run_lent=call.preemptible or call.fits_drain,
            )
            if klass.is_batch:
                # The first of the agent's own items stand there beside the bound that others have.
                snapshot.queue_depth -= engine.items.queued
        return snapshot

    def _budget(self, call: Call, klass: ClassEntry, now_us: int) -> BudgetView:
        view = BudgetView(None, posture=call.tenant.posture)
        bound = charge_upper_bound_nanos(
            call.card,
            prompt_tokens_bound(call.prompt_bytes, klass.policy.template_allowance_tokens),
            call.max_output_tokens,
            call.n,
            klass.stage_timeout_us,
        )
        self._engine.leases.look_up(view, call.tenant.policy.id, bound, now_us, call.exchange.job)
        return view

    def _admit(self, call: Call, snapshot: Snapshot, answer: AdmissionDecision, now_us: int) -> None:
        engine = self._engine
        if self.log.wants_admitted():
            self._explain(call, snapshot, answer, now_us)
        if answer.served_snapshot is not None:
            call.klass = engine.registry.classes[answer.served_snapshot.workload_class.slug]
            call.downgraded = True
        engine.admit(call, snapshot, answer, now_us)
        if snapshot.budget is not None:
            tenant_id = call.tenant.policy.id
            if isinstance(answer.reserve_from, SlicePurse):
                self.outage.admitted(tenant_id, call.tenant.policy.slug, now_us)
            if engine.leases.runs_low(tenant_id, call.bound_nanos, now_us, call.exchange.job):
                self.ask_lease(tenant_id, call.bound_nanos, call.exchange.job)

    def _refuse(self, call: Call, snapshot: Snapshot, answer: AdmissionDecision, now_us: int) -> None:
        engine, reason = self._engine, answer.reason
        assert reason is not None
        tenant_id, class_id = call.tenant.policy.id, call.klass.policy.id
        if self.log.wants_refused(tenant_id, class_id, reason, call.arrived_us):
            self._explain(call, snapshot, answer, now_us)
        self.log.count(tenant_id, class_id, reason, call.arrived_us)
        if reason is Reason.NO_LEASE and tenant_id in engine.leases.unanswered:
            self.outage.refused(tenant_id, call.tenant.policy.slug, now_us)
        judges = engine.objectives.judges(tenant_id, class_id, streamed=call.stream, now_us=call.arrived_us)
        engine.objectives.refused(judges, call.arrived_us, reason.value)
        minute_us = call.arrived_us - call.arrived_us % MINUTE_US
        engine.note(
            Turned(call.arrived_us, tenant_id, class_id, reason.code, [Mark(j.version_id, minute_us) for j in judges])
        )
        wait_us = snapshot.workload_class.max_wait_us if reason in WAIT_REASONS else None
        engine.figures.refused(call, reason.value, now_us, as_wait_us=wait_us)
        engine.offered += 1
        if engine.tracer is not None:
            engine.tracer.refused(call, reason, now_us)
        call.closed = True
        call.exchange.call = None
        detail = self._detail(call, reason)
        refusal = refusal_answer(reason, answer.retry_after_s, detail)
        headers = id_headers(call.request_id, call.exchange) + class_headers(call) + refusal.headers
        if answer.estimated_wait_us is not None and reason in WAIT_REASONS:
            headers += b"x-flexband-estimated-wait-ms: %d\r\n" % (answer.estimated_wait_us // 1000)
        call.exchange.respond(refusal.status, refusal.body, headers)
        if not call.klass.is_batch:
            engine.flex.refused(reason.value)

    def _detail(self, call: Call, reason: Reason) -> str:
        if reason is Reason.BUDGET_EXHAUSTED:
            budget = self._engine.leases.exhausted_window(call.tenant.policy.id)
            return f"Blocked by {budget}." if budget else ""
        return ""

    def _refuse_unknown(self, exchange: Exchange, request_id: str) -> None:
        prefix = exchange.bearer[:PREFIX_CHARS].decode("ascii", "replace")
        self.log.count_unknown_key(prefix if prefix.isprintable() else "")
        refusal = refusal_answer(Reason.KEY_UNKNOWN, None)
        exchange.respond(refusal.status, refusal.body, id_headers(request_id, exchange) + refusal.headers)

    def _explain(self, call: Call, snapshot: Snapshot, answer: AdmissionDecision, now_us: int) -> None:
        self.log.keep(
            decision_sample(
                call.request_id,
                at_us=now_us,
                tenant_id=call.tenant.policy.id,
                key_id=call.key.live.id,
                class_id=call.klass.policy.id,
                decision=answer.decision,
                reason=answer.reason,
                checks=explain_checks(snapshot),
            )
        )

    # Waiting for a lease

    def waiting_nanos(self, tenant_id: int) -> int:
        """Sum of the bounds of everything that waits for a tenant's lease."""
        return sum(call.bound_nanos for call in self.waiting.get(tenant_id, ()))

    def lease_answered(self, tenant_id: int) -> None:
        """Leases of a tenant arrived, or nobody answered: decide again for those that waited, in order of arrival."""
        now_us = self._engine.clock.now_us()
        for call in self.waiting.pop(tenant_id, ()):
            self._consider(call, now_us)

    def expire(self, now_us: int) -> None:
        """Refuse what has waited long enough for a lease."""
        for tenant_id, calls in list(self.waiting.items()):
            late = [call for call in calls if now_us >= call.lease_deadline_us]
            if late:
                self.waiting[tenant_id] = [call for call in calls if call not in late]
                if not self.waiting[tenant_id]:
                    del self.waiting[tenant_id]
                if self._engine.leases.answered_us < late[0].lease_deadline_us - LEASE_WAIT_US:
                    # Asked for that long, and not a word: the tenant's outage posture decides.
                    self._engine.leases.unanswered.add(tenant_id)
                for call in late:
                    self._consider(call, now_us)

    def client_gone(self, call: Call) -> bool:
        """A client went away while its request waited for a lease: refused without anybody to tell."""
        calls = self.waiting.get(call.tenant.policy.id, [])
        if call not in calls:
            return False
        calls.remove(call)
        if not calls:
            del self.waiting[call.tenant.policy.id]
        now_us = self._engine.clock.now_us()
        snapshot = self.snapshot(call, call.klass, now_us)
        self._refuse(call, snapshot, AdmissionDecision(Decision.REJECT, Reason.NO_LEASE, 1), now_us)
        return True


def stranger(key: KeyEntry) -> TenantEntry:
    """A tenant that this pool does not serve: it may use no class here."""
    return TenantEntry(
        TenantPolicy(
            id=key.live.tenant_id,
            slug="",
            weight=1,
            max_concurrency=0,
            classes=[],
            models=[],
            outage_posture="closed",
            hard_budget=False,
            ancestors=[],
        )
    )


def _unserved(slug: str) -> ClassEntry:
    """A class that this pool does not serve."""
    entry = ClassEntry(
        ClassPolicy(
            id=0,
            slug=slug,
            kind="interactive",
            priority=0,
            min_share_ppm=0,
            max_prompt_tokens=0,
            max_output_tokens=0,
            default_output_tokens=1,
            template_allowance_tokens=0,
            max_queue=0,
            max_wait_ms=0,
            stage_timeout_s=1,
            overload="reject",
            downgrade_to=None,
            retry_safe=False,
            cancellable=True,
            default_deadline_s=1,
            models=[],
        )
    )
    entry.view.active = False
    return entry
