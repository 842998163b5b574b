"""Leasing items to agents: what each has room for, claimed in the order of deadlines, listed until it was received.

Runs on the agents' door with psycopg's cursor. A claim takes rows with SKIP LOCKED, so two agents never wait for each
other; the order of locks is holder, items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from psycopg import Connection, Cursor, sql

from controlplane.core.estimate import WorkRates, raw_gpu_us
from controlplane.core.item_balance import Holding, excess
from controlplane.core.period import to_us
from controlplane.jobs.item_partitions import items_table
from controlplane.jobs.job_money import affordable
from controlplane.jobs.paid_work import Priced
from controlplane.jobs.queries import LEARNT_FROM_ITEMS, MISSED_GRACE
from controlplane.usage.sql import SqlCursor
from controlplane.wire.report import Item, ItemJob, ItemRoom, ItemsCancelled

HORIZON_S: Final = 60
SILENT_S: Final = 90
ITEMS_PER_ANSWER: Final = 5_000
BYTES_PER_ANSWER: Final = 4 * 1024 * 1024
ITEM_BYTES: Final = 64
ROOM_MOST: Final = 50_000


class RoomRow(msgspec.Struct, frozen=True):
    """What one report says about items; `class_id` 0 and no room where it says nothing."""

    agent_id: int
    epoch: int
    pool_id: int
    room: Sequence[ItemRoom]
    through: int


_NOTE_SQL = """
INSERT INTO jobs_itemholder AS h
    (agent_id, epoch, pool_id, class_id, room, room_gpu_us, free, through, held, seen_at)
SELECT r.agent_id, r.epoch, r.pool_id, r.class_id, r.room, r.gpu_us, r.room, r.through, 0, %s
FROM unnest(%s::int[], %s::int[], %s::int[], %s::int[], %s::int[], %s::bigint[], %s::bigint[])
     AS r (agent_id, epoch, pool_id, class_id, room, gpu_us, through)
ORDER BY r.agent_id
ON CONFLICT (agent_id) DO UPDATE SET
    epoch = EXCLUDED.epoch, pool_id = EXCLUDED.pool_id, class_id = EXCLUDED.class_id, room = EXCLUDED.room,
    room_gpu_us = EXCLUDED.room_gpu_us, free = EXCLUDED.room, through = EXCLUDED.through, seen_at = EXCLUDED.seen_at
WHERE h.epoch <= EXCLUDED.epoch
"""
_SILENT_SQL = "UPDATE jobs_itemholder SET free = 0, room = 0, seen_at = %s WHERE agent_id = ANY(%s) AND epoch = ANY(%s)"


def note_room(cursor: Cursor[Any], rows: Sequence[RoomRow], now: datetime) -> None:
    """Keeps what agents have room for. A pool has one batch class: of several rooms the greatest counts."""
    talking = sorted((row for row in rows if row.room or row.through), key=lambda row: row.agent_id)
    quiet = [row for row in rows if not (row.room or row.through)]
    if talking:
        rooms = [max(row.room, key=lambda each: each.items, default=ItemRoom(0, 0)) for row in talking]
        cursor.execute(
            _NOTE_SQL,
            (
                now,
                [row.agent_id for row in talking],
                [row.epoch for row in talking],
                [row.pool_id for row in talking],
                [room.class_id for room in rooms],
                [min(room.items, ROOM_MOST) for room in rooms],
                [room.gpu_us for room in rooms],
                [row.through for row in talking],
            ),
        )
    if quiet:
        cursor.execute(_SILENT_SQL, (now, [row.agent_id for row in quiet], [row.epoch for row in quiet]))


@dataclass(frozen=True, slots=True)
class Leasable:
    """A job that has items to lease, with the GPU time of one of them."""

    id: int
    day: date
    unfinished: int
    item_gpu_us: int
    lease_us: int
    uuid: UUID
    tenant_id: int
    item_bound_nanos: int

    @property
    def priced(self) -> Priced:
        return Priced(self.id, self.uuid, self.tenant_id, self.item_bound_nanos, self.unfinished)


@dataclass
class Leased:
    """What an agent is told: its items that it has not received, their jobs, and what it should drop."""

    items: list[Item] = field(default_factory=list)
    jobs: list[ItemJob] = field(default_factory=list)
    cancelled: list[ItemsCancelled] = field(default_factory=list)
    give_back: int = 0


_HOLDERS_SQL = """
SELECT agent_id, epoch, pool_id, class_id, room, room_gpu_us, free, through
FROM jobs_itemholder WHERE agent_id = ANY(%s)
"""


def lease_items(connection: Connection[Any], agents: Sequence[tuple[int, int]], now: datetime) -> Mapping[int, Leased]:
    """Claims items for agents (id, epoch) that have room and lists what each has not received yet.

    Each agent is a short transaction of its own. Asking again claims nothing more: what was claimed and not received
    fills the room that was reported.
    """
    epochs = dict(agents)
    with connection.cursor() as cursor:
        holders = cursor.execute(_HOLDERS_SQL, (list(epochs),)).fetchall()
        answers: dict[int, Leased] = {}
        jobs: dict[tuple[int, int], list[Leasable]] = {}
        paid: dict[int, int] = {}
        for agent_id, epoch, pool_id, class_id, room, *_ in sorted(holders):
            if epoch != epochs[agent_id]:
                continue
            if room > 0 and (pool_id, class_id) not in jobs:
                jobs[(pool_id, class_id)], bounds = in_turn(cursor, pool_id, class_id, now)
                paid |= bounds
            with connection.transaction():
                leased = _serve(cursor, agent_id, jobs.get((pool_id, class_id), []), paid, now)
            if leased is not None:
                answers[agent_id] = leased
    return answers


_LEASABLE_SQL = """
SELECT j.id, j.day, j.items - j.items_completed - j.items_parked - j.items_cancelled, j.items_completed, j.gpu_us_done,
       j.prompt_tokens, j.expected_output_tokens, p.prefill_us_per_token, p.decode_us_per_token, c.stage_timeout_s,
       j.uuid, j.tenant_id, coalesce(-div(-(j.admission ->> 'bound_nanos')::bigint, j.items), 0)::bigint
