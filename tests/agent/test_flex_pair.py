"""Controller, exchange and agent together: a slot is lent, runs batch, trips, drains and is home again."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from controlplane.flex.controller import Controller
from controlplane.flex.models import Grant, Trip
from controlplane.jobs.models import Job
from tests.agent import control_planes as cp
from tests.agent.wire_client import WireClient, chat_body, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]


def short_times(world) -> None:
    """The rules of every day with times that a test can wait for, and a backlog that two batch slots cannot do."""
    pool = world.pool
    pool.lend_hold_s = pool.decision_interval_s = pool.cooldown_s = 1
    pool.drain_bound_s, pool.grant_ttl_s, pool.min_hold_s, pool.return_hold_s = 5, 5, 0, 1
    pool.safe_rate = {"entries": {"1": 1000.0, "8": 8000.0}}
    pool.save()
    world.bulk.retry_safe, world.bulk.overload, world.bulk.max_output_tokens = True, "queue", 4000
    world.bulk.save()
    world.chat.max_queue = 64
    world.chat.save()
    now = datetime.now(UTC)
    Job.objects.create(
        tenant=world.tenant,
        workload_class=world.bulk,
        pool=pool,
        items=100_000,
        prompt_tokens=1000,
        expected_output_tokens=200,
        deadline=now + timedelta(hours=1),
        created_by="ada",
        created_at=now,
    )


def bulk(**fields) -> bytes:
    return post(chat_body(**fields), key=cp.SECRET, headers="x-flexband-class: bulk\r\n")


async def test_a_slot_goes_out_and_comes_home(world, tmp_path):
    await cp.in_database(short_times)(world)
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url, cp.running_agent(url, token, tmp_path / "state") as process:
        await cp.until(lambda: process.control.epoch_now())
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: process.engine.ready)
        controller = Controller()
        ticking = asyncio.create_task(tick(controller))
        try:
            await cp.until(lambda: process.engine.flex.any_lent)
            lent = [slot for slot in process.engine.flex.slots.values() if slot.state == "lent"]
            grant = await cp.in_database(Grant.objects.get)(slot_id=lent[0].slot_id)
            assert (grant.action, grant.fence) == ("lend", lent[0].grant.fence)

            clients = [await WireClient.connect(process.port) for _ in range(12)]
            for client in clients:
                client.send(bulk(max_tokens=4000, ignore_eos=True))
            engine = process.engine
            await cp.until(lambda: engine.flex.any_lent and _batch_on_flex(engine))
            fence = lent[0].grant.fence
            first_expiry = lent[0].grant.expires_at_us
            await cp.until(lambda: lent[0].grant.expires_at_us > first_expiry)
            assert lent[0].grant.fence == fence, "a renewal keeps its fence"

            engine.flex.refused("queue_full")
            assert not engine.flex.any_lent
            gaps = await _gaps_between_reports(process.control, 3)
            assert gaps[1] < gaps[2] - 0.1 and gaps[2] > 0.8, f"told soon, again soon, then as always: {gaps}"
            await cp.until(lambda: _trip_is_stored(lent[0].slot_id, fence))
            await cp.until(lambda: lent[0].state == "home")
            await cp.until(lambda: _grant_is_home(lent[0].slot_id, fence))
            for client in clients:
                client.abort()
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
    assert await cp.quarantined() == []


async def tick(controller: Controller) -> None:
    while True:
        await cp.in_database(controller.tick)()
        await asyncio.sleep(0.4)


async def _gaps_between_reports(control, count: int) -> list[float]:
    """Seconds between the next reports, from the last one that was sent."""
    gaps, before = [], control._sent_s
    while len(gaps) < count:
        await asyncio.sleep(0.005)
        if control._sent_s != before:
            gaps.append(control._sent_s - before)
            before = control._sent_s
    return gaps


def _batch_on_flex(engine) -> bool:
    return any(engine.scheduled_slot(name).running for name in engine.flex.slots)


@cp.in_database
def _trip_is_stored(slot_id: int, fence: int) -> bool:
    return Trip.objects.filter(slot_id=slot_id, fence=fence, reason="refused").exists()


@cp.in_database
def _grant_is_home(slot_id: int, fence: int) -> bool:
    """The controller saw the trip, recalled under the next fence, and knows that the slot came home."""
    grant = Grant.objects.get(slot_id=slot_id)
    return grant.fence > fence and grant.state in ("home", "lent")
