"""Removing old samples as fast as they are written: after 48 h all but a whole one of each minute, after 90 days all.

A leader goes through the time that has passed once, a slice a tick, and remembers where it is: what is kept beyond 48 h
is not looked at again and again. A slice is as long as is removed in a moment: an hour where nothing is to be removed,
seconds where a thousand pools wrote each second.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from django.db import OperationalError, connection, transaction
from psycopg.errors import QueryCanceled

SAMPLES_KEPT = timedelta(hours=48)
MINUTES_KEPT = timedelta(days=90)
#: More than passes from tick to tick: a leader for which each slice is slow catches up all the same.
LEAST_SLICE = timedelta(seconds=2)
#: Of a slice without anything to remove: it is slow because the database is, and a shorter one takes as long.
LEAST_EMPTY_SLICE = timedelta(minutes=1)
LONGEST_SLICE = timedelta(hours=1)
#: A slice that takes less is doubled, one that takes more than twice as long is halved.
SLICE_TAKES_S = 0.02
#: Time without samples is gone through by the hour, and may end where a thousand pools wrote each second: when nobody
#: led for a while, all of that is due at once. A slice that takes longer is given up for a shorter one.
SLICE_TAKES_MOST_MS = 500
OLD_EVERY = timedelta(minutes=1)
OLD_AT_ONCE = 50_000

_SLICE_SQL = """
DELETE FROM flex_poolsample
WHERE at >= %(since)s AND at < %(until)s AND NOT coalesce(kept, date_part('second', at) < 1)
"""
_OLD_SQL = """
DELETE FROM flex_poolsample WHERE id IN (SELECT id FROM flex_poolsample WHERE at < %(until)s LIMIT %(at_once)s)
"""


class Pruner:
    """How far samples were gone through, and how long the next slice is."""

    def __init__(self) -> None:
        self._done_to: datetime | None = None
        self._slice = LEAST_SLICE
        self._removed_old_at: datetime | None = None

    def prune(self, now: datetime) -> int:
        """Goes on by a slice; how many samples were removed."""
        removed = 0
        if self._removed_old_at is None or now - self._removed_old_at >= OLD_EVERY:
            removed = _execute(_OLD_SQL, {"until": now - MINUTES_KEPT, "at_once": OLD_AT_ONCE})
            self._removed_old_at = now
        since, limit = max(self._done_to or now - MINUTES_KEPT, now - MINUTES_KEPT), now - SAMPLES_KEPT
        if since >= limit:
            return removed
        until, began = min(limit, since + self._slice), time.monotonic()
        thinned = _thin(since, until)
        if thinned is None:
            self._slice = max((until - since) / 8, LEAST_SLICE)
            return removed
        self._done_to = until
        self._fit(time.monotonic() - began, thinned)
        return removed + thinned

    def is_done(self, now: datetime) -> bool:
        """Whether nothing is left to be gone through at this instant."""
        return self._done_to is not None and self._done_to >= now - SAMPLES_KEPT

    def _fit(self, took_s: float, removed: int) -> None:
        if took_s < SLICE_TAKES_S:
            self._slice = min(2 * self._slice, LONGEST_SLICE)
        elif took_s > 2 * SLICE_TAKES_S:
            self._slice = max(self._slice / 2, LEAST_SLICE if removed else LEAST_EMPTY_SLICE)


def _thin(since: datetime, until: datetime) -> int | None:
    """How many samples of this time were removed; None where that took too long, and none was."""
    slice_: dict[str, datetime | int] = {"since": since, "until": until}
    if until - since <= LEAST_SLICE:
        return _execute(_SLICE_SQL, slice_)
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {SLICE_TAKES_MOST_MS}")
            cursor.execute(_SLICE_SQL, slice_)
            removed = int(cursor.rowcount)
            cursor.execute("SET LOCAL statement_timeout = DEFAULT")
            return removed
    except OperationalError as error:
        if isinstance(error.__cause__, QueryCanceled):
            return None
        raise


def _execute(sql: str, parameters: dict[str, datetime | int]) -> int:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return int(cursor.rowcount)
