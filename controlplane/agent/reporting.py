"""Cutting reports: everything since the one before, and the last report of an epoch whose process is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from controlplane.agent.agent_slot import BROKEN, WARMING, AgentSlot
from controlplane.agent.engine import Engine
from controlplane.agent.item_ends import carried, closed_again, items_done, without_response
from controlplane.agent.journal_entries import Closed, Cut, Recut
from controlplane.agent.live_figures import Picture, picture, picture_steps
from controlplane.agent.objectives import ObjectiveLedger
from controlplane.agent.policy_state import LiveList, PolicyState
from controlplane.agent.refusal_log import RefusalLog
from controlplane.agent.spool import EpochSpool, StoredReport
from controlplane.core.reasons import Outcome
from controlplane.wire.clock import ClockReading, ahead_us
from controlplane.wire.packed import NO_ROWS, pack, pack_row, read_report
from controlplane.wire.report import (
    LAYOUT,
    DecisionSample,
    ItemDone,
    LeaseSpend,
    LostReports,
    Report,
    SlotMeter,
    SlotUsage,
)

RECORDS_MAX: Final = 8_000
"""Rows of one report."""
BODY_BYTES_MAX: Final = 6 * 1024 * 1024
"""Encoded size of one report: well under the 8 MiB that a control plane takes."""
ROOM_BYTES_MIN: Final = 256 * 1024
"""Room for rows in every report, however large the rest of it is: rows always get on."""
_encode = msgspec.json.Encoder().encode


ROWS_PER_STEP: Final = 64
"""Records packed, or rows written, between two looks at what else there is to do: some 300 us."""


@dataclass(frozen=True)
class Seen:
    """What was made ready for a report while requests passed; the time of slots is gathered too."""

    demand: msgspec.Raw
    """A list of `Demand`, written as in the report."""
    figures: msgspec.Raw
    """`LiveFigures`, written as in the report."""
    rows: dict[str, bytes]
    """Packed records by request id."""


def _body(spool: EpochSpool, report: Report, rows: Mapping[str, bytes] = NO_ROWS) -> bytes:
    """The bytes of a report: its records packed, where the control plane takes that and they fit."""
    packed = pack(report, rows) if spool.packs and report.records else None
    return _encode(report) if packed is None else packed


@dataclass(frozen=True)
class Metered:
    """Slot time since the last report."""

    usage: list[SlotUsage]
    meters: list[SlotMeter]


def gather_time(slot: AgentSlot, now_us: int) -> None:
    """Add up a slot's time for the next report."""
    slot.metered.gather(now_us, warming=slot.state == WARMING, broken=slot.state == BROKEN)


def collect_meters(engine: Engine, now_us: int, *, gathered: bool = False) -> Metered:
    """Take the slot time of all slots, of those that left until nothing runs on them.

    `gathered`: that of the slots of the policy was added up just before, and what came since waits for the next report.
    """
    usage: list[SlotUsage] = []
    meters: list[SlotMeter] = []
    for slot in engine.leaving if gathered else engine.all_slots():
        gather_time(slot, now_us)
    for slot in engine.all_slots():
        used, seen = slot.metered.take()
        usage += used
        meters += seen
    engine.leaving = [slot for slot in engine.leaving if slot.metered.holds_back]
    return Metered(usage, meters)


def follow_clock(engine: Engine, now_us: int) -> ClockReading | None:
    """Reckon the ends of leases by the best reading of the clock, which is returned."""
    clock = engine.clock.offset.reading()
    engine.leases.follow_clock(ahead_us(clock), now_us)
    return clock


async def look_around(engine: Engine, spool: EpochSpool) -> Seen:
    """Make the next report ready, a little at a time: requests pass in between."""
    steps = picture_steps(engine, engine.clock.now_us)
    while True:
        try:
            next(steps)
        except StopIteration as whole:
            found: Picture = whole.value
            break
        await asyncio.sleep(0)
    demand = await _written(found.demand)
    tenants: Any = await _written(found.figures.tenants)
    figures = msgspec.Raw(_encode(msgspec.structs.replace(found.figures, tenants=tenants)))
    rows: dict[str, bytes] = {}
    if spool.packs:
        entries = carried(spool.state.closed, RECORDS_MAX)
        for at in range(0, len(entries), ROWS_PER_STEP):
            await asyncio.sleep(0)
            for entry in entries[at : at + ROWS_PER_STEP]:
                packed = pack_row(entry.row)
                if packed is not None:
                    rows[entry.row.request_id] = packed
    for slot in list(engine.slots.values()):
        await asyncio.sleep(0)
        gather_time(slot, engine.clock.now_us())
    await asyncio.sleep(0)
    return Seen(demand, figures, rows)


