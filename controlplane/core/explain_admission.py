"""Answer "would this request be admitted, and why?" for a situation written as JSON.

It reads the situation into the snapshot that the agent uses and runs the production `decide`. What a document leaves
out is the default: nothing that narrows, expected output = max_output, no time to a first free place, posture closed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, Final

from controlplane.core.admission import (
    AdmissionDecision,
    BudgetView,
    ClassView,
    Decision,
    KeyState,
    KeyView,
    LeaseState,
    OutagePosture,
    Overload,
    Snapshot,
    TenantView,
    decide,
    explain_checks,
)
from controlplane.core.period import to_us
from controlplane.core.pricing import RateCard
from controlplane.core.reasons import ANSWERS
from controlplane.core.reservations import MICRO, ConcurrencyCounter, LeasePurse, TokenBucket

Document = Mapping[str, Any]

MINUTE_S: Final = 60


def explain(document: Document) -> dict[str, Any]:
    """The decision with every check's value, limit and verdict.

    Answer: `decision`, `reason`, `status`, `retry_after_s`, `estimated_wait_ms`, `charge_upper_bound_nanos`, where they
    apply `asked`, `served`, `served_decision` and `displaces`, and `checks` [{name, value, limit, held}].
    Raises ValueError when the input cannot be used.
    """
    snapshot = read_snapshot(document)
    answer = decide(snapshot, lambda: _fallback(document))
    result: dict[str, Any] = {
        "decision": answer.decision.value,
        "reason": None if answer.reason is None else answer.reason.value,
        "status": 200 if answer.decision is not Decision.REJECT else _status(answer),
        "retry_after_s": answer.retry_after_s,
        "estimated_wait_ms": _wait_ms(answer, answer.served_snapshot or snapshot),
        "charge_upper_bound_nanos": answer.charge_upper_bound_nanos or None,
        "checks": [_check(check) for check in explain_checks(snapshot)],
    }
    if answer.served is not None and answer.served_snapshot is not None:
        result["asked"] = snapshot.workload_class.slug
        result["served"] = answer.served_snapshot.workload_class.slug
        result["served_model"] = answer.served_snapshot.model
        result["served_decision"] = answer.served.decision.value
        result["served_checks"] = [_check(check) for check in explain_checks(answer.served_snapshot)]
    if answer.displaces is not None:
        result["displaces"] = answer.displaces
    return result


def _check(check: Any) -> dict[str, Any]:
    return {"name": check.name, "value": check.value, "limit": check.limit, "held": check.held}


def _status(answer: AdmissionDecision) -> int | None:
    return None if answer.reason is None else ANSWERS[answer.reason].status


def _wait_ms(answer: AdmissionDecision, s: Snapshot) -> int | float | None:
    """The estimated wait in exact milliseconds; the decision's own figure is rounded up to a microsecond."""
    if answer.estimated_wait_us is None:
        return None
    if s.free_now:
        return 0
    exact = Fraction(s.work_ahead_gpu_us + s.first_free_us, s.serving_slots * 1000)
    return exact.numerator if exact.denominator == 1 else float(exact)


