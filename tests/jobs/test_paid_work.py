"""Work that no hard budget pays for is no backlog, and whoever looks at it locks nothing."""

from __future__ import annotations

from datetime import datetime, timedelta

import psycopg
import pytest
from django.db import connection as django_connection
from django.db import transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.budgets.models import Budget, BudgetWindow, Lease
from controlplane.exchange.database import close_pools, connection
from controlplane.fleet.models import SlotInterval
from controlplane.flex import telemetry
from controlplane.flex.leadership import Shard
from controlplane.jobs import effects, queries
from controlplane.jobs.job_money import shortage_of
from controlplane.jobs.listing import slack_at_deadlines
from controlplane.jobs.models import Job
from controlplane.jobs.paid_work import item_bound_nanos, payable
from controlplane.ledger.models import RateCard
from tests import factories
from tests.jobs.batches import empty_items, running
from tests.jobs.test_admitting import hard_budget
from tests.world import build_world

HOUR = timedelta(hours=1)
ITEMS = 40


@pytest.fixture
def world(transactional_db, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    settings.SECURE_SSL_REDIRECT = False
    empty_items()
    world = build_world()
    RateCard.objects.create(
        class_slug="bulk", model=world.pool.model, effective_from=factories.NOW, prompt_nanos_per_mtok=1_000_000_000,
        cached_nanos_per_mtok=100_000_000, output_nanos_per_mtok=2_000_000_000, discount_ppm=500_000,
        created_at=factories.NOW, created_by="finance",
    )  # fmt: skip
    yield world
    close_pools()


def due(job: Job, hours: int) -> Job:
    Job.objects.filter(pk=job.pk).update(deadline=timezone.now() + hours * HOUR)
    job.refresh_from_db()
    return job


def backlog_items(world) -> dict[int, float]:
    """Job -> items of its that count, by the page's arithmetic; the controller's must be the same."""
    now = timezone.now()
    pairs = queries.backlog_jobs([world.pool.pk], now)
    read = telemetry.read(Shard(), now).pools[world.pool.pk].jobs
    assert sorted(us for _, us in pairs) == sorted(job.remaining_gpu_us for job in read)
    return {job.pk: us / queries.estimate_of(job, job.pool).gpu_us_per_item for job, us in pairs}


def test_items_that_no_budget_pays_for_are_no_backlog(world):
    job = due(running(world.tenant, ITEMS), 1)
    assert backlog_items(world) == {job.pk: ITEMS}
    budget = hard_budget(world.tenant, 15 * item_bound_nanos(job))
    assert backlog_items(world) == {job.pk: 15}
    Budget.objects.filter(pk=budget.pk).update(limit_nanos=item_bound_nanos(job) - 1)
    assert backlog_items(world) == {}
    slack = queries.pool_slack(world.pool, timezone.now())
    assert (slack.slack, slack.jobs) == (1.0, 0)
    Budget.objects.filter(pk=budget.pk).update(limit_nanos=100 * ITEMS * item_bound_nanos(job))
    assert backlog_items(world) == {job.pk: ITEMS}


def test_a_job_that_waits_for_money_past_its_deadline_asks_for_no_slot(world):
    job = running(world.tenant, ITEMS)
    Job.objects.filter(pk=job.pk).update(deadline=timezone.now() - timedelta(minutes=5))
    assert queries.pool_slack(world.pool, timezone.now()).slack is None
    hard_budget(world.tenant, 0)
    assert queries.pool_slack(world.pool, timezone.now()).slack == 1.0


def test_what_a_window_has_left_pays_for_the_first_deadline_only(world):
    late, soon = due(running(world.tenant, ITEMS), 5), due(running(world.tenant, ITEMS), 1)
    hard_budget(world.tenant, (ITEMS + 3) * item_bound_nanos(late))
    assert backlog_items(world) == {soon.pk: ITEMS, late.pk: 3}


def test_money_of_a_tenant_pays_once_for_its_jobs_in_two_pools(world):
    here, there = due(running(world.tenant, ITEMS), 2), due(running(world.tenant, ITEMS), 1)
    other = factories.pool("other", model=world.pool.model.name)
    Job.objects.filter(pk=there.pk).update(pool=other)
    hard_budget(world.tenant, (ITEMS + 3) * item_bound_nanos(here))
    now = timezone.now()

    def items(pool, job) -> float:
        ((_, us),) = queries.backlog_jobs([pool.pk], now)
        return us / queries.estimate_of(job, job.pool).gpu_us_per_item

    assert (items(other, there), items(world.pool, here)) == (ITEMS, 3), "as of both pools together"
    both = queries.backlog_jobs([world.pool.pk, other.pk], now)
    assert {job.pk: us / queries.estimate_of(job, job.pool).gpu_us_per_item for job, us in both} == {
        there.pk: ITEMS, here.pk: 3,
    }  # fmt: skip
    assert queries.pool_slack(world.pool, now).backlog_us == 3 * queries.estimate_of(here, world.pool).gpu_us_per_item


def test_effects_of_actions_and_slack_at_deadlines_count_what_is_paid_for(world):
    """Else another job's unpaid work would look like a deadline in danger, and more time like less slack."""
    unpaid, paid = due(running(world.tenant, ITEMS), 1), due(running(world.tenant, 10), 2)
    hard_budget(world.tenant, 8 * item_bound_nanos(unpaid))
    slot = factories.slot(world.pool, "floor", "batch")
    SlotInterval.objects.create(slot=slot, state="home", started_at=factories.NOW)
    now = timezone.now()

    def slots(items: float, deadline: datetime) -> float:
        work_us = items * queries.estimate_of(unpaid, unpaid.pool).gpu_us_per_item
        return pytest.approx(work_us / ((deadline - now) / timedelta(microseconds=1)), rel=0.01)

    listed = slack_at_deadlines([unpaid, paid], now)
    assert [1 - listed[job.pk] for job in (unpaid, paid)] == [
        slots(8, unpaid.deadline), slots(8, paid.deadline),
    ]  # fmt: skip
    later = effects.of_extension(unpaid, unpaid.deadline + 5 * HOUR, now)
    assert later.before.required == slots(8, unpaid.deadline)
    assert later.after.required == slots(8, paid.deadline), "its money goes to the job that is now due first"
    Job.objects.filter(pk=unpaid.pk).update(items_parked=20, items_completed=19)
    unpaid.refresh_from_db()
    again = effects.of_retry(unpaid, now)
    assert (again.items, again.own_after.required) == (20, slots(8, unpaid.deadline))
    assert effects.of_cancel(unpaid, now).after.required == slots(8, paid.deadline)


def test_the_budget_of_an_ancestor_counts_too(world):
    parent = factories.tenant("group")
    type(world.tenant).objects.filter(pk=world.tenant.pk).update(parent=parent)
    job = due(running(world.tenant, ITEMS), 1)
    hard_budget(world.tenant, 30 * item_bound_nanos(job))
    hard_budget(parent, 7 * item_bound_nanos(job))
    assert backlog_items(world) == {job.pk: 7}


def test_money_that_is_leased_counts_with_what_running_requests_hold_of_it(world):
    job = due(running(world.tenant, ITEMS), 1)
    bound = item_bound_nanos(job)
    hard_budget(world.tenant, 0)
    now = timezone.now()
    values = {
        "agent_id": 1,
        "tenant": world.tenant,
        "amount_nanos": 9 * bound,
        "granted_at": now,
        "state": "open",
        "epoch": 1,
    }
    Lease.objects.create(spent_nanos=2 * bound, reserved_nanos=4 * bound, expires_at=now + HOUR, **values)
    Lease.objects.create(expires_at=now - HOUR, **values)
    assert payable([queries.priced(job)], now) == {job.pk: 7}
    assert backlog_items(world) == {job.pk: 7}


def test_who_looks_at_a_job_locks_no_window_and_waits_for_none(world):
    job = running(world.tenant, ITEMS)
    budget = hard_budget(world.tenant, 3 * item_bound_nanos(job))
    pages = (reverse("job", args=[job.uuid]), f"/api/v1/jobs/{job.uuid}/")
    client: Client = factories.person("admin")
    assert [client.get(page).status_code for page in pages] == [200, 200]
    assert not BudgetWindow.objects.exists(), "to look makes no window"
    Budget.objects.filter(pk=budget.pk).update(limit_nanos=1)
    now = timezone.now()
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    BudgetWindow.objects.create(
        budget=budget, starts_at=day, ends_at=day + 24 * HOUR, limit_nanos=3 * item_bound_nanos(job), hard=True
    )
    lock = "SELECT id FROM budgets_budgetwindow FOR UPDATE NOWAIT"
    with connection() as other:
        with other.transaction():
            assert other.execute(lock).fetchall()
            with django_connection.cursor() as cursor:
                cursor.execute("SET lock_timeout = '2s'")
            page, told = (client.get(each) for each in pages)
            assert "Its items wait for money" in page.content.decode()
            assert told.json()["waits_for"]["remaining_nanos"] == 1, "the limit of now, though nothing wrote it yet"
        with transaction.atomic():
            assert shortage_of(job, now) is not None
            queries.pool_slack(world.pool, now)
            try:
                with other.transaction():
                    assert other.execute(lock).fetchall()
            except psycopg.errors.LockNotAvailable:
                pytest.fail("looking holds a lock on the budget's window")
    assert BudgetWindow.objects.get().limit_nanos == 3 * item_bound_nanos(job), "looking changes nothing"
