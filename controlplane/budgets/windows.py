"""Budget windows: the calendar period of a budget in its own zone, as half-open instants, made when first needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from controlplane.budgets.models import Budget
from controlplane.core.period import Calendar, Window, load_zone, window_at
from controlplane.usage.sql import SqlCursor

LIMIT_NANOS_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A budget that holds for a tenant, its own or an ancestor's (`level` is the owner's slug)."""

    id: int
    tenant_id: int
    level: str
    name: str
    period: str
    anchor_day: int
    zone: str
    limit_nanos: int
    hard: bool


@dataclass(frozen=True, slots=True)
class WindowRow:
    """A window as stored, locked or not.

    Of a locked one the budget's limit is that of the instant, increases included, which falls at `falls_at`.
    """

    id: int
    budget: BudgetRow
    starts_at: datetime
    ends_at: datetime
    limit_nanos: int
    settled_nanos: int
    leased_nanos: int
    notified_percent: int
    falls_at: datetime | None = None


def row_of(budget: Budget) -> BudgetRow:
    return BudgetRow(
        budget.pk, budget.tenant_id, budget.tenant.slug, budget.name, budget.period, budget.anchor_day, budget.zone,
        budget.limit_nanos, budget.hard,
    )  # fmt: skip


def window_of(budget: BudgetRow, at: datetime) -> Window:
    """The window of a budget that holds an instant; depends on zone and calendar alone, never on first use."""
    return window_at(load_zone(budget.zone), Calendar(budget.period), at, anchor_day=budget.anchor_day)


_CHAIN_SQL = """
WITH RECURSIVE chain (start_id, tenant_id, depth) AS (
    SELECT t.id, t.id, 0 FROM tenants_tenant t WHERE t.id = ANY(%s)
    UNION ALL
    SELECT c.start_id, t.parent_id, c.depth + 1
    FROM chain c JOIN tenants_tenant t ON t.id = c.tenant_id
    WHERE t.parent_id IS NOT NULL AND c.depth < 32
)
SELECT c.start_id, b.id, b.tenant_id, t.slug, b.name, b.period, b.anchor_day, b.zone, b.limit_nanos, b.hard
FROM chain c
JOIN budgets_budget b ON b.tenant_id = c.tenant_id
JOIN tenants_tenant t ON t.id = b.tenant_id
WHERE b.archived_at IS NULL AND b.hard = %s
ORDER BY b.id
"""


def budgets_of(cursor: SqlCursor, tenant_ids: Iterable[int], *, hard: bool) -> dict[int, list[BudgetRow]]:
    """The budgets in force for each tenant, its own and its ancestors', in id order; tenants without are missing."""
    cursor.execute(_CHAIN_SQL, (sorted(set(tenant_ids)), hard))
    found: dict[int, list[BudgetRow]] = {}
    for start_id, *columns in cursor.fetchall():
        found.setdefault(start_id, []).append(BudgetRow(*columns))
    return found


_ENSURE_SQL = """
INSERT INTO budgets_budgetwindow
    (budget_id, starts_at, ends_at, limit_nanos, hard, settled_nanos, leased_nanos, notified_percent)
SELECT r.*, 0, 0, 0
FROM unnest(%s::int[], %s::timestamptz[], %s::timestamptz[], %s::bigint[], %s::bool[]) AS r
ON CONFLICT (budget_id, starts_at) DO NOTHING
"""
_READ_SQL = """
SELECT w.id, w.budget_id, w.starts_at, w.ends_at, w.limit_nanos, w.settled_nanos, w.leased_nanos, w.notified_percent
FROM budgets_budgetwindow w
JOIN unnest(%s::int[], %s::timestamptz[]) AS r (budget_id, starts_at)
  ON w.budget_id = r.budget_id AND w.starts_at = r.starts_at
ORDER BY w.id
"""


def windows_at(
    cursor: SqlCursor, wanted: Sequence[tuple[BudgetRow, datetime]], *, lock: bool = False
) -> dict[tuple[int, datetime], WindowRow]:
    """(budget id, start) -> window, for the windows that hold the instants; missing ones are made.

    With `lock` the rows are locked, in id order. A limit that was changed since, and increases that began or ended,
    take effect here: at once upwards, and as far down as what is settled and leased leaves room.
    """
    spans = _spans(wanted)
    if not spans:
        return {}
    keys = sorted(spans)
    columns = (
        [key[0] for key in keys],
        [key[1] for key in keys],
        [spans[key].ends_at for key in keys],
        [spans[key].budget.limit_nanos for key in keys],
        [spans[key].budget.hard for key in keys],
    )
    rows = _read(cursor, columns[:2], spans, lock=lock)
    if len(rows) < len(keys):
        cursor.execute(_ENSURE_SQL, columns)
        rows = _read(cursor, columns[:2], spans, lock=lock)
    if lock:
        rows = [_follow_limit(cursor, row) for row in _with_present_limits(cursor, rows, spans)]
    return {(row.budget.id, row.starts_at): row for row in rows}


