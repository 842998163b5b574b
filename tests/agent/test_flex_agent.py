"""Lent slots on a real agent: grants, expiry, the tripwire, the way home."""

import asyncio

import msgspec
import pytest

from controlplane.agent.clock import boot_us
from controlplane.core.grants import Receipt
from controlplane.core.slot_states import SlotState
from controlplane.wire.report import Grant
from tests.agent import worlds
from tests.agent.test_engine import report_of, send

FLEX_ID = 3
BATCH = {"key": worlds.BATCH_SECRET, "max_tokens": 100, "ignore_eos": True}


def flex_document(revision: int = 1, *, drain_bound_s: int = 1, lend_p95_ms: int = 200, **bulk):
    """One interactive slot and one flex slot with a place each; batch has no floor."""
    return worlds.document(
        revision,
        pool={
            "slots": [worlds.slot(1, places=1), worlds.slot(FLEX_ID, "flex", places=1)],
            "flex": worlds.flex_policy(drain_bound_s=drain_bound_s, lend_p95_ms=lend_p95_ms),
        },
        classes=[worlds.class_policy(), worlds.class_policy("bulk", kind="batch", overload="queue", **bulk)],
    )


def lend(agent, fence: int = 1, ttl_us: int = 15_000_000, sent_us: int | None = None):
    grant = Grant(FLEX_ID, fence, "lend", ttl_us)
    return agent.engine.flex.apply([grant], sent_boot_us=boot_us() if sent_us is None else sent_us)


def recall(agent, fence: int):
    return agent.engine.flex.apply([Grant(FLEX_ID, fence, "recall", 0)], sent_boot_us=boot_us())


def state(agent) -> SlotState:
    return agent.engine.flex.slots["S3"].state


async def test_batch_runs_on_a_lent_slot_only_and_interactive_not(make_agent):
    agent = await make_agent(flex_document(), speed=20.0)
    waiting = await send(agent, **BATCH)
    await asyncio.sleep(0.1)
    assert len(agent.engine.calls) == 1 and not agent.engine.scheduler.slots[1].running
    assert lend(agent) == [Receipt.TAKEN]
    agent.engine.step()
    assert state(agent) is SlotState.LENT
    assert agent.engine.scheduler.slots[1].running
    await send(agent, max_tokens=400, ignore_eos=True)
    assert (await waiting.answer()).status == 200
    (row,) = [row for row in agent.closed_rows() if row.class_id == 2]
    assert row.slot_id == FLEX_ID
    interactive = [call.slot.policy.id for call in agent.engine.calls.values() if call.slot]
    assert interactive == [1]


async def test_ttl_counts_from_the_instant_the_report_was_sent(make_agent):
    agent = await make_agent(flex_document(), speed=1.0)
    lend(agent, ttl_us=30_000_000, sent_us=boot_us() - 29_500_000)
    assert state(agent) is SlotState.LENT
    await agent.until(lambda: state(agent) is SlotState.HOME, within_s=20)
    assert lend(agent, ttl_us=1_000_000, sent_us=boot_us() - 2_000_000) == [Receipt.REPEATED]
    assert state(agent) is SlotState.HOME


async def test_renewal_keeps_it_lent_and_a_lower_fence_is_ignored(make_agent):
    agent = await make_agent(flex_document())
    lend(agent, fence=5, ttl_us=1_500_000)
    for _ in range(4):
        await asyncio.sleep(0.5)
        assert lend(agent, fence=5, ttl_us=1_500_000) == [Receipt.REPEATED]
    assert state(agent) is SlotState.LENT
    assert recall(agent, fence=4) == [Receipt.IGNORED_LOWER_FENCE]
    assert state(agent) is SlotState.LENT
    assert recall(agent, fence=6) == [Receipt.TAKEN]
    assert state(agent) is SlotState.HOME, "nothing ran on it"


async def test_recall_drains_and_tells_the_instants(make_agent):
    agent = await make_agent(flex_document(drain_bound_s=10), speed=10.0)
    lend(agent)
    client = await send(agent, **BATCH)
    agent.engine.step()
    assert agent.engine.scheduler.slots[1].running
    recall(agent, fence=2)
    assert state(agent) is SlotState.DRAINING
    await send(agent, **BATCH)
    agent.engine.step()
    assert len(agent.engine.scheduler.slots[1].running) == 1, "a draining slot takes nothing new"
    assert (await client.answer()).status == 200
    await agent.until(lambda: state(agent) is SlotState.HOME)
    live = next(slot for slot in report_of(agent).figures.slots if slot.slot_id == FLEX_ID)
    assert (live.flex, live.fence) == ("home", 2)
    assert live.stop_admit_us <= live.last_token_us <= live.home_us
    assert live.home_us - live.stop_admit_us < 5_000_000


