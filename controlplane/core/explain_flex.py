"""The JSON face of the flex-band decision: a question in, the production decision with its checks out.

The unit of a number is in its key: ``_s`` seconds, ``_ms`` milliseconds; instants are ISO 8601 with a zone. Numbers are
converted once, here, to integer microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from controlplane.core.flex import decide
from controlplane.core.flex_decision import Check, FlexAction, FlexDecision
from controlplane.core.flex_policy import FlexPolicy, SafeRate, SpilloverAction
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.json_reader import ABSENT, JsonReader
from controlplane.core.slot_states import Band, SlotState

#: Checks whose time is shown in milliseconds, as their policy keys are; every other time is shown in seconds.
_SHOWN_IN_MS = frozenset({"p95_queue_us", "interactive_p95"})
_TIMED_REASONS = frozenset({"telemetry_stale", "grant_expired"})


def explain(question: dict[str, Any]) -> dict[str, Any]:
    """Decide one question and say why.

    The answer has ``actions``, ``required``, ``available``, ``slack`` and ``missed`` (slack is null and missed is true
    where nothing is enough), ``missed_jobs``, ``notes``, ``checks``, and ``ignored_keys`` where the question has any
    that mean nothing. Raises ``ValueError`` that names the key and what is wrong with it.
    """
    reader = JsonReader(question, "")
    decision = decide(read_snapshot(reader))
    answer = answer_of(decision)
    ignored = sorted(reader.ignored())
    return {**answer, "ignored_keys": ignored} if ignored else answer


def answer_of(decision: FlexDecision) -> dict[str, Any]:
    """A decision as JSON types. Infinite and unknown numbers are null."""
    return {
        "actions": [_action(action) for action in decision.actions],
        "required": _finite(decision.required),
        "available": _finite(decision.available),
        "slack": _finite(decision.slack),
        "missed": decision.missed,
        "missed_jobs": [*decision.demand.missed_now, *decision.demand.missed_before],
        "notes": [str(note) for note in decision.notes],
        "checks": [_check(check) for check in decision.checks],
    }


def _action(action: FlexAction) -> dict[str, str]:
    said = {"action": str(action.kind), "slot": action.slot}
    return said if action.reason is None else {**said, "reason": str(action.reason)}


def _check(check: Check) -> dict[str, Any]:
    name, unit_us = str(check.name), 1
    if name in _SHOWN_IN_MS:
        name, unit_us = name.removesuffix("_us") + "_ms" * name.endswith("_us"), 1_000
    elif name.endswith("_us") or name in _TIMED_REASONS:
        name, unit_us = name.removesuffix("_us") + "_s" * name.endswith("_us"), 1_000_000
    said = {
        "name": name,
        "value": _shown(check.value, unit_us),
        "limit": _shown(check.limit, unit_us),
        "held": check.held,
        "used_for": str(check.used_for),
    }
    return said if check.slot is None else {**said, "slot": check.slot}


def _shown(value: float | str | None, unit_us: int) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    return _finite(value if unit_us == 1 else value / unit_us)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def read_snapshot(reader: JsonReader) -> FlexSnapshot:
    """The frozen snapshot that a question describes."""
    batch = reader.part("batch")
    return FlexSnapshot(
        now_us=reader.instant("now", required=True),
        policy=_read_policy(reader.part("policy")),
        safe_rate=_read_safe_rate(reader),
        slots=_read_slots(reader, batch),
        interactive=_read_interactive(reader.part("interactive")),
        jobs=tuple(_read_job(job, position) for position, job in enumerate(batch.items("jobs"), 1)),
        lends_this_week=reader.integer("lends_this_week", 0),
        frozen=reader.flag("frozen"),
        last_recall_at_us=reader.instant("last_recall_at"),
        last_lend_at_us=reader.instant("last_lend_at"),
        slack_above_return_since_us=reader.instant("slack_above_return_since"),
        manual_recalls=_read_slot_names(reader, "manual_recalls"),
        trips=_read_slot_names(reader, "trips"),
    )


def _read_policy(reader: JsonReader) -> FlexPolicy:
    given: dict[str, Any] = {}
    for field in fields(FlexPolicy):
        name = field.name
        if name == "lend_p95_us":
            given[name] = reader.duration_us("lend_p95_ms", field.default)
        elif name.endswith("_us"):
            given[name] = reader.duration_us(name.removesuffix("_us") + "_s", field.default)
        elif name == "spillover_action":
            given[name] = reader.choice(name, SpilloverAction, SpilloverAction.WARN)
        elif name in ("max_lent", "spillover_per_week"):
            given[name] = reader.integer(name, None)
        else:
            given[name] = reader.number(name, field.default)
    try:
        return FlexPolicy(**given)
    except ValueError as problem:
        raise ValueError(f"policy: {problem}") from None


def _read_safe_rate(reader: JsonReader) -> SafeRate | None:
    """``{"4": 16.0, ...}`` with ``valid_until`` among or ``safe_rate_valid_until`` beside; null: never tested."""
    if reader.take("safe_rate") is None:
        reader.take("safe_rate_valid_until", None)
        return None
    table = reader.part("safe_rate")
    entries = []
    for key in table.names():
        if key == "valid_until":
            continue
        if not (key.isascii() and key.isdigit()):
            raise ValueError(f"safe_rate.{key}: the key must be a number of slots")
        entries.append((int(key), table.number(key, ABSENT)))
    until_us = table.instant("valid_until")
    if until_us is None:
        until_us = reader.instant("safe_rate_valid_until")
    try:
        return SafeRate(entries=tuple(entries), valid_until_us=until_us)
    except ValueError as problem:
        raise ValueError(f"safe_rate: {problem}") from None


def _read_slots(reader: JsonReader, batch: JsonReader) -> tuple[FlexSlot, ...]:
    """Batch efficiency is one number, one per slot name, or a key of the slot; 1.0 where it was not measured."""
    measured: dict[str, float] = {}
    general = 1.0
    if isinstance(batch.take("efficiency", None), dict):
        by_name = batch.part("efficiency")
        measured = {name: by_name.number(name, ABSENT) for name in by_name.names()}
    else:
        general = batch.number("efficiency", 1.0)
    slots = tuple(_read_slot(slot, measured, general) for slot in reader.items("slots"))
    names = [slot.name for slot in slots]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"slots: named more than once: {', '.join(twice)}")
    return slots


def _read_slot(reader: JsonReader, measured: Mapping[str, float], general: float) -> FlexSlot:
    name = reader.text("slot")
    state = reader.choice("state", SlotState, ABSENT)
    if state is SlotState.LENT:
        reader.take("grant_expires_at")
    if state is SlotState.DRAINING:
        reader.instant("recalled_at", required=True)
    own = reader.number("efficiency", measured.get(name, general))
    try:
        return FlexSlot(
            name=name,
            band=reader.choice("band", Band, ABSENT),
            state=state,
            batch_efficiency=reader.number("batch_efficiency", own),
            fence=reader.integer("fence", 0),
            lent_at_us=reader.instant("lent_at"),
            grant_expires_at_us=reader.instant("grant_expires_at"),
            recalled_at_us=reader.instant("recalled_at"),
            cancelled_at_us=reader.instant("cancelled_at"),
            running_batch_gpu_us=reader.duration_us("running_batch_gpu_s", 0),
            cancellable=reader.flag("cancellable"),
            slack_above_return_since_us=reader.instant("slack_above_return_since"),
        )
    except ValueError as problem:
        raise ValueError(reader.located(str(problem))) from None


def _read_interactive(reader: JsonReader) -> InteractiveFigures:
    rate = reader.take("admitted_per_s")
    p95 = reader.take("p95_queue_ms")
    return InteractiveFigures(
        admitted_per_s=None if rate is None else reader.number("admitted_per_s", ABSENT),
        p95_queue_us=None if p95 is None else reader.duration_us("p95_queue_ms", ABSENT),
        p95_below_since_us=reader.instant("p95_below_since"),
        telemetry_at_us=reader.instant("telemetry_at"),
    )


def _read_job(reader: JsonReader, position: int) -> BatchJob:
    """A job without a deadline has ``"deadline": null``; a forgotten deadline is an error, not a best-effort job."""
    reader.take("deadline")
    named = next((key for key in ("job", "name", "id") if reader.take(key, None) is not None), None)
    return BatchJob(
        name=str(position) if named is None else str(reader.take(named)),
        remaining_gpu_us=reader.duration_us("remaining_gpu_s", ABSENT),
        deadline_us=reader.instant("deadline"),
    )


def _read_slot_names(reader: JsonReader, key: str) -> frozenset[str]:
    known = {item.text("slot") for item in reader.items("slots")}
    names = reader.take(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key}: must be a list of slot names")
    strangers = sorted(set(names) - known)
    if strangers:
        raise ValueError(f"{key}: not among the slots: {', '.join(strangers)}")
    return frozenset(names)