FROM jobs_job j
JOIN fleet_pool p ON p.id = j.pool_id
JOIN contracts_workloadclass c ON c.id = j.workload_class_id
JOIN tenants_tenant t ON t.id = j.tenant_id
LEFT JOIN tenants_apikey k ON k.id = j.key_id
WHERE j.pool_id = %s AND j.workload_class_id = %s AND j.state = 'running' AND j.has_items
  AND j.items > j.items_completed + j.items_parked + j.items_cancelled AND c.state = 'active' AND t.state = 'active'
  AND (k.id IS NULL OR k.state = 'active')
ORDER BY CASE WHEN j.deadline IS NULL THEN 2 WHEN j.deadline <= %s THEN 1 ELSE 0 END, j.deadline, j.id
LIMIT 200
"""


def _leasable(cursor: SqlCursor, pool_id: int, class_id: int, now: datetime) -> list[Leasable]:
    """Jobs by deadline. Those that missed theirs for good make way for those that can still hold it."""
    cursor.execute(_LEASABLE_SQL, (pool_id, class_id, now - MISSED_GRACE))
    return [
        Leasable(
            id=row[0],
            day=row[1],
            unfinished=row[2],
            item_gpu_us=max(1, row[4] // row[3])
            if row[3] >= LEARNT_FROM_ITEMS and row[4] > 0
            else max(1, raw_gpu_us(WorkRates(row[7], row[8]), row[5], row[6])),
            # all of the horizon may be before it in the queue, then it runs as long as a stage may
            lease_us=(2 * HORIZON_S + row[9]) * 1_000_000,
            uuid=row[10],
            tenant_id=row[11],
            item_bound_nanos=row[12],
        )
        for row in cursor.fetchall()
    ]


def in_turn(cursor: SqlCursor, pool_id: int, class_id: int, now: datetime) -> tuple[list[Leasable], dict[int, int]]:
    """Jobs whose items can be leased, in their turn, and how many of each can be paid for where that is a bound."""
    found = _leasable(cursor, pool_id, class_id, now)
    paid = affordable(cursor, [job.priced for job in found], now)
    return [job for job in found if paid.get(job.id, 1)], paid


def _serve(
    cursor: Cursor[Any], agent_id: int, jobs: Sequence[Leasable], paid: dict[int, int], now: datetime
) -> Leased | None:
    """One agent's turn, under the lock of its holder row. What it gets is taken off what jobs can pay for."""
    row = cursor.execute(
        "SELECT epoch, pool_id, class_id, room, room_gpu_us, through, free, held FROM jobs_itemholder"
        " WHERE agent_id = %s FOR UPDATE",
        (agent_id,),
    ).fetchone()
    if row is None:
        return None
    epoch, pool_id, class_id, room, room_gpu_us, through, free, noted = row
    held, pending = _holding(cursor, agent_id, epoch, through)
    wanted = min(room - pending, ITEMS_PER_ANSWER - pending)
    claimed = share = 0
    if wanted > 0 and jobs:
        waiting = sum(job.unfinished for job in jobs) - held
        share = _share(cursor, pool_id, class_id, agent_id, wanted, waiting, now)
        claimed = _claim(cursor, agent_id, epoch, jobs, share, room_gpu_us, paid, now)
    # who had its share of too little asks for no more until its next report
    left = max(0, wanted - claimed) if share == wanted or not jobs else 0
    if held + claimed != noted or free != left:
        cursor.execute(
            "UPDATE jobs_itemholder SET held = %s, free = %s WHERE agent_id = %s", (held + claimed, left, agent_id)
        )
    leased = _list(cursor, agent_id, epoch, through, now) if pending + claimed else Leased()
    if held:
        leased.cancelled = _cancelled(cursor, agent_id, epoch)
        if not claimed and not pending:
            leased.give_back = _excess(cursor, pool_id, class_id, agent_id, Holding(held, held + room), now)
    return leased


