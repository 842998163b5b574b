"""Snapshots, decisions and marks as JSON: what a decision saw, so that the same function gives the same answer again.

Fields at their default are left out, so that a sample of one second stays small. Infinite numbers are the words
`infinite` and `-infinite`, which JSON has no numbers for.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from controlplane.core.flex_decision import Check, FlexAction, FlexDecision
from controlplane.core.flex_marks import FlexMarks
from controlplane.core.flex_policy import FlexPolicy, SafeRate, SpilloverAction
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.slot_states import Band, SlotState

_PLAIN = ("lends_this_week", "frozen", "last_recall_at_us", "last_lend_at_us", "slack_above_return_since_us")


def snapshot_as_json(snapshot: FlexSnapshot, *, with_limits: bool = True) -> dict[str, Any]:
    """The snapshot as JSON types; without limits (policy and table) it is read with those of a row before it."""
    said: dict[str, Any] = {
        "now_us": snapshot.now_us,
        "interactive": _given(snapshot.interactive),
        "slots": [_slot(slot) for slot in snapshot.slots],
    }
    if snapshot.jobs:
        said["jobs"] = [[job.name, job.remaining_gpu_us, job.deadline_us] for job in snapshot.jobs]
    for name in _PLAIN:
        value = getattr(snapshot, name)
        if value:
            said[name] = value
    for name in ("manual_recalls", "trips"):
        names = getattr(snapshot, name)
        if names:
            said[name] = sorted(names)
    if with_limits:
        said |= limits_as_json(snapshot.policy, snapshot.safe_rate)
    return said


def limits_as_json(policy: FlexPolicy, table: SafeRate | None) -> dict[str, Any]:
    """Policy and safe rate table in full: defaults may change, evidence must not."""
    rates = None if table is None else {"entries": [list(e) for e in table.entries], "until_us": table.valid_until_us}
    return {"policy": {field.name: getattr(policy, field.name) for field in fields(policy)}, "safe_rate": rates}


def read_snapshot(said: Mapping[str, Any], limits: Mapping[str, Any] | None = None) -> FlexSnapshot:
    """The snapshot that JSON stands for. `limits` are given where it was stored without them."""
    limits = said if limits is None else limits
    policy, rates = dict(limits["policy"]), limits["safe_rate"]
    policy["spillover_action"] = SpilloverAction(policy["spillover_action"])
    table = None
    if rates is not None:
        entries = tuple((int(slots), float(rate)) for slots, rate in rates["entries"])
        table = SafeRate(entries=entries, valid_until_us=rates["until_us"])
    return FlexSnapshot(
        now_us=said["now_us"],
        policy=FlexPolicy(**policy),
        safe_rate=table,
        slots=tuple(_read_slot(slot) for slot in said["slots"]),
        interactive=InteractiveFigures(**said["interactive"]),
        jobs=tuple(BatchJob(name=n, remaining_gpu_us=r, deadline_us=d) for n, r, d in said.get("jobs", ())),
        manual_recalls=frozenset(said.get("manual_recalls", ())),
        trips=frozenset(said.get("trips", ())),
        **{name: said[name] for name in _PLAIN if name in said},
    )


def _read_slot(said: Mapping[str, Any]) -> FlexSlot:
    values = dict(said)
    values["band"] = Band(values["band"])
    if "state" in values:
        values["state"] = SlotState(values["state"])
    return FlexSlot(**values)


@lru_cache(maxsize=32_768)
def _slot(slot: FlexSlot) -> dict[str, Any]:
    """Shared by every snapshot that has the same slot: read it, never change it."""
    return _given(slot)


def _given(record: Any) -> dict[str, Any]:
    """Fields that differ from their default; those without a default always."""
    said = {}
    for name, default in _defaults(record.__class__):
        value = getattr(record, name)
        if default is MISSING or value != default:
            said[name] = value
    return said


@lru_cache(maxsize=16)
def _defaults(record: type) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in fields(record))


def checks_as_json(decision: FlexDecision) -> list[dict[str, Any]]:
    """[{name, value, limit, held, used_for, slot?}] in the decision's order; times in microseconds."""
    return [_check(check) for check in decision.checks]


def actions_as_json(decision: FlexDecision) -> list[dict[str, Any]]:
    """[{kind, slot, fence, reason?, grant_expires_at_us?, overrides_min_hold?}] in the order of slot names."""
    return [_action(action) for action in decision.actions]


def finite(value: float) -> float | None:
    """The number, or None where it is infinite."""
    return value if math.isfinite(value) else None


def _check(check: Check) -> dict[str, Any]:
    said = {
        "name": str(check.name),
        "value": _value(check.value),
        "limit": _value(check.limit),
        "held": check.held,
        "used_for": str(check.used_for),
    }
    return said if check.slot is None else {**said, "slot": check.slot}


def _value(value: float | str | None) -> float | str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return "-infinite" if value < 0 else "infinite"
    return value


def _action(action: FlexAction) -> dict[str, Any]:
    said: dict[str, Any] = {"kind": str(action.kind), "slot": action.slot, "fence": action.fence}
    if action.reason is not None:
        said["reason"] = str(action.reason)
    if action.grant_expires_at_us is not None:
        said["grant_expires_at_us"] = action.grant_expires_at_us
    if action.overrides_min_hold:
        said["overrides_min_hold"] = True
    return said


def marks_as_json(marks: FlexMarks) -> dict[str, Any]:
    """The controller's memory of a pool."""
    said = {field.name: getattr(marks, field.name) for field in fields(marks) if getattr(marks, field.name)}
    if marks.slack_above_since_us:
        said["slack_above_since_us"] = dict(marks.slack_above_since_us)
    else:
        said.pop("slack_above_since_us", None)
    return said


def read_marks(said: Mapping[str, Any]) -> FlexMarks:
    """The memory that JSON stands for."""
    values = dict(said)
    if "slack_above_since_us" in values:
        values["slack_above_since_us"] = MappingProxyType(dict(values["slack_above_since_us"]))
    return FlexMarks(**values)
