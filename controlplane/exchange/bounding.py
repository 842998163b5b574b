"""Numbers of a report that cannot be true, taken out when it is decoded so that they cost nothing beside them.

Records, counts and slot minutes have checks of their own. This is for the rest: what acknowledges, what the agent's
clock says, spends, trips, demand and the live figures. What is taken out is kept for the quarantine as text.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from controlplane.exchange.messages import ReportOfTuples
from controlplane.wire.report import (
    Demand,
    DirectWork,
    ItemDone,
    ItemRoom,
    LeaseSpend,
    LiveFigures,
    LostReports,
    SlotLive,
    SlotMeter,
    Trip,
)

INT4_MAX: Final = 2**31 - 1
INT8_MAX: Final = 2**63 - 1
# The last year a calendar of four digits has.
CLOCK_MAX_US: Final = 253_402_300_800_000_000
COUNT_MAX: Final = 2**53
_SCOPES: Final = ("t", "k", "c")

Impossible = dict[str, Any]
"""Field -> what was said in it, as text."""


def bounded(report: ReportOfTuples) -> tuple[ReportOfTuples, Impossible]:
    """The report without its impossible numbers, and those.

    An impossible revision or live number counts as none, so that the agent gets all of it again; an impossible clock
    as 0, which ends no lease.
    """
    impossible: Impossible = {}
    changes: dict[str, Any] = {}
    for name, most, instead in _SCALARS:
        value = getattr(report, name)
        if value is not None and not 0 <= value <= most:
            impossible[name], changes[name] = str(value), instead
    for name, possible in _ROWS:
        rows: Sequence[Any] = getattr(report, name)
        if rows and not all(map(possible, rows)):
            impossible[name] = [_text(row) for row in rows if not possible(row)]
            changes[name] = [row for row in rows if possible(row)]
    if report.figures is not None and not _is_figures(report.figures):
        impossible["figures"] = _text(report.figures)
        changes["figures"] = None
    if report.clock is not None and max(map(abs, msgspec.structs.astuple(report.clock))) > CLOCK_MAX_US:
        impossible["clock"] = _text(report.clock)
        changes["clock"] = None
    if report.lost is not None and not _is_gap(report.lost, report.seq):
        impossible["lost"] = _text(report.lost)
        changes["lost"] = None
    return (msgspec.structs.replace(report, **changes), impossible) if changes else (report, impossible)


def dropped_requests(report: ReportOfTuples) -> frozenset[bytes]:
    """The ids of requests whose item's result cannot be true: neither result nor charge may count without the other."""
    rows = [row for row in report.items_done if not _is_item_done(row)]
    return frozenset(uuid.UUID(row.request_id).bytes for row in rows if _is_uuid(row.request_id))


def is_spend(row: LeaseSpend) -> bool:
    """Whether every number of a spend fits its column."""
    return 0 < row.lease_id <= INT8_MAX and max(abs(row.spent_nanos), abs(row.reserved_nanos)) <= INT8_MAX


def _is_trip(row: Trip) -> bool:
    return 0 < row.slot_id <= INT4_MAX and 0 <= row.fence <= INT8_MAX


def _is_demand(row: Demand) -> bool:
    counts = (row.requests, row.tokens, row.refused, row.present)
    return row.scope in _SCOPES and 0 <= row.id <= INT4_MAX and min(counts) >= 0 and max(counts) <= COUNT_MAX


def _is_meter(row: SlotMeter) -> bool:
    # busy and observed are held against a minute; the others have only their column
    return max(abs(row.warming_us), abs(row.broken_us)) <= COUNT_MAX


def _is_room(row: ItemRoom) -> bool:
    return 0 < row.class_id <= INT4_MAX and 0 <= row.items <= INT4_MAX and -1 <= row.gpu_us <= INT8_MAX


def _is_item_done(row: ItemDone) -> bool:
    small = (row.attempt, row.outcome, row.status)
    return (
        0 < row.job_id <= INT8_MAX
        and 0 < row.line <= INT4_MAX
        and 0 < row.fence <= INT8_MAX
        and 0 <= row.lease_id <= INT8_MAX
        and min(small) >= 0
        and max(small) < 2**15
        and _is_uuid(row.request_id)
        and _is_text(bytes(row.response))
    )


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def _is_text(document: bytes) -> bool:
    # the decoder passes over what is left as it came
    try:
        document.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_figures(figures: LiveFigures) -> bool:
    sound = 0 <= figures.at_us <= CLOCK_MAX_US and all(map(_is_slot, figures.slots))
    return sound and all(map(_is_direct, (row for klass in figures.classes for row in klass.direct)))


def _is_direct(row: DirectWork) -> bool:
    return 0 <= row.due_us <= CLOCK_MAX_US and 0 <= row.gpu_us <= COUNT_MAX


def _is_gap(lost: LostReports, seq: int) -> bool:
    return 0 < lost.first_seq < seq and -1 <= lost.records <= INT4_MAX


def _is_slot(slot: SlotLive) -> bool:
    return 0 < slot.slot_id <= INT4_MAX and 0 <= slot.fence <= INT8_MAX


def _text(document: Any) -> str:
    # neither JSON nor the database has numbers of this size
    if isinstance(document, ItemDone):
        return str(msgspec.structs.astuple(document))
    return str(msgspec.to_builtins(document))


_SCALARS: Final = (
    ("revision", INT4_MAX, 0),
    ("live_number", INT8_MAX, 0),
    ("refused_revision", INT4_MAX, None),
    ("sent_us", CLOCK_MAX_US, 0),
    ("items_through", INT8_MAX, 0),
)
_ROWS: Final[tuple[tuple[str, Callable[[Any], bool]], ...]] = (
    ("spends", is_spend),
    ("trips", _is_trip),
    ("demand", _is_demand),
    ("item_room", _is_room),
    ("items_done", _is_item_done),
    ("slot_meters", _is_meter),
)
