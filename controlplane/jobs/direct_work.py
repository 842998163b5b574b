"""Batch requests of clients with loops of their own, as backlog: what agents say is there of them now.

Such a request is a job of one, due at its arrival + its class's default deadline. One that names a running job in
`x-flexband-job` is counted by that job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from django.db import connection

from controlplane.core.flex_snapshot import BatchJob
from controlplane.core.period import from_us

ROWS_MAX: Final = 16
"""Of a pool: neighbours by due are one, due with the first of them."""
SILENT_S: Final = 90
"""What an agent held that has said nothing for so long counts no longer: its clients have lost it."""

Due = tuple[int, int]
"""(instant due, GPU time), both in us."""

# `figures` is `wire.report.LiveFigures`; a row of `direct` is `DirectWork`.
_SQL = """
SELECT a.pool_id, (d.row ->> 1)::bigint, (d.row ->> 2)::bigint
FROM fleet_agent a
JOIN fleet_agentlive l ON l.agent_id = a.id
CROSS JOIN LATERAL jsonb_path_query(l.figures, '$.classes[*].direct[*]') AS d (row)
WHERE a.pool_id = ANY(%s) AND a.state = 'active' AND a.drain_requested_at IS NULL AND l.reported_at > %s
  AND NOT EXISTS (
    SELECT FROM jobs_job j WHERE j.pool_id = a.pool_id AND j.state = 'running' AND j.uuid::text = d.row ->> 0
  )
"""


def direct_work(pool_ids: Iterable[int], now: datetime) -> dict[int, list[tuple[int, datetime]]]:
    """Pool id -> (GPU time in us, instant due) of its direct batch requests, in the order in which they are due."""
    found: dict[int, list[Due]] = defaultdict(list)
    with connection.cursor() as cursor:
        cursor.execute(_SQL, (list(pool_ids), now - timedelta(seconds=SILENT_S)))
        for pool_id, due_us, gpu_us in cursor.fetchall():
            found[pool_id].append((due_us, gpu_us))
    return {pool_id: [(gpu_us, from_us(due_us)) for due_us, gpu_us in merged(rows)] for pool_id, rows in found.items()}


def merged(rows: Iterable[Due]) -> list[Due]:
    """At most ROWS_MAX of them, in order; several together are due with their first."""
    ordered = sorted(row for row in rows if row[1] > 0)
    size = -(-len(ordered) // ROWS_MAX) or 1
    return [
        (ordered[at][0], sum(gpu_us for _, gpu_us in ordered[at : at + size])) for at in range(0, len(ordered), size)
    ]


def as_jobs(rows: Iterable[Due]) -> list[BatchJob]:
    """The same as the core's backlog."""
    return [
        BatchJob(name=f"direct {number}", remaining_gpu_us=gpu_us, deadline_us=due_us)
        for number, (due_us, gpu_us) in enumerate(merged(rows), start=1)
    ]
