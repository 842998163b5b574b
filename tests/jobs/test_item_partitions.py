"""Days of items end as a whole: nothing of a day stays behind, and no day goes of which a job still has its rows."""

from __future__ import annotations

from datetime import date

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.jobs import batch_sweep
from controlplane.jobs.item_partitions import create_day, drop_purged_days, items_table
from controlplane.jobs.models import Item, ItemBody, ItemResult, Job
from tests.jobs.batches import empty_items, running
from tests.jobs.settling import run_all
from tests.world import build_world

OLD, OLDER = date(2020, 1, 2), date(2020, 1, 1)
ROWS = (Item, ItemBody, ItemResult)


@pytest.fixture
def world(transactional_db, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    empty_items()
    yield build_world()
    with connection.cursor() as cursor:
        for day in (OLD, OLDER):
            for table in ("jobs_item", "jobs_itembody", "jobs_itemresult"):
                cursor.execute(f"DROP TABLE IF EXISTS {table}_{day:%Y%m%d}")


def job_of(world, day: date, items: int) -> Job:
    """A job of a day long ago, all of whose items have a result."""
    job = running(world.tenant, items)
    run_all(world)
    with connection.cursor() as cursor:
        create_day(cursor, day)
        for model in ROWS:
            cursor.execute(
                f"UPDATE {model._meta.db_table} SET day = %s WHERE job_id = %s AND day = %s", [day, job.pk, job.day]
            )
    Job.objects.filter(pk=job.pk).update(day=day)
    return job


def days() -> list[date]:
    with connection.cursor() as cursor:
        return drop_purged_days(cursor)


def there(day: date) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [items_table(day)])
        return bool(cursor.fetchone()[0])


def test_a_day_goes_with_all_that_belongs_to_its_items_once_all_its_jobs_are_purged(world):
    """No row of a side table outlives what it belongs to; neither does what a purge that was killed left."""
    first, second, kept = job_of(world, OLD, 3), job_of(world, OLD, 2), job_of(world, OLDER, 4)
    assert [model.objects.count() for model in ROWS] == [9, 9, 9]
    Job.objects.filter(pk=first.pk).update(rows_purged_at=timezone.now())
    assert days() == [] and [model.objects.count() for model in ROWS] == [9, 9, 9]
    Job.objects.filter(pk=second.pk).update(rows_purged_at=timezone.now())
    assert days() == [OLD] and not there(OLD) and there(OLDER)
    for model in ROWS:
        assert set(model.objects.values_list("job_id", flat=True)) == {kept.pk}, model.__name__
    assert days() == []


def test_rows_of_a_large_job_go_a_bounded_number_at_a_time_each_with_its_own_commit(world, monkeypatch):
    """However large it is and whatever else the database does: no statement is long, and what is removed stays so."""
    monkeypatch.setattr(batch_sweep, "PURGE_LINES", 10)
    job, now = running(world.tenant, 25), timezone.now()
    run_all(world)
    job.refresh_from_db()
    removed: dict[str, list[int]] = {}

    def watch(execute, sql, params, many, context):
        result = execute(sql, params, many, context)
        if sql.startswith("DELETE FROM jobs_item"):
            removed.setdefault(sql.split()[2], []).append(context["cursor"].rowcount)
            assert connection.in_atomic_block and not connection.savepoint_ids, "in a transaction of its own"
        return result

    with connection.execute_wrapper(watch):
        assert batch_sweep._purge(job, now)
    assert removed == {model._meta.db_table: [10, 10, 5] for model in ROWS}
    assert [model.objects.count() for model in ROWS] == [0, 0, 0]
