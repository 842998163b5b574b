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
from controlplane.budgets.windows import budgets_of, windows_seen
from controlplane.core.leases import BudgetWindow
from controlplane.usage.sql import SqlCursor


@dataclass(frozen=True, slots=True)
class JobMoney:
    """Of one job under hard budgets: what is left in its reservation and in each lease that may pay for it, and the
    windows of its tenant and ancestors. `free_nanos` is without what running requests hold, `unspent_nanos` with it.
    """

    free_nanos: Sequence[int]
    unspent_nanos: Sequence[int]
    windows: Sequence[BudgetWindow]

    @property
    def tightest(self) -> BudgetWindow:
        """The window with the least left."""
        return min(self.windows, key=lambda window: window.remaining_nanos)

    def items(self, bound_nanos: int) -> int:
        """How many more items of this upper bound can be paid for: one lease pays for an item, never two rests."""
        left_nanos = max(0, self.tightest.remaining_nanos)
        return left_nanos // bound_nanos + sum(free // bound_nanos for free in self.free_nanos)


def money_of(cursor: SqlCursor, jobs: Mapping[UUID, int], now: datetime) -> dict[UUID, JobMoney]:
    """Job -> its money, for jobs (by tenant id) whose tenant is under a hard budget; others are missing.

    It only looks: no row is locked. Whether a request may begin is decided where its lease is taken.
    """
    budgets = budgets_of(cursor, jobs.values(), hard=True) if jobs else {}
    under = {job: tenant for job, tenant in jobs.items() if tenant in budgets}
    if not under:
        return {}
    wanted = {budget.id: (budget, now) for rows in budgets.values() for budget in rows}
    windows = {row.budget.id: as_core(row) for row in windows_seen(cursor, list(wanted.values()))}
    held = _held(cursor, under, now)
    return {
        job: JobMoney(
            [unspent - reserved for unspent, reserved in held[job]],
            [unspent for unspent, _ in held[job]],
            [windows[budget.id] for budget in budgets[tenant]],
        )
        for job, tenant in under.items()
    }


def _held(cursor: SqlCursor, jobs: Mapping[UUID, int], now: datetime) -> dict[UUID, list[tuple[int, int]]]:
    """Job -> (unspent, reserved) of each lease of the job, its reservation among them, and of its tenant's for
    anything.
    """
    cursor.execute(
        """
        SELECT tenant_id, job, amount_nanos - spent_nanos, least(reserved_nanos, amount_nanos - spent_nanos)
        FROM budgets_lease
        WHERE state = 'open' AND NOT outage AND expires_at > %s AND tenant_id = ANY(%s)
          AND (job IS NULL OR job = ANY(%s)) AND amount_nanos > spent_nanos
        """,
        (now, sorted(set(jobs.values())), sorted(jobs)),
    )
    found: dict[tuple[int, UUID | None], list[tuple[int, int]]] = defaultdict(list)
    for tenant, job, unspent, reserved in cursor.fetchall():
        found[tenant, job].append((unspent, reserved))
    return {job: found[tenant, job] + found[tenant, None] for job, tenant in jobs.items()}
