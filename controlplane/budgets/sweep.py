"""What time does to budgets: windows roll over, limits that were changed take effect, thresholds notify, leases end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import connection, transaction

from controlplane.budgets.lease_settling import close_epochs
from controlplane.budgets.models import Budget
from controlplane.budgets.outage import keep_outage_slices
from controlplane.budgets.windows import BudgetRow, WindowRow, windows_at

BATCH = 500


@dataclass(frozen=True)
class Swept:
    """What one sweep did."""

    windows: int
    epochs_closed: int
    thresholds: int
    slices: int


def sweep(now: datetime) -> Swept:
    """Makes the present window of every budget, follows changed limits, closes what is sealed, notes thresholds,
    keeps outage slices.

    Safe to run any number of times. A lease whose agent is silent is left alone: it may be spent without our knowing,
    so it stays counted until its epoch is sealed.
    """
    windows = thresholds = 0
    budgets = _budgets()
    for start in range(0, len(budgets), BATCH):
        with transaction.atomic(), connection.cursor() as cursor:
            rows = windows_at(cursor, [(budget, now) for budget in budgets[start : start + BATCH]], lock=True)
            windows += len(rows)
            thresholds += _note_thresholds(list(rows.values()))
    return Swept(windows, _close_sealed(now), thresholds, keep_outage_slices(now))


def _budgets() -> list[BudgetRow]:
    rows = Budget.objects.filter(archived_at__isnull=True).select_related("tenant").order_by("pk")
    return [
        BudgetRow(
            row.pk,
            row.tenant_id,
            row.tenant.slug,
            row.name,
            row.period,
            row.anchor_day,
            row.zone,
            row.limit_nanos,
            row.hard,
        )
        for row in rows
    ]


def _close_sealed(now: datetime) -> int:
    """Closes leases of epochs that were sealed by write-off, or by a report whose lease was still open."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT DISTINCT l.agent_id, l.epoch FROM budgets_lease l
            JOIN usage_agentcursor c ON c.agent_id = l.agent_id AND c.epoch = l.epoch
            WHERE l.state = 'open' AND c.sealed_at IS NOT NULL
            """
        )
        sealed = cursor.fetchall()
        close_epochs(cursor, sealed, now)
        return len(sealed)


def _note_thresholds(rows: Sequence[WindowRow]) -> int:
    """Remembers the highest threshold each window has passed, once: what pages and alerts notify of."""
    noted = 0
    limits = dict(Budget.objects.filter(pk__in=[row.budget.id for row in rows]).values_list("pk", "thresholds_percent"))
    with connection.cursor() as cursor:
        for row in rows:
            passed = [
                percent
                for percent in limits.get(row.budget.id, [])
                if row.settled_nanos * 100 >= row.budget.limit_nanos * percent
            ]
            if passed:
                cursor.execute(
                    "UPDATE budgets_budgetwindow SET notified_percent = %s WHERE id = %s AND notified_percent < %s",
                    (max(passed), row.id, max(passed)),
                )
                noted += cursor.rowcount
    return noted
