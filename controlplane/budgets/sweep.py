"""What time does to budgets: windows roll over, limits that were changed take effect, thresholds notify, leases end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import connection, transaction

from controlplane.alerts.delivering import tell_notice
from controlplane.alerts.models import Severity
from controlplane.budgets.lease_settling import close_epochs
from controlplane.budgets.models import Budget
from controlplane.budgets.outage import keep_outage_slices
from controlplane.budgets.windows import BudgetRow, WindowRow, row_of, windows_at
from controlplane.usage.sql import SqlCursor
from controlplane.web.numerals import money

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
            thresholds += note_thresholds(cursor, list(rows.values()), now)
    return Swept(windows, _close_sealed(now), thresholds, keep_outage_slices(now))


def _budgets() -> list[BudgetRow]:
    rows = Budget.objects.filter(archived_at__isnull=True).select_related("tenant").order_by("pk")
    return [row_of(row) for row in rows]


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


def note_thresholds(cursor: SqlCursor, rows: Sequence[WindowRow], now: datetime) -> int:
    """Writes a notice for each threshold that locked windows have passed since the last look; returns how many.

    Thresholds are shares of the limit in force, increases included. What lies under its threshold again is armed.
    """
    marks = dict(Budget.objects.filter(pk__in=[row.budget.id for row in rows]).values_list("pk", "thresholds_percent"))
    noted = 0
    for row in rows:
        limit = row.budget.limit_nanos
        at = row.settled_nanos * 100
        passed = [mark for mark in marks.get(row.budget.id, []) if at and at >= limit * mark]
        highest = max(passed, default=0)
        if highest == row.notified_percent:
            continue
        new = [mark for mark in passed if mark > row.notified_percent]
        cursor.execute(
            "INSERT INTO budgets_budgetnotice (window_id, percent, at, settled_nanos, limit_nanos)"
            " SELECT %s, unnest(%s::int[]), %s, %s, %s",
            (row.id, new, now, row.settled_nanos, limit),
        )
        cursor.execute("UPDATE budgets_budgetwindow SET notified_percent = %s WHERE id = %s", (highest, row.id))
        noted += len(new)
        if new:
            _tell(row, highest, now)
    return noted


def _tell(row: WindowRow, percent: int, now: datetime) -> None:
    """One message for the highest threshold that was passed; a hard budget that is used up wakes somebody."""
    budget, spent = row.budget, money(row.settled_nanos)
    stops = budget.hard and percent >= 100
    subject = f"Budget {budget.name} of {budget.level} is {percent} % used"
    text = f"{spent} of {money(budget.limit_nanos)} are spent in the window until {row.ends_at:%Y-%m-%d %H:%M} UTC."
    if stops:
        text += " It is a hard limit: new requests of the tenant are refused until it is raised or the window ends."
    data = {
        "text": text, "tenant": budget.level, "budget": budget.id, "percent": percent, "hard": budget.hard,
        "settled_nanos": row.settled_nanos, "limit_nanos": budget.limit_nanos,
    }  # fmt: skip
    tell_notice("budget.threshold", Severity.PAGE if stops else Severity.TICKET, subject, data, now)
