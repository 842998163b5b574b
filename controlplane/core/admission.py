"""Admission: can the service promise to take this request?

`decide` runs the ordered checks over one snapshot and stops at the first that fails; it builds no explanation.
`explain_checks` lists every check of the same snapshot with its value, its limit and whether it held; it is called
only when somebody asks, on a refusal that is kept, or on a sample, and before anything is taken. `reserve` takes
bucket, lease and concurrency together once every check has passed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from controlplane.core.admission_snapshot import (
    BudgetView,
    ClassView,
    KeyState,
    KeyView,
    LeaseState,
    OutagePosture,
    Overload,
    Snapshot,
    TenantView,
)
from controlplane.core.native import native
from controlplane.core.pricing import charge_upper_bound_nanos
from controlplane.core.reasons import NO_SERVING_SLOT_RETRY_S, Reason
from controlplane.core.reservations import PICO, ConcurrencyCounter, LeasePurse, Reservation, TokenBucket

__all__ = [
    "AdmissionDecision",
    "BudgetView",
    "Check",
    "ClassView",
    "Decision",
    "KeyState",
    "KeyView",
    "LeaseState",
    "OutagePosture",
    "Overload",
    "Snapshot",
    "TenantView",
    "decide",
    "explain_checks",
    "reserve",
]

SECOND_US: Final = 1_000_000
QUOTE_CHARS_MAX: Final = 200
"""How much of a name that a client sent an explanation quotes: reports carry explanations and have bounds."""


class Decision(StrEnum):
    """The four answers of admission."""

    ADMIT = "admit"
    QUEUE = "queue"
    DOWNGRADE = "downgrade"
    REJECT = "reject"


# Looking up a member on its enumeration costs as much as three calls; what every request needs has a name here.
ADMIT: Final = Decision.ADMIT
QUEUE: Final = Decision.QUEUE
REJECT: Final = Decision.REJECT
ACTIVE: Final = KeyState.ACTIVE
MAY_WAIT_LONG: Final = Overload.QUEUE
WAIT_REASONS: Final = frozenset({Reason.QUEUE_FULL, Reason.WAIT_TOO_LONG})


@native(free_list_len=1, acyclic=True)
class AdmissionDecision:
    """The answer; `estimated_wait_us` None is an infinite wait or a check before the queue.

    `served` is the inner answer of a downgrade (admit or queue) and `served_snapshot` what it was decided on.
    `reserve_from` is the purse that `reserve` takes the charge's bound from.
    """

    __slots__ = (
        "charge_upper_bound_nanos", "decision", "displaces", "estimated_wait_us", "reason", "reserve_from",
        "retry_after_s", "served", "served_snapshot",
    )  # fmt: skip

    def __init__(
        self,
        decision: Decision,
        reason: Reason | None = None,
        retry_after_s: int | None = None,
        estimated_wait_us: int | None = None,
        charge_upper_bound_nanos: int = 0,
        reserve_from: LeasePurse | None = None,
        displaces: str | int | None = None,
        served: AdmissionDecision | None = None,
        served_snapshot: Snapshot | None = None,
    ) -> None:
        self.decision = decision
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.estimated_wait_us = estimated_wait_us
        self.charge_upper_bound_nanos = charge_upper_bound_nanos
        self.reserve_from = reserve_from
        self.displaces = displaces
        self.served = served
        self.served_snapshot = served_snapshot


class Check(NamedTuple):
    """One line of an explanation; value and limit in the unit that the name ends with, None where there is none."""

    name: str
    value: int | float | str | None
    limit: int | float | str | None
    held: bool


CHECK_REASONS: Final[dict[str, frozenset[Reason]]] = {
    "key": frozenset({Reason.KEY_UNKNOWN, Reason.KEY_REVOKED, Reason.KEY_EXPIRED}),
    "tenant": frozenset({Reason.TENANT_SUSPENDED}),
    "class": frozenset({Reason.CLASS_NOT_ALLOWED}),
    "model": frozenset({Reason.MODEL_NOT_ALLOWED}),
    "prompt_tokens": frozenset({Reason.PROMPT_TOO_LONG}),
    "output_tokens": frozenset({Reason.OUTPUT_TOO_LONG}),
    "budget_nanos": frozenset({Reason.BUDGET_EXHAUSTED, Reason.NO_LEASE}),
    "tenant_concurrency": frozenset({Reason.CONCURRENCY_LIMIT}),
    "key_concurrency": frozenset({Reason.CONCURRENCY_LIMIT}),
    "class_rate": frozenset({Reason.RATE_LIMIT}),
    "tenant_request_rate": frozenset({Reason.RATE_LIMIT}),
    "tenant_token_rate": frozenset({Reason.RATE_LIMIT}),
    "key_request_rate": frozenset({Reason.RATE_LIMIT}),
    "key_token_rate": frozenset({Reason.RATE_LIMIT}),
    "fits_kv_tokens": frozenset({Reason.NEVER_FITS}),
    "queue_depth": frozenset({Reason.QUEUE_FULL}),
    "queue_wait_ms": frozenset({Reason.WAIT_TOO_LONG}),
    # Memory alone never refuses: what does not fit now waits.
    "memory_kv_tokens": frozenset(),
}
"""The reasons that a failed check can give, by the name it has in an explanation, in order of the checks."""


def estimate_wait_us(work_ahead_gpu_us: int, first_free_us: int, serving_slots: int) -> int | None:
    """Expected wait in the queue, rounded up to a microsecond; None (infinite) when no slot serves the class."""
    if serving_slots <= 0:
        return None
    return -(-(work_ahead_gpu_us + first_free_us) // serving_slots)


def charge_bound_nanos(s: Snapshot) -> int:
    """Upper bound of the charge of the snapshot's request."""
    return charge_upper_bound_nanos(s.card, s.prompt_bound_tokens, s.max_output_tokens, s.n, s.stage_timeout_us)


