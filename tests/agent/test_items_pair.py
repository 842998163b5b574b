"""Batch items with agents and control plane as they are: leased, run, reported, each with one result and one charge."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from django.utils import timezone

from controlplane.core.batch_items import ItemState
from controlplane.core.reasons import Outcome
from controlplane.fleet.models import Agent, Slot
from controlplane.jobs import batch_actions
from controlplane.jobs.models import Item
from tests.agent import control_planes as cp
from tests.agent.item_jobs import account_of, assert_each_once, completed, item_states, job_of, state_of, sweeping
from tests.agent.losing_proxy import LosingProxy
from tests.agent.test_kill import Process
from tests.agent.wire_client import WireClient
from tests.jobs.batches import ADA, empty_items

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True)
def files(world, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    empty_items()


async def ready(process) -> None:
    await cp.until(lambda: process.control.epoch_now())
    await cp.in_database(cp.push_policy)()
    await cp.until(lambda: process.engine.ready)


async def test_a_job_is_run_to_its_end_and_every_item_is_charged_once(world, tmp_path):
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        async with cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "20") as process:
            await ready(process)
            job = await job_of(world, 300)
            began = time.perf_counter()
            await cp.until(lambda: completed(job, 300), 60)
            print(f"\n  300 items on one agent: {time.perf_counter() - began:.2f} s")
            assert not process.engine.items.held.by_fence
            assert not process.engine.calls
        account = await assert_each_once(job, 300)
        assert account.free == 0
        assert (await state_of(job))[0] == "completed"
    assert await cp.quarantined() == []


async def test_a_third_of_all_answers_lost_changes_nothing(world, tmp_path):
    """Reports are taken and their answers lost: what was leased comes with a later one, what was told counts once."""
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url, LosingProxy(int(url.rsplit(":", 1)[1]), seed=3, share=0.33) as proxy:
        async with cp.running_agent(proxy.url, token, tmp_path / "state", "--sim-speed", "5") as process:
            await ready(process)
            job = await job_of(world, 200, ignore_eos=True)
            await cp.until(lambda: completed(job, 200), 60)
            print(f"\n  {proxy.lost} answers to reports lost, {proxy.passed} passed")
            assert proxy.lost >= 2
        account = await assert_each_once(job, 200)
        assert account.free == 0, "nothing was leased or run twice"
    assert await cp.quarantined() == []


async def test_a_job_without_a_key_runs_too(world, tmp_path):
    token = await cp.in_database(world.token)()
    async with (
        cp.control_plane() as url,
        cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "0") as process,
    ):
        await ready(process)
        job = await job_of(world, 20, key=False)
        await cp.until(lambda: completed(job, 20), 60)
        await assert_each_once(job, 20)
    assert await cp.quarantined() == []


@pytest.mark.processes
@pytest.mark.slow
async def test_kill_of_an_agent_midway_leaves_each_item_one_result_and_one_charge(world, tmp_path):
    """Two processes share the pool's batch slots; one is killed with items running and results not yet reported."""
    items = 400
    async with cp.control_plane() as url, sweeping():
        one = await start(world, url, tmp_path, "gpu-1")
        two = await start(world, url, tmp_path, "gpu-2")
        await cp.in_database(share_slots)(world)
        await cp.in_database(cp.push_policy)()
        for process in (one, two):
            await cp.until(process.ready, 60)
        job = await job_of(world, items, ignore_eos=True)
        began = time.perf_counter()
        await cp.until(lambda: completed(job, items // 4), 60)
        held = (await one.health())["items"]
        await one.end(signal.SIGKILL)
        killed_s, at_kill = time.perf_counter() - began, (await state_of(job))[1]
        assert 0 < at_kill < items
        again = await start(world, url, tmp_path, "gpu-1", token=False)
        await cp.until(lambda: completed(job, items), 120)
        took_s = time.perf_counter() - began
        account = await assert_each_once(job, items)
        print(
            f"\n  {items} items on two agents: {took_s:.2f} s; one killed after {killed_s:.2f} s with {at_kill} done, "
            f"{held} on it; {account.free} records of repeated or lost work"
        )
        assert account.free > 0, "what ran at the kill is lost, and nobody pays for it"
        assert await again.end() == await two.end() == 0
    assert await cp.quarantined() == []


async def start(world, url: str, tmp_path, name: str, *, token: bool = True, speed: float = 3) -> Process:
    secret = await cp.in_database(world.token)() if token else ""
    more = ("--name", name, "--slots", "4", "--sim-speed", str(speed))
    process = await Process.start(url, secret, tmp_path / name, *more)
    await cp.until(lambda: _has_epoch(process))
    return process


async def _has_epoch(process: Process) -> bool:
    return (await process.health())["epoch"] > 0


def share_slots(world) -> None:
    """Each agent gets every second slot of each band."""
    agents = list(Agent.objects.order_by("name"))
    for number, slot in enumerate(world.slots):
        Slot.objects.filter(pk=slot.pk).update(agent=agents[number % len(agents)])


@pytest.mark.processes
@pytest.mark.slow
async def test_short_items_keep_the_batch_slots_busy(world, tmp_path):
    """No gaps between leases while there is something to lease."""
    items = 8000
    async with cp.control_plane() as url:
        processes = [await start(world, url, tmp_path, name, speed=10) for name in ("gpu-1", "gpu-2")]
        await cp.in_database(share_slots)(world)
        await cp.in_database(cp.push_policy)()
        for process in processes:
            await cp.until(process.ready, 60)
        job = await job_of(world, items, ignore_eos=True)
        await cp.until(lambda: completed(job, 200), 60)
        began, before = time.perf_counter(), await busy_s(processes)
        await asyncio.sleep(15)
        took_s, after = time.perf_counter() - began, await busy_s(processes)
        done, states = (await state_of(job))[1], await item_states(job)
        shares = {slot: (after[slot] - before[slot]) / took_s for slot in ("b4", "b5")}
        print(
            f"\n  busy over {took_s:.1f} s: {', '.join(f'{slot} {share:.1%}' for slot, share in shares.items())}; "
            f"{done} items done, {states[ItemState.LEASED]} leased"
        )
        await cp.in_database(cancel_job)(job)
        assert [await process.end() for process in processes] == [0, 0]
        account = await account_of(job)
        assert len(account.results) == len(set(account.lines)) >= done
        assert set(account.results) <= set(account.charged)
        assert min(shares.values()) > 0.9
    assert await cp.quarantined() == []


async def busy_s(processes: list[Process]) -> dict[str, float]:
    """Seconds in which something ran, by slot."""
    found: dict[str, float] = {}
    for process in processes:
        client = await WireClient.connect(process.admin_port)
        answer = await client.ask(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        for line in answer.body.decode().splitlines():
            if line.startswith("flexband_slot_busy_seconds_total{"):
                found[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
    return found


async def test_agents_that_share_the_end_of_a_job_end_together(world, tmp_path):
    """Both are leased as much at first, and one turns out to be a hundred times slower: the other runs its rest."""
    items = 300
    tokens = [await cp.in_database(world.token)() for _ in range(2)]
    half = ("--slots", "4", "--sim-speed")
    async with (
        cp.control_plane() as url,
        cp.running_agent(url, tokens[0], tmp_path / "fast", "--name", "gpu-1", *half, "10") as fast,
        cp.running_agent(url, tokens[1], tmp_path / "slow", "--name", "gpu-2", *half, "0.1") as slow,
    ):
        for process in (fast, slow):
            await cp.until(lambda each=process: each.control.epoch_now())
        await cp.in_database(share_slots)(world)
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: fast.engine.ready and slow.engine.ready)
        job = await job_of(world, items, ignore_eos=True)
        await cp.until(lambda: len(slow.engine.items.held.by_fence) > 50)
        leased = len(slow.engine.items.held.by_fence)
        await cp.until(lambda: completed(job, items), 120)
        ran = sum(count for (_, how), count in slow.engine.items.done.items() if how is Outcome.COMPLETED)
        print(f"\n  the slow agent was leased {leased} items and ran {ran}")
        assert 0 < ran < leased // 2
        account = await assert_each_once(job, items)
        attempts = await cp.in_database(lambda: set(Item.objects.values_list("attempt", flat=True)))()
        assert (account.free, attempts) == (0, {1})


async def test_an_orderly_end_hands_back_what_has_not_begun(world, tmp_path):
    """The next process gets it at once, as the same attempt: nothing waits for a lease to lapse."""
    items = 200
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        async with cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "5") as process:
            await ready(process)
            job = await job_of(world, items, ignore_eos=True)
            await cp.until(lambda: completed(job, 20), 60)
        states = await item_states(job)
        assert not states[ItemState.LEASED], "its last report has settled all that it held"
        assert states[ItemState.WAITING] > 0
        async with cp.running_agent(url, "", tmp_path / "state", "--sim-speed", "20") as process:
            await cp.until(lambda: completed(job, items), 60)
        account = await assert_each_once(job, items)
        attempts = await cp.in_database(lambda: set(Item.objects.values_list("attempt", flat=True)))()
        assert (account.free, attempts) == (0, {1})
    assert await cp.quarantined() == []


async def test_a_cancelled_job_stops_within_a_report_interval(world, tmp_path):
    """Waiting items are handed back, running ones are cancelled at the server and closed."""
    token = await cp.in_database(world.token)()
    async with (
        cp.control_plane() as url,
        cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "0.2") as process,
    ):
        await ready(process)
        job = await job_of(world, 50, ignore_eos=True)
        engine = process.engine
        await cp.until(lambda: any(call.running for call in engine.calls.values()))
        await cp.in_database(cancel_job)(job)
        taken = process.engine.spool.state.accepted_through
        await cp.until(lambda: not engine.items.held.by_fence and not engine.calls)
        reports = process.engine.spool.state.accepted_through - taken
        print(f"\n  stopped with the {reports}. answer after the cancellation")
        assert reports <= 2, "the first may have been under way"
        await cp.until(lambda: nothing_open(job))
        account = await account_of(job)
        assert len(account.results) < 50
    assert await cp.quarantined() == []


def cancel_job(job) -> None:
    batch_actions.cancel_batch(batch_id=job.batch.pk, actor=ADA, reason="wrong file", now=timezone.now())


async def nothing_open(job) -> bool:
    states = await item_states(job)
    return not states[ItemState.LEASED]
