"""Folding: deltas of closed minutes move into minutes, quarters and days, each delta exactly once.

A fold is one transaction: the deltas are deleted and added to all three levels, so a killed fold leaves everything as
it was and a second run adds nothing. Deltas that come late for a minute that was folded are added by the next fold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
from django.db import connection, transaction

from controlplane.core.period import (
    US_PER_QUARTER,
    Calendar,
    from_us,
    load_zone,
    minute_start_us,
    to_us,
    window_at,
)
from controlplane.tenants.models import Installation
from controlplane.usage.records import Ints
from controlplane.usage.rollup_keys import KEY_COLUMNS, ROLLUP_COLUMNS, SUM_COLUMNS, group_by, sum_groups
from controlplane.usage.sketch import merge_groups

# Any fixed number: one fold at a time.
FOLD_LOCK = 0x666F6C64
BATCH = 20_000


@dataclass(frozen=True)
class Level:
    """A table of rollups: `column` holds its time, `to_value` turns the integer used for grouping into it."""

    table: str
    column: str
    kind: str
    to_value: Callable[[int], Any]


MINUTE = Level("usage_rollupminute", "minute", "timestamptz", from_us)
QUARTER = Level("usage_rollupquarter", "quarter", "timestamptz", from_us)
DAY = Level("usage_rollupday", "day", "date", date.fromordinal)
KEY_TYPES = (*("int",) * 5, "smallint")


def fold(now: datetime) -> int:
    """Folds every delta of a minute that is closed at `now`; returns how many. Two folds at once do the work once."""
    total = 0
    while folded := _fold_batch(now):
        total += folded
    return total


def _fold_batch(now: datetime) -> int:
    zone = billing_zone()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", (FOLD_LOCK,))
        if not cursor.fetchone()[0]:
            return 0
        cursor.execute(
            f"""
            DELETE FROM usage_rollupdelta WHERE ctid = ANY(ARRAY(
                SELECT ctid FROM usage_rollupdelta WHERE minute < %s ORDER BY minute LIMIT %s
            )) RETURNING minute, {", ".join(ROLLUP_COLUMNS)}
            """,  # noqa: S608 - the names are constants
            (from_us(minute_start_us(to_us(now))), BATCH),
        )
        deltas = cursor.fetchall()
        if deltas:
            _add_to_levels(cursor, deltas, zone)
        return len(deltas)


def billing_zone() -> ZoneInfo:
    """The zone whose days are summed up."""
    return load_zone(Installation.objects.filter(pk=1).values_list("billing_zone", flat=True).first() or "UTC")


def _add_to_levels(cursor: Any, deltas: Sequence[tuple[Any, ...]], zone: ZoneInfo) -> None:
    minutes = np.array([to_us(row[0]) for row in deltas], dtype=np.int64)
    quarters = minutes - minutes % US_PER_QUARTER
    days = np.array([local_day(zone, quarter).toordinal() for quarter in quarters.tolist()], dtype=np.int64)
    keys = np.array([row[1 : 1 + len(KEY_COLUMNS)] for row in deltas], dtype=np.int64).T
    sums = np.array([row[1 + len(KEY_COLUMNS) : -1] for row in deltas], dtype=np.int64).T
    blobs = [bytes(row[-1]) for row in deltas]
    for level, times in ((MINUTE, minutes), (QUARTER, quarters), (DAY, days)):
        _add(cursor, level, times, keys, sums, blobs)


@lru_cache(maxsize=4096)
def local_day(zone: ZoneInfo, at_us: int) -> date:
    """The date of the zone that holds an instant."""
    return date.fromisoformat(window_at(zone, Calendar.DAY, from_us(at_us)).label)


def _add(cursor: Any, level: Level, times: Ints, keys: Ints, sums: Ints, blobs: Sequence[bytes]) -> None:
    groups = group_by([times, *keys])
    added = sum_groups(groups, sums)
    values = [[level.to_value(time) for time in groups.keys[0].tolist()], *groups.keys[1:].tolist()]
    stored = _stored_stages(cursor, level, values)
    of = np.concatenate([groups.of, np.array(sorted(stored), dtype=np.int64)])
    stages = merge_groups(of, len(groups), [*blobs, *(stored[at] for at in sorted(stored))])
    names = ", ".join((level.column, *ROLLUP_COLUMNS))
    types = (level.kind, *KEY_TYPES, *("bigint",) * len(SUM_COLUMNS), "bytea")
    columns = ", ".join(f"%s::{kind}[]" for kind in types)
    grown = ", ".join(f"{name} = r.{name} + EXCLUDED.{name}" for name in SUM_COLUMNS)
    cursor.execute(
        f"""
        INSERT INTO {level.table} AS r ({names}) SELECT * FROM unnest({columns})
        ON CONFLICT ({level.column}, {", ".join(KEY_COLUMNS)}) DO UPDATE SET {grown}, stages = EXCLUDED.stages
        """,  # noqa: S608 - the names are constants
        [*values, *added.tolist(), stages],
    )


def _stored_stages(cursor: Any, level: Level, values: Sequence[list[Any]]) -> dict[int, bytes]:
    """Position in `values` -> the sketch that the level has for that key."""
    names = (level.column, *KEY_COLUMNS)
    columns = ", ".join(f"%s::{kind}[]" for kind in (level.kind, *KEY_TYPES))
    cursor.execute(
        f"""
        SELECT k.at, r.stages FROM unnest({columns}) WITH ORDINALITY AS k ({", ".join(names)}, at)
        JOIN {level.table} r USING ({", ".join(names)})
        """,  # noqa: S608 - the names are constants
        list(values),
    )
    return {at - 1: bytes(stages) for at, stages in cursor.fetchall()}
