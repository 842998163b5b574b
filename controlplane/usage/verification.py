"""Rollups against records: everything is added up again from the records and compared, sums and sketches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import numpy as np
from django.db import connection, transaction

from controlplane.core.period import US_PER_MINUTE, from_us, to_us
from controlplane.tenants.models import Installation
from controlplane.usage.ingest import roll_up
from controlplane.usage.record_files import rows_between
from controlplane.usage.records import INTEGERS, Records
from controlplane.usage.retirement import retired_files
from controlplane.usage.rollup_keys import KEY_COLUMNS, ROLLUP_COLUMNS, SUM_COLUMNS
from controlplane.usage.sketch import merge_groups

CHUNK = 20_000
Key = tuple[int, ...]
"""(minute in Unix us, then KEY_COLUMNS)"""


@dataclass(frozen=True)
class Difference:
    """A rollup key whose stored numbers are not those of its records."""

    minute: datetime
    key: dict[str, int]
    column: str
    stored: int | str
    rebuilt: int | str


@dataclass(frozen=True)
class Verification:
    records: int
    keys: int
    differences: list[Difference]


@dataclass
class _Sums:
    values: list[int]
    blobs: list[bytes]


def verify(since: datetime | None = None, until: datetime | None = None) -> Verification:
    """Compares minutes (with open deltas) against the records that ended in [since, until).

    Without bounds, quarters and days are compared against their minutes too.

    One snapshot of the database, so that ingest and folds may go on meanwhile. Retired days are read from their files;
    raises ArchiveChanged when one of those is not what was written.
    """
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        rebuilt, records = _rebuilt(since, until)
        stored = _stored(since, until)
        coarse = list(_coarse_differences()) if since is None and until is None else []
    keys = sorted(rebuilt.keys() | stored.keys())
    differences = [found for key in keys for found in _compare(key, stored.get(key), rebuilt.get(key))]
    return Verification(records, len(keys), differences + coarse)


# Sums of every level by (time of the coarser level, key); what is folded is in all three.
_COARSE_SQL = """
SELECT coalesce(c.at, f.at), {keys}, {both}
FROM (SELECT {column} AS at, {names} FROM {table}) AS c
FULL JOIN (SELECT {cut} AS at, {key_names}, {sums} FROM usage_rollupminute GROUP BY 1, {key_names}) AS f
USING (at, {key_names})
WHERE ({left}) IS DISTINCT FROM ({right})
LIMIT 1000
"""


def _coarse_differences() -> Iterator[Difference]:
    """Quarters and days that are not the sums of their minutes."""
    zone = Installation.objects.filter(pk=1).values_list("billing_zone", flat=True).first() or "UTC"
    cuts: tuple[tuple[str, str, str, list[str]], ...] = (
        ("usage_rollupquarter", "quarter", "date_bin('15 minutes', minute, 'epoch'::timestamptz)", []),
        ("usage_rollupday", "day", "(minute AT TIME ZONE %s)::date", [zone]),
    )
    for table, column, cut, given in cuts:
        sql = _COARSE_SQL.format(
            keys=", ".join(KEY_COLUMNS),
            both=", ".join(f"coalesce(c.{name}, 0), coalesce(f.{name}, 0)" for name in SUM_COLUMNS),
            column=column,
            names=", ".join((*KEY_COLUMNS, *SUM_COLUMNS)),
            key_names=", ".join(KEY_COLUMNS),
            table=table,
            cut=cut,
            sums=", ".join(f"sum({name})::bigint AS {name}" for name in SUM_COLUMNS),
            left=", ".join(f"c.{name}" for name in SUM_COLUMNS),
            right=", ".join(f"f.{name}" for name in SUM_COLUMNS),
        )
        with connection.cursor() as cursor:
            cursor.execute(sql, given)
            rows = cursor.fetchall()
        for at, *values in rows:
            key = dict(zip(KEY_COLUMNS, values, strict=False))
            begin = at if isinstance(at, datetime) else datetime(at.year, at.month, at.day, tzinfo=UTC)
            pairs = zip(SUM_COLUMNS, values[len(KEY_COLUMNS) :: 2], values[len(KEY_COLUMNS) + 1 :: 2], strict=True)
            for name, have, due in pairs:
                if have != due:
                    yield Difference(begin, key, f"{column}.{name}", have, due)


def _compare(key: Key, stored: _Sums | None, rebuilt: _Sums | None) -> Iterator[Difference]:
    nothing = _Sums([0] * len(SUM_COLUMNS), [])
    left, right = stored or nothing, rebuilt or nothing
    minute, names = from_us(key[0]), dict(zip(KEY_COLUMNS, key[1:], strict=True))
    for column, have, due in zip(SUM_COLUMNS, left.values, right.values, strict=True):
        if have != due:
            yield Difference(minute, names, column, have, due)
    have_blob, due_blob = _merged(left.blobs), _merged(right.blobs)
    if have_blob != due_blob:
        yield Difference(minute, names, "stages", f"{len(have_blob)} bytes", f"{len(due_blob)} bytes that differ")


def _merged(blobs: list[bytes]) -> bytes:
    return merge_groups(np.zeros(len(blobs), dtype=np.int64), 1, blobs)[0]


def _between(column: str, since: datetime | None, until: datetime | None) -> tuple[str, list[Any]]:
    where = f" WHERE ({column} >= %s OR %s IS NULL) AND ({column} < %s OR %s IS NULL)"
    return where.replace("%s IS NULL", "%s::timestamptz IS NULL"), [since, since, until, until]


def _stored(since: datetime | None, until: datetime | None) -> dict[Key, _Sums]:
    where, given = _between("minute", since, until)
    found: dict[Key, _Sums] = {}
    with connection.cursor() as cursor:
        for table in ("usage_rollupminute", "usage_rollupdelta"):
            cursor.execute(f"SELECT minute, {', '.join(ROLLUP_COLUMNS)} FROM {table}{where}", given)  # noqa: S608
            for minute, *values in cursor.fetchall():
                key = (to_us(minute), *values[: len(KEY_COLUMNS)])
                _add(found, key, values[len(KEY_COLUMNS) : -1], bytes(values[-1]))
    return found


def _add(found: dict[Key, _Sums], key: Key, values: list[int], blob: bytes) -> None:
    sums = found.setdefault(key, _Sums([0] * len(SUM_COLUMNS), []))
    sums.values = [have + more for have, more in zip(sums.values, values, strict=True)]
    sums.blobs.append(blob)
    if len(sums.blobs) > 64:
        sums.blobs = [_merged(sums.blobs)]


_STORED_COLUMN = {"arrived_us": "extract(epoch FROM arrived_at)", "ended_us": "extract(epoch FROM ended_at)"}


def _rebuilt(since: datetime | None, until: datetime | None) -> tuple[dict[Key, _Sums], int]:
    found: dict[Key, _Sums] = defaultdict(lambda: _Sums([0] * len(SUM_COLUMNS), []))
    count = 0
    for rows in chain(_table_rows(since, until), _file_rows(since, until)):
        count += len(rows)
        rolled = roll_up(_records(np.array(rows, dtype=np.int64).T))
        keys, sums = rolled.groups.keys.T.tolist(), rolled.sums.T.tolist()
        for key, values, blob in zip(keys, sums, rolled.stages, strict=True):
            _add(found, (key[0] * US_PER_MINUTE, *key[1:]), values, blob)
    return dict(found), count


def _table_rows(since: datetime | None, until: datetime | None) -> Iterator[list[tuple[Any, ...]]]:
    where, given = _between("ended_at", since, until)
    columns = [f"({_STORED_COLUMN[name]} * 1000000)::bigint" if name in _STORED_COLUMN else name for name in INTEGERS]
    sql = f"SELECT pool_id, {', '.join(columns)} FROM usage_record{where}"  # noqa: S608 - names are constants
    with connection.chunked_cursor() as cursor:
        cursor.execute(sql, given)
        while rows := cursor.fetchmany(CHUNK):
            yield rows


def _file_rows(since: datetime | None, until: datetime | None) -> Iterator[list[tuple[Any, ...]]]:
    """Rows of the days that were retired, in the form of `_table_rows`."""
    renamed = {"arrived_us": "arrived_at", "ended_us": "ended_at"}
    columns = ["pool_id", *(renamed.get(name, name) for name in INTEGERS)]
    return rows_between(retired_files(), columns, since, until, CHUNK)


def _records(table: Any) -> Records:
    n = table.shape[1]
    zeros = np.zeros(n, dtype=np.int64)
    return Records(
        request_ids=np.zeros((n, 16), dtype=np.uint8),
        integers=np.ascontiguousarray(table[1:]),
        jobs=[""] * n,
        client_ids=[""] * n,
        source=zeros,
        agent_ids=zeros,
        pool_ids=np.ascontiguousarray(table[0]),
        job_ids=zeros,
    )
