"""What a transaction of reports writes about usage: records, rollup deltas, slot minutes, refusals, samples.

Every function takes the raw psycopg cursor of that transaction. Upserts are in key order, so that two transactions
never wait for each other in a circle.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from psycopg import Cursor
from psycopg.types.json import Jsonb

from controlplane.core.period import US_PER_MINUTE, from_us, to_us
from controlplane.core.stage_stack import STAGES
from controlplane.usage.copy_binary import PG_EPOCH_US, row_template, rows_with_blobs
from controlplane.usage.partitions import partition_of
from controlplane.usage.records import COPY_COLUMNS, Ints, Records, to_copy
from controlplane.usage.rollup_keys import KEY_COLUMNS, ROLLUP_COLUMNS, SUM_COLUMNS, Groups, group_by, sum_groups
from controlplane.usage.sketch import sketch_groups
from controlplane.usage.validation import charged_nanos
from controlplane.wire.report import FLAG_STREAMED, DecisionSample, RefusalCount, SlotMeter, SlotUsage

_DELTA_SQL = "COPY usage_rollupdelta (minute, {}) FROM STDIN (FORMAT BINARY)".format(", ".join(ROLLUP_COLUMNS))
_DELTA_ROW = row_template(
    [
        ("minute", "time"),
        *((name, "int2" if name == "outcome" else "int4") for name in KEY_COLUMNS),
        *((name, "int8") for name in SUM_COLUMNS),
    ],
    None,
)
_FIRST_STAGE, _LAST_STAGE = "admission_us", "return_us"


@dataclass(frozen=True)
class RollupRows:
    """Records added up by minute of end and key: `sums` is (SUM_COLUMNS, groups)."""

    groups: Groups
    sums: Ints
    stages: list[bytes]


def roll_up(records: Records) -> RollupRows:
    """Records by (minute of end, key) with their sums and sketches."""
    minutes = records.column("ended_us") // US_PER_MINUTE
    columns = [minutes, records.pool_ids, *(records.column(name) for name in KEY_COLUMNS[1:])]
    groups = group_by(columns)
    added = [
        np.ones((1, len(records)), dtype=np.int64),
        records.rows("prompt_tokens", "output_tokens"),
        records.column("gpu_us")[None, :],
        records.rows("charge_prompt_nanos", "charge_gpu_nanos"),
    ]
    sums = sum_groups(groups, np.concatenate(added))
    stages_us = records.rows(_FIRST_STAGE, _LAST_STAGE)
    assert stages_us.shape[0] == len(STAGES)
    streamed = (records.column("flags") & FLAG_STREAMED) != 0
    blobs = sketch_groups(groups.of, len(groups), stages_us, records.column("ttft_us"), streamed)
    return RollupRows(groups, sums, blobs)


def store_records(cursor: Cursor[Any], records: Records, now: datetime) -> None:
    """COPYs the records and one delta per rollup key. They must have passed `validation.find_faults`."""
    if not len(records):
        return
    copy_records(cursor, records, now)
    rows = roll_up(records)
    with cursor.copy(_DELTA_SQL) as copy:
        copy.write(_deltas_to_copy(rows))


def copy_records(cursor: Cursor[Any], records: Records, now: datetime) -> None:
    """COPYs records received at `now` into the table of that day: by way of the whole it is a tenth more work."""
    with cursor.copy(f"COPY {partition_of(now)} {COPY_COLUMNS} FROM STDIN (FORMAT BINARY)") as copy:
        copy.write(to_copy(records, to_us(now)))


def _deltas_to_copy(rows: RollupRows) -> bytes:
    """The bytes of COPY BINARY for `_DELTA_SQL`."""
    packed = np.repeat(_DELTA_ROW, len(rows.groups))
    packed["minute"] = rows.groups.keys[0] * US_PER_MINUTE - PG_EPOCH_US
    for name, column in zip(KEY_COLUMNS, rows.groups.keys[1:], strict=True):
        packed[name] = column
    for name, column in zip(SUM_COLUMNS, rows.sums, strict=True):
        packed[name] = column
    return rows_with_blobs(packed, rows.stages)


def charges_by_tenant(records: Records, step_us: int) -> list[tuple[int, int, int]]:
    """(tenant id, start of the step of arrival in Unix us, charge in nanos), ordered; without those that are zero."""
    if not len(records):
        return []
    charges = records.rows("charge_prompt_nanos", "charge_gpu_nanos").sum(axis=0)
    groups = group_by([records.column("tenant_id"), records.column("arrived_us") // step_us])
    sums = sum_groups(groups, charges[None, :])[0].tolist()
    rows = zip(groups.keys.T.tolist(), sums, strict=True)
    return [(tenant, step * step_us, nanos) for (tenant, step), nanos in rows if nanos]


_SLOT_USAGE_SQL = """
INSERT INTO usage_slotusageminute (slot_id, minute, tenant_id, class_id, charged, gpu_us)
SELECT * FROM unnest(%s::int[], %s::timestamptz[], %s::int[], %s::int[], %s::bool[], %s::bigint[])
ON CONFLICT (minute, slot_id, tenant_id, class_id, charged)
DO UPDATE SET gpu_us = usage_slotusageminute.gpu_us + EXCLUDED.gpu_us
"""
_SLOT_METER_SQL = """
INSERT INTO usage_slotminute (slot_id, minute, busy_us, observed_us, warming_us, broken_us)
SELECT * FROM unnest(%s::int[], %s::timestamptz[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
ON CONFLICT (minute, slot_id) DO UPDATE SET
    busy_us = usage_slotminute.busy_us + EXCLUDED.busy_us,
    observed_us = usage_slotminute.observed_us + EXCLUDED.observed_us,
    warming_us = usage_slotminute.warming_us + EXCLUDED.warming_us,
    broken_us = usage_slotminute.broken_us + EXCLUDED.broken_us
"""
_REFUSAL_SQL = """
INSERT INTO usage_refusalminute (minute, pool_id, tenant_id, class_id, reason, count)
SELECT * FROM unnest(%s::timestamptz[], %s::int[], %s::int[], %s::int[], %s::smallint[], %s::bigint[])
ON CONFLICT (minute, pool_id, tenant_id, class_id, reason)
DO UPDATE SET count = usage_refusalminute.count + EXCLUDED.count
"""
_SAMPLE_SQL = """
INSERT INTO usage_decisionsample
    (request_id, at, agent_id, pool_id, tenant_id, key_id, class_id, decision, reason, checks)
SELECT * FROM unnest(%s::uuid[], %s::timestamptz[], %s::int[], %s::int[], %s::int[], %s::int[], %s::int[], %s::text[],
                     %s::smallint[], %s::jsonb[])
ON CONFLICT (request_id) DO NOTHING
"""


def _execute_columns(cursor: Cursor[Any], sql: str, rows: Sequence[Sequence[Any]]) -> None:
    if rows:
        cursor.execute(sql, [list(column) for column in zip(*rows, strict=True)])


def add_slot_usage(cursor: Cursor[Any], rows: Iterable[SlotUsage]) -> None:
    """Adds GPU time by slot, minute, tenant and class."""
    added: dict[tuple[int, int, int, int, bool], int] = defaultdict(int)
    for row in rows:
        added[(row.minute_us, row.slot_id, row.tenant_id, row.class_id, row.charged)] += row.gpu_us
    _execute_columns(
        cursor,
        _SLOT_USAGE_SQL,
        [(k[1], from_us(k[0]), k[2], k[3], k[4], gpu_us) for k, gpu_us in sorted(added.items())],
    )


def add_slot_meters(cursor: Cursor[Any], rows: Iterable[SlotMeter]) -> None:
    """Adds what the meters saw by slot and minute."""
    added: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        sums = added.setdefault((row.minute_us, row.slot_id), [0, 0, 0, 0])
        for at, value in enumerate((row.busy_us, row.observed_us, row.warming_us, row.broken_us)):
            sums[at] += value
    _execute_columns(cursor, _SLOT_METER_SQL, [(k[1], from_us(k[0]), *sums) for k, sums in sorted(added.items())])


def read_slot_minutes(
    cursor: Cursor[Any], keys: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], tuple[int, int, int]]:
    """(slot id, minute in Unix us) -> (attributed, busy, observed) microseconds stored so far."""
    wanted = sorted(set(keys))
    if not wanted:
        return {}
    cursor.execute(
        """
        SELECT k.slot_id, k.minute,
               coalesce((SELECT sum(u.gpu_us) FROM usage_slotusageminute u
                         WHERE u.minute = k.minute AND u.slot_id = k.slot_id), 0)::bigint,
               coalesce(m.busy_us, 0), coalesce(m.observed_us, 0)
        FROM unnest(%s::int[], %s::timestamptz[]) AS k (slot_id, minute)
        LEFT JOIN usage_slotminute m ON m.minute = k.minute AND m.slot_id = k.slot_id
        """,
        ([slot for slot, _ in wanted], [from_us(minute_us) for _, minute_us in wanted]),
    )
    return {(slot, to_us(minute)): (gpu, busy, observed) for slot, minute, gpu, busy, observed in cursor.fetchall()}


def add_refusals(cursor: Cursor[Any], rows: Iterable[tuple[int, RefusalCount]]) -> None:
    """Adds refusal counts; rows are (pool id, count)."""
    added: dict[tuple[int, int, int, int, int], int] = defaultdict(int)
    for pool_id, row in rows:
        added[(row.minute_us, pool_id, row.tenant_id, row.class_id, row.reason)] += row.count
    _execute_columns(cursor, _REFUSAL_SQL, [(from_us(k[0]), *k[1:], count) for k, count in sorted(added.items())])


def _storable(document: Any) -> str:
    # PostgreSQL has no zero character in JSON; what is stored shows where one was
    return json.dumps(document).replace("\\u0000", "\\ufffd")


def store_samples(cursor: Cursor[Any], rows: Iterable[tuple[int, int, DecisionSample]]) -> None:
    """Keeps admission decisions in full; rows are (agent id, pool id, sample). A sample that is there stays."""
    made = [
        (
            sample.request_id, from_us(sample.at_us), agent_id, pool_id, sample.tenant_id, sample.key_id,
            sample.class_id, sample.decision.replace("\x00", ""), sample.reason,
            # a check quotes what a client sent, and a client may send anything
            Jsonb(
                [{"name": c.name, "value": c.value, "limit": c.limit, "held": c.held} for c in sample.checks],
                dumps=_storable,
            ),
        )
        for agent_id, pool_id, sample in rows
    ]  # fmt: skip
    _execute_columns(cursor, _SAMPLE_SQL, sorted(made, key=lambda row: row[0]))


@dataclass(frozen=True)
class SetAside:
    """Something for the quarantine: `records` is how many usage records it holds."""

    agent_id: int
    epoch: int
    seq: int
    reason: str
    payload: Any
    records: int


def quarantine(cursor: Cursor[Any], rows: Sequence[SetAside], now: datetime) -> None:
    """Keeps what cannot be counted, with its reason."""
    cursor.executemany(
        "INSERT INTO usage_quarantine (at, agent_id, epoch, seq, reason, payload, records, nanos)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
        [
            (
                now, row.agent_id, row.epoch, row.seq, row.reason[:60], Jsonb(row.payload, dumps=_storable),
                row.records, charged_nanos(row.payload),
            )
            for row in rows
        ],
    )  # fmt: skip
