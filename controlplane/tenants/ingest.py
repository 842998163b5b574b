"""What reports say about API keys: when each was last used."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from psycopg import Cursor

# Pages show minutes: a key in use is written once in this time, not with each report.
USE_STEP = timedelta(seconds=60)

_SQL = """
WITH moved AS (
    SELECT k.id, r.at
    FROM unnest(%s::bigint[], %s::timestamptz[]) AS r (id, at) JOIN tenants_apikey k ON k.id = r.id
    WHERE k.last_used_at IS NULL OR k.last_used_at < r.at - %s
    ORDER BY k.id FOR NO KEY UPDATE OF k
)
UPDATE tenants_apikey k SET last_used_at = greatest(k.last_used_at, moved.at) FROM moved WHERE k.id = moved.id
"""


def note_key_use(cursor: Cursor[Any], used: Mapping[int, datetime], now: datetime) -> None:
    """Takes the newest use of each key (by key id), in id order; never backwards and never beyond `now`.

    Keys that are not known are left out.
    """
    if used:
        cursor.execute(_SQL, (list(used), [min(at, now) for at in used.values()], USE_STEP))
