"""Hours of `objective_minute` added up once they are over, so that a window of a month is read in hours.

An hour is folded when it has been over for `FOLD_AFTER`. Counts that come later take the mark away from their hour, of
all pools and contracts (whether a minute lies above a load range depends on the others), and it is folded again.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, Final

from django.db import connection, transaction
from psycopg import Cursor

from controlplane.core.money import US_PER_HOUR
from controlplane.core.period import from_us, to_us

FOLD_AFTER: Final = timedelta(hours=2)
LATE_AFTER: Final = timedelta(hours=1)
"""Far enough below `FOLD_AFTER`: who takes counts for fresh has committed them long before their hour is folded."""
KEPT_FOR: Final = timedelta(days=100)
"""Above the longest period of a budget, 90 days; what is looked at from before is read by its minutes."""
HOURS_MOST: Final = 200
RUN_S: Final = 5.0
"""Of one run, whichever comes first; the next one goes on."""
# Any fixed number: whoever adds late counts shares it; folding takes it alone, and never waits for it.
FOLD_LOCK: Final = 0x666C6F68

LOADS: Final = """
  SELECT contract.workload_class_id, counts.pool_id, counts.minute, max(counts.admitted) / 60.0 AS admitted_per_s
    FROM {minutes} AS counts
    JOIN contracts_contractversion AS version ON version.id = counts.contract_version_id
    JOIN contracts_contract AS contract ON contract.id = version.contract_id"""
"""What each class was given by minute and pool, which load ranges are about; to be narrowed, and grouped by 1, 2, 3."""
JOIN_LOADS: Final = """
    LEFT JOIN loads ON loads.workload_class_id = {whose}.workload_class_id AND loads.pool_id = counts.pool_id
                   AND loads.minute = counts.minute"""
OVER: Final = "coalesce(loads.admitted_per_s > {limit}, false)"
NONSENSE: Final = """NOT (least(offered, admitted, successful, good, neutral) >= 0 AND good <= successful
                    AND successful + neutral <= admitted AND admitted <= offered)"""
MINUTE_BIT: Final = "(1::bigint << (extract(epoch FROM counts.minute)::bigint / 60 %% 60)::int)"

_UNFOLDED = """
SELECT series.hour
  FROM generate_series((SELECT date_trunc('hour', min(minute), 'UTC') FROM contracts_objectiveminute
                         WHERE minute >= %(first)s), %(last)s::timestamptz, interval '1 hour') AS series (hour)
 WHERE NOT EXISTS (SELECT FROM contracts_foldedhour AS folded WHERE folded.hour = series.hour)
 ORDER BY series.hour DESC LIMIT %(most)s
"""

_FOLD = f"""
WITH loads AS MATERIALIZED (
  {LOADS.format(minutes="contracts_objectiveminute")}
   WHERE counts.minute >= %(hour)s AND counts.minute < %(hour)s + interval '1 hour' GROUP BY 1, 2, 3
), counted AS MATERIALIZED (
  SELECT counts.*, {MINUTE_BIT} AS minutes, {OVER.format(limit="version.load_limit_per_s")} AS outside
    FROM contracts_objectiveminute AS counts
    JOIN contracts_contractversion AS version ON version.id = counts.contract_version_id
    JOIN contracts_contract AS contract ON contract.id = version.contract_id {JOIN_LOADS.format(whose="contract")}
   WHERE counts.minute >= %(hour)s AND counts.minute < %(hour)s + interval '1 hour'
)
INSERT INTO contracts_objectivehour
       (contract_version_id, pool_id, hour, outside, offered, admitted, successful, good, neutral, nonsense, minutes)
SELECT contract_version_id, pool_id, %(hour)s, outside, sum(offered), sum(admitted), sum(successful), sum(good),
       sum(neutral), bool_or({NONSENSE}), bit_or(minutes)
  FROM counted GROUP BY contract_version_id, pool_id, outside
"""  # noqa: S608 - put together from constants


def fold_hours(now: datetime, *, most: int = HOURS_MOST) -> int:
    """Folds hours that are over, the newest first, each in a transaction of its own, and drops those of before
    `KEPT_FOR`; returns how many were folded.
    """
    first, last = _hour_of(now - KEPT_FOR), _hour_of(now - FOLD_AFTER - timedelta(hours=1))
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM contracts_foldedhour WHERE hour < %s", [first])
        cursor.execute("DELETE FROM contracts_objectivehour WHERE hour < %s", [first])
        cursor.execute(_UNFOLDED, {"first": first, "last": last, "most": most})
        hours = [hour for (hour,) in cursor.fetchall()]
    began, folded = monotonic(), 0
    for hour in hours:
        if monotonic() - began > RUN_S or not _fold(hour):
            break
        folded += 1
    return folded


def _hour_of(at: datetime) -> datetime:
    """The hour of UTC that holds an instant."""
    return from_us(to_us(at) // US_PER_HOUR * US_PER_HOUR)


def _fold(hour: datetime) -> bool:
    """Whether it was folded: not while late counts are being added, or by another worker."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [FOLD_LOCK])
        (alone,) = cursor.fetchone()
        if alone:
            cursor.execute("DELETE FROM contracts_objectivehour WHERE hour = %s", [hour])
            cursor.execute(_FOLD, {"hour": hour})
            cursor.execute("INSERT INTO contracts_foldedhour (hour) VALUES (%s) ON CONFLICT DO NOTHING", [hour])
        return bool(alone)


def unfold(cursor: Cursor[Any], minutes_us: Iterable[int], now: datetime) -> None:
    """Takes the marks of the hours of these minutes away, before counts are added to them; fresh ones have none."""
    late_us = to_us(now - LATE_AFTER)
    hours = sorted({minute_us // US_PER_HOUR for minute_us in minutes_us if minute_us < late_us})
    if not hours:
        return
    cursor.execute("SELECT pg_advisory_xact_lock_shared(%s)", [FOLD_LOCK])
    cursor.execute(
        "DELETE FROM contracts_foldedhour WHERE hour IN (SELECT hour FROM contracts_foldedhour"
        " WHERE hour = ANY(%s) ORDER BY hour FOR UPDATE)",
        [[from_us(hour * US_PER_HOUR) for hour in hours]],
    )
