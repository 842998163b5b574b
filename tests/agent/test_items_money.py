"""A budget that ends in the middle of a job: its items stop, nothing is overspent, others run, then it goes on."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from django.db.models import F
from django.urls import reverse
from django.utils import timezone

from controlplane.budgets.models import Budget, BudgetWindow
from controlplane.core.batch_items import ItemState
from controlplane.jobs.job_money import item_bound_nanos, shortage_of
from controlplane.jobs.models import Item, Job
from tests import factories
from tests.agent import control_planes as cp
from tests.agent.item_jobs import assert_each_once, completed, item_states, job_of, state_of
from tests.jobs.batches import empty_items, running

pytestmark = [pytest.mark.django_db(transaction=True)]
ITEMS = 400


@pytest.fixture(autouse=True)
def files(world, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    empty_items()


@cp.in_database
def short(job: Job):
    return shortage_of(Job.objects.get(pk=job.pk), timezone.now())


@cp.in_database
def budget_of(world, items: int, job: Job) -> None:
    """From now on a hard budget that pays for about so many items more."""
    cp.hard_budget(world.tenant, items * item_bound_nanos(Job.objects.get(pk=job.pk)))
    cp.push_policy()


@cp.in_database
def windows() -> list[tuple[int, int, int]]:
    return list(BudgetWindow.objects.values_list("limit_nanos", "settled_nanos", "leased_nanos"))


@cp.in_database
def attempts(job: Job) -> set[int]:
    return set(Item.objects.filter(job_id=job.pk).values_list("attempt", flat=True))


@cp.in_database
def shown(job: Job) -> tuple[str, dict]:
    """The job's page and its REST resource as its tenant's operator gets them."""
    client = factories.person("tenant", tenant_row=job.tenant, name=f"member-{uuid.uuid4()}")
    page = client.get(reverse("job", args=[job.uuid])).content.decode()
    return page, client.get(f"/api/v1/jobs/{job.uuid}/").json()


async def test_a_budget_that_ends_midway_stops_the_job_until_it_is_raised(world, tmp_path):
    token = await cp.in_database(world.token)()
    async with (
        cp.control_plane() as url,
        cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "2") as process,
    ):
        await cp.until(lambda: process.control.epoch_now())
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: process.engine.ready)
        job = await job_of(world, ITEMS, ignore_eos=True)
        await cp.until(lambda: completed(job, 5), 60)
        await budget_of(world, 12, job)
        await cp.until(lambda: short(job), 60)
        await cp.until(lambda: not process.engine.items.held.by_fence, 60)
        state, done, parked, _ = await state_of(job)
        assert state == "running" and 5 < done < ITEMS and not parked
        for limit, settled, leased in await windows():
            assert settled + leased <= limit and settled > 0
        await asyncio.sleep(3)
        assert (await item_states(job)) == {ItemState.DONE: done, ItemState.WAITING: ITEMS - done}
        assert not process.engine.items.held.by_fence, "an item that nobody pays for is not leased again"
        page, told = await shown(job)
        assert "Its items wait for money" in page
        assert told["waits_for"]["reason"] == "budget_exhausted" and told["waits_for"]["budget"] == "acme"
        assert told["waits_for"]["remaining_nanos"] < 2 * told["waits_for"]["item_bound_nanos"]

        other = await cp.in_database(running)(await cp.in_database(factories.tenant)("other"), 40)
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: completed(other, 40), 60)
        assert (await state_of(job))[1] == done

        await cp.in_database(Budget.objects.update)(limit_nanos=F("limit_nanos") * 100)
        await cp.until(lambda: completed(job, ITEMS), 120)
        assert await attempts(job) == {1}
        assert (await shown(job))[1]["waits_for"] is None
    account = await assert_each_once(job, ITEMS)
    assert account.free == 0
    assert await cp.quarantined() == []
