"""Clocks that jump: durations stay those of the monotonic clock, and the offset to the control plane is known."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from controlplane.agent.clock import BUSY_SLEW_US, READINGS, Clock, OffsetFilter
from controlplane.agent.purses import LeaseBook
from controlplane.core.admission_snapshot import BudgetView
from controlplane.wire.clock import OFF_BY_US, ClockReading, ahead_us
from controlplane.wire.report import Lease
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
    earliest_us = REAL_NS() // 1000 - S
    told_us = clock._offset_us + time.monotonic_ns() // 1000
    assert earliest_us - 20_000 <= told_us <= REAL_NS() // 1000 - S + 20_000, "however long reading three clocks takes"


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


@pytest.mark.parametrize("shift_us", [-3600 * S, 3600 * S])
def test_what_was_read_before_the_clock_was_set_is_known_to_be_off_by_as_much(monkeypatch, shift_us):
    clock = Clock()
    for _ in range(READINGS):
        clock.compare(clock.now_us(), clock.now_us())
    assert not clock.offset.is_off()
    wall(monkeypatch, shift_us)
    for _ in range(3):
        clock.adjust(idle=True)
    reading = clock.offset.reading()
    moved_us = clock.now_us() - REAL_NS() // 1000
    assert reading is not None and abs(reading.offset_us - max(moved_us, reading.offset_us)) < S
    assert clock.offset.is_off() == (shift_us > 0), "forward at once; back it only stands still"


def test_only_a_clock_that_is_certainly_wrong_is_reckoned_with():
    assert ahead_us(None) == ahead_us(ClockReading(OFF_BY_US, 0)) == ahead_us(ClockReading(-3 * S, 2 * S)) == 0
    assert (ahead_us(ClockReading(3600 * S, S)), ahead_us(ClockReading(-3600 * S, S))) == (3600 * S, -3600 * S)


class TestLeases:
    """Their ends are times of the control plane's clock."""

    NOW = 1_800_000_000 * S

    def book(self, ahead: int) -> LeaseBook:
        book = LeaseBook()
        book.begin_epoch(1, self.NOW)
        book.follow_clock(ahead, self.NOW + ahead)
        return book

    def usable(self, book: LeaseBook, now_us: int) -> bool:
        view = BudgetView(None)
        book.look_up(view, 1, 10, now_us)
        return view.purse is not None

    @pytest.mark.parametrize("ahead", [0, 3600 * S, -3600 * S])
    def test_a_lease_lasts_as_long_as_it_was_given_on_a_clock_that_is_wrong(self, ahead):
        book, here = self.book(ahead), self.NOW + ahead
        book.apply([Lease(5, 1, 100, self.NOW + 600 * S)], [], asked_us=here, now_us=here)
        assert self.usable(book, here) and self.usable(book, here + 599 * S)
        assert not self.usable(book, here + 600 * S)

    def test_a_clock_that_is_set_while_a_lease_runs_neither_ends_nor_prolongs_it(self):
        book = self.book(0)
        book.apply([Lease(5, 1, 100, self.NOW + 600 * S)], [], asked_us=self.NOW, now_us=self.NOW)
        book.follow_clock(3600 * S, self.NOW + 3600 * S)
        assert self.usable(book, self.NOW + 3600 * S)
        assert not self.usable(book, self.NOW + 3600 * S + 600 * S)

    def test_what_a_report_told_to_be_over_stays_over_whatever_the_clock_does(self):
        """The control plane has given the rest back: it must not be spent when the clock is set back."""
        book = self.book(0)
        book.apply([Lease(5, 1, 100, self.NOW + 600 * S)], [], asked_us=self.NOW, now_us=self.NOW)
        book.follow_clock(0, self.NOW + 601 * S)
        assert not self.usable(book, self.NOW + 10 * S)
        assert [(row.lease_id, row.spent_nanos, row.reserved_nanos) for row in book.spends()] == [(5, 0, 0)]

    def test_a_slice_whose_end_moved_on_may_be_spent_again(self):
        book = self.book(0)
        for end_s, at_s in ((600, 0), (1_200, 700)):
            at_us = self.NOW + at_s * S
            book.follow_clock(0, at_us)
            book.apply([Lease(5, 1, 100, self.NOW + end_s * S)], [], asked_us=at_us, now_us=at_us)
            assert self.usable(book, at_us)
