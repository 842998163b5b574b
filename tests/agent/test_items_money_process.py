"""A hard budget that ends in the middle of a job of an agent as an operator starts it, which is killed meanwhile.

How many items a budget pays for may move: money that was leased and not used comes back when its holder is gone. What
may never move is the limit, so windows are looked at all the time, and the charges once more at the end.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from django.db.models import F
from django.utils import timezone

from controlplane.budgets.models import Budget, BudgetWindow
from controlplane.core.batch_items import ItemState
from controlplane.jobs.job_money import item_bound_nanos, shortage_of
from controlplane.jobs.models import Job
from tests.agent import control_planes as cp
from tests.agent.item_jobs import assert_each_once, completed, item_states, job_of, state_of, sweeping
from tests.agent.test_items_pair import share_slots, start
from tests.jobs.batches import empty_items

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes, pytest.mark.slow]
ITEMS, PAID = 300, 12


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
def charged_and_left(job: Job) -> tuple[int, int]:
    """(nanos that the job was charged, nanos that its window has not settled)."""
    window = BudgetWindow.objects.get()
    return Job.objects.get(pk=job.pk).charge_nanos, window.limit_nanos - window.settled_nanos


@asynccontextmanager
async def watched() -> AsyncIterator[list[tuple[int, int, int]]]:
    """Every state of the windows that was seen, one every 30 ms."""
    seen: list[tuple[int, int, int]] = []

    async def look() -> None:
        while True:
            for state in await windows():
                if not seen or seen[-1] != state:
                    seen.append(state)
            await asyncio.sleep(0.03)

    task = asyncio.create_task(look())
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def still(job: Job) -> bool:
    """Nothing is leased, and what is done stays as it is over two leases of the job's money."""
    done = (await state_of(job))[1]
    if (await item_states(job))[ItemState.LEASED]:
        return False
    await asyncio.sleep(3)
    return (await state_of(job))[1] == done and not (await item_states(job))[ItemState.LEASED]


async def test_a_process_of_its_own_spends_no_more_than_the_budget_either(world, tmp_path):
    async with cp.control_plane() as url, sweeping(), watched() as seen:
        process = await start(world, url, tmp_path, "gpu-1", speed=2)
        await cp.in_database(share_slots)(world)
        await cp.in_database(cp.push_policy)()
        await cp.until(process.ready, 60)
        job = await job_of(world, ITEMS, ignore_eos=True)
        await cp.until(lambda: completed(job, 5), 90)
        await budget_of(world, PAID, job)
        await cp.until(lambda: short(job), 120)
        await cp.until(lambda: still(job), 120)
        _, done, parked, _ = await state_of(job)
        assert 5 < done < ITEMS and not parked
        charged, left = await charged_and_left(job)
        print(f"\n  before the kill: {done} done, windows {await windows()}")
        await process.end(signal.SIGKILL)
        again = await start(world, url, tmp_path, "gpu-1", token=False, speed=2)
        await cp.until(again.ready, 60)
        await asyncio.sleep(5)
        await cp.until(lambda: still(job), 120)
        after = (await state_of(job))[1]
        print(f"  after it: {after} done, windows {await windows()}, {len(seen)} states seen")
        assert done <= after <= done + PAID < ITEMS
        assert (await charged_and_left(job))[0] - charged <= left, "a kill gives back what was leased, no more"
        assert (await item_states(job)) == {ItemState.DONE: after, ItemState.WAITING: ITEMS - after}
        await cp.in_database(Budget.objects.update)(limit_nanos=F("limit_nanos") * 100)
        await cp.until(lambda: completed(job, ITEMS), 240)
        assert await again.end() == 0
    assert seen and all(settled + leased <= limit for limit, settled, leased in seen)
    assert any(settled for _, settled, _ in seen)
    await assert_each_once(job, ITEMS)
    assert await cp.quarantined() == []
