"""What reports say of items: ends beside their records within the bounds of a report, and room for more."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.agent.item_room import HALF_LIFE_S, HELD_BYTES_MAX, HELD_MAX, KNOWN_ENDS, Held, ServiceRate, room_of
from controlplane.agent.reporting import BODY_BYTES_MAX, recut
from controlplane.core.reasons import Outcome
from tests.agent.leased_items import ended, item, job, lease, report, upstream_agent
from tests.agent.upstreams import Upstream, respond

# -- reports ------------------------------------------------------------------


async def test_large_results_are_split_over_reports_each_with_its_record(make_agent):
    async def large(_, __, writer) -> None:
        text = json.dumps({"text": "y" * 1_000_000, "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
        respond(writer, 200, text.encode())

    async with Upstream(large) as upstream:
        agent = await upstream_agent(make_agent, upstream)
        lease(agent, [item(fence) for fence in range(1, 13)])
        await agent.until(lambda: ended(agent) == 12)
    seen: list[int] = []
    for _ in range(12):
        told = report(agent)
        if not told.items_done:
            break
        assert len(agent.spool.body_of(agent.spool.state.reports[-1])) <= BODY_BYTES_MAX
        assert {done.request_id for done in told.items_done} == {row.request_id for row in told.records}
        seen += [done.fence for done in told.items_done]
    assert sorted(seen) == list(range(1, 13))
    assert agent.spool.state.responses_bytes == 0


async def test_a_report_cut_down_keeps_each_end_with_its_record(make_agent):
    agent = await make_agent()
    lease(agent, [item(fence) for fence in range(1, 9)])
    await agent.until(lambda: ended(agent) == 8)
    report(agent)
    stored = agent.spool.state.reports[-1]
    assert recut(agent.spool, stored, 1), "figures go first"
    assert recut(agent.spool, agent.spool.state.reports[-1], 2)
    first = msgspec.json.decode(agent.spool.body_of(agent.spool.state.reports[-1]), type=type(report(agent)))
    assert len(first.records) == len(first.items_done) == 4
    assert {done.request_id for done in first.items_done} == {row.request_id for row in first.records}
    rest = msgspec.json.decode(agent.spool.body_of(agent.spool.state.reports[-1]), type=type(first))
    assert {done.request_id for done in rest.items_done} == {row.request_id for row in rest.records}
    assert len(rest.items_done) == 4


async def test_one_result_that_no_report_can_carry_fails_instead_of_stopping_all_reports(make_agent):
    agent = await make_agent()
    lease(agent, [item(1)])
    await agent.until(lambda: ended(agent) == 1)
    report(agent)
    for now_us in range(1, 5):
        if not recut(agent.spool, agent.spool.state.reports[-1], now_us):
            break
    else:
        raise AssertionError("it goes on for ever")
    told = msgspec.json.decode(agent.spool.body_of(agent.spool.state.reports[-1]), type=type(report(agent)))
    (done,) = told.items_done
    assert (done.outcome, done.status, bytes(done.response)) == (Outcome.UPSTREAM_ERROR.code, 413, b"null")
    assert "bytes" in done.reason


# -- room ------------------------------------------------------------------


async def test_room_is_told_with_each_report_and_none_while_it_should_take_none(make_agent):
    agent = await make_agent()
    (room,) = report(agent).item_room
    assert (room.class_id, room.items > 0, room.gpu_us) == (2, True, 60_000_000)
    lease(agent, [item(1)], jobs=[job(expected_output_tokens=1000)])
    (less,) = report(agent).item_room
    assert (less.items, less.gpu_us < room.gpu_us) == (room.items - 1, True)
    agent.engine.disk_problem = "full"
    assert [each.items for each in report(agent).item_room] == [0]
    agent.engine.disk_problem = ""
    agent.engine.readiness.state = "broken"
    agent.engine.readiness.apply()
    assert [each.items for each in report(agent).item_room] == [0]


@given(
    held=st.integers(0, 2 * HELD_MAX),
    work_us=st.integers(0, 10**12),
    size=st.integers(0, 2 * HELD_BYTES_MAX),
    slots=st.integers(0, 64),
    places=st.integers(0, 256),
    rate=st.none() | st.floats(0, 1e4),
)
def test_room_is_never_negative_never_over_the_bound_and_never_leaves_places_idle(
    held, work_us, size, slots, places, rate
):
    room = room_of(Held(held, work_us, size), slots=slots, places=places, per_place_s=rate)
    assert 0 <= room.items <= max(0, HELD_MAX - held) and room.gpu_us >= -1
    if held < min(2 * places, HELD_MAX) and size < HELD_BYTES_MAX:
        assert room.items > 0
    if not places or size >= HELD_BYTES_MAX:
        assert room.items == 0


@settings(deadline=None)
@given(per_s=st.integers(1, 500), places=st.integers(1, 64), seconds=st.integers(2, 120), idle=st.integers(0, 3600))
def test_the_rate_is_what_ended_per_place_while_there_was_work(per_s, places, seconds, idle):
    rate, now_us = ServiceRate(), 0
    rate.advance(now_us, places=places, busy=False)
    for _ in range(seconds):
        for _ in range(per_s):
            now_us += 1_000_000 // per_s
            rate.advance(now_us, places=places, busy=True)
            rate.ended()
    rate.advance(now_us + idle * 1_000_000, places=places, busy=False)
    # As the ends count, the older the less: of eight in eight seconds less than eight are left.
    counted = sum(0.5 ** (number / per_s / HALF_LIFE_S) for number in range(per_s * seconds))
    if counted < 1.01 * KNOWN_ENDS:
        return
    assert rate.per_place_s is not None
    assert rate.per_place_s * places == pytest.approx(per_s, rel=0.2)


async def test_a_report_goes_early_when_the_work_runs_out_and_not_when_nothing_more_came(make_agent):
    agent = await make_agent()
    asked: list[int] = []
    agent.engine.items.report_soon = lambda: asked.append(ended(agent))
    report(agent)
    await asyncio.sleep(0.15)
    lease(agent, [item(fence) for fence in range(1, 5)])
    await agent.until(lambda: ended(agent) == 4)
    assert len(asked) == 1
    report(agent)
    await asyncio.sleep(0.15)
    lease(agent, [])
    agent.engine.items.after_end(agent.engine.clock.now_us())
    assert len(asked) == 1, "the last answer brought nothing: the next report comes in its time"
