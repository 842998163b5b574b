"""What a pool must hold before it is saved, by name. Pure: rows that were read before go in, errors by field come out.

The names are those of the rules that a push checks again, so that the same problem has the same name everywhere.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError

from controlplane.fleet.models import Pool, Slot
from controlplane.fleet.served_classes import ServedClass

PPM = 1_000_000
# A grant is renewed about once a second: under this a single late report would send every loan home.
GRANT_TTL_LEAST_S = 5
SAFE_RATE_KEYS = frozenset({"entries", "measured_at", "trace", "valid_until"})
SIZE_BOUNDS_MOST = 8
BATCH_SIZE_MOST = 1024
BATCH_WAIT_MOST_MS = 10_000

Errors = dict[str, list[ValidationError]]


def check_pool(pool: Pool, bands: Iterable[str], classes: Sequence[ServedClass]) -> None:
    """Raises ValidationError with every rule that the pool breaks, by field. `bands`: one entry a slot in the fleet."""
    slots = Counter(bands)
    errors: Errors = {}
    _check_numbers(pool, errors)
    _check_batching(pool, errors)
    _check_lent(pool, slots, errors)
    _check_classes(pool, classes, errors)
    _check_shares(pool, slots, classes, errors)
    _check_safe_rate(pool.safe_rate, errors)
    if errors:
        raise ValidationError(errors)


def _add(errors: Errors, field: str, rule: str, message: str) -> None:
    errors.setdefault(field, []).append(ValidationError(message, code=rule))


def _check_numbers(pool: Pool, errors: Errors) -> None:
    if pool.return_slack <= pool.lend_slack:
        _add(
            errors,
            "return_slack",
            "return_slack_not_over_lend_slack",
            f"Return slack must be over lend slack ({pool.lend_slack:g}), or a slot that comes back is lent again at"
            " once. Raise it or lower lend slack.",
        )
    for field in ("lend_slack", "return_slack"):
        if not 0 <= getattr(pool, field) <= 1:
            _add(errors, field, "out_of_range", "Slack is a share of the batch slots: enter a number from 0 to 1.")
    if not 0 < pool.load_limit <= 1:
        _add(errors, "load_limit", "out_of_range", "Enter a share of the safe rate over 0 and up to 1, such as 0.7.")
    if pool.grant_ttl_s < GRANT_TTL_LEAST_S:
        _add(
            errors,
            "grant_ttl_s",
            "grant_ttl_too_short",
            f"One late report would send every lent slot home. Enter {GRANT_TTL_LEAST_S} s or more.",
        )
    for field in ("lend_p95_ms", "drain_bound_s", "decision_interval_s", "aging_s", "decode_us_per_token"):
        if getattr(pool, field) < 1:
            _add(errors, field, "out_of_range", "Enter 1 or more.")
    if pool.fairness_unit == Pool.Unit.TOKENS and pool.prompt_weight + pool.output_weight < 1:
        _add(errors, "output_weight", "out_of_range", "With the unit tokens, one of the two weights must be 1 or more.")
    if pool.lend_price_share_ppm > PPM:
        _add(errors, "lend_price_share_ppm", "out_of_range", "Enter a share from 0 to 100 % of the slot's cost.")
    bounds = pool.size_bounds_gpu_ms
    if len(bounds) > SIZE_BOUNDS_MOST or sorted(set(bounds)) != list(bounds) or 0 in bounds:
        _add(
            errors,
            "size_bounds_gpu_ms",
            "out_of_range",
            f"Enter at most {SIZE_BOUNDS_MOST} bounds over 0, each larger than the one before, such as 500, 5000.",
        )


def _check_batching(pool: Pool, errors: Errors) -> None:
    if not 1 <= pool.max_batch_size <= BATCH_SIZE_MOST:
        _add(errors, "max_batch_size", "out_of_range", f"Enter 1 (no batching) to {BATCH_SIZE_MOST} inputs.")
    if not 0 <= pool.max_batch_wait_ms <= BATCH_WAIT_MOST_MS:
        _add(errors, "max_batch_wait_ms", "out_of_range", f"Enter 0 to {BATCH_WAIT_MOST_MS} ms.")
    elif pool.max_batch_size > 1 and not pool.max_batch_wait_ms:
        _add(
            errors,
            "max_batch_wait_ms",
            "batching_without_wait",
            "Without a wait every request runs by itself. Enter 1 ms or more, or a batch of 1 for no batching.",
        )


def _check_lent(pool: Pool, slots: Counter[str], errors: Errors) -> None:
    flex = slots[Slot.Band.FLEX]
    if pool.max_lent is not None and slots.total() and pool.max_lent > flex:
        _add(
            errors,
            "max_lent",
            "max_lent_over_flex",
            f"Only {flex} of the pool's slots are in the flex band. Lower the limit or leave it empty for all of them.",
        )


def _check_classes(pool: Pool, classes: Sequence[ServedClass], errors: Errors) -> None:
    by_slug = {row.slug: row for row in classes}
    if not pool.interactive_class and not pool.batch_class:
        _add(errors, "interactive_class", "class_unknown", "Choose an interactive class, a batch class, or both.")
    for kind in ("interactive", "batch"):
        field = f"{kind}_class"
        slug = getattr(pool, field)
        if not slug:
            continue
        row = by_slug.get(slug)
        if row is None:
            _add(errors, field, "class_unknown", f"There is no class {slug}, or it is archived. Choose another.")
        elif row.kind != kind:
            _add(errors, field, "class_kind_mismatch", f"{slug} is a {row.kind} class. Choose a class of kind {kind}.")
        elif not row.allows(pool.model.name):
            _add(
                errors,
                field,
                "class_model_mismatch",
                f"{slug} does not allow the model {pool.model.name}. Add the model to the class or choose another.",
            )


def _check_shares(pool: Pool, slots: Counter[str], classes: Sequence[ServedClass], errors: Errors) -> None:
    """In shared pools minimum shares add up to at most 1; elsewhere the floor is the share, so none may be larger."""
    served = [row for row in classes if row.serves(pool, pool.model.name)]
    if pool.isolation == Pool.Isolation.SHARED:
        total = sum(row.min_share_ppm for row in served)
        if total > PPM:
            _add(
                errors,
                "isolation",
                "floors_over_slots",
                f"The minimum shares of its classes add up to {total / PPM:.0%} of the slots. Lower them to 100 %"
                " together.",
            )
        return
    for row in served:
        if message := share_over_floor(row, slots):
            _add(errors, "isolation", "floors_over_slots", message)


def share_over_floor(row: ServedClass, slots: Counter[str]) -> str:
    """Why a class's minimum share does not fit the floor of a reserved or dedicated pool; empty when it does."""
    count, floor = slots.total(), slots[row.kind]
    if not count or row.min_share_ppm * count <= floor * PPM:
        return ""
    return (
        f"Class {row.slug} is promised {row.min_share_ppm / PPM:.0%} of {count} slots, but its floor has {floor}."
        f" Move slots to the {row.kind} floor or lower the class's minimum share."
    )


