"""Pages of records in the order of their receipt, at a cost that grows with neither the depth nor the day.

Records have no index but the small one of ranges (BRIN) on `received_at`: a page in their order would sort all that was
received until the cursor. So they are looked for in slices that begin at the cursor and widen, in one statement that
stops at the slice that fills the page.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.core.exceptions import EmptyResultSet
from django.db.models import QuerySet
from django.db.models.expressions import RawSQL

from controlplane.usage.models import UsageRecord

FIRST_SLICE = timedelta(seconds=1)
WIDER = 2
"""Each slice is as many times as wide as the one before: a day is 17. One more is looked into than fills the page."""

ORDER = ("received_at", "request_id", "attempt", "agent_id")
"""What no two records share: a report closes an attempt once. Two agents may, which the audit of copies finds."""


@dataclass(frozen=True, slots=True)
class Received:
    """When: [since, until)."""

    since: datetime
    until: datetime


def slices(within: Received, start: datetime | None, *, newest_first: bool) -> list[Received]:
    """The slices of a time from the instant `start` on, which is in the first; None starts where the order begins."""
    found: list[Received] = []
    width, since, until = FIRST_SLICE, within.since, within.until
    if newest_first and start is not None and start < until:
        until = start + timedelta(microseconds=1)
    elif not newest_first and start is not None:
        since = max(since, start)
    while since < until:
        wide = min(width, until - since)
        found.append(Received(until - wide, until) if newest_first else Received(since, since + wide))
        since, until = (since, until - wide) if newest_first else (since + wide, until)
        width *= WIDER
    return found


def first_records(
    rows: QuerySet[UsageRecord], within: Received, start: datetime | None, count: int
) -> list[UsageRecord]:
    """The first `count` of ordered rows that were received in a time; one statement. Their order is that of ORDER, up
    or down.
    """
    newest_first = str(rows.query.order_by[0]).startswith("-")
    parts = slices(within, start, newest_first=newest_first)
    begins, ends = RawSQL("slice.begins", ()), RawSQL("slice.ends", ())
    inner = rows.filter(received_at__gte=begins, received_at__lt=ends)[:count]
    try:
        statement, values = inner.query.sql_with_params()
    except EmptyResultSet:
        return []
    way = "DESC" if newest_first else "ASC"
    outer = ", ".join(f"found.{name} {way}" for name in ORDER)
    return list(
        UsageRecord.objects.raw(
            f"""
            SELECT found.* FROM unnest(%s::timestamptz[], %s::timestamptz[])
                WITH ORDINALITY AS slice (begins, ends, number)
            CROSS JOIN LATERAL ({statement}) AS found
            ORDER BY slice.number, {outer} LIMIT %s
            """,  # noqa: S608 - names are constants, values are parameters
            [[part.since for part in parts], [part.until for part in parts], *values, count],
        )
    )