def token_need(s: Snapshot) -> int:
    """Tokens that the token-rate buckets are charged at admission: prompt plus expected output of every choice."""
    expected = s.max_output_tokens if s.expected_output_tokens is None else s.expected_output_tokens
    return s.prompt_tokens + s.n * expected


def _identity_reason(s: Snapshot) -> Reason | None:
    key = s.key
    if key.state is not ACTIVE:
        return Reason.KEY_UNKNOWN if key.state is KeyState.UNKNOWN else Reason.KEY_REVOKED
    if key.expires_at_us is not None and s.now_us >= key.expires_at_us:
        return Reason.KEY_EXPIRED
    return None if s.tenant.active else Reason.TENANT_SUSPENDED


def _class_allowed(s: Snapshot) -> bool:
    bounds, allowed, keyed = s.workload_class, s.tenant.classes, s.key.classes
    slug = bounds.slug
    return bounds.active and (allowed is None or slug in allowed) and (keyed is None or slug in keyed)


def _model_allowed(s: Snapshot) -> bool:
    model = s.model
    if model is None:
        return True
    of_tenant, of_key, of_class = s.tenant.models, s.key.models, s.workload_class.models
    return (
        (of_tenant is None or model in of_tenant)
        and (of_key is None or model in of_key)
        and (of_class is None or model in of_class)
    )


def _scope_reason(s: Snapshot) -> Reason | None:
    if not _class_allowed(s):
        return Reason.CLASS_NOT_ALLOWED
    if not _model_allowed(s):
        return Reason.MODEL_NOT_ALLOWED
    bounds = s.workload_class
    if bounds.max_prompt_tokens is not None and s.prompt_tokens > bounds.max_prompt_tokens:
        return Reason.PROMPT_TOO_LONG
    if bounds.max_output_tokens is not None and s.max_output_tokens > bounds.max_output_tokens:
        return Reason.OUTPUT_TOO_LONG
    return None


def _payer(budget: BudgetView, bound_nanos: int) -> LeasePurse | Reason:
    """The purse that covers the bound, or why none does."""
    purse = budget.purse
    if purse is not None and bound_nanos <= purse.remaining_nanos:
        return purse
    if budget.state is LeaseState.EXHAUSTED or (budget.state is LeaseState.HELD and purse is not None):
        return Reason.BUDGET_EXHAUSTED
    outage = budget.outage_purse
    if budget.posture is OutagePosture.OPEN and outage is not None and bound_nanos <= outage.remaining_nanos:
        return outage
    return Reason.NO_LEASE


def _has_room(s: Snapshot) -> bool:
    of_tenant, of_key = s.tenant.concurrency, s.key.concurrency
    return (of_tenant is None or of_tenant.has_room()) and (of_key is None or of_key.has_room())