def read_snapshot(document: Document) -> Snapshot:
    """The snapshot that a document describes; ValueError says which key is wrong and what it should be."""
    if not isinstance(document, Mapping):
        raise ValueError("an admission input must be an object with key, tenant, class, request, queue and slots")
    now_us = _instant(document, "now", required=True)
    if now_us is None:
        raise ValueError("now must be given as an instant with its zone, such as 2026-11-29T20:00:00Z")
    tenant = _part(document, "tenant")
    request, queue = _part(document, "request"), _part(document, "queue")
    workload_class = _class(_part(document, "class"), document.get("bucket"), now_us)
    max_output = _count(request, "max_output_tokens", workload_class.max_output_tokens or 0)
    prompt = _count(request, "prompt_tokens", 0)
    largest, free = _memory(document, request.get("model"))
    return Snapshot(
        now_us=now_us,
        key=_key(document, now_us),
        tenant=_tenant(tenant, now_us),
        workload_class=workload_class,
        card=_card(_part(document, "rate_card", {})),
        budget=_budget(document),
        model=_text(request, "model"),
        prompt_tokens=prompt,
        prompt_bound_tokens=_count(request, "prompt_bound_tokens", prompt),
        max_output_tokens=max_output,
        expected_output_tokens=_count_or_none(request, "expected_output_tokens"),
        n=max(1, _count(request, "n", 1)),
        stage_timeout_us=_duration_us(
            request, "stage_timeout", _duration_us(_part(document, "class"), "stage_timeout")
        ),
        queue_depth=_count(queue, "depth", 0),
        work_ahead_gpu_us=_count(queue, "work_ahead_gpu_us", 0),
        first_free_us=_first_free_us(queue),
        serving_slots=_count(queue, "serving_slots", _ready_slots(document)),
        free_now=_flag(document, "free_now", False),
        displaceable_id=_displaceable(document, queue),
        largest_slot_kv_tokens=largest,
        free_kv_tokens=free,
    )


def _fallback(document: Document) -> Snapshot | None:
    """The situation after one step down: `downgrade` holds the parts that differ (class, request, queue, slots)."""
    given = document.get("downgrade", _part(document, "class").get("downgrade"))
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError("downgrade must be an object with the parts that differ, such as class, queue and bucket")
    merged = {key: value for key, value in document.items() if key not in ("downgrade", "bucket", "free_now")}
    for key, value in given.items():
        base = document.get(key)
        merged[key] = {**base, **value} if isinstance(base, Mapping) and isinstance(value, Mapping) else value
    merged["class"] = {key: value for key, value in merged["class"].items() if key not in ("overload", "downgrade")}
    return read_snapshot(merged)


def _part(document: Document, name: str, default: Document | None = None) -> Document:
    value = document.get(name, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {value!r}")
    return value


def _count_or_none(part: Document, name: str) -> int | None:
    value = part.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
    return value


def _count(part: Document, name: str, default: int) -> int:
    value = _count_or_none(part, name)
    return default if value is None else value


def _flag(part: Document, name: str, default: bool) -> bool:
    value = part.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def _text(part: Document, name: str) -> str | None:
    value = part.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r}")
    return value


def _names(part: Document, name: str) -> frozenset[str] | None:
    value = part.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} must be a list of slugs, got {value!r}")
    return frozenset(value)


def _number(part: Document, name: str) -> Fraction | None:
    value = part.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    return Fraction(str(value))


def _instant(part: Document, name: str, *, required: bool = False) -> int | None:
    value = part.get(name)
    if value is None and not required:
        return None
    try:
        at = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError:
        raise ValueError(f"{name} must be an instant such as 2026-11-29T20:00:00Z, got {value!r}") from None
    if at.tzinfo is None:
        raise ValueError(f"{name} must carry its zone, such as 2026-11-29T20:00:00Z, got {value!r}")
    return to_us(at.astimezone(UTC))


def _duration_us(part: Document, name: str, default: int = 0) -> int:
    """A duration that may be given as `name_us`, `name_ms` or `name_s`."""
    for suffix, factor in (("_us", 1), ("_ms", 1_000), ("_s", 1_000_000)):
        value = _number(part, name + suffix)
        if value is not None:
            return math.ceil(value * factor)
    return default


def _bucket(given: object, name: str, now_us: int) -> TokenBucket | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be an object with level, rate_per_s and burst, got {given!r}")
    rate, per_minute = _number(given, "rate_per_s"), _number(given, "rate_per_minute")
    if rate is None:
        rate = Fraction(0) if per_minute is None else per_minute / MINUTE_S
    level, burst = _number(given, "level"), _number(given, "burst")
    burst = max(rate, level or Fraction(0)) if burst is None else burst
    return TokenBucket(
        rate_micro_per_s=math.floor(rate * MICRO),
        burst_micro=math.floor(burst * MICRO),
        level_micro=None if level is None else math.floor(level * MICRO),
        now_us=now_us,
    )


