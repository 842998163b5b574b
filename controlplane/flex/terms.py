"""The terms a pool's flex band runs under: those of its revision in force, or as saved before its first push."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from controlplane.core.flex_policy import SECOND_US, FlexPolicy, SafeRate, SpilloverAction
from controlplane.core.period import to_us
from controlplane.core.slot_states import Band
from controlplane.flex.reading import Terms
from controlplane.policy.queries import PoolTerms, desired, pool_terms

log = logging.getLogger(__name__)

#: Of `fleet.Pool` and of `wire.policy.FlexPolicy`, which name them alike.
POLICY_FIELDS = (
    "lend_p95_ms", "lend_hold_s", "load_limit", "lend_slack", "return_slack", "return_hold_s", "min_hold_s",
    "drain_bound_s", "grant_ttl_s", "cooldown_s", "decision_interval_s", "max_lent", "spillover_per_week",
    "spillover_action",
)  # fmt: skip

# By pool, with the digest: a revision is parsed once, however often it is asked for. Only that in force is kept.
_parsed: dict[int, tuple[str, Terms]] = {}


def terms_in_force(pool_ids: Sequence[int]) -> dict[int, Terms]:
    """Pool id -> terms of its newest signed revision of which every wave was sent; none, no entry."""
    digests = {pool_id: digest for pool_id, (_, digest) in desired(pool_ids).items()}
    unread = {digest for pool_id, digest in digests.items() if _parsed.get(pool_id, ("",))[0] != digest}
    fresh = {digest: _pushed_terms(said) for digest, said in pool_terms(sorted(unread)).items()}
    for pool_id, digest in digests.items():
        if digest in fresh:
            _parsed[pool_id] = (digest, fresh[digest])
    return {pool_id: _parsed[pool_id][1] for pool_id in digests}


def _pushed_terms(said: PoolTerms) -> Terms:
    pool = said.pool
    return Terms(
        isolation=pool.isolation,
        interactive_class=pool.interactive_class,
        batch_class=pool.batch_class,
        policy=_policy(*(getattr(pool.flex, name) for name in POLICY_FIELDS)),
        safe_rate=safe_rate_of(msgspec.to_builtins(pool.safe_rate)),
        bands={slot.id: Band(slot.band) for slot in pool.slots},
        cancellable=any(row.slug == pool.batch_class and row.retry_safe and row.cancellable for row in said.classes),
    )


def saved_terms(row: tuple[Any, ...]) -> Terms:
    """Of a pool that was never pushed: its columns isolation, interactive_class, batch_class, safe_rate, POLICY_FIELDS.

    Its first revision will say the same, and until then its agents serve nobody.
    """
    isolation, interactive_class, batch_class, rates, *policy = row
    return Terms(
        isolation=isolation,
        interactive_class=interactive_class,
        batch_class=batch_class,
        policy=_policy(*policy),
        safe_rate=safe_rate_of(rates),
        bands=None,
        cancellable=None,
    )


@lru_cache(maxsize=4_096)
def _policy(*values: Any) -> FlexPolicy | None:
    """None when the numbers contradict each other: such a pool lends nothing, and the others go on."""
    given = dict(zip(POLICY_FIELDS, values, strict=True))
    try:
        return _read_policy(given)
    except ValueError as problem:
        log.error("a pool's flex policy is unsound, nothing is lent by it: %s", problem)
        return None


def _read_policy(given: Mapping[str, Any]) -> FlexPolicy:
    return FlexPolicy(
        lend_p95_us=given["lend_p95_ms"] * 1_000,
        load_limit=given["load_limit"],
        lend_slack=given["lend_slack"],
        return_slack=given["return_slack"],
        max_lent=given["max_lent"],
        spillover_per_week=given["spillover_per_week"],
        spillover_action=SpilloverAction(given["spillover_action"]),
        **{f"{name.removesuffix('_s')}_us": given[name] * SECOND_US for name in POLICY_FIELDS if name.endswith("_s")},
    )


def safe_rate_of(stored: Any) -> SafeRate | None:
    """The table of `Pool.safe_rate`; None when nothing was tested or it cannot be read: then nothing is lent."""
    return _safe_rate(stored if isinstance(stored, str) else msgspec.json.encode(stored).decode())


@lru_cache(maxsize=4_096)
def _safe_rate(text: str) -> SafeRate | None:
    raw = msgspec.json.decode(text) or {}
    try:
        entries = tuple((int(slots), float(rate)) for slots, rate in (raw.get("entries") or {}).items())
        until = raw.get("valid_until") or None
        until_us = None if until is None else to_us(_instant(str(until)))
        return SafeRate(entries=entries, valid_until_us=until_us) if entries else None
    except (ValueError, TypeError, AttributeError):
        return None


def _instant(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
