"""Clocks that jump: durations stay those of the monotonic clock, and the offset to the control plane is known."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from controlplane.agent.clock import BUSY_SLEW_US, OFF_BY_US, READINGS, Clock, OffsetFilter
from tests.agent.wire_client import WireClient, chat_body, post

S = 1_000_000
REAL_NS = time.time_ns


def wall(monkeypatch, shift_us: int) -> None:
    monkeypatch.setattr("controlplane.agent.clock.time.time_ns", lambda: REAL_NS() + shift_us * 1000)


@pytest.mark.parametrize("shift_us", [-3600 * S, -1 * S, 1 * S, 3600 * S])
async def test_a_jump_of_the_wall_clock_while_a_request_runs_changes_no_duration(make_agent, monkeypatch, shift_us):
    agent = await make_agent(speed=1)
    client = await WireClient.connect(agent.port)
    began = time.monotonic_ns()
    client.send(post(chat_body(stream=True, max_tokens=60, ignore_eos=True)))
    await agent.until(lambda: any(call.first_us for call in agent.engine.calls.values()))
    wall(monkeypatch, shift_us)
    for _ in range(20):
        agent.engine.clock.adjust(idle=not agent.engine.calls)
        await asyncio.sleep(0.005)
    assert (await client.answer()).status == 200
    took_us = (time.monotonic_ns() - began) // 1000
    [row] = agent.closed_rows()
    parts = (row.admission_us, row.queue_us, row.preprocess_us, row.prefill_us, row.decode_us, row.return_us)
    assert min(parts) >= 0 and sum(parts) + row.batch_wait_us == row.ended_us - row.arrived_us
    measured_us = row.ended_us - row.arrived_us
    # The agent itself adjusts once a second too.
    slewed_us = (22 + took_us // S) * BUSY_SLEW_US
    assert 0.5 * took_us - slewed_us < measured_us <= took_us + slewed_us
    assert 0 < row.ttft_us < measured_us


def test_it_never_goes_back_and_never_stands_still_for_long_while_something_runs(monkeypatch):
    clock = Clock()
    wall(monkeypatch, -60 * S)
    last = clock.now_us()
    for _ in range(50):
        real = time.monotonic_ns() // 1000
        clock.adjust(idle=False)
        until = real + 2 * BUSY_SLEW_US
        while time.monotonic_ns() // 1000 < until:
            now = clock.now_us()
            assert now >= last
            last = now
        assert clock.now_us() > last - 1


def test_it_follows_a_wall_clock_that_is_behind_while_nothing_runs(monkeypatch):
    clock = Clock()
    wall(monkeypatch, -S)
    for _ in range(40):
        clock.adjust(idle=True)
    assert abs(clock.now_us() - (REAL_NS() // 1000 - S)) < S, "it stands still until the other has caught up"
    assert clock._offset_us + time.monotonic_ns() // 1000 - REAL_NS() // 1000 == pytest.approx(-S, abs=20_000)


def test_the_reading_with_the_shortest_round_trip_counts():
    offset = OffsetFilter()
    assert offset.reading() is None and not offset.is_off()
    offset.note(1_000, 101_000, 500)
    offset.note(2_000_000, 2_002_000, 2_000_500)
    offset.note(3_000_000, 3_400_000, 3_000_000)
    reading = offset.reading()
    assert (reading.offset_us, reading.error_us) == (500, 1_000)
    for _ in range(READINGS):
        offset.note(14_000_000, 14_010_000, 14_005_000 - 7 * S)
    assert offset.reading().offset_us == 7 * S, "old exchanges are forgotten"
    assert offset.is_off()
    offset.note(9_000, 8_000, 5)
    offset.note(9_000, 9_500, 0)
    assert offset.reading().offset_us == 7 * S, "nonsense is no reading"


def test_a_clock_is_called_wrong_only_when_it_certainly_is(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    now_us = clock.now_us()
    clock.compare(now_us - 4 * OFF_BY_US, now_us - 3 * OFF_BY_US)
    assert not clock.offset.is_off(), "the round trip was too long to say"
    clock.compare(clock.now_us(), clock.now_us() - 2 * OFF_BY_US)
    assert clock.offset.is_off()
    for _ in range(3):
        clock.compare(clock.now_us(), clock.now_us() - 2 * OFF_BY_US)
    assert caplog.text.count("set this machine's clock") == 1
    for _ in range(READINGS):
        clock.compare(clock.now_us(), clock.now_us())
    assert not clock.offset.is_off() and caplog.text.count("right again") == 1
