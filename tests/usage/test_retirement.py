"""Days leave the database for files without losing a row: cut off at any point, tampered with, or run twice."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import duckdb
import psycopg
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction

from controlplane.core.period import to_us
from controlplane.usage import retirement
from controlplane.usage.ingest import store_records
from controlplane.usage.models import RetiredDay, UsageRecord
from controlplane.usage.partitions import create_days, ensure_day
from controlplane.usage.record_files import read_back
from controlplane.usage.records import Origin, to_columns
from controlplane.usage.rollups import fold
from controlplane.usage.verification import verify
from tests.usage_rows import as_tuple, usage_row

NOW = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
OLD = NOW - timedelta(days=40)
TEXTS = ["", "plain", 'quote " comma , line\nend', "naïve 漢字 \\x41", "'", "\t"]


@pytest.fixture(autouse=True)
def archive(settings, tmp_path, transactional_db):
    settings.USAGE_ARCHIVE, settings.USAGE_RECORD_DAYS = tmp_path / "archive's", 31
    yield settings.USAGE_ARCHIVE
    with connection.cursor() as cursor:
        for day in {OLD.date(), (OLD - timedelta(days=1)).date()}:
            cursor.execute(f"DROP TABLE IF EXISTS usage_record_{day:%Y%m%d}")


def store(in_transaction, world, received, n=50):
    chance = random.Random(n)
    rows = [
        usage_row(
            world, prices=world.prices, ended_us=to_us(received) - chance.randrange(10**10), slot_id=-1,
            client_request_id=chance.choice(TEXTS), queue_us=chance.choice([-1, 0, 2**40]),
            output_tokens=chance.randrange(1, 999),
        )
        for _ in range(n)
    ]  # fmt: skip
    in_transaction(create_days, [received.date()])
    in_transaction(store_records, to_columns([(Origin(7, world.pool.pk), [as_tuple(row) for row in rows])]), received)
    return rows


def test_an_old_day_moves_into_a_file_and_verify_reads_it_there(world, in_transaction, archive):
    rows = store(in_transaction, world, OLD)
    in_transaction(ensure_day, NOW)
    store(in_transaction, world, NOW, 20)
    fold(NOW + timedelta(hours=1))
    [day] = retirement.retire_old_days(NOW)
    assert (day.day, day.records, UsageRecord.objects.count()) == (OLD.date(), 50, 20)
    assert OLD.date() not in retirement.stored_days() and NOW.date() in retirement.stored_days()
    whole = verify()
    assert (whole.records, whole.differences) == (70, [])
    begin = OLD - timedelta(days=1)
    assert verify(begin, OLD + timedelta(days=1)).records == 50
    assert verify(until=begin).records == 0
    with duckdb.connect() as database:
        found = database.execute(
            "SELECT CAST(request_id AS VARCHAR), client_request_id, epoch_us(ended_at) FROM read_parquet(?)",
            [str(archive / day.path)],
        ).fetchall()
    assert sorted(found) == sorted((row.request_id, row.client_request_id, row.ended_us) for row in rows)
    assert retirement.retire_old_days(NOW) == []
    call_command("usage", "verify")


def test_a_difference_in_a_retired_day_is_found(world, in_transaction):
    store(in_transaction, world, OLD)
    fold(NOW)
    retirement.retire_old_days(NOW)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE usage_rollupminute SET output_tokens = output_tokens + 1"
            " WHERE ctid = (SELECT min(ctid) FROM usage_rollupminute)"
        )
    assert "output_tokens" in {row.column for row in verify().differences}


def test_a_day_that_was_written_and_not_dropped_is_dropped_by_the_next_run(world, in_transaction, archive, monkeypatch):
    store(in_transaction, world, OLD)

    def killed(day, now):
        retirement._write(day, now)
        raise KeyboardInterrupt

    with monkeypatch.context() as cut_off, pytest.raises(KeyboardInterrupt):
        cut_off.setattr(retirement, "retire_day", killed)
        retirement.retire_old_days(NOW)
    assert UsageRecord.objects.count() == verify().records == 50
    path = archive / RetiredDay.objects.get().path
    before = path.stat().st_mtime_ns
    retirement.retire_old_days(NOW)
    assert path.stat().st_mtime_ns == before
    assert (UsageRecord.objects.count(), verify().records) == (0, 50)


def test_a_file_that_was_damaged_before_the_drop_is_written_again(world, in_transaction, archive):
    store(in_transaction, world, OLD)
    day = retirement._write(OLD.date(), NOW)
    path = archive / day.path
    path.write_bytes(path.read_bytes()[:-9])
    retirement.retire_old_days(NOW)
    assert read_back(path).records == verify().records == 50


def test_the_database_refuses_to_drop_what_no_file_has(world, in_transaction):
    store(in_transaction, world, OLD)
    drop = "SELECT usage_drop_partition(%s)"
    with pytest.raises(DatabaseError, match="no verified file"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(drop, (OLD.date(),))
    retirement._write(OLD.date(), NOW)
    store(in_transaction, world, OLD, 1)
    refused = pytest.raises(DatabaseError, match="has 50 records, the table 51")
    with refused, transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(drop, (OLD.date(),))
    assert UsageRecord.objects.count() == 51


def test_a_record_that_came_after_the_file_was_written_makes_it_written_again(world, in_transaction):
    store(in_transaction, world, OLD)
    retirement._write(OLD.date(), NOW)
    store(in_transaction, world, OLD, 1)
    assert [day.records for day in retirement.retire_old_days(NOW)] == [51]
    assert (UsageRecord.objects.count(), verify().records) == (0, 51)


def test_a_file_that_is_gone_or_changed_stops_the_verification(world, in_transaction, archive):
    store(in_transaction, world, OLD)
    fold(NOW)
    [day] = retirement.retire_old_days(NOW)
    path = archive / day.path
    kept = path.read_bytes()
    for content in (kept[:-1], kept + b"\0", None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        with pytest.raises(CommandError, match="restore the file"):
            call_command("usage", "verify")
    path.write_bytes(kept)
    assert verify().differences == []


def test_an_empty_day_is_dropped_too(world, in_transaction):
    in_transaction(create_days, [OLD.date()])
    [day] = retirement.retire_old_days(NOW)
    assert day.records == 0 and OLD.date() not in retirement.stored_days()
    assert verify().records == 0


def test_a_reader_in_the_way_only_puts_the_drop_off(world, in_transaction):
    store(in_transaction, world, OLD)
    parameters = connection.get_connection_params()
    parameters.pop("cursor_factory", None)
    parameters.pop("context", None)
    with psycopg.connect(**parameters) as reader:
        reader.execute("SELECT count(*) FROM usage_record")
        with pytest.raises(DatabaseError, match="lock"):
            retirement.retire_old_days(NOW)
        assert UsageRecord.objects.count() == 50
    assert len(retirement.retire_old_days(NOW)) == 1


@pytest.mark.parametrize(("days", "usable"), [(0, True), (31, True), (92, True), (30, False), (-1, False)])
def test_the_setting_keeps_a_month_or_everything(settings, days, usable):
    settings.USAGE_RECORD_DAYS = days
    if usable:
        assert retirement.keep_days() == days
    else:
        with pytest.raises(ImproperlyConfigured, match="31 or more, or 0"):
            retirement.keep_days()


def test_nothing_is_retired_when_all_is_kept(world, in_transaction, settings):
    settings.USAGE_RECORD_DAYS = 0
    store(in_transaction, world, OLD)
    assert retirement.retire_old_days(NOW) == [] and UsageRecord.objects.count() == 50