def check_bands(pool: Pool, bands: Iterable[str], classes: Sequence[ServedClass], *, growing: bool = False) -> None:
    """Raises ValidationError when the pool's slots, as they would be, break a rule.

    `growing`: slots are being added, maybe one band after the other, so floors may still be short; a push checks them.
    """
    slots = Counter(bands)
    errors: Errors = {}
    if pool.isolation == Pool.Isolation.DEDICATED and slots[Slot.Band.FLEX]:
        _add(
            errors,
            "band",
            "flex_in_dedicated",
            "A dedicated pool lends nothing. Choose the interactive or the batch floor, or make the pool reserved.",
        )
    if not growing:
        _check_floors(pool, slots, classes, errors)
    if errors:
        raise ValidationError(errors)


def _check_floors(pool: Pool, slots: Counter[str], classes: Sequence[ServedClass], errors: Errors) -> None:
    reserved = pool.isolation == Pool.Isolation.RESERVED
    if reserved and pool.interactive_class and slots[Slot.Band.FLEX] and not slots[Slot.Band.INTERACTIVE]:
        _add(
            errors,
            "band",
            "interactive_without_floor",
            "No slot would be reserved for interactive work, so lending every flex slot would shut it out. Keep at"
            " least one on the interactive floor.",
        )
    found: Errors = {}
    _check_lent(pool, slots, found)
    if pool.isolation != Pool.Isolation.SHARED:
        _check_shares(pool, slots, classes, found)
    for messages in found.values():
        errors.setdefault("band", []).extend(messages)


def _check_safe_rate(raw: Any, errors: Errors) -> None:
    if not isinstance(raw, dict) or set(raw) - SAFE_RATE_KEYS:
        _add(
            errors,
            "safe_rate",
            "safe_rate_unreadable",
            "Write {entries, measured_at, trace, valid_until}; entries maps a number of slots to requests per second.",
        )
        return
    entries = raw.get("entries") or {}
    try:
        table = sorted((int(slots), float(rate)) for slots, rate in entries.items())
    except (TypeError, ValueError, AttributeError):
        table = [(0, 0.0)]
    if any(slots < 1 or not 0 < rate < 1e6 for slots, rate in table) or len({slots for slots, _ in table}) < len(table):
        _add(
            errors,
            "safe_rate",
            "safe_rate_unreadable",
            "Each entry is a number of slots from 1 with a tested rate over 0 requests/s, each number once.",
        )
    elif any(left[1] > right[1] for left, right in itertools.pairwise(table)):
        _add(
            errors,
            "safe_rate",
            "safe_rate_falls",
            "More slots cannot have a lower safe rate: check the entries or measure again.",
        )
    for key in ("measured_at", "valid_until"):
        text = raw.get(key)
        if text:
            _check_instant(str(text), errors)


def _check_instant(text: str, errors: Errors) -> None:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        _add(
            errors,
            "safe_rate",
            "safe_rate_unreadable",
            f"{text[:40]!r} is not a date and time. Write it like 2026-12-31T00:00:00Z.",
        )
