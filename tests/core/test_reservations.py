"""Buckets, leases and counters: never negative, and everything that was taken comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.reservations import PICO, ConcurrencyCounter, LeasePurse, Reservation, TokenBucket


def bucket(per_s: int, burst: int, level: int | None = None) -> TokenBucket:
    micro = 1_000_000
    return TokenBucket(
        rate_micro_per_s=per_s * micro,
        burst_micro=burst * micro,
        level_micro=None if level is None else level * micro,
        now_us=0,
    )


def test_a_lease_of_one_unit_covers_exactly_ten_of_fifty_requests_of_a_tenth() -> None:
    purse = LeasePurse(1_000_000_000)
    taken = []
    for _ in range(50):
        taken.append(purse.reserve(100_000_000))
        assert purse.settled_nanos + purse.reserved_nanos <= 1_000_000_000
    assert taken.count(True) == 10
    for _ in range(10):
        assert purse.settle(100_000_000, 40_000_000) == 0
    assert (purse.remaining_nanos, purse.reserved_nanos, purse.settled_nanos) == (600_000_000, 0, 400_000_000)


def test_an_excess_over_the_reservation_is_not_the_tenants() -> None:
    purse = LeasePurse(100)
    purse.reserve(40)
    assert purse.settle(40, 55) == 15
    assert purse.settled_nanos == 40


def test_recall_leaves_what_is_reserved() -> None:
    purse = LeasePurse(100)
    purse.reserve(70)
    assert purse.recall(100) == 30
    assert (purse.granted_nanos, purse.remaining_nanos, purse.reserved_nanos) == (70, 0, 70)
    purse.grant(5)
    assert purse.remaining_nanos == 5


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 400)), max_size=60))
@settings(max_examples=200)
def test_ten_thousand_ways_to_settle_leave_counter_and_ledger_equal(ops: list[tuple[int, int]]) -> None:
    purse, open_, ledger = LeasePurse(1_000), [], 0
    for amount, charge in ops:
        if purse.reserve(amount):
            open_.append((amount, charge))
        if len(open_) > 3:
            reserved, cost = open_.pop(0)
            ledger += cost - purse.settle(reserved, cost)
        assert min(purse.remaining_nanos, purse.reserved_nanos) >= 0
        assert purse.remaining_nanos + purse.reserved_nanos + purse.settled_nanos == 1_000
    for reserved, cost in open_:
        ledger += cost - purse.settle(reserved, cost)
    assert (purse.reserved_nanos, purse.settled_nanos) == (0, ledger)


def test_settling_what_is_not_reserved_is_refused() -> None:
    with pytest.raises(ValueError, match="not reserved here"):
        LeasePurse(10).settle(1, 1)
    with pytest.raises(ValueError, match="negative"):
        LeasePurse(10).reserve(-1)


@given(
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 2_000)), max_size=60),
)
@settings(max_examples=200)
def test_a_bucket_never_leaves_its_bounds_and_never_gives_more_than_rate(
    rate: int, burst: int, ops: list[tuple[int, int]]
) -> None:
    b = TokenBucket(rate_micro_per_s=rate, burst_micro=burst, now_us=0)
    now, got = 0, 0
    for step, tokens in ops:
        now += step
        got += tokens if b.take(tokens, now) else 0
        assert 0 <= b.level_pico <= b.burst_pico
        assert got * PICO <= burst * 1_000_000 + rate * now


def test_refilling_in_one_step_or_many_is_the_same() -> None:
    once, often = bucket(7, 1_000, 0), bucket(7, 1_000, 0)
    for now in range(0, 1_000_001, 997):
        often.refill(now)
    assert once.refill(1_000_000) == often.refill(1_000_000) == 7 * PICO


def test_time_does_not_run_backwards_in_a_bucket() -> None:
    b = bucket(10, 10, 0)
    b.refill(500_000)
    assert b.refill(100_000) == 5 * PICO
    assert b.refill(1_000_000) == 10 * PICO


def test_five_calls_at_once_against_a_limit_that_holds_one() -> None:
    b = bucket(0, 100)
    assert [b.take(60, 0) for _ in range(5)].count(True) == 1
    b.give_back(2)
    assert b.level_pico == 42 * PICO
    assert not b.take(60, 0)


def test_use_beyond_the_estimate_stops_at_zero() -> None:
    b = bucket(0, 100, 10)
    assert b.take_late(25) == 15
    assert b.level_pico == 0


def test_seconds_until_are_rounded_up_and_at_least_one() -> None:
    assert bucket(18, 18, 0).seconds_until(1, 0) == 1
    assert bucket(1, 100, 0).seconds_until(7, 0) == 7
    assert bucket(1, 5, 0).seconds_until(700, 0) == 5


def test_a_new_rate_does_not_give_back_what_was_spent() -> None:
    b = bucket(1, 100, 3)
    b.set_rate(rate_micro_per_s=50_000_000, burst_micro=500_000_000, now_us=0)
    assert b.level_pico == 3 * PICO


def test_concurrency_counts_running_and_queued() -> None:
    counter = ConcurrencyCounter(2)
    assert counter.enter() and counter.enter() and not counter.enter()
    counter.start()
    assert (counter.running, counter.queued, counter.has_room()) == (1, 1, False)
    counter.leave(running=True)
    assert counter.has_room()
    with pytest.raises(ValueError, match="no running"):
        counter.leave(running=True)


ENDS = {
    "completed": lambda r: (r.start(), r.settle(30, 50)),
    "cancelled in the queue": lambda r: r.release(),
    "cancelled while running": lambda r: (r.start(), r.settle(10, 5)),
    "displaced": lambda r: r.release(),
    "timed out": lambda r: r.release(),
    "preempted, then completed": lambda r: (r.start(), r.requeue(), r.start(), r.settle(30, 80)),
    "preempted, then cancelled": lambda r: (r.start(), r.requeue(), r.release()),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_nothing_is_held_after_any_end(end) -> None:
    purse, tenant, key, tokens = LeasePurse(100), ConcurrencyCounter(4), ConcurrencyCounter(None), bucket(0, 100)
    assert purse.reserve(60) and tenant.enter() and key.enter() and tokens.take(60, 0)
    reservation = Reservation(purse, 60, tenant, key, tokens, None, 60)
    end(reservation)
    assert (purse.reserved_nanos, tenant.held, key.held) == (0, 0, 0)
    assert purse.remaining_nanos + purse.settled_nanos == 100
    with pytest.raises(ValueError, match="already settled"):
        reservation.release()
