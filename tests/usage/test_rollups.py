"""Rollups: exactly once from deltas through minutes to quarters and days, and equal to the records."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from random import Random
from zoneinfo import ZoneInfo

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from controlplane.core.period import from_us
from controlplane.tenants.models import Installation
from controlplane.usage import partitions, queries
from controlplane.usage.ingest import store_records
from controlplane.usage.models import RollupDay, RollupDelta, RollupMinute, RollupQuarter, UsageRecord
from controlplane.usage.partitions import create_days, days_ahead, ensure_day
from controlplane.usage.queries import Scope
from controlplane.usage.records import Origin, to_columns
from controlplane.usage.rollups import fold
from controlplane.usage.tasks import create_partitions
from controlplane.usage.verification import verify
from tests.usage_rows import as_tuple, usage_row

NOW = datetime.now(UTC).replace(microsecond=0)


def store(in_transaction, world, rows, now=NOW):
    records = to_columns([(Origin(1, world.pool.pk), [as_tuple(row) for row in rows])])
    in_transaction(ensure_day, now)
    in_transaction(store_records, records, now)


def scattered(world, n, seed=1, spread_s=7_200):
    random = Random(seed)
    newest = round(NOW.timestamp()) * 1_000_000 - 120_000_000
    return [
        usage_row(
            world,
            prices=world.prices,
            ended_us=newest - random.randrange(spread_s * 1_000_000),
            output_tokens=random.randrange(1, 900),
            queue_us=random.choice([0, -1, random.randrange(10**7)]),
            flags=random.choice([0, 1]),
            ttft_us=random.choice([-1, random.randrange(10**6)]),
        )
        for _ in range(n)
    ]


def test_a_fold_moves_closed_minutes_into_every_level_once(world, in_transaction):
    rows = scattered(world, 300)
    store(in_transaction, world, rows)
    before = verify()
    assert (before.records, before.differences) == (300, [])
    assert fold(NOW + timedelta(minutes=5)) > 0
    assert fold(NOW + timedelta(minutes=5)) == 0
    assert RollupDelta.objects.count() == 0
    for level in (RollupMinute, RollupQuarter, RollupDay):
        assert sum(level.objects.values_list("requests", flat=True)) == 300
        assert sum(level.objects.values_list("output_tokens", flat=True)) == sum(row.output_tokens for row in rows)
    assert verify().differences == []


def test_late_deltas_are_added_to_what_was_folded(world, in_transaction):
    for seed in range(4):
        store(in_transaction, world, scattered(world, 80, seed))
        fold(NOW + timedelta(minutes=5))
    assert sum(RollupMinute.objects.values_list("requests", flat=True)) == 320
    assert verify().differences == []


def test_two_folds_at_once_count_once(world, in_transaction):
    store(in_transaction, world, scattered(world, 400))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: fold(NOW + timedelta(minutes=5)), range(4)))
    fold(NOW + timedelta(minutes=5))
    assert sum(RollupQuarter.objects.values_list("requests", flat=True)) == 400
    assert verify().differences == []


def test_open_minutes_stay_deltas(world, in_transaction):
    store(in_transaction, world, [usage_row(world, ended_us=time.time_ns() // 1000 + 60_000_000)])
    assert fold(datetime.now(UTC)) == 0
    assert RollupDelta.objects.count() == 1


def test_days_are_those_of_the_billing_zone(world, in_transaction):
    Installation.objects.update(billing_zone="Asia/Kolkata")
    midnight = datetime(NOW.year, NOW.month, NOW.day, 18, 30, tzinfo=UTC) - timedelta(days=1)
    at = int(midnight.timestamp() * 1e6)
    store(in_transaction, world, [usage_row(world, ended_us=at - 1), usage_row(world, ended_us=at)])
    fold(NOW + timedelta(days=1))
    days = sorted(RollupDay.objects.values_list("day", flat=True))
    assert days == [midnight.date(), midnight.date() + timedelta(days=1)]


def test_queries_are_the_same_before_and_after_the_fold(world, in_transaction):
    rows = scattered(world, 500)
    store(in_transaction, world, rows)
    until = NOW + timedelta(minutes=2)
    scopes = [Scope(until - timedelta(hours=3), until), Scope(NOW - timedelta(minutes=47), NOW - timedelta(minutes=8))]

    def read():
        return [
            (
                queries.totals(scope),
                queries.totals(scope, by=("tenant_id", "outcome")),
                queries.series(scope, timedelta(minutes=15)),
                queries.breakdown(world.pool.pk, scope.since, scope.until),
            )
            for scope in scopes
        ]

    first = read()
    fold(NOW + timedelta(minutes=5))
    assert read() == first
    for scope, (totals, *_, breakdown) in zip(scopes, first, strict=True):
        # minutes are the grain: an edge inside a minute belongs to the minute it starts
        inside = [row for row in rows if scope.since <= from_us(row.ended_us // 60_000_000 * 60_000_000) < scope.until]
        assert totals[0].requests == len(inside) == breakdown.requests == breakdown.stack.count
        assert totals[0].charge_output_nanos == sum(row.charge_output_nanos for row in inside)
        known = [row.queue_us for row in inside if row.queue_us >= 0]
        assert breakdown.stages["queue"].count == len(known)
    assert len(inside) < 500


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/New_York"])
def test_whole_days_of_the_billing_zone_are_read_as_days(world, in_transaction, zone):
    Installation.objects.update(billing_zone=zone)
    rows = scattered(world, 400, spread_s=6 * 86_400)
    store(in_transaction, world, rows)
    fold(NOW + timedelta(minutes=5))
    until = NOW.replace(second=0) + timedelta(minutes=3)
    scopes = [
        Scope(until - timedelta(days=back, minutes=minutes), until - timedelta(minutes=later))
        for back, minutes, later in ((5, 0, 0), (4, 37, 1_441), (3, 815, 300), (1, 100, 0), (0, 900, 7))
    ]
    found = [(queries.totals(scope, by=("outcome",)), queries.breakdowns(scope)) for scope in scopes]
    for scope, (totals, breakdowns) in zip(scopes, found, strict=True):
        inside = [row for row in rows if scope.since <= from_us(row.ended_us // 60_000_000 * 60_000_000) < scope.until]
        assert sum(row.requests for row in totals) == len(inside) == breakdowns[()].requests
        assert sum(row.charge_output_nanos for row in totals) == sum(row.charge_output_nanos for row in inside)
    begin, end = queries.whole_days(ZoneInfo(zone), scopes[0].since, scopes[0].until)
    assert end.start - begin.start >= timedelta(days=3)
    assert RollupQuarter.objects.filter(quarter__gte=begin.start, quarter__lt=end.start).delete()[0]
    assert queries.totals(scopes[0], by=("outcome",)) == found[0][0]


def test_there_is_no_whole_day_between_two_midnights_of_one(world):
    noon = datetime(2026, 3, 8, 12, tzinfo=UTC)
    zone = ZoneInfo("America/New_York")
    assert queries.whole_days(zone, noon, noon + timedelta(hours=39)) is None
    # the day of 8 March has 23 hours there, so 9 March begins at 4:00
    begin, end = queries.whole_days(zone, noon, noon + timedelta(hours=40))
    assert (begin.label, end.label) == ("2026-03-09", "2026-03-10")
    assert begin.start == datetime(2026, 3, 9, 4, tzinfo=UTC)


def test_verify_finds_a_number_that_was_changed(world, in_transaction, capsys):
    store(in_transaction, world, scattered(world, 50))
    fold(NOW + timedelta(minutes=5))
    call_command("usage", "verify")
    assert "50 records" in capsys.readouterr().out
    row = RollupMinute.objects.first()
    RollupMinute.objects.filter(pk=row.pk).update(output_tokens=row.output_tokens + 1)
    found = {difference.column for difference in verify().differences}
    assert found == {"output_tokens", "quarter.output_tokens", "day.output_tokens"}
    with pytest.raises(CommandError) as refused:
        call_command("usage", "verify", "--json")
    assert refused.value.returncode == 1


def test_a_request_is_found_by_its_id(world, in_transaction):
    row = usage_row(world, client_request_id="order-17 é")
    others = scattered(world, 20)
    store(in_transaction, world, [row, *others])
    story = queries.find_request(UsageRecord.objects.get(request_id=row.request_id).request_id, now=datetime.now(UTC))
    assert [found.client_request_id for found in story.records] == ["order-17 é"]
    assert story.sample is None


def test_records_go_to_the_table_of_the_utc_day_on_which_they_were_received(world, in_transaction):
    # already the next day where this clock hangs
    received = datetime(2031, 4, 1, 1, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    store(in_transaction, world, scattered(world, 3), now=received)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT tableoid::regclass::text, count(*) FROM usage_record GROUP BY 1")
            assert cursor.fetchall() == [("usage_record_20310331", 3)]
    finally:
        in_transaction(lambda cursor: cursor.execute("DROP TABLE usage_record_20310331"))
        partitions._known_days.clear()


def test_partitions_are_made_ahead_once(world, in_transaction):
    far = datetime(2031, 5, 1, tzinfo=UTC)
    days = in_transaction(create_days, days_ahead(far))
    assert len(days) == 4
    assert in_transaction(create_days, days_ahead(far)) == []
    for day in days:
        in_transaction(lambda cursor, name: cursor.execute(f"DROP TABLE {name}"), f"usage_record_{day:%Y%m%d}")
    create_partitions()
    assert create_partitions() == 0