async def _written(rows: Sequence[Any]) -> msgspec.Raw:
    """A list as a report has it, written a little at a time."""
    parts: list[bytes] = []
    for at in range(0, len(rows), ROWS_PER_STEP):
        await asyncio.sleep(0)
        parts.append(_encode(rows[at : at + ROWS_PER_STEP])[1:-1])
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def cut_report(
    engine: Engine,
    spool: EpochSpool,
    policy: PolicyState,
    live: LiveList,
    *,
    seal: bool = False,
    seen: Seen | None = None,
) -> None:
    """Write down the next report of the current epoch; it is sent as these bytes until it is accepted.

    What it has no room for waits for the next one. With `seal` that one follows at once: nothing comes after the seal.
    `seen` was made ready just before; without it everything is done at once.
    """
    whole = _cut_once(engine, spool, policy, live, seal, seen)
    while seal and not whole:
        whole = _cut_once(engine, spool, policy, live, seal, None)


def _cut_once(
    engine: Engine, spool: EpochSpool, policy: PolicyState, live: LiveList, seal: bool, seen: Seen | None
) -> bool:
    """One report, sealed if it may be and everything fits; says whether everything did."""
    now_us = engine.clock.now_us()
    now_seen: Any = picture(engine, now_us) if seen is None else seen
    metered = collect_meters(engine, now_us, gathered=seen is not None)
    entries = carried(spool.state.closed, RECORDS_MAX)
    clock = follow_clock(engine, now_us)
    ends = engine.items.take_ends()
    seq = spool.state.last_seq + 1
    report = Report(
        layout=LAYOUT,
        epoch=spool.epoch,
        seq=seq,
        sent_us=now_us,
        revision=policy.revision,
        live_number=live.number,
        records=[entry.row for entry in entries],
        slot_usage=metered.usage,
        slot_meters=metered.meters,
        objectives=engine.objectives.take(),
        refusals=engine.desk.log.take_counts(),
        samples=engine.desk.log.take_samples(),
        spends=engine.leases.spends(),
        trips=engine.flex.take_trips(),
        demand=now_seen.demand,
        figures=now_seen.figures,
        refused_revision=policy.refused_revision,
        refused_reason=policy.refused_reason,
        seal=seal,
        item_room=engine.items.room(now_us),
        items_through=engine.items.through,
        items_done=ends + items_done(entries),
        clock=clock,
    )
    whole = len(entries) == len(spool.state.closed)
    body = _body(spool, report, NO_ROWS if seen is None else seen.rows)
    if len(body) > BODY_BYTES_MAX or (seal and not whole):
        report, samples_left, samples_dropped = _fitted(report, entries, ends, len(body))
        whole = whole and len(report.records) == len(entries) and not samples_left
        report = msgspec.structs.replace(report, seal=seal and whole)
        engine.desk.log.put_back(samples_left, samples_dropped)
        body = _body(spool, report)
    spool.cut(Cut(seq, now_us, len(report.records), report.seal, body))
    engine.leases.note_told(report.spends)
    return whole


def _fitted(
    report: Report, entries: Sequence[Closed], ends: list[ItemDone], size: int
) -> tuple[Report, list[DecisionSample], int]:
    """The report with the rows and samples it has room for, the samples left over, and how many were dropped.

    The oldest samples are dropped where all of them are more than a report by themselves could carry.
    """
    if size <= BODY_BYTES_MAX:
        return report, [], 0
    room = BODY_BYTES_MAX - len(_encode(msgspec.structs.replace(report, records=[], items_done=ends, samples=[])))
    room = max(room, ROOM_BYTES_MIN)
    sizes = [len(_encode(sample)) + 1 for sample in report.samples]
    dropped, waiting = 0, sum(sizes)
    while waiting > room:
        waiting -= sizes[dropped]
        dropped += 1
    samples, sizes = report.samples[dropped:], sizes[dropped:]
    entries = _fitting(entries, room)
    room -= sum(_size(entry) for entry in entries)
    taken = 0
    while taken < len(samples) and sizes[taken] <= room:
        room -= sizes[taken]
        taken += 1
    report = msgspec.structs.replace(
        report,
        records=[entry.row for entry in entries],
        items_done=ends + items_done(entries),
        samples=samples[:taken],
    )
    return report, samples[taken:], dropped


def _size(entry: Closed) -> int:
    """Bytes of a record in a report, with its item's end."""
    size = len(_encode(entry.row)) + 1
    return size if entry.item is None else size + len(_encode(items_done([entry]))) + 1


