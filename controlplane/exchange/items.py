"""Batch items in a transaction of reports: settled before records are stored, so that each item is charged once."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
from psycopg import Cursor

from controlplane.exchange.messages import Incoming
from controlplane.jobs.item_leases import RoomRow, note_room
from controlplane.jobs.item_settling import Brought, Settled, settle
from controlplane.usage.records import Records
from controlplane.wire.report import FLAG_NOT_CHARGED


def settle_items(
    cursor: Cursor[Any], taken: Sequence[Incoming], records: Records, item_jobs: set[int], now: datetime
) -> Settled:
    """Settles the results of these reports and takes the charge off every record whose result was not the first.

    `item_jobs` are the ids of the jobs whose items are rows: their records are charged by an accepted result only.
    """
    brought = [
        Brought(incoming.envelope.agent_id, incoming.pool_id, done)
        for incoming in taken
        for done in incoming.report.items_done
    ]
    settled = settle(cursor, brought, now)
    if brought or item_jobs:
        named = {row.done.request_id for row in brought}
        uncharge(records, _to_uncharge(records, item_jobs, named, settled.charged))
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