def _rate_retry_s(s: Snapshot) -> int:
    """0 when every bucket covers the request, else the seconds until the first that does not will.

    A level that was enough when it was last brought up to date still is: only the others are refilled.
    """
    bucket, now_us = s.workload_class.rate_bucket, s.now_us
    if bucket is not None and bucket.level_pico < PICO and bucket.refill(now_us) < PICO:
        return bucket.seconds_until(1, now_us)
    limits: TenantView | KeyView = s.tenant
    while True:
        bucket = limits.request_bucket
        if bucket is not None and bucket.level_pico < PICO and bucket.refill(now_us) < PICO:
            return bucket.seconds_until(1, now_us)
        bucket = limits.token_bucket
        if bucket is not None:
            need = token_need(s)
            if not bucket.covers(need, now_us):
                return bucket.seconds_until(need, now_us)
        if limits is s.key:
            return 0
        limits = s.key


def _largest_need(s: Snapshot) -> int:
    return s.prompt_tokens + s.n * s.max_output_tokens


def _fits_memory_now(s: Snapshot) -> bool:
    return s.free_kv_tokens is None or token_need(s) <= s.free_kv_tokens


def _ceil_s(duration_us: int) -> int:
    return max(1, -(-duration_us // SECOND_US))


def _within_wait(s: Snapshot, wait_us: int | None) -> bool:
    bound = s.workload_class.max_wait_us
    return bound is None or (wait_us is not None and wait_us <= bound)


def decide(s: Snapshot, downgrade: Callable[[], Snapshot | None] | None = None) -> AdmissionDecision:
    """Run the checks in order; the first that fails names the reason.

    `downgrade` builds the snapshot of the class or model to fall back to; it is called only when the class's overload
    action is `downgrade` and a queue bound was reached, and at most one step is taken.
    """
    reason = _identity_reason(s)
    if reason is not None:
        return AdmissionDecision(REJECT, reason)
    if downgrade is None:
        return _decide_from_scope(s)
    answer = _decide_from_scope(s)
    if s.workload_class.overload is Overload.DOWNGRADE and answer.reason in WAIT_REASONS:
        return _downgraded(answer, downgrade())
    return answer


def _downgraded(refusal: AdmissionDecision, fallback: Snapshot | None) -> AdmissionDecision:
    """One step down: checks 2 to 8 on the fallback; where it cannot serve either, the first refusal stands."""
    if fallback is None:
        return refusal
    served = _decide_from_scope(fallback)
    if served.decision is REJECT:
        return refusal
    return AdmissionDecision(
        Decision.DOWNGRADE,
        refusal.reason,
        None,
        served.estimated_wait_us,
        served.charge_upper_bound_nanos,
        served.reserve_from,
        served.displaces,
        served,
        fallback,
    )


def _decide_from_scope(s: Snapshot) -> AdmissionDecision:
    """Checks 2 to 8."""
    reason = _scope_reason(s)
    if reason is not None:
        return AdmissionDecision(REJECT, reason)
    bound = charge_upper_bound_nanos(s.card, s.prompt_bound_tokens, s.max_output_tokens, s.n, s.stage_timeout_us)
    payer: LeasePurse | None = None
    budget = s.budget
    if budget is not None:
        payer = budget.purse
        if payer is None or bound > payer.remaining_nanos:
            covered = _payer(budget, bound)
            if isinstance(covered, Reason):
                return AdmissionDecision(REJECT, covered, _budget_retry_s(s, covered), None, bound)
            payer = covered
    if not _has_room(s):
        return AdmissionDecision(REJECT, Reason.CONCURRENCY_LIMIT, 1, None, bound)
    retry = _rate_retry_s(s)
    if retry:
        return AdmissionDecision(REJECT, Reason.RATE_LIMIT, retry, None, bound)
    largest = s.largest_slot_kv_tokens
    if largest is not None and s.prompt_tokens + s.n * s.max_output_tokens > largest:
        return AdmissionDecision(REJECT, Reason.NEVER_FITS, None, None, bound)
    if s.free_now:
        return AdmissionDecision(ADMIT if _fits_memory_now(s) else QUEUE, None, None, 0, bound, payer)
    return _decide_queue(s, bound, payer)


def _decide_queue(s: Snapshot, bound_nanos: int, payer: LeasePurse | None) -> AdmissionDecision:
    """Check 7 for a request that cannot start at once."""
    slots = s.serving_slots
    # As `estimate_wait_us` has it.
    wait = -(-(s.work_ahead_gpu_us + s.first_free_us) // slots) if slots > 0 else None
    bounds = s.workload_class
    if bounds.max_queue is not None and s.queue_depth >= bounds.max_queue:
        if _may_displace(s, wait):
            return AdmissionDecision(QUEUE, None, None, wait, bound_nanos, payer, s.displaceable_id)
        retry = NO_SERVING_SLOT_RETRY_S if wait is None else _ceil_s(s.first_free_us)
        return AdmissionDecision(REJECT, Reason.QUEUE_FULL, retry, wait, bound_nanos)
    most = bounds.max_wait_us
    if most is None or (wait is not None and wait <= most) or bounds.overload is MAY_WAIT_LONG:
        return AdmissionDecision(QUEUE, None, None, wait, bound_nanos, payer)
    # The ceiling of a ceiling to microseconds is the ceiling of the exact quotient.
    retry = NO_SERVING_SLOT_RETRY_S if wait is None else _ceil_s(wait - most)
    return AdmissionDecision(REJECT, Reason.WAIT_TOO_LONG, retry, wait, bound_nanos)


def _may_displace(s: Snapshot, wait_us: int | None) -> bool:
    """Whether dropping a queued request of lower precedence makes room in a full queue.

    It frees a queue place, never time: work of lower precedence is not in the estimated wait.
    """
    return s.workload_class.overload is Overload.CANCEL and s.displaceable_id is not None and _within_wait(s, wait_us)


def _budget_retry_s(s: Snapshot, reason: Reason) -> int | None:
    if reason is Reason.NO_LEASE:
        return 1
    ends = s.budget.window_ends_at_us if s.budget is not None else None
    return None if ends is None else _ceil_s(ends - s.now_us)


def reserve(s: Snapshot, answer: AdmissionDecision) -> Reservation:
    """Take buckets, lease and concurrency together for an answer that is not a refusal.

    Must follow `decide` on the same snapshot with nothing in between. Raises ValueError on a refusal.
    """
    if answer.decision is REJECT:
        raise ValueError(f"a refused request reserves nothing (reason {answer.reason})")
    if answer.served_snapshot is not None:
        s = answer.served_snapshot
    now_us = s.now_us
    bucket = s.workload_class.rate_bucket
    if bucket is not None:
        bucket.take(1, now_us)
    of_tenant, of_key = s.tenant, s.key
    bucket = of_tenant.request_bucket
    if bucket is not None:
        bucket.take(1, now_us)
    bucket = of_key.request_bucket
    if bucket is not None:
        bucket.take(1, now_us)
    tokens, tenant_bucket, key_bucket = 0, of_tenant.token_bucket, of_key.token_bucket
    if tenant_bucket is not None or key_bucket is not None:
        tokens = token_need(s)
        if tenant_bucket is not None:
            tenant_bucket.take(tokens, now_us)
        if key_bucket is not None:
            key_bucket.take(tokens, now_us)
    tenant, key = of_tenant.concurrency, of_key.concurrency
    if tenant is not None:
        tenant.enter()
    if key is not None:
        key.enter()
    bound, purse = answer.charge_upper_bound_nanos, answer.reserve_from
    if purse is not None and not purse.reserve(bound):
        raise ValueError("the lease changed between the decision and the reservation")
    return Reservation(purse, bound, tenant, key, tenant_bucket, key_bucket, tokens)


def explain_checks(s: Snapshot) -> tuple[Check, ...]:
    """Every check with its observed value, its limit and whether it held, in the order in which they are made.

    Call it before `reserve` changes what the snapshot points at.
    """
    return (*_identity_checks(s), *_scope_checks(s), _budget_check(s), *_limit_checks(s), *_queue_checks(s))


def _identity_checks(s: Snapshot) -> tuple[Check, ...]:
    reason = _identity_reason(s)
    key_held = reason is None or reason is Reason.TENANT_SUSPENDED
    state = "active" if key_held else "expired" if reason is Reason.KEY_EXPIRED else s.key.state.value
    active = s.tenant.active
    return (
        Check("key", state, "active", key_held),
        Check("tenant", "active" if active else "suspended", "active", active),
    )


def _names(*sets: frozenset[str] | None) -> str | None:
    """The allowed names that all given sets share, for a person to read; None when nothing narrows them."""
    given = [names for names in sets if names is not None]
    if not given:
        return None
    return ", ".join(sorted(given[0] if len(given) == 1 else frozenset.intersection(*given)))


def _quoted(name: str | None) -> str | None:
    return (
        name if name is None or len(name) <= QUOTE_CHARS_MAX else f"{name[:QUOTE_CHARS_MAX]}… ({len(name)} characters)"
    )


def _at_most(name: str, value: int, limit: int | None) -> Check:
    return Check(name, value, limit, limit is None or value <= limit)


def _scope_checks(s: Snapshot) -> tuple[Check, ...]:
    bounds = s.workload_class
    models = _names(s.tenant.models, s.key.models, bounds.models)
    return (
        Check("class", _quoted(bounds.slug), _names(s.tenant.classes, s.key.classes), _class_allowed(s)),
        Check("model", _quoted(s.model), models, _model_allowed(s)),
        _at_most("prompt_tokens", s.prompt_tokens, bounds.max_prompt_tokens),
        _at_most("output_tokens", s.max_output_tokens, bounds.max_output_tokens),
    )


def _budget_check(s: Snapshot) -> Check:
    bound = charge_bound_nanos(s)
    if s.budget is None:
        return Check("budget_nanos", bound, None, True)
    covered = _payer(s.budget, bound)
    if isinstance(covered, LeasePurse):
        return Check("budget_nanos", bound, covered.remaining_nanos, True)
    purse = s.budget.purse
    return Check("budget_nanos", bound, None if purse is None else purse.remaining_nanos, False)


def _concurrency_check(name: str, counter: ConcurrencyCounter | None) -> Check:
    if counter is None:
        return Check(name, None, None, True)
    held, limit = counter.running + counter.queued, counter.limit
    return Check(name, held, limit, limit is None or held < limit)


def _bucket_check(name: str, bucket: TokenBucket | None, need: int, now_us: int) -> Check:
    """Value is what the bucket holds in tokens, limit what the request needs: it holds when value >= limit."""
    if bucket is None:
        return Check(name, None, need, True)
    level = bucket.refill(now_us)
    return Check(name, level / PICO, need, level >= need * PICO)


def _limit_checks(s: Snapshot) -> tuple[Check, ...]:
    need, now_us, of_tenant, of_key = token_need(s), s.now_us, s.tenant, s.key
    return (
        _concurrency_check("tenant_concurrency", of_tenant.concurrency),
        _concurrency_check("key_concurrency", of_key.concurrency),
        _bucket_check("class_rate", s.workload_class.rate_bucket, 1, now_us),
        _bucket_check("tenant_request_rate", of_tenant.request_bucket, 1, now_us),
        _bucket_check("tenant_token_rate", of_tenant.token_bucket, need, now_us),
        _bucket_check("key_request_rate", of_key.request_bucket, 1, now_us),
        _bucket_check("key_token_rate", of_key.token_bucket, need, now_us),
    )


def _queue_checks(s: Snapshot) -> tuple[Check, ...]:
    bounds = s.workload_class
    wait = 0 if s.free_now else estimate_wait_us(s.work_ahead_gpu_us, s.first_free_us, s.serving_slots)
    may_displace = bounds.overload is Overload.CANCEL and s.displaceable_id is not None
    depth_held = s.free_now or bounds.max_queue is None or s.queue_depth < bounds.max_queue or may_displace
    wait_held = s.free_now or bounds.overload is MAY_WAIT_LONG or _within_wait(s, wait)
    wait_ms = None if wait is None else wait / 1000
    limit_ms = None if bounds.max_wait_us is None else bounds.max_wait_us / 1000
    return (
        _at_most("fits_kv_tokens", _largest_need(s), s.largest_slot_kv_tokens),
        Check("queue_depth", s.queue_depth, bounds.max_queue, depth_held),
        Check("queue_wait_ms", wait_ms, limit_ms, wait_held),
        Check("memory_kv_tokens", token_need(s), s.free_kv_tokens, _fits_memory_now(s)),
    )