def _fitting(entries: Sequence[Closed], room: int) -> Sequence[Closed]:
    """The first of some records, as many as fit into `room` bytes, but one at least."""
    for index, entry in enumerate(entries):
        room -= _size(entry)
        if room < 0:
            return entries[: max(1, index)]
    return entries


def recut(spool: EpochSpool, stored: StoredReport, now_us: int) -> bool:
    """Make a report smaller that the control plane found too large; False when there is nothing left to take off.

    First goes what is only looked at: samples, demand and figures. After that the second half of its rows waits for a
    later report. The number stays: the report was never stored.
    """
    report = read_report(spool.body_of(stored))
    rest: list[Closed] = []
    lost: list[str] = []
    if report.samples or report.demand or report.figures is not None:
        report = msgspec.structs.replace(report, samples=[], demand=[], figures=None)
    elif len(report.records) > 1:
        half = len(report.records) // 2
        lost = [row.request_id for row in report.records if row.request_id in spool.state.opened]
        # The seal comes with the report that carries the rest.
        rest = closed_again(report.records[half:], report.items_done)
        later = {entry.row.request_id for entry in rest}
        ends = [end for end in report.items_done if end.request_id not in later]
        report = msgspec.structs.replace(report, records=report.records[:half], items_done=ends, seal=False)
    elif (smaller := without_response(report)) is not None:
        report = smaller
    else:
        return False
    records = min(stored.records, len(report.records))
    spool.recut(Recut(report.seq, now_us, records, report.seal, _body(spool, report), rest, lost))
    return True


def name_lost(spool: EpochSpool, stored: StoredReport, first_seq: int, now_us: int) -> None:
    """Make a report say that those from `first_seq` up to it are lost for good. Its number stays."""
    report = read_report(spool.body_of(stored))
    records = spool.records_lost(first_seq, stored.seq)
    report = msgspec.structs.replace(report, lost=LostReports(first_seq, -1 if records is None else records))
    spool.recut(Recut(stored.seq, now_us, stored.records, stored.seal, _body(spool, report), [], []))


def cut_last_report(spool: EpochSpool, now_us: int, spends: Sequence[LeaseSpend] = ()) -> None:
    """Write down what is left of an old epoch: unreported records, what was open as lost, their counts; and seal it.

    Requests that were open ended when their process was last heard of. Left-over rows beyond one report's size go in
    reports before the last one. `spends` are what this process knows of the epoch's leases: it may have been its own.
    """
    state = spool.state
    totals = dict(state.spent)
    for spend in spends:
        totals[spend.lease_id] = max(spend.spent_nanos, totals.get(spend.lease_id, 0))
    spent = [LeaseSpend(lease_id, nanos, 0) for lease_id, nanos in sorted(totals.items())]
    objectives, refusals = ObjectiveLedger(), RefusalLog()
    objectives.recover_admitted(state.admitted)
    for opened in state.opened.values():
        if not opened.counted:
            objectives.recover_admitted(opened.marks)
        objectives.recover_lost(opened.marks, Outcome.LOST.value)
    for closed in state.closed:
        if not closed.counted:
            objectives.recover_closed(closed.verdicts)
    for turned in state.turned:
        objectives.recover_refused(turned.marks, turned.reason)
        refusals.recover(turned.tenant_id, turned.class_id, turned.reason, turned.at_us)
    lost_bytes = sum(len(_encode(entry.row)) + 1 for entry in state.opened.values())
    room = max(BODY_BYTES_MAX - lost_bytes, ROOM_BYTES_MIN)
    while True:
        entries = _fitting(carried(state.closed, RECORDS_MAX), room)
        if len(entries) == len(state.closed):
            break
        rows = [entry.row for entry in entries]
        done = items_done(entries)
        report = Report(
            LAYOUT, spool.epoch, state.last_seq + 1, now_us, 0, 0, records=rows, items_done=done, spends=spent
        )
        spool.cut(Cut(state.last_seq + 1, now_us, len(rows), False, _body(spool, report)))
    rows = [entry.row for entry in entries]
    closed_rows = len(rows)
    rows += [
        msgspec.structs.replace(entry.row, ended_us=max(entry.row.arrived_us, spool.last_heard_us))
        for entry in state.opened.values()
    ]
    seq = state.last_seq + 1
    report = Report(
        layout=LAYOUT,
        epoch=spool.epoch,
        seq=seq,
        sent_us=now_us,
        revision=0,
        live_number=0,
        records=rows,
        objectives=objectives.take(),
        refusals=refusals.take_counts(),
        spends=spent,
        seal=True,
        items_done=items_done(entries),
    )
    spool.cut(Cut(seq, now_us, closed_rows, True, _body(spool, report)))
