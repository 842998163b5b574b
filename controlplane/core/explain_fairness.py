"""Answer "in which order would these be served?" for arrivals written as JSON.

One server runs one request at a time for its gpu_us; a dispatch sees every arrival at or before its instant; output is
charged linearly over gpu_us. It drives the production `FairQueue`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from controlplane.core.fairness import FairQueue, FairTenant, WorkPolicy, WorkUnit


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """One request of the input, in the order in which arrivals count: by instant, then id."""

    t_us: int
    id: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    gpu_us: int


def explain(document: Mapping[str, Any]) -> dict[str, Any]:
    """Order of service of `arrivals`, with the counters that decided each dispatch.

    Input: `arrivals` [{id, tenant, t_us, prompt, output, gpu_us}], optional `unit` (tokens), `weights` (1 each),
    `w_prompt` (1), `w_output` (2). Answer: `order`, `dispatches` [{id, tenant, t_us, counters}] and the final
    `counters` in weighted work. Raises ValueError when the input cannot be used.
    """
    arrivals = sorted(_arrival(index, item) for index, item in enumerate(_list(document.get("arrivals"), "arrivals")))
    _refuse_repeats(arrivals)
    weights = _weights(document.get("weights"), arrivals)
    policy, denominator = _work_policy(document)
    # A scale that every weight divides keeps all counters exact, so that ties are ties.
    queue = FairQueue(math.lcm(*(weight.numerator for weight in weights.values())) if weights else 1)
    unit = denominator * queue.scale
    dispatches = _serve(queue, policy, arrivals, weights, unit)
    return {
        "order": [dispatch["id"] for dispatch in dispatches],
        "dispatches": dispatches,
        "counters": {slug: _number(Fraction(queue.tenant(slug, w).counter, unit)) for slug, w in weights.items()},
    }


def _serve(
    queue: FairQueue, policy: WorkPolicy, arrivals: list[Arrival], weights: dict[str, Fraction], unit: int
) -> list[dict[str, Any]]:
    waiting: dict[str, deque[Arrival]] = {slug: deque() for slug in weights}
    dispatches: list[dict[str, Any]] = []
    now_us, seen = 0, 0
    while len(dispatches) < len(arrivals):
        if not any(waiting.values()):
            now_us = max(now_us, arrivals[seen].t_us)
        while seen < len(arrivals) and arrivals[seen].t_us <= now_us:
            waiting[arrivals[seen].tenant].append(arrivals[seen])
            queue.join(queue.tenant(arrivals[seen].tenant, weights[arrivals[seen].tenant]))
            seen += 1
        queue.settle(now_us)
        tenant = queue.pop_least(now_us)
        if tenant is None:
            raise ValueError("no tenant is backlogged although requests wait")
        counters = {slug: _number(Fraction(queue.tenants[slug].counter, unit)) for slug in weights if waiting[slug]}
        request = waiting[tenant.slug].popleft()
        dispatches.append({"id": request.id, "tenant": tenant.slug, "t_us": now_us, "counters": counters})
        queue.charge(tenant, policy.at_dispatch(request.prompt_tokens))
        if waiting[tenant.slug]:
            queue.push(tenant)
        else:
            queue.leave(tenant)
        now_us = _run(queue, tenant, policy, request, now_us)
    return dispatches


def _run(queue: FairQueue, tenant: FairTenant, policy: WorkPolicy, request: Arrival, now_us: int) -> int:
    """Run one request to its end; returns that instant."""
    work = policy.afterwards(request.output_tokens, request.gpu_us)
    linear = queue.start_linear(tenant, work, now_us, request.gpu_us)
    end_us = now_us + request.gpu_us
    tenant.accrue(end_us)
    queue.stop_linear(tenant, linear, work)
    return end_us


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {type(value).__name__}")
    return value


def _whole(item: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = item.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where}.{key} must be a whole number of at least 0, got {value!r}")
    return value


def _arrival(index: int, item: object) -> Arrival:
    where = f"arrivals[{index}]"
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} must be an object with id, tenant, t_us, prompt, output and gpu_us")
    tenant = item.get("tenant")
    if not isinstance(tenant, str) or not tenant:
        raise ValueError(f"{where}.tenant must be a tenant's slug, got {tenant!r}")
    if not isinstance(item.get("id"), str | int):
        raise ValueError(f"{where}.id must be given")
    return Arrival(
        t_us=_whole(item, "t_us", where, 0),
        id=str(item["id"]),
        tenant=tenant,
        prompt_tokens=_whole(item, "prompt", where, 0),
        output_tokens=_whole(item, "output", where, 0),
        gpu_us=_whole(item, "gpu_us", where, 0),
    )


def _refuse_repeats(arrivals: list[Arrival]) -> None:
    ids = [arrival.id for arrival in arrivals]
    for repeated in sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"arrivals name the id {repeated!r} more than once; ids must be unique")


def _positive(value: object, name: str, *, zero_allowed: bool = False) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        exact = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if exact < 0 or (exact == 0 and not zero_allowed):
        raise ValueError(f"{name} must be positive, got {value!r}")
    return exact


def _weights(given: object, arrivals: list[Arrival]) -> dict[str, Fraction]:
    if given is not None and not isinstance(given, Mapping):
        raise ValueError("weights must be an object of tenant: weight")
    weights = {slug: _positive(value, f"weights.{slug}") for slug, value in dict(given or {}).items()}
    return {slug: weights.get(slug, Fraction(1)) for slug in sorted({*weights, *(a.tenant for a in arrivals)})}


def _work_policy(document: Mapping[str, Any]) -> tuple[WorkPolicy, int]:
    """The policy in whole numbers and the factor by which all its token work was multiplied to get there."""
    try:
        unit = WorkUnit(document.get("unit", WorkUnit.TOKENS))
    except ValueError:
        names = ", ".join(WorkUnit)
        raise ValueError(f"unit must be one of {names}, got {document.get('unit')!r}") from None
    prompt = _positive(document.get("w_prompt", 1), "w_prompt", zero_allowed=True)
    output = _positive(document.get("w_output", 2), "w_output", zero_allowed=True)
    factor = math.lcm(prompt.denominator, output.denominator) if unit is WorkUnit.TOKENS else 1
    return WorkPolicy(unit, int(prompt * factor), int(output * factor)), factor
