"""Exact objective counts of reports, added up by contract version, pool and minute of arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from psycopg import Cursor
from psycopg.types.json import Jsonb

from controlplane.contracts.hours import unfold
from controlplane.core.period import from_us
from controlplane.wire.report import ObjectiveCount

_SQL = """
INSERT INTO contracts_objectiveminute AS o
    (contract_version_id, pool_id, minute, offered, admitted, successful, good, neutral, bad)
SELECT * FROM unnest(%s::int[], %s::int[], %s::timestamptz[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
                     %s::bigint[], %s::jsonb[])
ON CONFLICT (contract_version_id, pool_id, minute) DO UPDATE SET
    offered = o.offered + EXCLUDED.offered,
    admitted = o.admitted + EXCLUDED.admitted,
    successful = o.successful + EXCLUDED.successful,
    good = o.good + EXCLUDED.good,
    neutral = o.neutral + EXCLUDED.neutral,
    bad = (
        SELECT coalesce(jsonb_object_agg(cause, total), '{}'::jsonb)
        FROM (
            SELECT key AS cause, sum(value::bigint) AS total
            FROM (SELECT * FROM jsonb_each_text(o.bad) UNION ALL SELECT * FROM jsonb_each_text(EXCLUDED.bad)) AS causes
            GROUP BY key
        ) AS totals
    )
"""


def is_sound(row: ObjectiveCount) -> bool:
    """Whether the counts of a report can be true: nothing negative and no part larger than its whole.

    Requests that arrived in a minute may end in a later report, so good alone may come after its offered; within the
    increments only signs and causes are checked, the sums are checked where they are judged.
    """
    counts = (row.offered, row.admitted, row.successful, row.good, row.neutral, *row.bad.values())
    if any("\x00" in cause for cause in row.bad):  # PostgreSQL cannot hold it
        return False
    return min(counts) >= 0 and max(counts) < 2**40 and row.minute_us % 60_000_000 == 0 and len(row.bad) <= 64


def add_objectives(cursor: Cursor[Any], rows: Iterable[tuple[int, ObjectiveCount]], now: datetime) -> None:
    """Adds counts; rows are (pool id, count). Written in key order; hours that were folded are folded again."""
    added: dict[tuple[int, int, int], tuple[list[int], Counter[str]]] = {}
    for pool_id, row in rows:
        sums, bad = added.setdefault((row.contract_version_id, pool_id, row.minute_us), ([0] * 5, Counter()))
        for at, value in enumerate((row.offered, row.admitted, row.successful, row.good, row.neutral)):
            sums[at] += value
        bad.update(row.bad)
    if not added:
        return
    unfold(cursor, (minute_us for _, _, minute_us in added), now)
    ordered = sorted(added.items())
    rows_out = [(k[0], k[1], from_us(k[2]), *sums, Jsonb(dict(bad))) for k, (sums, bad) in ordered]
    cursor.execute(_SQL, [list(column) for column in zip(*rows_out, strict=True)])