def _limit_bucket(part: Document, names: tuple[str, ...], per_minute: str, now_us: int) -> TokenBucket | None:
    """A bucket under one of its names, or a full one made from a limit per minute."""
    for name in names:
        if part.get(name) is not None:
            return _bucket(part[name], name, now_us)
    limit = _number(part, per_minute)
    if limit is None:
        return None
    used = _number(part, per_minute.replace("_per_minute", "_used")) or Fraction(0)
    level = max(Fraction(0), limit - used)
    return TokenBucket(
        rate_micro_per_s=math.floor(limit * MICRO / MINUTE_S),
        burst_micro=math.floor(limit * MICRO),
        level_micro=math.floor(level * MICRO),
        now_us=now_us,
    )


def _concurrency(part: Document) -> ConcurrencyCounter | None:
    limit = _count_or_none(part, "max_concurrency")
    if limit is None:
        return None
    return ConcurrencyCounter(limit, running=_count(part, "running", 0), queued=_count(part, "queued", 0))


def _key(document: Document, now_us: int) -> KeyView:
    given = document.get("key", {"state": "active"})
    if given is None:
        return KeyView(KeyState.UNKNOWN)
    key = _part({"key": given}, "key")
    state = key.get("state", "active")
    expires_at_us = _instant(key, "expires_at")
    if state == "expired":
        state, expires_at_us = "active", now_us
    if state not in tuple(KeyState):
        raise ValueError(f"key.state must be one of {', '.join(KeyState)}, expired; got {state!r}")
    requests = {**key, "key_bucket": key.get("bucket", document.get("key_bucket"))}
    tokens = {**key, "token_bucket": key.get("token_bucket", document.get("token_bucket"))}
    return KeyView(
        KeyState(state),
        expires_at_us,
        _names(key, "classes"),
        _names(key, "models"),
        _concurrency(key),
        _limit_bucket(requests, ("request_bucket", "key_bucket"), "requests_per_minute", now_us),
        _limit_bucket(tokens, ("token_bucket",), "tokens_per_minute", now_us),
    )


def _tenant(tenant: Document, now_us: int) -> TenantView:
    state = tenant.get("state", "active")
    if state not in ("active", "suspended"):
        raise ValueError(f"tenant.state must be active or suspended, got {state!r}")
    return TenantView(
        _text(tenant, "slug") or "",
        state == "active",
        _names(tenant, "classes"),
        _names(tenant, "models"),
        _concurrency(tenant),
        _limit_bucket(tenant, ("request_bucket", "bucket"), "requests_per_minute", now_us),
        _limit_bucket(tenant, ("token_bucket",), "tokens_per_minute", now_us),
    )


def _class(given: Document, bucket: object, now_us: int) -> ClassView:
    overload = given.get("overload", Overload.REJECT)
    if overload not in tuple(Overload):
        raise ValueError(f"class.overload must be one of {', '.join(Overload)}, got {overload!r}")
    wait_known = any(given.get(f"max_wait{suffix}") is not None for suffix in ("_us", "_ms", "_s"))
    return ClassView(
        slug=_text(given, "slug") or "",
        max_prompt_tokens=_count_or_none(given, "max_prompt_tokens"),
        max_output_tokens=_count_or_none(given, "max_output_tokens"),
        max_queue=_count_or_none(given, "max_queue"),
        max_wait_us=_duration_us(given, "max_wait") if wait_known else None,
        overload=Overload(overload),
        active=given.get("state", "active") == "active",
        models=_names(given, "models"),
        rate_bucket=_bucket(bucket, "bucket", now_us),
    )


