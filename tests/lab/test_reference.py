"""The reference model against the recursion, by hand, and by what must hold of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.lab.reference import Rules, fifo_recursion, serve

requests = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(0, 1)), min_size=1, max_size=60).map(
    lambda rows: list(zip(*sorted(rows, key=lambda row: row[0]), strict=True))
)


@given(requests, st.integers(1, 6))
def test_fifo_is_the_recursion(columns, places):
    at, service, is_batch = columns
    served = serve(at, service, is_batch, Rules(places))
    assert list(served.started) == fifo_recursion(at, service, places)
    assert list(served.ended) == [start + time for start, time in zip(served.started, service, strict=True)]


@given(requests, st.integers(1, 6))
def test_two_queues_without_a_rule_are_one(columns, places):
    at, service, _ = columns
    nobody = [0] * len(at)
    assert serve(at, service, nobody, Rules(places, priority=True)) == serve(at, service, nobody, Rules(places))


@given(requests, st.integers(1, 6), st.booleans(), st.integers(0, 6), st.none() | st.integers(0, 5))
def test_places_floor_and_bound_hold_at_every_instant(columns, places, priority, floor, bound):
    at, service, is_batch = columns
    rules = Rules(places, priority=priority, interactive_floor=min(floor, places), queue_bound=bound)
    served = serve(at, service, is_batch, rules)
    for now in {*at, *served.ended} - {-1}:
        running = [row for row in range(len(at)) if served.started[row] <= now < served.ended[row]]
        of_batch = sum(is_batch[row] for row in running)
        waiting = [row for row in range(len(at)) if at[row] <= now < served.started[row]]
        assert len(running) <= places and of_batch <= places - rules.interactive_floor
        if len(running) < places:
            # Nothing waits that might run.
            assert all(is_batch[row] for row in waiting) and (not waiting or of_batch == places - floor)
        if bound is not None and not rules.interactive_floor:
            assert len(waiting) <= bound
    if bound is None and (floor < places or not any(is_batch)):
        assert min(served.started) >= 0


def test_priority_lets_interactive_pass_what_waits_and_nothing_that_runs():
    at, service, is_batch = [0, 1, 2, 3], [10, 10, 10, 10], [1, 1, 0, 0]
    assert list(serve(at, service, is_batch, Rules(1)).started) == [0, 10, 20, 30]
    assert list(serve(at, service, is_batch, Rules(1, priority=True)).started) == [0, 30, 10, 20]


def test_a_floor_keeps_places_from_batch_and_a_bound_refuses():
    at, service, is_batch = [0, 0, 0, 5], [10, 10, 10, 10], [1, 1, 1, 0]
    assert list(serve(at, service, is_batch, Rules(2, interactive_floor=1)).started) == [0, 10, 20, 5]
    assert list(serve(at, service, is_batch, Rules(1, queue_bound=1)).started) == [0, 10, -1, -1]


def test_an_end_at_the_instant_of_an_arrival_makes_room_for_it():
    assert list(serve([0, 10], [10, 1], [0, 0], Rules(1, queue_bound=0)).started) == [0, 10]


def test_rules_that_make_no_sense_are_refused():
    with pytest.raises(ValueError):
        Rules(0)
    with pytest.raises(ValueError):
        Rules(2, interactive_floor=3)
    with pytest.raises(ValueError):
        Rules(2, queue_bound=-1)
