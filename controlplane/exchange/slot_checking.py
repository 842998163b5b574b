"""Slot minutes of a report against what a minute can hold: 60 s of one slot, in all reports together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from controlplane.exchange.messages import Incoming
from controlplane.usage.validation import MINUTE_US, Bounds, Known
from controlplane.wire.report import Report, SlotMeter, SlotUsage

_INT4_MAX = 2**31 - 1

SlotMinuteKey = tuple[int, int]
"""(slot id, minute in Unix us)"""


def sound_keys(group: Sequence[Incoming], known: Known, bounds: Bounds) -> set[SlotMinuteKey]:
    """The slot minutes of a group that can exist: a known slot, a whole minute, an instant within bounds."""
    rows = (row for incoming in group for row in _rows(incoming.report))
    return {
        key for row in rows if _can_exist(key := (row.slot_id, row.minute_us), bounds) and key[0] in known.slot_pools
    }


def _can_exist(key: SlotMinuteKey, bounds: Bounds) -> bool:
    slot_id, minute_us = key
    in_bounds = bounds.oldest_us - MINUTE_US <= minute_us <= bounds.newest_us
    return 0 < slot_id <= _INT4_MAX and minute_us % MINUTE_US == 0 and in_bounds


def _rows(report: Report) -> list[SlotUsage | SlotMeter]:
    return [*report.slot_usage, *report.slot_meters]


def rows_of(report: Report, keys: Collection[SlotMinuteKey]) -> list[SlotUsage | SlotMeter]:
    """The rows of a report about some slot minutes."""
    return [row for row in _rows(report) if (row.slot_id, row.minute_us) in keys]


def check_slots(
    incoming: Incoming, stored: Mapping[SlotMinuteKey, tuple[int, int, int]], known: Known
) -> dict[SlotMinuteKey, str]:
    """The slot minutes of a report that cannot be counted, with the reason. `stored` has every sound one.

    Values of `stored` are (attributed, busy, observed) microseconds so far: none may pass a minute.
    """
    bad: dict[SlotMinuteKey, str] = {}
    for key, added in _added(incoming.report).items():
        if key not in stored:
            bad[key] = "unknown_slot"
        elif known.slot_pools[key[0]] != incoming.pool_id:
            bad[key] = "foreign_slot"
        elif any(have + more > MINUTE_US for have, more in zip(stored[key], added, strict=True)):
            bad[key] = "over_a_minute"
    for usage in incoming.report.slot_usage:
        key = (usage.slot_id, usage.minute_us)
        if usage.gpu_us < 0:
            bad.setdefault(key, "negative_number")
        elif usage.tenant_id not in known.tenants or usage.class_id not in known.classes:
            bad.setdefault(key, "unknown_tenant")
    for meter in incoming.report.slot_meters:
        if min(meter.busy_us, meter.observed_us, meter.warming_us, meter.broken_us) < 0:
            bad.setdefault((meter.slot_id, meter.minute_us), "negative_number")
    return bad


def _added(report: Report) -> dict[SlotMinuteKey, list[int]]:
    """(attributed, busy, observed) microseconds that a report adds."""
    added: dict[SlotMinuteKey, list[int]] = defaultdict(lambda: [0, 0, 0])
    for usage in report.slot_usage:
        added[usage.slot_id, usage.minute_us][0] += usage.gpu_us
    for meter in report.slot_meters:
        sums = added[meter.slot_id, meter.minute_us]
        sums[1] += meter.busy_us
        sums[2] += meter.observed_us
    return added
