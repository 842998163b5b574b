"""Batch items in a transaction of reports: settled before records are stored, so that each item is charged once."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from msgspec import structs
from psycopg import Cursor

from controlplane.budgets.lease_settling import Waiver
from controlplane.exchange.checking import Checked
from controlplane.exchange.messages import Incoming
from controlplane.jobs.item_leases import RoomRow, note_room
from controlplane.jobs.item_settling import Brought, JobChange, settle
from controlplane.usage.records import Records
from controlplane.wire.report import FLAG_NOT_CHARGED, SlotUsage


@dataclass(frozen=True, slots=True)
class ItemsSettled:
    """What the results of a transaction add to jobs, and what leases paid for results that were not the first."""

    jobs: Mapping[int, JobChange]
    waivers: Sequence[Waiver]


def settle_items(cursor: Cursor[Any], taken: Sequence[Incoming], checked: Checked, now: datetime) -> ItemsSettled:
    """Settles the results of these reports and takes the charge off every record whose result was not the first.

    A record that no result names is a request that a client sent itself and pays for, whatever job it says it is of.
    """
    records = checked.records
    brought = [
        Brought(incoming.envelope.agent_id, incoming.pool_id, done)
        for incoming in taken
        for done in incoming.report.items_done
    ]
    settled = settle(cursor, brought, now)
    waivers: list[Waiver] = []
    refused = {_bytes_of(row): row for row in brought if row.done.request_id not in settled.charged}
    if refused:
        positions = [at for at, raw in enumerate(records.request_ids) if raw.tobytes() in refused]
        repeated = [at for at in positions if not records.column("flags")[at] & FLAG_NOT_CHARGED]
        checked.slot_usage = as_repeated(checked.slot_usage, _gpu_us(records, repeated))
        for at, nanos in zip(repeated, _charges(records, repeated), strict=True):
            row = refused[records.request_ids[at].tobytes()]
            if row.done.lease_id and nanos > 0:
                waivers.append(Waiver(row.agent_id, row.done.lease_id, nanos))
        uncharge(records, positions)
    return ItemsSettled(settled.jobs, waivers)


def _bytes_of(row: Brought) -> bytes:
    try:
        return uuid.UUID(row.done.request_id).bytes
    except ValueError:
        return b""


def _charges(records: Records, positions: Sequence[int]) -> list[int]:
    """What each of these records charges, in nanos."""
    charges: list[int] = records.rows("charge_prompt_nanos", "charge_gpu_nanos")[:, positions].sum(axis=0).tolist()
    return charges


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
