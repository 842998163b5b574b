"""Removing old samples as fast as they are written: after 48 h all but a whole one of each minute, after 90 days all.

A leader goes through the time that has passed once, a slice a tick, and remembers where it is: what is kept beyond 48 h
is not looked at again and again. A slice is as long as is removed in a moment: an hour where nothing is to be removed,
seconds where a thousand pools wrote each second.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from django.db import connection

SAMPLES_KEPT = timedelta(hours=48)
MINUTES_KEPT = timedelta(days=90)
FIRST_SLICE = timedelta(seconds=2)
LEAST_SLICE = timedelta(seconds=1)
LONGEST_SLICE = timedelta(hours=1)
#: A slice that takes less is doubled, one that takes more than twice as long is halved.
SLICE_TAKES_S = 0.02
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
        self._slice = FIRST_SLICE
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
        removed += _execute(_SLICE_SQL, {"since": since, "until": until})
        self._done_to = until
        self._fit(time.monotonic() - began)
        return removed

    def is_done(self, now: datetime) -> bool:
        """Whether nothing is left to be gone through at this instant."""
        return self._done_to is not None and self._done_to >= now - SAMPLES_KEPT

    def _fit(self, took_s: float) -> None:
        if took_s < SLICE_TAKES_S:
            self._slice = min(2 * self._slice, LONGEST_SLICE)
        elif took_s > 2 * SLICE_TAKES_S:
            self._slice = max(self._slice / 2, LEAST_SLICE)


def _execute(sql: str, parameters: dict[str, datetime | int]) -> int:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return int(cursor.rowcount)