def _card(given: Document) -> RateCard:
    return RateCard(
        _count(given, "prompt_nanos_per_mtok", 0),
        _count(given, "cached_nanos_per_mtok", 0),
        _count(given, "output_nanos_per_mtok", 0),
        _count_or_none(given, "gpu_nanos_per_slot_hour"),
        _count(given, "batch_discount_ppm", 0),
    )


def _budget(document: Document) -> BudgetView | None:
    """`lease` left out: no hard budget. `lease` null, or without an amount: a hard budget and no lease here."""
    if "lease" not in document:
        return None
    lease = _part(document, "lease", {})
    if not _flag(lease, "hard", True):
        return None
    posture = lease.get("outage_posture", OutagePosture.CLOSED)
    if posture not in tuple(OutagePosture):
        raise ValueError(f"lease.outage_posture must be one of {', '.join(OutagePosture)}, got {posture!r}")
    remaining = _count_or_none(lease, "remaining_nanos")
    reachable = _flag(lease, "control_plane_reachable", _flag(document, "control_plane_reachable", True))
    slice_nanos = _count_or_none(lease, "outage_slice_nanos")
    state = LeaseState.ABSENT if remaining is None else LeaseState.HELD
    if lease.get("state") is not None:
        if lease["state"] not in tuple(LeaseState):
            raise ValueError(f"lease.state must be one of {', '.join(LeaseState)}, got {lease['state']!r}")
        state = LeaseState(lease["state"])
    elif not reachable:
        state = LeaseState.CUT_OFF
    return BudgetView(
        purse=None if remaining is None else LeasePurse(remaining),
        state=state,
        posture=OutagePosture(posture),
        outage_purse=None if slice_nanos is None else LeasePurse(slice_nanos),
        window_ends_at_us=_instant(lease, "window_ends_at"),
    )


def _slots(document: Document) -> list[Document]:
    slots = document.get("slots", [])
    if not isinstance(slots, list) or not all(isinstance(slot, Mapping) for slot in slots):
        raise ValueError("slots must be a list of objects with slot, free_kv_tokens, total_kv_tokens and ready")
    return slots


def _ready_slots(document: Document) -> int:
    return sum(_flag(slot, "ready", True) for slot in _slots(document))


def _memory(document: Document, model: object) -> tuple[int | None, int | None]:
    """KV tokens of the largest slot, ready or not, and the most that a ready one has free; None where unbounded."""
    slots = [slot for slot in _slots(document) if slot.get("model") in (None, model)]
    totals = [_count_or_none(slot, "total_kv_tokens") for slot in slots]
    known = [total for total in totals if total is not None]
    largest = max(known) if known and len(known) == len(totals) else None
    ready = [slot for slot in slots if _flag(slot, "ready", True)]
    free = [_count_or_none(slot, "free_kv_tokens") for slot in ready]
    if not slots or any(value is None for value in free):
        return largest, None
    return largest, max((value for value in free if value is not None), default=0)


def _first_free_us(queue: Document) -> int:
    for name in ("first_free", "expected_first_free", "time_to_first_free"):
        found = _duration_us(queue, name, -1)
        if found >= 0:
            return found
    return 0


def _displaceable(document: Document, queue: Document) -> str | int | None:
    """The newest queued request of strictly lower precedence (a larger number) than the class, if any is listed."""
    waiting = queue.get("requests")
    if waiting is None:
        return None
    if not isinstance(waiting, list) or not all(isinstance(item, Mapping) for item in waiting):
        raise ValueError("queue.requests must be a list of objects with id, precedence and t_us")
    own = _count(_part(document, "class"), "precedence", 0)
    lower = [item for item in waiting if _count(item, "precedence", 0) > own]
    if not lower:
        return None
    newest: str | int = max(lower, key=lambda item: (_count(item, "t_us", 0), str(item.get("id"))))["id"]
    return newest