_OTHERS_SQL = """
SELECT held, held + room FROM jobs_itemholder
WHERE pool_id = %s AND class_id = %s AND seen_at > %s AND agent_id <> %s AND held + room > 0
"""


def _excess(cursor: Cursor[Any], pool_id: int, class_id: int, agent_id: int, own: Holding, now: datetime) -> int:
    """What the agent should give back for others that have nothing left; nothing while there is something to lease."""
    since = now - timedelta(seconds=SILENT_S)
    rows = cursor.execute(_OTHERS_SQL, (pool_id, class_id, since, agent_id)).fetchall()
    others = [Holding(*row) for row in rows]
    more = excess(own, others) if others else 0
    if not more:
        return 0
    unfinished = sum(job.unfinished for job in _leasable(cursor, pool_id, class_id, now))
    return 0 if unfinished > own.held + sum(other.held for other in others) else more


def _holding(cursor: Cursor[Any], agent_id: int, epoch: int, through: int) -> tuple[int, int]:
    """(items leased to the epoch, those of them it has not received)"""
    row = cursor.execute(
        "SELECT count(*), count(*) FILTER (WHERE fence > %s) FROM jobs_item"
        " WHERE state = 1 AND agent_id = %s AND epoch = %s",
        (through, agent_id, epoch),
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def _share(
    cursor: Cursor[Any], pool_id: int, class_id: int, agent_id: int, wanted: int, open_items: int, now: datetime
) -> int:
    """How many of the waiting items are this agent's: all it wants while there is enough for every agent's room, else
    its part of them in proportion to its room. `open_items` are those that this agent does not hold.
    """
    row = cursor.execute(
        "SELECT coalesce(sum(free), 0), coalesce(sum(held), 0) FROM jobs_itemholder"
        " WHERE pool_id = %s AND class_id = %s AND seen_at > %s AND agent_id <> %s",
        (pool_id, class_id, now - timedelta(seconds=SILENT_S), agent_id),
    ).fetchone()
    assert row is not None
    others, held = row
    waiting = max(0, open_items - held)
    if waiting >= wanted + others:
        return wanted
    return min(wanted, -(-waiting * wanted // (wanted + others)) or 1)


# On the day's own table: there only the index of waiting items has this order, so a claim late in a job does not go
# through all that is done; and its rows are named by where they are, so that no plan looks for them again.
_CLAIM_SQL = sql.SQL("""
UPDATE {table}
SET state = 1, agent_id = %(agent)s, epoch = %(epoch)s, fence = nextval('jobs_item_fence'), lease_expires = %(expires)s
WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM {table} WHERE job_id = %(job)s AND state = 0
    ORDER BY line LIMIT %(limit)s FOR UPDATE SKIP LOCKED
))
""")


def _claim(
    cursor: Cursor[Any],
    agent_id: int,
    epoch: int,
    jobs: Sequence[Leasable],
    wanted: int,
    room_gpu_us: int,
    paid: dict[int, int],
    now: datetime,
) -> int:
    claimed = 0
    for job in jobs:
        limit = wanted - claimed
        if room_gpu_us >= 0:
            limit = min(limit, room_gpu_us // job.item_gpu_us or (0 if claimed else 1))
        if limit <= 0:
            break
        limit = min(limit, paid.get(job.id, limit))
        if not limit:
            continue
        cursor.execute(
            _CLAIM_SQL.format(table=sql.Identifier(items_table(job.day))),
            {
                "day": job.day, "job": job.id, "limit": limit, "agent": agent_id, "epoch": epoch,
                "expires": now + timedelta(microseconds=job.lease_us),
            },
        )  # fmt: skip
        claimed += cursor.rowcount
        if job.id in paid:
            paid[job.id] -= cursor.rowcount
        if room_gpu_us >= 0:
            room_gpu_us = max(0, room_gpu_us - cursor.rowcount * job.item_gpu_us)
        if claimed >= wanted:
            break
    return claimed


_LIST_SQL = """
SELECT day, job_id, line, attempt, fence, lease_expires, prompt_tokens
FROM jobs_item WHERE state = 1 AND agent_id = %s AND epoch = %s AND fence > %s ORDER BY fence LIMIT %s
"""
_OF_LINES = " FROM jobs_itembody WHERE day = %s AND job_id = %s AND line BETWEEN %s AND %s AND line = ANY(%s)"
_SIZES_SQL = "SELECT line, octet_length(body)" + _OF_LINES
_BODIES_SQL = "SELECT line, body" + _OF_LINES
_JOBS_SQL = """
SELECT j.id, j.uuid, j.tenant_id, coalesce(j.key_id, 0), j.workload_class_id, m.name, j.endpoint, j.deadline,
       j.expected_output_tokens
FROM jobs_job j JOIN fleet_pool p ON p.id = j.pool_id JOIN fleet_servedmodel m ON m.id = p.model_id
WHERE j.id = ANY(%s) ORDER BY j.id
"""


def _list(cursor: Cursor[Any], agent_id: int, epoch: int, through: int, now: datetime) -> Leased:
    """The items after `through` in the order of their fences, cut at the bounds of an answer; the rest come next."""
    rows = cursor.execute(_LIST_SQL, (agent_id, epoch, through, ITEMS_PER_ANSWER)).fetchall()
    rows = _that_fit(rows, _of_lines(cursor, _SIZES_SQL, rows))
    bodies = _of_lines(cursor, _BODIES_SQL, rows)
    now_us = to_us(now)
    items = [
        Item(job, line, attempt, fence, max(0, to_us(expires) - now_us), tokens, msgspec.Raw(bodies[(job, line)]))
        for _, job, line, attempt, fence, expires, tokens in rows
    ]
    jobs = cursor.execute(_JOBS_SQL, (sorted({row[1] for row in rows}),)).fetchall()
    return Leased(items, [_item_job(row) for row in jobs])


_Row = tuple[Any, ...]


def _of_lines(cursor: Cursor[Any], query: str, rows: Sequence[_Row]) -> dict[tuple[int, int], Any]:
    """(job, line) -> what the query says of it; one query a job."""
    lines: dict[tuple[date, int], list[int]] = {}
    for day, job, line, *_ in rows:
        lines.setdefault((day, job), []).append(line)
    return {
        (job, line): value
        for (day, job), wanted in lines.items()
        for line, value in cursor.execute(query, (day, job, min(wanted), max(wanted), wanted)).fetchall()
    }


def _that_fit(rows: Sequence[_Row], sizes: Mapping[tuple[int, int], int]) -> list[_Row]:
    """The first rows whose bodies fit an answer, at least one."""
    total = 0
    fitting: list[_Row] = []
    for row in rows:
        total += sizes[(row[1], row[2])] + ITEM_BYTES
        if fitting and total > BYTES_PER_ANSWER:
            break
        fitting.append(row)
    return fitting


def _item_job(row: tuple[Any, ...]) -> ItemJob:
    job_id, uuid, tenant, key, class_id, model, endpoint, deadline, output = row
    due_us = None if deadline is None else to_us(deadline)
    return ItemJob(job_id, str(uuid), tenant, key, class_id, model, endpoint, due_us, output)


def _cancelled(cursor: Cursor[Any], agent_id: int, epoch: int) -> list[ItemsCancelled]:
    """The jobs of which the agent holds items and that run no longer."""
    rows: Iterable[tuple[int]] = cursor.execute(
        "SELECT DISTINCT i.job_id FROM jobs_item i JOIN jobs_job j ON j.id = i.job_id"
        " WHERE i.state = 1 AND i.agent_id = %s AND i.epoch = %s AND j.state <> 'running' ORDER BY 1",
        (agent_id, epoch),
    ).fetchall()
    return [ItemsCancelled(job_id) for (job_id,) in rows]
