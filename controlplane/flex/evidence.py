"""Snapshots, decisions and marks as JSON: what a decision saw, so that the same function gives the same answer again.

Fields at their default are left out, so that a sample of one second stays small. Infinite numbers are the words
`infinite` and `-infinite`, which JSON has no numbers for.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from controlplane.core.flex_decision import Check, FlexAction, FlexDecision
from controlplane.core.flex_marks import FlexMarks
from controlplane.core.flex_policy import FlexPolicy, SafeRate, SpilloverAction
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.slot_states import Band, SlotState

_encode = msgspec.json.Encoder().encode
_PLAIN = ("lends_this_week", "frozen", "last_recall_at_us", "last_lend_at_us", "slack_above_return_since_us")


def as_text(said: Any) -> str:
    """JSON types as JSON text, in one line."""
    return _encode(said).decode()


def snapshot_as_json(snapshot: FlexSnapshot, *, with_limits: bool = True) -> dict[str, Any]:
    """The snapshot as JSON types; without limits (policy and table) it is read with those of a row before it."""
    said = _without_slots(snapshot) | {"slots": [slot_as_json(slot) for slot in snapshot.slots]}
    if with_limits:
        said |= limits_as_json(snapshot.policy, snapshot.safe_rate)
    return said


def snapshot_text(snapshot: FlexSnapshot) -> str:
    """`snapshot_as_json` without limits, as JSON text."""
    slots = ",".join([_slot_text(slot) for slot in snapshot.slots])
    return f'{as_text(_without_slots(snapshot))[:-1]},"slots":[{slots}]}}'


def _without_slots(snapshot: FlexSnapshot) -> dict[str, Any]:
    said: dict[str, Any] = {"now_us": snapshot.now_us, "interactive": _given(snapshot.interactive)}
    if snapshot.jobs:
        said["jobs"] = jobs_as_json(snapshot.jobs)
    for name in _PLAIN:
        value = getattr(snapshot, name)
        if value:
            said[name] = value
    for name in ("manual_recalls", "trips"):
        names = getattr(snapshot, name)
        if names:
            said[name] = sorted(names)
    return said


def with_limits_text(seen: str, policy: FlexPolicy, table: SafeRate | None) -> str:
    """`snapshot_as_json` with limits, as JSON text, of what `snapshot_text` says."""
    return seen[:-1] + _limits_members(policy, table)


@lru_cache(maxsize=4_096)
def _limits_members(policy: FlexPolicy, table: SafeRate | None) -> str:
    return "," + as_text(limits_as_json(policy, table))[1:]


#: Texts of floor slots by the object's identity: each pool has the same ones tick after tick, and to ask for the same
#: fields costs more than to write them.
_floor_texts: dict[int, tuple[FlexSlot, str]] = {}
_FLOOR_TEXTS_MOST = 65_536


def _slot_text(slot: FlexSlot) -> str:
    if slot.band is Band.FLEX:
        return as_text(_given(slot))
    known = _floor_texts.get(id(slot))
    if known is not None and known[0] is slot:
        return known[1]
    if len(_floor_texts) >= _FLOOR_TEXTS_MOST:
        _floor_texts.clear()
    text = as_text(_given(slot))
    _floor_texts[id(slot)] = (slot, text)
    return text


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
def slot_as_json(slot: FlexSlot) -> dict[str, Any]:
    """Shared by every snapshot that has the same slot: read it, never change it."""
    return _given(slot)


def jobs_as_json(jobs: Iterable[BatchJob]) -> list[list[Any]]:
    """[[name, remaining GPU time, deadline], ...], both in us."""
    return [[job.name, job.remaining_gpu_us, job.deadline_us] for job in jobs]


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


class _CheckRow(msgspec.Struct, omit_defaults=True, gc=False):
    name: str
    value: float | str | None
    limit: float | str | None
    held: bool
    used_for: str
    slot: str | None = None


def checks_text(decision: FlexDecision) -> str:
    """`checks_as_json` as JSON text."""
    return as_text(
        [
            _CheckRow(name, value if value.__class__ is not float else _value(value), limit, held, used_for, slot)
            for name, value, limit, held, used_for, slot in decision.checks
        ]
    )


def actions_as_json(decision: FlexDecision) -> list[dict[str, Any]]:
    """[{kind, slot, fence, reason?, grant_expires_at_us?, overrides_min_hold?}] in the order of slot names."""
    return [_action(action) for action in decision.actions]


def finite(value: float) -> float | None:
    """The number, or None where it is infinite."""
    return value if math.isfinite(value) else None


def _check(check: Check) -> dict[str, Any]:
    name, value, limit, held, used_for, slot = check
    said = {"name": str(name), "value": _value(value), "limit": _value(limit), "held": held, "used_for": str(used_for)}
    if slot is not None:
        said["slot"] = slot
    return said


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
    said = {name: value for name, value in marks.__dict__.items() if value}
    if marks.slack_above_since_us:
        said["slack_above_since_us"] = dict(marks.slack_above_since_us)
    else:
        said.pop("slack_above_since_us", None)
    return said


def figures_text(seen: str, marks: FlexMarks) -> str:
    """`PoolSample.figures` as JSON text: what the tick saw, as `snapshot_text` says it, and the marks after it."""
    return f'{{"seen":{seen},"marks":{as_text(marks_as_json(marks))}}}'


def difference_text(grant_expires_at_us: int | None, running_batch_gpu_us: Sequence[int], jobs: str | None) -> str:
    """`PoolSample.figures` of a tick that only went on from a whole row: what can have changed and is no column.

    When its loans ended, the batch work on each of them in the order of names, and its jobs as JSON text if those are
    others than the whole row's.
    """
    if grant_expires_at_us is None:
        return "{}" if jobs is None else f'{{"jobs":{jobs}}}'
    before = "" if jobs is None else f'"jobs":{jobs},'
    work = ",".join(map(str, running_batch_gpu_us))
    return f'{{{before}"grant_expires_at_us":{grant_expires_at_us},"running_batch_gpu_us":[{work}]}}'


def made_whole(
    whole: Mapping[str, Any],
    difference: Mapping[str, Any],
    *,
    at_us: int,
    p95_queue_us: int | None,
    admitted_per_s: float | None,
    telemetry_age_us: int | None,
) -> dict[str, Any]:
    """`figures_text` of a tick as JSON types, of the whole row before it, its `difference_text` and its columns."""
    interactive = {
        "admitted_per_s": admitted_per_s,
        "p95_queue_us": p95_queue_us,
        "p95_below_since_us": whole["seen"]["interactive"]["p95_below_since_us"],
        "telemetry_at_us": None if telemetry_age_us is None else at_us - telemetry_age_us,
    }
    seen = {**whole["seen"], "now_us": at_us, "interactive": interactive}
    if "grant_expires_at_us" in difference:
        work = iter(difference["running_batch_gpu_us"])
        expires = {"grant_expires_at_us": difference["grant_expires_at_us"]}
        seen["slots"] = [
            _worked(slot | expires, next(work)) if slot.get("state") == SlotState.LENT else slot
            for slot in seen["slots"]
        ]
    if "jobs" in difference:
        seen["jobs"] = difference["jobs"]
        if not seen["jobs"]:
            del seen["jobs"]
    return {"seen": seen, "marks": {**whole["marks"], "ticked_at_us": at_us}}


def _worked(slot: dict[str, Any], running_batch_gpu_us: int) -> dict[str, Any]:
    slot.pop("running_batch_gpu_us", None)
    return slot | {"running_batch_gpu_us": running_batch_gpu_us} if running_batch_gpu_us else slot


def read_marks(said: Mapping[str, Any]) -> FlexMarks:
    """The memory that JSON stands for."""
    values = dict(said)
    if "slack_above_since_us" in values:
        values["slack_above_since_us"] = MappingProxyType(dict(values["slack_above_since_us"]))
    return FlexMarks(**values)
