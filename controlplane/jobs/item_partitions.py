"""Day partitions of items, bodies and results; the day is the UTC day on which their job was made."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from controlplane.usage.sql import SqlCursor


def day_of(now: datetime) -> date:
    """The partition of a job that is made now."""
    return now.astimezone(UTC).date()


def items_table(day: date) -> str:
    """The name of the table that holds the items of one day."""
    return f"jobs_item_{day:%Y%m%d}"


def analyse(cursor: SqlCursor, day: date) -> None:
    """Tells the planner what a day's tables hold, after many rows came at once."""
    cursor.execute("SELECT jobs_analyse_partition(%s)", (day,))


def create_day(cursor: SqlCursor, day: date) -> bool:
    """Makes the partitions of a day; False where they exist. Call it outside the transaction that writes items."""
    cursor.execute("SELECT jobs_create_partition(%s)", (day,))
    row = cursor.fetchone()
    return bool(row and row[0])


def create_days_ahead(cursor: SqlCursor, now: datetime, days: int = 2) -> int:
    """Makes those of today and the days after it; returns how many were missing."""
    return sum(create_day(cursor, day_of(now) + timedelta(days=ahead)) for ahead in range(days + 1))


def drop_purged_days(cursor: SqlCursor) -> list[date]:
    """Drops the partitions of days all of whose jobs have been purged; the database refuses any other."""
    cursor.execute(
        "SELECT DISTINCT j.day FROM jobs_job j WHERE j.day IS NOT NULL AND j.day < (now() AT TIME ZONE 'UTC')::date"
        " AND to_regclass('jobs_item_' || to_char(j.day, 'YYYYMMDD')) IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM jobs_job k WHERE k.day = j.day AND k.rows_purged_at IS NULL)"
        " ORDER BY 1 LIMIT 50"
    )
    days = [row[0] for row in cursor.fetchall()]
    dropped = []
    for day in days:
        cursor.execute("SELECT jobs_drop_partition(%s)", (day,))
        row = cursor.fetchone()
        if row and row[0]:
            dropped.append(day)
    return dropped
