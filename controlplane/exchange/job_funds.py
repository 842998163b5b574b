"""Money for the items that agents hold, out of what their jobs have reserved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import Connection, Cursor

from controlplane.budgets.job_reservations import JobNeed, fund
from controlplane.budgets.leases import ENOUGH_REQUESTS
from controlplane.wire.lease import LeaseRequest

_RESERVED_SQL = """
SELECT EXISTS (SELECT 1 FROM budgets_lease
               WHERE job IS NOT NULL AND agent_id IS NULL AND state = 'open' AND amount_nanos > 0)
"""
# What an item of a job can cost is its part of the reservation: the job's bound over its items, rounded up.
_NEEDS_SQL = """
SELECT held.agent_id, held.epoch, j.uuid, held.items * (-div(-j.reserved_nanos, j.items))::bigint
FROM (SELECT agent_id, epoch, job_id, count(*) AS items FROM jobs_item
      WHERE state = 1 AND agent_id = ANY(%s) GROUP BY 1, 2, 3) held
JOIN unnest(%s::int[], %s::int[]) AS a (agent_id, epoch) ON a.agent_id = held.agent_id AND a.epoch = held.epoch
JOIN jobs_job j ON j.id = held.job_id
WHERE j.reserved_nanos > 0 ORDER BY 1, 2
"""


def fund_items(connection: Connection[Any], agents: Sequence[tuple[int, int]], now: datetime) -> None:
    """Sees to it that agents (id, epoch) can pay for the items they were leased: one short transaction an agent."""
    with connection.cursor() as cursor:
        row = cursor.execute(_RESERVED_SQL).fetchone()
        if row is None or not row[0]:
            return
        ids, epochs = [agent for agent, _ in agents], [epoch for _, epoch in agents]
        needs: dict[tuple[int, int], list[JobNeed]] = defaultdict(list)
        for agent_id, epoch, job, nanos in cursor.execute(_NEEDS_SQL, (ids, ids, epochs)).fetchall():
            needs[(agent_id, epoch)].append(JobNeed(job, nanos))
        for (agent_id, epoch), wanted in needs.items():
            with connection.transaction():
                fund(cursor, agent_id, epoch, wanted, now)


def fund_request(cursor: Cursor[Any], agent: tuple[int, int], asked: LeaseRequest, now: datetime) -> bool:
    """Whether the request of a job that needs money can be paid from what the job reserved; in a transaction.

    False for a job that is not this tenant's, has reserved nothing, or has nothing left.
    """
    try:
        named = UUID(asked.job)
    except ValueError:
        return False
    cursor.execute(
        "SELECT 1 FROM jobs_job WHERE uuid = %s AND tenant_id = %s AND reserved_nanos > 0", (named, asked.tenant_id)
    )
    if cursor.fetchone() is None:
        return False
    wanted = max(ENOUGH_REQUESTS * max(1, asked.need_nanos), asked.waiting_nanos)
    return fund(cursor, *agent, [JobNeed(named, wanted)], now).get(named, 0) >= asked.need_nanos
