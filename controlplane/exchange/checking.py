"""What of a report cannot be counted, found before anything is written; each piece with its reason for quarantine."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from psycopg import Cursor

from controlplane.contracts.ingest import is_sound
from controlplane.exchange.messages import Incoming
from controlplane.exchange.slot_checking import SlotMinuteKey, check_slots, rows_of, sound_keys
from controlplane.usage.ingest import SetAside, read_slot_minutes
from controlplane.usage.records import (
    Batch,
    Origin,
    PackedRows,
    Records,
    RecordTuple,
    UnreadableRows,
    as_rows,
    to_columns,
)
from controlplane.usage.rollup_keys import group_by
from controlplane.usage.validation import MINUTE_US, Bounds, Fault, Known, find_faults
from controlplane.wire.report import DecisionSample, ObjectiveCount, RefusalCount, SlotMeter, SlotUsage

_INT4_MAX = 2**31 - 1


@dataclass
class Checked:
    """What can be counted of a group of reports, and what was set aside. `aside_records` is by position.

    `objective_agents` says whose each of `objectives` is.
    """

    records: Records
    slot_usage: list[SlotUsage] = field(default_factory=list)
    slot_meters: list[SlotMeter] = field(default_factory=list)
    objectives: list[tuple[int, ObjectiveCount]] = field(default_factory=list)
    objective_agents: list[int] = field(default_factory=list)
    refusals: list[tuple[int, RefusalCount]] = field(default_factory=list)
    samples: list[tuple[int, int, DecisionSample]] = field(default_factory=list)
    aside: list[SetAside] = field(default_factory=list)
    aside_records: dict[int, int] = field(default_factory=lambda: defaultdict(int))


@dataclass
class Read:
    """The records of a group as columns, and those that no column can hold."""

    records: Records
    unreadable: dict[int, list[RecordTuple]] = field(default_factory=dict)

    @property
    def revisions(self) -> set[tuple[int, int]]:
        """The (pool id, revision) pairs that the records name."""
        groups = group_by([self.records.pool_ids, self.records.column("revision")])
        return {(pool_id, revision) for pool_id, revision in groups.keys.T.tolist()}


def read_records(group: Sequence[Incoming]) -> Read:
    """The records of a group as columns."""
    batches: Batches = [(Origin(i.envelope.agent_id, i.pool_id), i.rows) for i in group]
    try:
        return Read(to_columns(batches))
    except UnreadableRows as unreadable:
        kept, dropped = _without(batches, set(unreadable.rows))
        return Read(to_columns(kept), dropped)


def check_records(group: Sequence[Incoming], read: Read, known: Known, bounds: Bounds) -> Checked:
    """Splits the records of a group into those that count and those that are set aside."""
    checked = Checked(read.records)
    for at, rows in read.unreadable.items():
        checked.aside.append(_aside(group[at], Fault.UNREADABLE.reason, _plain(rows), len(rows)))
        checked.aside_records[at] += len(rows)
    faults = find_faults(read.records, known, bounds)
    if faults.any():
        for at, fault, faulty in _faulty(read.records, faults):
            checked.aside.append(_aside(group[at], fault.reason, {"records": faulty}, len(faulty)))
            checked.aside_records[at] += len(faulty)
        checked.records = read.records.only(faults == Fault.NONE)
    if any(incoming.dropped for incoming in group):
        _set_aside_dropped(group, checked)
    return checked


def _set_aside_dropped(group: Sequence[Incoming], checked: Checked) -> None:
    """Records of batch items whose result was set aside: what nobody gets nobody pays, and the item runs again."""
    records = checked.records
    sources = records.source.tolist()
    positions = [at for at, raw in enumerate(records.request_ids) if raw.tobytes() in group[sources[at]].dropped]
    for source in sorted({sources[at] for at in positions}):
        rows = as_rows(records, [at for at in positions if sources[at] == source])
        checked.aside.append(_aside(group[source], "impossible_item", {"records": rows}, len(rows)))
        checked.aside_records[source] += len(rows)
    keep = np.ones(len(sources), dtype=np.bool_)
    keep[positions] = False
    checked.records = records.only(keep)


Batches = list[Batch]


def _without(batches: Batches, drop: set[int]) -> tuple[Batches, dict[int, list[RecordTuple]]]:
    kept: Batches = []
    dropped: dict[int, list[RecordTuple]] = defaultdict(list)
    position = 0
    for at, (origin, rows) in enumerate(batches):
        if isinstance(rows, PackedRows):
            kept.append((origin, rows))
            continue
        good: list[RecordTuple] = []
        for row in rows:
            (dropped[at] if position in drop else good).append(row)
            position += 1
        kept.append((origin, good))
    return kept, dropped


def _plain(rows: Sequence[RecordTuple]) -> dict[str, list[list[str]]]:
    # numbers that fit no column may fit no JSON number either
    return {"records": [[str(value) for value in row] for row in rows]}


def _faulty(records: Records, faults: NDArray[np.int8]) -> Iterator[tuple[int, Fault, list[list[object]]]]:
    for at in np.unique(records.source[faults != 0]).tolist():
        for fault in np.unique(faults[(records.source == at) & (faults != 0)]).tolist():
            chosen = np.flatnonzero((records.source == at) & (faults == fault)).tolist()
            yield at, Fault(fault), as_rows(records, chosen)


def _aside(incoming: Incoming, reason: str, payload: object, records: int = 0) -> SetAside:
    envelope = incoming.envelope
    return SetAside(envelope.agent_id, envelope.epoch, envelope.seq, reason, payload, records)


def check_rest(cursor: Cursor[Any], group: Sequence[Incoming], checked: Checked, known: Known, bounds: Bounds) -> None:
    """Sorts slot minutes, objectives, refusals and samples into what counts and what is set aside."""
    stored = read_slot_minutes(cursor, sound_keys(group, known, bounds))
    for incoming in group:
        if incoming.impossible:
            checked.aside.append(_aside(incoming, "impossible_number", incoming.impossible))
        report = incoming.report
        if report.slot_usage or report.slot_meters:
            _sort_slots(incoming, checked, check_slots(incoming, stored, known))
        if report.objectives or report.refusals or report.samples:
            _check_counts(incoming, checked, known, bounds)


def _sort_slots(incoming: Incoming, checked: Checked, bad: Mapping[SlotMinuteKey, str]) -> None:
    """Takes the slot minutes of a report but those that are `bad`, which are set aside by their reason."""
    report = incoming.report
    checked.slot_usage += [row for row in report.slot_usage if (row.slot_id, row.minute_us) not in bad]
    checked.slot_meters += [row for row in report.slot_meters if (row.slot_id, row.minute_us) not in bad]
    for reason in sorted(set(bad.values())):
        rows = rows_of(report, [key for key, why in bad.items() if why == reason])
        checked.aside.append(_aside(incoming, f"slot_minute_{reason}", msgspec.to_builtins(rows)))


def _check_counts(incoming: Incoming, checked: Checked, known: Known, bounds: Bounds) -> None:
    bad: dict[str, list[msgspec.Struct]] = defaultdict(list)
    agent_id, pool_id = incoming.envelope.agent_id, incoming.pool_id
    for objective in incoming.report.objectives:
        if objective.contract_version_id not in known.contract_versions:
            bad["unknown_contract"].append(objective)
        elif not is_sound(objective) or not bounds.oldest_us <= objective.minute_us <= bounds.newest_us:
            bad["unsound_objective"].append(objective)
        else:
            checked.objectives.append((pool_id, objective))
            checked.objective_agents.append(agent_id)
    for refusal in incoming.report.refusals:
        if refusal.tenant_id != 0 and refusal.tenant_id not in known.tenants:
            bad["unknown_tenant"].append(refusal)
        elif not _is_refusal(refusal, bounds):
            bad["unsound_refusal"].append(refusal)
        else:
            checked.refusals.append((pool_id, refusal))
    for sample in incoming.report.samples:
        if _is_sample(sample, bounds):
            checked.samples.append((agent_id, pool_id, sample))
        else:
            bad["unsound_sample"].append(sample)
    for reason, rows in bad.items():
        checked.aside.append(_aside(incoming, reason, msgspec.to_builtins(rows)))


def _is_refusal(row: RefusalCount, bounds: Bounds) -> bool:
    return (
        0 < row.count < 2**40
        and row.minute_us % MINUTE_US == 0
        and bounds.oldest_us - MINUTE_US <= row.minute_us <= bounds.newest_us
        and 0 <= row.reason < 2**15
        and 0 <= row.class_id <= _INT4_MAX
    )


def _is_sample(sample: DecisionSample, bounds: Bounds) -> bool:
    try:
        uuid.UUID(sample.request_id)
    except ValueError:
        return False
    ids = (sample.tenant_id, sample.key_id, sample.class_id)
    sound = all(0 <= number <= _INT4_MAX for number in ids) and 0 <= sample.reason < 2**15
    return sound and len(sample.decision) <= 9 and 0 < sample.at_us <= bounds.newest_us
