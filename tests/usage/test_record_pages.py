"""Records are looked for in slices that widen from the cursor on: all are found, once, and no more is read than needed.

The slices together are the time that was asked for, in order, without a gap.
"""

from datetime import UTC, datetime, timedelta

from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.period import to_us
from controlplane.usage.ingest import store_records
from controlplane.usage.models import UsageRecord
from controlplane.usage.partitions import create_days
from controlplane.usage.record_pages import ORDER, Received, first_records, slices
from controlplane.usage.records import Origin, to_columns
from tests.usage_rows import as_tuple, usage_row

MIDNIGHT = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
DAY = Received(MIDNIGHT - timedelta(hours=12), MIDNIGHT + timedelta(hours=12))
TICK = timedelta(microseconds=1)
instants = st.datetimes(datetime(2026, 1, 1), datetime(2026, 1, 3), timezones=st.just(UTC))


@given(since=instants, until=instants, start=st.none() | instants, newest_first=st.booleans())
def test_slices_are_the_time_from_the_cursor_on(since, until, start, newest_first):
    found = slices(Received(since, until), start, newest_first=newest_first)
    if newest_first:
        until = until if start is None else min(until, start + TICK)
        found = [Received(part.until, part.since) for part in found]
        begin, end = until, since
    else:
        begin, end = since if start is None else max(since, start), until
    if (begin <= end) if newest_first else (begin >= end):
        assert found == []
        return
    assert [part.since for part in found] == [begin, *(part.until for part in found[:-1])]
    assert found[-1].until == end and len(found) <= 18


def store(in_transaction, world, received, count=1):
    rows = [as_tuple(usage_row(world, ended_us=to_us(received) - 5_000_000, slot_id=-1)) for _ in range(count)]
    in_transaction(create_days, [received.date()])
    in_transaction(store_records, to_columns([(Origin(7, world.pool.pk), rows)]), received)


def ordered(*, newest_first=True):
    return UsageRecord.objects.order_by(*(f"{'-' if newest_first else ''}{name}" for name in ORDER))


def test_the_first_records_are_those_of_the_order_in_either_direction(world, in_transaction):
    for second in (0, 1, 2, 5, 3_000, 40_000, 43_210, 80_000):
        store(in_transaction, world, DAY.until - timedelta(seconds=second + 1), 3)
    for newest_first in (True, False):
        rows = ordered(newest_first=newest_first)
        keys = [tuple(getattr(row, name) for name in ORDER) for row in rows]
        for count in (1, 2, 7, 24, 30):
            for start in (None, *(row.received_at for row in rows[::5])):
                found = first_records(rows, DAY, start, count)
                wanted = [key for key in keys if start is None or (key[0] <= start) == newest_first or key[0] == start]
                assert [tuple(getattr(row, name) for name in ORDER) for row in found] == wanted[:count]


def test_slices_behind_the_page_are_not_read(world, in_transaction):
    for second in range(0, 3_600, 10):
        store(in_transaction, world, MIDNIGHT - timedelta(seconds=second + 1), 2)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE usage_record")
    for start in (None, MIDNIGHT - timedelta(seconds=1_800)):
        read = rows_read(ordered(), Received(MIDNIGHT - timedelta(days=1), MIDNIGHT), start, count=5)
        assert 5 <= read < 60, f"{read} of 720 records were read for a page of 5"
    assert rows_read(ordered(), Received(MIDNIGHT - timedelta(days=1), MIDNIGHT), None, count=10_000) == 720


def rows_read(rows, within, start, count):
    """What the parts of the statement that read records let through, all their loops together."""
    statements = []

    def explain(execute, sql, params, many, context):
        execute(f"EXPLAIN (ANALYZE, FORMAT JSON, TIMING OFF, COSTS OFF) {sql}", params, many, context)
        statements.append(context["cursor"].fetchone()[0])
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explain):
        first_records(rows, within, start, count)
    (plan,) = statements
    read = (
        node["Actual Rows"] * node["Actual Loops"]
        for node in nodes(plan[0]["Plan"])
        if node.get("Relation Name", "").startswith("usage_record")
    )
    return round(sum(read))  # rows are told as the mean of the loops


def nodes(node):
    yield node
    for part in node.get("Plans", ()):
        yield from nodes(part)
