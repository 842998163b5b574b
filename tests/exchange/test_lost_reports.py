"""Reports that an agent has lost for good: named by the next one, kept as a gap, never passed over in silence."""

from __future__ import annotations

import msgspec
import pytest
from asgiref.sync import sync_to_async

from controlplane.fleet.models import AgentLive
from controlplane.usage.models import AgentCursor, Quarantine, UsageRecord
from controlplane.wire.clock import ClockReading
from controlplane.wire.report import LostReports
from tests.usage_rows import usage_row


@sync_to_async
def gaps():
    return list(Quarantine.objects.filter(reason="reports_lost").values_list("seq", "payload", "records"))


@sync_to_async
def cursor_of(agent):
    return AgentCursor.objects.filter(agent_id=agent.id, epoch=agent.epoch).values_list("last_seq", "records").get()


async def test_a_gap_that_is_named_is_kept_and_the_epoch_goes_on(agent, world):
    await agent.report()
    report = agent.build(seq=5, records=[usage_row(world, prices=world.prices)], lost=LostReports(2, 40))
    assert (await agent.send(report)).status == 200
    assert await gaps() == [(5, {"first_seq": 2, "last_seq": 4, "records": 40}, 40)]
    assert await cursor_of(agent) == (5, 1)
    assert (await agent.send(report)).status == 200, "the same bytes again are a repeat"
    assert len(await gaps()) == 1 and await sync_to_async(UsageRecord.objects.count)() == 1
    agent.seq = 5
    assert (await agent.report()).accepted_through == 6


async def test_how_many_records_went_may_be_unknown(agent, world):
    assert (await agent.send(agent.build(seq=3, lost=LostReports(1, -1)))).status == 200
    assert await gaps() == [(3, {"first_seq": 1, "last_seq": 2, "records": None}, 0)]


async def test_another_process_of_the_control_plane_knows_of_the_gap(agent, process):
    report = agent.build(seq=3, lost=LostReports(1, 2))
    assert (await agent.send(report)).status == 200
    other = process()
    assert (await agent.send(report, app=other)).status == 200
    assert len(await gaps()) == 1


@pytest.mark.parametrize("first", [1, 2, 3])
async def test_what_was_taken_is_not_lost_though_its_agent_did_not_hear_of_it(agent, world, first):
    """It lost reports whose answers it never got: the next one follows, nothing is missing."""
    for _ in range(3):
        await agent.report()
    report = agent.build(records=[usage_row(world, prices=world.prices)], lost=LostReports(first, 40))
    assert (await agent.send(report)).status == 200
    assert await gaps() == []
    assert await cursor_of(agent) == (4, 1)


@pytest.mark.parametrize("lost", [None, LostReports(1, 0), LostReports(3, 0), LostReports(7, 0)])
async def test_a_gap_begins_where_the_control_plane_stands(agent, world, lost):
    await agent.report()
    problem = (await agent.send(agent.build(seq=5, lost=lost))).problem
    assert (problem.code, problem.expected) == ("expected", 2)
    assert await gaps() == []


@pytest.mark.parametrize("lost", [LostReports(0, 1), LostReports(9, 1), LostReports(-3, 1), LostReports(1, 2**40)])
async def test_an_impossible_gap_is_none(agent, world, lost):
    report = agent.build(seq=1, lost=lost)
    assert (await agent.send(report)).status == 200, "the report itself is next"
    assert await gaps() == []
    kept = await sync_to_async(lambda: Quarantine.objects.get().payload)()
    assert "lost" in str(kept)


async def test_the_clock_is_the_one_that_the_agent_measured(agent, world):
    await agent.report(clock=ClockReading(-2_500, 400), sent_us=1_700_000_000_000_000)
    offset = await sync_to_async(lambda: AgentLive.objects.get(agent_id=agent.id).clock_offset_us)()
    assert offset == -2_500, "not the age of the report"
    await agent.report(clock=ClockReading(2**62, 0))
    kept = await sync_to_async(lambda: Quarantine.objects.get().payload)()
    assert "clock" in msgspec.json.encode(kept).decode()
