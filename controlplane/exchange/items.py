"""Batch items in a transaction of reports: settled before records are stored, so that each item is charged once."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from msgspec import structs
from psycopg import Cursor

from controlplane.exchange.checking import Checked
from controlplane.exchange.messages import Incoming
from controlplane.jobs.item_leases import RoomRow, note_room
from controlplane.jobs.item_settling import Brought, Settled, settle
from controlplane.usage.records import Records
from controlplane.wire.report import FLAG_NOT_CHARGED, SlotUsage


def settle_items(
    cursor: Cursor[Any], taken: Sequence[Incoming], checked: Checked, item_jobs: set[int], now: datetime
) -> Settled:
    """Settles the results of these reports and takes the charge off every record whose result was not the first.

    `item_jobs` are the ids of the jobs whose items are rows: their records are charged by an accepted result only.
    """
    records = checked.records
    brought = [
        Brought(incoming.envelope.agent_id, incoming.pool_id, done)
        for incoming in taken
        for done in incoming.report.items_done
    ]
    settled = settle(cursor, brought, now)
    if brought or item_jobs:
        named = {row.done.request_id for row in brought}
        positions = _to_uncharge(records, item_jobs, named, settled.charged)
        repeated = [at for at in positions if not records.column("flags")[at] & FLAG_NOT_CHARGED]
        checked.slot_usage = as_repeated(checked.slot_usage, _gpu_us(records, repeated))
        uncharge(records, positions)
    return settled


def _to_uncharge(records: Records, item_jobs: set[int], named: set[str], charged: set[str]) -> list[int]:
    """The positions of records of items that no accepted result came with."""
    of_items = np.isin(records.job_ids, list(item_jobs)) if item_jobs else np.zeros(len(records), dtype=bool)
    named_bytes, charged_bytes = _bytes_of(named), _bytes_of(charged)
    found = []
    for at, raw in enumerate(records.request_ids):
        request = raw.tobytes()
        if request not in charged_bytes and (of_items[at] or request in named_bytes):
            found.append(at)
    return found


def _bytes_of(texts: set[str]) -> set[bytes]:
    found = set()
    for text in texts:
        try:
            found.add(uuid.UUID(text).bytes)
        except ValueError:
            continue
    return found


_Use = tuple[int, int, int]


def _gpu_us(records: Records, positions: Sequence[int]) -> dict[_Use, int]:
    """(slot, tenant, class) -> GPU time of these records."""
    found: dict[_Use, int] = defaultdict(int)
    names = ("slot_id", "tenant_id", "class_id", "gpu_us")
    for at in positions:
        slot, tenant, klass, gpu_us = (int(records.column(name)[at]) for name in names)
        found[(slot, tenant, klass)] += gpu_us
    return found


def as_repeated(rows: list[SlotUsage], gpu_us: Mapping[_Use, int]) -> list[SlotUsage]:
    """Slot minutes with so much of their charged time as repeated work, the newest minutes first; sums stay.

    Time that an earlier report told stays charged time of its tenant: its minutes are stored.
    """
    left = {use: us for use, us in gpu_us.items() if us > 0}
    if not left:
        return rows
    found: list[SlotUsage] = []
    for row in sorted(rows, key=lambda row: row.minute_us, reverse=True):
        use = (row.slot_id, row.tenant_id, row.class_id)
        moved = min(left.get(use, 0), row.gpu_us) if row.charged else 0
        if moved > 0:
            left[use] -= moved
            found.append(structs.replace(row, charged=False, gpu_us=moved))
        if row.gpu_us - max(0, moved):
            found.append(structs.replace(row, gpu_us=row.gpu_us - max(0, moved)))
    return found


def uncharge(records: Records, positions: Sequence[int]) -> None:
    """Takes the charges off records: what they used is repeated work."""
    if positions:
        # a single record is a view of the bytes it was packed in
        records.integers = np.require(records.integers, requirements="W")
        records.rows("charge_prompt_nanos", "charge_gpu_nanos")[:, positions] = 0
        records.column("flags")[positions] |= FLAG_NOT_CHARGED


def note_item_room(cursor: Cursor[Any], present: Sequence[Incoming], now: datetime) -> None:
    """Keeps what the agents of these reports, each of its present epoch, have room for."""
    rows = [
        RoomRow(i.envelope.agent_id, i.envelope.epoch, i.pool_id, i.report.item_room, i.report.items_through)
        for i in present
    ]
    note_room(cursor, rows, now)
