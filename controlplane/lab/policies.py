"""Policy documents for simulations: built from a few numbers, or from what an installation runs, with changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from controlplane.core.flex_policy import SECOND_US, SafeRate, SpilloverAction
from controlplane.core.flex_policy import FlexPolicy as CoreFlexPolicy
from controlplane.wire.policy import (
    SCHEMA,
    ClassPolicy,
    FlexPolicy,
    PolicyDocument,
    PoolPolicy,
    SizeBounds,
    SlotPolicy,
    TenantPolicy,
)
from controlplane.wire.policy import SafeRate as SafeRateTable

INTERACTIVE: Final = "interactive"
BATCH: Final = "batch"
AGENT_ID: Final = 1
LONG_AGO: Final = "2020-01-01T00:00:00+00:00"
FOR_EVER: Final = "2099-01-01T00:00:00+00:00"
_SECONDS: Final = (
    "lend_hold_s", "return_hold_s", "min_hold_s", "drain_bound_s", "grant_ttl_s", "cooldown_s", "decision_interval_s",
)  # fmt: skip


def class_of(slug: str, kind: str, number: int, **changes: Any) -> ClassPolicy:
    """A class with the defaults of a new one; batch may be cancelled and waits until its deadline."""
    batch = kind == BATCH
    base: dict[str, Any] = {
        "id": number, "slug": slug, "kind": kind, "priority": 10 if batch else 0, "min_share_ppm": 0,
        "max_prompt_tokens": 200_000, "max_output_tokens": 8_192, "default_output_tokens": 1_024,
        "template_allowance_tokens": 64, "max_queue": 100_000 if batch else 256, "max_wait_ms": 0 if batch else 10_000,
        "stage_timeout_s": 3_600 if batch else 600, "overload": "queue" if batch else "reject", "downgrade_to": None,
        "retry_safe": batch, "cancellable": True, "default_deadline_s": 43_200, "models": [],
    }  # fmt: skip
    return ClassPolicy(**{**base, **changes})


def flex_of(**changes: Any) -> FlexPolicy:
    """A flex band with the defaults."""
    base: dict[str, Any] = {
        "lend_p95_ms": 200, "lend_hold_s": 600, "load_limit": 0.7, "lend_slack": 0.25, "return_slack": 0.35,
        "return_hold_s": 60, "min_hold_s": 60, "drain_bound_s": 30, "grant_ttl_s": 15, "cooldown_s": 300,
        "decision_interval_s": 30, "max_lent": None, "spillover_per_week": 1_000, "spillover_action": "warn",
    }  # fmt: skip
    return FlexPolicy(**{**base, **changes})


def bands(interactive: int, flex: int, batch: int) -> list[str]:
    """Bands of slots, floor first."""
    return [INTERACTIVE] * interactive + ["flex"] * flex + [BATCH] * batch


def document_of(
    slot_bands: Sequence[str],
    tenants: Sequence[str],
    *,
    places: int = 16,
    kv_tokens: int = 0,
    isolation: str = "reserved",
    weights: Mapping[str, int] | None = None,
    safe_rate: Mapping[int, float] | None = None,
    prefill_us_per_token: int = 100,
    decode_us_per_token: int = 2_000,
    max_concurrency: int = 1_000_000,
    interactive: Mapping[str, Any] | None = None,
    batch: Mapping[str, Any] | None = None,
    flex: Mapping[str, Any] | None = None,
    sizes: SizeBounds | None = None,
) -> PolicyDocument:
    """One pool of equal slots, an interactive and a batch class, and tenants that may use both."""
    slots = [
        SlotPolicy(id=number, name=f"S{number:02}", band=band, places=places, kv_tokens=kv_tokens, agent_id=AGENT_ID)
        for number, band in enumerate(slot_bands, start=1)
    ]
    pool = PoolPolicy(
        id=1, slug="lab", model="model", model_id=1, isolation=isolation, interactive_class=INTERACTIVE,
        batch_class=BATCH, fairness_unit="tokens", prompt_weight=1, output_weight=2,
        sizes=sizes or SizeBounds(gpu_ms=[250, 2_000], aging_s=30, reserve_after_ms=2_000),
        prefill_us_per_token=prefill_us_per_token, decode_us_per_token=decode_us_per_token,
        flex=flex_of(**(flex or {})),
        safe_rate=SafeRateTable(entries={str(slots): rate for slots, rate in (safe_rate or {}).items()}), slots=slots,
    )  # fmt: skip
    return PolicyDocument(
        schema=SCHEMA, installation="lab", revision=1, not_before=LONG_AGO, accept_until=FOR_EVER, pool=pool,
        classes=[
            class_of(INTERACTIVE, INTERACTIVE, 1, **(interactive or {})), class_of(BATCH, BATCH, 2, **(batch or {})),
        ],
        tenants=[
            TenantPolicy(
                id=number, slug=slug, weight=(weights or {}).get(slug, 1), max_concurrency=max_concurrency,
                classes=[INTERACTIVE, BATCH], models=[], outage_posture="closed", hard_budget=False, ancestors=[],
            )
            for number, slug in enumerate(tenants, start=1)
        ],
        contracts=[], rates=[],
    )  # fmt: skip


def core_flex_policy(flex: FlexPolicy) -> CoreFlexPolicy:
    """The flex band's numbers as the decision takes them. Raises ValueError when they contradict each other."""
    return CoreFlexPolicy(
        lend_p95_us=flex.lend_p95_ms * 1_000,
        load_limit=flex.load_limit,
        lend_slack=flex.lend_slack,
        return_slack=flex.return_slack,
        max_lent=flex.max_lent,
        spillover_per_week=flex.spillover_per_week,
        spillover_action=SpilloverAction(flex.spillover_action),
        **{f"{name.removesuffix('_s')}_us": getattr(flex, name) * SECOND_US for name in _SECONDS},
    )


def core_safe_rate(pool: PoolPolicy) -> SafeRate | None:
    """The pool's tested rates; in a simulation they do not expire."""
    entries = tuple((int(slots), rate) for slots, rate in pool.safe_rate.entries.items())
    return SafeRate(entries=entries) if entries else None


def changed(document: PolicyDocument, changes: Mapping[str, Any]) -> PolicyDocument:
    """A document with some values replaced, by path: `pool.flex.lend_p95_ms`, `classes.chat.max_queue`.

    Raises ValueError that names a path that is not there.
    """
    raw = msgspec.to_builtins(document)
    for path, value in changes.items():
        place: Any = raw
        *parts, last = path.split(".")
        for part in parts:
            place = _step_into(place, part, path)
        if not isinstance(place, dict) or last not in place:
            raise ValueError(f"a policy has no {path}")
        place[last] = value
    try:
        return msgspec.convert(raw, PolicyDocument)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _step_into(place: Any, part: str, path: str) -> Any:
    if isinstance(place, dict) and part in place:
        return place[part]
    if isinstance(place, list):
        for row in place:
            if part in (row.get("slug"), row.get("name")):
                return row
    raise ValueError(f"a policy has no {path}")
