"""Day partitions of `usage_record`, made ahead of time; the day is the UTC day of receipt."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from threading import Lock
from typing import Any

from psycopg import Cursor

from controlplane.usage.sql import SqlCursor

DAYS_AHEAD = 3

_known_days: set[tuple[str, date]] = set()
_known_lock = Lock()


def partition_of(now: datetime) -> str:
    """The table of the records received at an instant, as `usage_create_partition` names it."""
    return f"usage_record_{now.astimezone(UTC):%Y%m%d}"


def days_ahead(now: datetime, days: int = DAYS_AHEAD) -> list[date]:
    """The UTC day of `now` and the `days` after it."""
    today = now.astimezone(UTC).date()
    return [today + timedelta(days=ahead) for ahead in range(days + 1)]


def create_days(cursor: SqlCursor, days: Iterable[date]) -> list[date]:
    """Creates the partitions that are missing and returns their days; those that exist are left alone."""
    created = []
    for day in days:
        cursor.execute("SELECT usage_create_partition(%s)", (day,))
        row = cursor.fetchone()
        if row is not None and row[0]:
            created.append(day)
    return created


def ensure_day(cursor: Cursor[Any], now: datetime) -> None:
    """Makes sure that the partition for records received now exists; asks the database once a day and process.

    Call it before the transaction that writes the records, so that a rollback cannot take a known partition away.
    """
    day = (cursor.connection.info.dbname, now.astimezone(UTC).date())
    if day in _known_days:
        return
    create_days(cursor, [day[1]])
    with _known_lock:
        _known_days.add(day)
