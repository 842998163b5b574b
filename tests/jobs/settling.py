"""Leases and settles items straight through the functions of the agents' door, for tests of what comes after."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from django.utils import timezone
from msgspec import Raw

from controlplane.core.reasons import Outcome
from controlplane.exchange.database import close_pools, connection
from controlplane.jobs.ingest import Progress, note_progress
from controlplane.jobs.item_leases import Leased, RoomRow, lease_items, note_room
from controlplane.jobs.item_settling import Brought, Settled, settle
from controlplane.wire.report import Item, ItemDone, ItemRoom

AGENT = 9_001


def lease(world, items: int, *, agent: int = AGENT, epoch: int = 1, through: int = 0, now=None) -> Leased:
    """What an agent with room for so many items is leased."""
    now = now or timezone.now()
    room = [ItemRoom(world.bulk.pk, items)] if items else []
    with connection() as held:
        with held.transaction(), held.cursor() as cursor:
            note_room(cursor, [RoomRow(agent, epoch, world.pool.pk, room, through)], now)
        return lease_items(held, [(agent, epoch)], now).get(agent, Leased())


def done(item: Item, *, response: bytes | None = None, status: int = 200, reason: str = "", outcome=None) -> ItemDone:
    text = response if response is not None else b'{"line":%d}' % item.line
    outcome = outcome or (Outcome.COMPLETED if status == 200 else Outcome.UPSTREAM_ERROR)
    return ItemDone(
        item.job_id, item.line, item.attempt, item.fence, str(uuid.uuid4()), outcome.code, status, Raw(text), reason
    )


def bring(world, ends: Sequence[ItemDone], *, agent: int = AGENT, now=None) -> Settled:
    """Settles ends of attempts in one transaction, as a report of that agent would."""
    now = now or timezone.now()
    with connection() as held, held.transaction(), held.cursor() as cursor:
        settled = settle(cursor, [Brought(agent, world.pool.pk, end) for end in ends], now)
        rows = [
            Progress(job, change.completed, change.failed, 0, now, change.parked, change.cancelled)
            for job, change in settled.jobs.items()
        ]
        note_progress(cursor, rows, now)
    return settled


def run_all(world, *, parked: dict[int, str] | None = None, only: Sequence[int] | None = None) -> None:
    """Runs every item of every job, or those of some lines only; `parked` lines are refused by the engine."""
    parked = parked or {}
    leased = lease(world, 1_000 if only is None else len(only))
    ends = [
        done(item, status=400, reason=parked[item.line], response=b"null") if item.line in parked else done(item)
        for item in leased.items
    ]
    bring(world, ends)
    close_pools()
