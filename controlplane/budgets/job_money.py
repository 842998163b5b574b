"""What is there to pay for the items of jobs: money that is reserved or leased already, and what the windows have left.

An item needs its upper bound at an agent before it may begin. Where neither is there, it would only take up room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from controlplane.budgets.leases import as_core
from controlplane.budgets.windows import budgets_of, windows_at
from controlplane.core.leases import BudgetWindow
from controlplane.usage.sql import SqlCursor


@dataclass(frozen=True, slots=True)
class JobMoney:
    """Of one job under hard budgets: what is unspent and unreserved in its reservation and in each lease that may pay
    for it, and the window of its tenant and ancestors with the least left.
    """

    held_nanos: Sequence[int]
    tightest: BudgetWindow

    def items(self, bound_nanos: int) -> int:
        """How many items of this upper bound can be paid for: one lease pays for an item, never the rests of two."""
        left_nanos = max(0, self.tightest.remaining_nanos)
        return left_nanos // bound_nanos + sum(free // bound_nanos for free in self.held_nanos)


def money_of(cursor: SqlCursor, jobs: Mapping[UUID, int], now: datetime) -> dict[UUID, JobMoney]:
    """Job -> its money, for jobs (by tenant id) whose tenant is under a hard budget; others are missing.

    Must run in a transaction of its own: the windows are locked until it ends, since a limit that was changed, or an
    increase that began, takes effect under the lock.
    """
    budgets = budgets_of(cursor, jobs.values(), hard=True) if jobs else {}
    under = {job: tenant for job, tenant in jobs.items() if tenant in budgets}
    if not under:
        return {}
    held = _held(cursor, under, now)
    wanted = {budget.id: (budget, now) for rows in budgets.values() for budget in rows}
    windows = {row.budget.id: as_core(row) for row in windows_at(cursor, list(wanted.values()), lock=True).values()}
    return {
        job: JobMoney(
            held[job], min((windows[budget.id] for budget in budgets[tenant]), key=lambda row: row.remaining_nanos)
        )
        for job, tenant in under.items()
    }


def _held(cursor: SqlCursor, jobs: Mapping[UUID, int], now: datetime) -> dict[UUID, list[int]]:
    """Job -> what is free in each lease of the job, its reservation among them, and of its tenant for anything."""
    cursor.execute(
        """
        SELECT tenant_id, job, amount_nanos - spent_nanos - reserved_nanos FROM budgets_lease
        WHERE state = 'open' AND NOT outage AND expires_at > %s AND tenant_id = ANY(%s)
          AND (job IS NULL OR job = ANY(%s)) AND amount_nanos > spent_nanos + reserved_nanos
        """,
        (now, sorted(set(jobs.values())), sorted(jobs)),
    )
    free: dict[tuple[int, UUID | None], list[int]] = defaultdict(list)
    for tenant, job, nanos in cursor.fetchall():
        free[tenant, job].append(nanos)
    return {job: free[tenant, job] + free[tenant, None] for job, tenant in jobs.items()}