async def test_at_the_drain_bound_batch_goes_back_to_its_queue(make_agent):
    """Home within the bound; the request waits at the head with its arrival and runs on the next loan."""
    agent = await make_agent(flex_document(drain_bound_s=1), speed=0.2)
    lend(agent)
    client = await send(agent, **BATCH)
    agent.engine.step()
    recall(agent, fence=2)
    began = asyncio.get_running_loop().time()
    await agent.until(lambda: state(agent) is SlotState.HOME)
    assert asyncio.get_running_loop().time() - began > 0.8
    (call,) = agent.engine.calls.values()
    assert call.queued.attempt == 2 and call.slot is None
    agent.engine.backend.inner.speed = 100.0
    lend(agent, fence=3)
    agent.engine.step()
    assert (await client.answer()).status == 200
    (row,) = agent.closed_rows()
    assert row.attempt == 2
    usage = report_of(agent).slot_usage
    assert {u.charged for u in usage} == {True, False}
    agent.assert_nothing_held()


async def test_what_cannot_be_cancelled_is_overdue_and_comes_home_in_the_end(make_agent):
    """A request whose worst case fits the bound was let on, and then took longer than it said."""
    agent = await make_agent(flex_document(drain_bound_s=1, retry_safe=False), speed=0.5)
    lend(agent)
    client = await send(agent, key=worlds.BATCH_SECRET, max_tokens=40, ignore_eos=True)
    agent.engine.step()
    assert agent.engine.scheduler.slots[1].running
    recall(agent, fence=2)
    await agent.until(lambda: state(agent) is SlotState.OVERDUE)
    assert next(s for s in report_of(agent).figures.slots if s.slot_id == FLEX_ID).flex == "overdue"
    assert (await client.answer()).status == 200
    await agent.until(lambda: state(agent) is SlotState.HOME)


async def test_a_renewal_that_comes_while_it_drains_leaves_the_drain_its_bound(make_agent):
    agent = await make_agent(flex_document(), speed=0.2)
    lend(agent, ttl_us=200_000)
    await send(agent, **BATCH)
    agent.engine.step()
    assert agent.engine.scheduler.slots[1].running
    await agent.until(lambda: state(agent) is SlotState.DRAINING)
    assert lend(agent) == [Receipt.REPEATED]
    assert state(agent) is SlotState.DRAINING, "it has to be home before it is lent again"
    await agent.until(lambda: state(agent) is SlotState.HOME, within_s=5)
    assert lend(agent) == [Receipt.REPEATED]
    assert state(agent) is SlotState.LENT


async def test_batch_that_may_not_be_cancelled_and_does_not_fit_waits_for_the_floor(make_agent):
    agent = await make_agent(flex_document(drain_bound_s=1, retry_safe=False), speed=1.0)
    lend(agent)
    await send(agent, key=worlds.BATCH_SECRET, max_tokens=500, ignore_eos=True)
    streamed = {"key": worlds.BATCH_SECRET, "max_tokens": 500, "stream": True, "ignore_eos": True}
    await send(agent, **streamed)
    agent.engine.step()
    assert not agent.engine.scheduler.slots[1].running


async def test_the_wire_trips_when_interactive_waits_too_long(make_agent):
    agent = await make_agent(flex_document(lend_p95_ms=100), speed=1.0)
    lend(agent, fence=3)
    await send(agent, max_tokens=400, ignore_eos=True)
    assert state(agent) is SlotState.LENT
    await send(agent, max_tokens=5)
    await agent.until(lambda: state(agent) is SlotState.HOME, within_s=5)
    (trip,) = report_of(agent).trips
    assert (trip.slot_id, trip.fence, trip.reason) == (FLEX_ID, 3, "oldest_waiting")
    assert trip.value >= 100_000
    assert lend(agent, fence=3) == [Receipt.IGNORED_AFTER_TRIP], "that fence is over for good"
    assert report_of(agent).trips == []
    await agent.until(lambda: len([c for c in agent.engine.calls.values() if c.slot]) == 2)


async def test_a_refusal_for_want_of_slots_trips_at_once(make_agent):
    doc = flex_document()
    doc = msgspec.structs.replace(doc, classes=[worlds.class_policy(max_queue=0), doc.classes[1]])
    agent = await make_agent(doc, speed=1.0)
    lend(agent, fence=7)
    await send(agent, max_tokens=400, ignore_eos=True)
    refused = await send(agent)
    assert (await refused.answer()).status == 429
    (trip,) = report_of(agent).trips
    assert (trip.fence, trip.reason, trip.value) == (7, "refused", 1.0)
    assert state(agent) is SlotState.HOME


