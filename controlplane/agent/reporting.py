"""Cutting reports: everything since the one before, and the last report of an epoch whose process is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from controlplane.agent.agent_slot import BROKEN, WARMING
from controlplane.agent.engine import Engine
from controlplane.agent.journal_entries import Cut
from controlplane.agent.live_figures import demand_rows, live_figures
from controlplane.agent.objectives import ObjectiveLedger
from controlplane.agent.policy_state import LiveList, PolicyState
from controlplane.agent.refusal_log import RefusalLog
from controlplane.agent.spool import EpochSpool
from controlplane.core.reasons import Outcome
from controlplane.wire.report import LAYOUT, Report, SlotMeter, SlotUsage

RECORDS_MAX: Final = 8_000
"""Rows of one report: well under the 8 MiB that a report may have."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Metered:
    """Slot time since the last report."""

    usage: list[SlotUsage]
    meters: list[SlotMeter]


def collect_meters(engine: Engine, now_us: int) -> Metered:
    """Take the slot time of all slots, of those that left until nothing runs on them."""
    usage: list[SlotUsage] = []
    meters: list[SlotMeter] = []
    for slot in engine.all_slots():
        used, seen = slot.metered.collect(now_us, warming=slot.state == WARMING, broken=slot.state == BROKEN)
        usage += used
        meters += seen
    engine.leaving = [slot for slot in engine.leaving if slot.metered.holds_back]
    return Metered(usage, meters)


def cut_report(engine: Engine, spool: EpochSpool, policy: PolicyState, live: LiveList, *, seal: bool = False) -> None:
    """Write down the next report of the current epoch; it is sent as these bytes until it is accepted."""
    now_us = engine.clock.now_us()
    metered = collect_meters(engine, now_us)
    records = [entry.row for _, entry in zip(range(RECORDS_MAX), spool.state.closed, strict=False)]
    seq = spool.state.last_seq + 1
    report = Report(
        layout=LAYOUT,
        epoch=spool.epoch,
        seq=seq,
        sent_us=now_us,
        revision=policy.revision,
        live_number=live.number,
        records=records,
        slot_usage=metered.usage,
        slot_meters=metered.meters,
        objectives=engine.objectives.take(),
        refusals=engine.desk.log.take_counts(),
        samples=engine.desk.log.take_samples(),
        spends=engine.leases.spends(),
        trips=engine.flex.take_trips(),
        demand=demand_rows(engine.figures, now_us),
        figures=live_figures(engine, now_us),
        refused_revision=policy.refused_revision,
        refused_reason=policy.refused_reason,
        seal=seal,
    )
    spool.cut(Cut(seq, now_us, len(records), seal, _encode(report)))


def cut_last_report(spool: EpochSpool, now_us: int) -> None:
    """Write down what is left of an old epoch: unreported records, what was open as lost, their counts; and seal it.

    Requests that were open ended when their process was last heard of. Left-over rows beyond one report's size go in
    reports before the last one.
    """
    state = spool.state
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
    while len(state.closed) > RECORDS_MAX:
        rows = [entry.row for _, entry in zip(range(RECORDS_MAX), state.closed, strict=False)]
        body = _encode(Report(LAYOUT, spool.epoch, state.last_seq + 1, now_us, 0, 0, records=rows))
        spool.cut(Cut(state.last_seq + 1, now_us, len(rows), False, body))
    rows = [entry.row for entry in state.closed]
    carried = len(rows)
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
        seal=True,
    )
    spool.cut(Cut(seq, now_us, carried, True, _encode(report)))