def windows_seen(cursor: SqlCursor, wanted: Sequence[tuple[BudgetRow, datetime]]) -> list[WindowRow]:
    """The same windows for who only looks: nothing is locked, made or changed, and limits are those of the instants.

    A window that nobody needed before is whole; its id is 0.
    """
    spans = _spans(wanted)
    if not spans:
        return []
    keys = sorted(spans)
    rows = _read(cursor, ([key[0] for key in keys], [key[1] for key in keys]), spans, lock=False)
    known = {(row.budget.id, row.starts_at): row for row in rows}
    rows = [known.get(key) or _unused(key[1], spans[key]) for key in keys]
    return [replace(row, limit_nanos=_present_limit(row)) for row in _with_present_limits(cursor, rows, spans)]


def _unused(starts_at: datetime, span: _Span) -> WindowRow:
    return WindowRow(0, span.budget, starts_at, span.ends_at, span.budget.limit_nanos, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Span:
    """A window that is wanted, and the latest instant in it that it is wanted for."""

    budget: BudgetRow
    ends_at: datetime
    at: datetime


def _spans(wanted: Iterable[tuple[BudgetRow, datetime]]) -> dict[tuple[int, datetime], _Span]:
    spans: dict[tuple[int, datetime], _Span] = {}
    for budget, at in wanted:
        window = window_of(budget, at)
        known = spans.get((budget.id, window.start))
        spans[(budget.id, window.start)] = _Span(budget, window.end, at if known is None else max(at, known.at))
    return spans


def _read(
    cursor: SqlCursor,
    columns: tuple[list[int], list[datetime]],
    spans: dict[tuple[int, datetime], _Span],
    *,
    lock: bool,
) -> list[WindowRow]:
    cursor.execute(_READ_SQL + (" FOR UPDATE OF w" if lock else ""), columns)
    return [WindowRow(row[0], spans[(row[1], row[2])].budget, *row[2:]) for row in cursor.fetchall()]


_PRESENT_SQL = """
SELECT b.limit_nanos, b.hard, coalesce(sum(i.amount_nanos), 0), min(least(i.ends_at, i.ended_at))
FROM unnest(%s::int[], %s::timestamptz[]) WITH ORDINALITY AS r (budget_id, at, number)
JOIN budgets_budget b ON b.id = r.budget_id
LEFT JOIN budgets_budgetincrease i
  ON i.budget_id = r.budget_id AND i.starts_at <= r.at AND least(i.ends_at, i.ended_at) > r.at
GROUP BY r.number, b.id ORDER BY r.number
"""


def _with_present_limits(
    cursor: SqlCursor, rows: Sequence[WindowRow], spans: dict[tuple[int, datetime], _Span]
) -> list[WindowRow]:
    """The rows with limit and stop as they are now: they may have changed while a lock was waited for."""
    ats = [spans[(row.budget.id, row.starts_at)].at for row in rows]
    cursor.execute(_PRESENT_SQL, ([row.budget.id for row in rows], ats))
    found = []
    for row, (limit_nanos, hard, more, falls_at) in zip(rows, cursor.fetchall(), strict=True):
        limit = min(limit_nanos + int(more), LIMIT_NANOS_MAX)
        found.append(replace(row, budget=replace(row.budget, limit_nanos=limit, hard=hard), falls_at=falls_at))
    return found


def _present_limit(row: WindowRow) -> int:
    """The budget's limit; of a hard one never under what is settled and leased."""
    used = row.settled_nanos + row.leased_nanos if row.budget.hard else 0
    return max(row.budget.limit_nanos, used)


def _follow_limit(cursor: SqlCursor, row: WindowRow) -> WindowRow:
    limit = _present_limit(row)
    if limit != row.limit_nanos:
        cursor.execute(
            "UPDATE budgets_budgetwindow SET limit_nanos = %s, hard = %s WHERE id = %s",
            (limit, row.budget.hard, row.id),
        )
    return replace(row, limit_nanos=limit)


def until_end(windows: Iterable[WindowRow], latest: datetime) -> datetime:
    """The earliest end among windows and increases, at most `latest`: what is leased ends with what allowed it."""
    falls = (window.falls_at for window in windows if window.falls_at is not None)
    return min([latest, *(window.ends_at for window in windows), *falls])
