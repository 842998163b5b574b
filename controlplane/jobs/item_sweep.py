"""What time does to items: leases lapse, and what was cancelled or expired ends. Safe to run any number of times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from django.db import connection, transaction

from controlplane.core.batch_items import ItemState, StoredItem, lapse
from controlplane.jobs.item_leases import SILENT_S
from controlplane.usage.sql import SqlCursor

CHUNK = 5_000
CHUNKS_MOST = 200


@dataclass(frozen=True, slots=True)
class ItemSweep:
    """What one sweep did, in items."""

    lapsed: int
    ended: int


def sweep_items(now: datetime) -> ItemSweep:
    """Gives lapsed leases back and ends the waiting items of jobs that run no longer."""
    return ItemSweep(lapsed=_lapse(now), ended=sum(_end_waiting(*job) for job in _jobs_to_end()))


def _lapse(now: datetime) -> int:
    total = 0
    for _ in range(CHUNKS_MOST):
        done = _lapse_chunk(now)
        total += done
        if done < CHUNK:
            break
    return total


_LAPSED_SQL = """
SELECT i.day, i.job_id, i.line, i.attempt, i.failures, i.fence, j.state <> 'running', i.agent_id
FROM jobs_item i
JOIN jobs_job j ON j.id = i.job_id
LEFT JOIN jobs_itemholder h ON h.agent_id = i.agent_id
LEFT JOIN usage_agentcursor c ON c.agent_id = i.agent_id AND c.epoch = i.epoch
WHERE i.state = 1
  AND (i.lease_expires <= %(now)s OR h.seen_at IS NULL OR h.seen_at <= %(silent)s
       OR (h.epoch <> i.epoch AND c.sealed_at IS NOT NULL))
ORDER BY i.job_id, i.line LIMIT %(limit)s FOR UPDATE OF i SKIP LOCKED
"""
_BACK_SQL = """
UPDATE jobs_item i SET state = r.state, attempt = r.attempt, reason = r.reason,
    agent_id = NULL, epoch = NULL, lease_expires = NULL
FROM unnest(%s::date[], %s::bigint[], %s::int[], %s::smallint[], %s::smallint[], %s::text[])
     AS r (day, job_id, line, state, attempt, reason)
WHERE i.day = r.day AND i.job_id = r.job_id AND i.line = r.line
"""
LAPSED_OFTEN = "Its lease ended {attempts} times without a result: it may be what ends its agents."


def _lapse_chunk(now: datetime) -> int:
    """Leases that ended: past their time, of a silent agent, or of a process whose successor sealed its reports."""
    with transaction.atomic(), connection.cursor() as cursor:
        silent = now - timedelta(seconds=SILENT_S)
        cursor.execute(_LAPSED_SQL, {"now": now, "silent": silent, "limit": CHUNK})
        rows = cursor.fetchall()
        if not rows:
            return 0
        after = [
            lapse(StoredItem(ItemState.LEASED, attempt, failures, fence, cancelled))
            for _, _, _, attempt, failures, fence, cancelled, _ in rows
        ]
        reasons = [
            LAPSED_OFTEN.format(attempts=each.attempt) if each.state is ItemState.PARKED else "" for each in after
        ]
        cursor.execute(
            _BACK_SQL,
            (
                [row[0] for row in rows],
                [row[1] for row in rows],
                [row[2] for row in rows],
                [int(each.state) for each in after],
                [each.attempt for each in after],
                reasons,
            ),
        )
        _let_go(cursor, Counter(row[7] for row in rows))
        _count(cursor, [(row[1], each.state) for row, each in zip(rows, after, strict=True)], now)
    return len(rows)


def _let_go(cursor: SqlCursor, lapsed: Counter[int]) -> None:
    agents = sorted(lapsed)
    cursor.execute("SELECT 1 FROM jobs_itemholder WHERE agent_id = ANY(%s) ORDER BY agent_id FOR UPDATE", (agents,))
    cursor.execute(
        "UPDATE jobs_itemholder h SET held = greatest(0, h.held - r.n) FROM unnest(%s::int[], %s::int[]) AS r (id, n)"
        " WHERE h.agent_id = r.id",
        (agents, [lapsed[agent] for agent in agents]),
    )


_COUNT_SQL = """
UPDATE jobs_job j SET items_parked = j.items_parked + r.parked, items_cancelled = j.items_cancelled + r.cancelled,
    state = CASE WHEN j.state = 'running' AND j.items_completed + j.items_parked + r.parked >= j.items
                 THEN 'completed' ELSE j.state END,
    finished_at = CASE WHEN j.finished_at IS NULL AND j.items_completed + j.items_parked + r.parked >= j.items
                       THEN %s ELSE j.finished_at END,
    version = j.version + 1
FROM unnest(%s::bigint[], %s::int[], %s::int[]) AS r (id, parked, cancelled)
WHERE j.id = r.id
"""


def _count(cursor: SqlCursor, ends: list[tuple[int, ItemState]], now: datetime) -> None:
    parked = Counter(job for job, state in ends if state is ItemState.PARKED)
    cancelled = Counter(job for job, state in ends if state is ItemState.CANCELLED)
    jobs = sorted({*parked, *cancelled})
    if jobs:
        cursor.execute("SELECT id FROM jobs_job WHERE id = ANY(%s) ORDER BY id FOR UPDATE", (jobs,))
        counts = [parked[job] for job in jobs], [cancelled[job] for job in jobs]
        cursor.execute(_COUNT_SQL, (now, jobs, *counts))


def _jobs_to_end() -> list[tuple[int, date]]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id, day FROM jobs_job WHERE has_items AND rows_purged_at IS NULL"
            " AND state IN ('cancelled', 'expired') AND items > items_completed + items_parked + items_cancelled"
            " ORDER BY id LIMIT 100"
        )
        return cursor.fetchall()


_END_SQL = """
WITH ended AS (
    UPDATE jobs_item SET state = 4
    WHERE day = %(day)s AND job_id = %(job)s AND line = ANY(ARRAY(
        SELECT line FROM jobs_item WHERE day = %(day)s AND job_id = %(job)s AND state = 0
        LIMIT %(limit)s FOR UPDATE SKIP LOCKED
    )) RETURNING 1
)
UPDATE jobs_job SET items_cancelled = items_cancelled + (SELECT count(*) FROM ended), version = version + 1
WHERE id = %(job)s RETURNING (SELECT count(*) FROM ended)
"""


def _end_waiting(job_id: int, day: date) -> int:
    """Cancels what waits of a job that ended; what runs is ended by its agent, or by the end of its lease."""
    total = 0
    for _ in range(CHUNKS_MOST * 10):
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(_END_SQL, {"day": day, "job": job_id, "limit": CHUNK})
            row = cursor.fetchone()
        done = row[0] if row else 0
        total += done
        if done < CHUNK:
            break
    return total
