"""What reports settle against budgets: leases by their spends, soft budgets by the charges of records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from psycopg import Cursor

from controlplane.budgets.lease_settling import Overspent, SpendReport, Waiver, close_epochs, settle
from controlplane.budgets.windows import BudgetRow, budgets_of, window_of, windows_at
from controlplane.core.period import from_us

__all__ = ["Overspent", "SpendReport", "Waiver", "close_epochs", "settle", "settle_soft"]


def settle_soft(cursor: Cursor[Any], charges: Sequence[tuple[int, int, int]]) -> None:
    """Adds charges to the soft budgets of tenants and their ancestors, which need no leases.

    Rows are (tenant id, instant of admission in Unix us, nanos). Windows are updated in id order.
    """
    if not charges:
        return
    budgets = budgets_of(cursor, {tenant_id for tenant_id, _, _ in charges}, hard=False)
    if not budgets:
        return
    added: dict[tuple[int, datetime], int] = defaultdict(int)
    wanted: dict[tuple[int, datetime], tuple[BudgetRow, datetime]] = {}
    for tenant_id, at_us, nanos in charges:
        at = from_us(at_us)
        for budget in budgets.get(tenant_id, ()):
            key = (budget.id, window_of(budget, at).start)
            added[key] += nanos
            wanted.setdefault(key, (budget, at))
    windows = windows_at(cursor, list(wanted.values()), lock=True)
    rows = sorted((windows[key].id, nanos) for key, nanos in added.items())
    cursor.execute(
        "UPDATE budgets_budgetwindow w SET settled_nanos = w.settled_nanos + r.nanos"
        " FROM unnest(%s::bigint[], %s::bigint[]) AS r (id, nanos) WHERE w.id = r.id",
        ([row[0] for row in rows], [row[1] for row in rows]),
    )