async def test_fences_and_trips_outlive_the_process_a_loan_does_not(make_agent):
    agent = await make_agent(flex_document(lend_p95_ms=100), speed=1.0)
    lend(agent, fence=3)
    again = worlds.Engine(
        clock=worlds.Clock(), backend=worlds.sim(), agent_id=worlds.AGENT_ID, state_dir=agent.state_dir
    )
    again.apply_policy(agent.policy.document, agent.live)
    assert again.flex.slots["S3"].state is SlotState.HOME, "nothing runs and nobody renewed"
    assert again.flex.slots["S3"].grant.fence == 3
    grant = Grant(FLEX_ID, 3, "lend", 15_000_000)
    assert again.flex.apply([grant], sent_boot_us=boot_us()) == [Receipt.IGNORED_AFTER_TRIP]
    (trip,) = again.flex.take_trips()
    assert (trip.slot_id, trip.fence, trip.reason) == (FLEX_ID, 3, "restarted"), "the controller recalls and cools down"
    agent.engine.flex.refused("queue_full")
    third = worlds.Engine(
        clock=worlds.Clock(), backend=worlds.sim(), agent_id=worlds.AGENT_ID, state_dir=agent.state_dir
    )
    third.apply_policy(agent.policy.document, agent.live)
    assert third.flex.apply([grant], sent_boot_us=boot_us()) == [Receipt.IGNORED_AFTER_TRIP]
    assert third.flex.apply([Grant(FLEX_ID, 4, "lend", 15_000_000)], sent_boot_us=boot_us()) == [Receipt.TAKEN]


async def test_a_trip_is_told_again_after_a_kill_until_a_recall_came(make_agent):
    """Killed between the trip and the report that would have told it: the next process tells it, with its instant."""
    agent = await make_agent(flex_document(), speed=1.0)
    lend(agent, fence=3)
    agent.engine.flex.refused("queue_full")
    (told,) = agent.engine.flex.trips

    def restarted():
        engine = worlds.Engine(
            clock=worlds.Clock(), backend=worlds.sim(), agent_id=worlds.AGENT_ID, state_dir=agent.state_dir
        )
        engine.apply_policy(agent.policy.document, agent.live)
        return engine.flex

    for _ in range(2):
        assert restarted().take_trips() == [told]
    second = restarted()
    assert second.apply([Grant(FLEX_ID, 4, "recall", 0)], sent_boot_us=boot_us()) == [Receipt.TAKEN]
    assert restarted().take_trips() == [], "answered"


async def test_no_loan_begins_that_cannot_be_written_down(make_agent):
    """A full disk: fences that are not on it would be taken as new after a kill. Trips and recalls act all the same."""
    agent = await make_agent(flex_document(), speed=1.0)
    beside = agent.state_dir / "flex.json.new"
    beside.mkdir()
    lend(agent, fence=1)
    assert state(agent) is SlotState.HOME
    beside.rmdir()
    lend(agent, fence=1)
    assert state(agent) is SlotState.LENT, "the next answer brings it again"
    beside.mkdir()
    agent.engine.flex.refused("queue_full")
    assert state(agent) is SlotState.HOME
    lend(agent, fence=3)
    assert state(agent) is SlotState.HOME
    beside.rmdir()
    agent.engine.step()
    assert b'"tripped":false' in (agent.state_dir / "flex.json").read_bytes(), "written as soon as the disk takes it"
    lend(agent, fence=3)
    assert state(agent) is SlotState.LENT


async def test_instants_of_an_older_drain_are_not_told_as_those_of_a_loan_that_never_came(make_agent):
    agent = await make_agent(flex_document(), speed=1.0)
    lend(agent, fence=1)
    recall(agent, fence=2)
    assert agent.engine.flex.drain_instants("S3").home_us is not None
    recall(agent, fence=4)  # the loan under fence 3 was lost on its way
    assert agent.engine.flex.drain_instants("S3").home_us is None


async def test_the_own_p95_is_one_quantile_over_all_interactive_classes(make_agent):
    """A class with one slow request among many quick ones of another does not trip by itself."""
    doc = flex_document(lend_p95_ms=100)
    doc = msgspec.structs.replace(doc, classes=[*doc.classes, worlds.class_policy("chat2", id=9)])
    agent = await make_agent(doc, speed=1.0)
    now_us = agent.engine.clock.now_us()
    figures = agent.engine.figures
    for _ in range(40):
        figures.of_class(agent.engine.registry.class_id("chat"), now_us).wait.record(1_000, now_us)
    figures.of_class(9, now_us).wait.record(500_000, now_us)
    lend(agent)
    agent.engine.step()
    assert state(agent) is SlotState.LENT
    for _ in range(3):
        figures.of_class(9, now_us).wait.record(500_000, now_us)
    await agent.until(lambda: state(agent) is SlotState.HOME)
    assert report_of(agent).trips[0].reason == "queue_p95"


@pytest.mark.parametrize("grant", [Grant(99, 1, "lend", 1), Grant(FLEX_ID, 0, "lend", 1), Grant(FLEX_ID, 1, "lend", 0)])
async def test_nonsense_grants_change_nothing(make_agent, grant):
    agent = await make_agent(flex_document())
    agent.engine.flex.apply([grant], sent_boot_us=boot_us())
    assert state(agent) is SlotState.HOME
    assert agent.engine.flex.slots["S3"].grant.fence == 0
