"""Lease sizes and shares of limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.leases import BudgetWindow, divide_among, divide_limit, divide_places, lease_size
from controlplane.core.reasons import Reason


def window(remaining: int, level: str = "acme", name: str = "month") -> BudgetWindow:
    return BudgetWindow(level, name, 10, remaining + 300, 200, 100)


def size(windows: list[BudgetWindow], agents: int = 5, spend: int = 10**9, request: int = 10):
    return lease_size(windows, active_agents=agents, recent_spend_nanos=spend, max_request_nanos=request)


def test_half_an_even_share_of_the_tightest_window() -> None:
    assert size([window(10_000), window(1_000, name="day")]).amount_nanos == 100


def test_brought_down_to_recent_spend_and_up_to_one_request() -> None:
    assert size([window(1_000)], spend=40).amount_nanos == 40
    assert size([window(1_000)], spend=0).amount_nanos == 10
    assert size([window(1_000)], request=500).amount_nanos == 500


def test_what_is_left_is_enough_for_one_request_or_nothing_is_granted() -> None:
    assert size([window(10)]).amount_nanos == 10
    answer = size([window(10_000), window(9, level="holding", name="week")])
    assert (answer.amount_nanos, answer.reason) == (0, Reason.BUDGET_EXHAUSTED)
    assert answer.blocked_by is not None
    assert (answer.blocked_by.level, answer.blocked_by.window) == ("holding", "week")


def test_an_overleased_window_after_a_lowered_limit_grants_nothing() -> None:
    lowered = BudgetWindow("acme", "month", 10, 50, 40, 30)
    assert size([lowered], request=0).reason is Reason.BUDGET_EXHAUSTED


def test_no_window_is_a_callers_mistake() -> None:
    with pytest.raises(ValueError, match="no hard budget window"):
        size([])


windows = st.lists(st.builds(window, st.integers(0, 10**6)), min_size=1, max_size=4)


@given(windows, st.integers(1, 100), st.integers(0, 10**6), st.integers(0, 10**4))
def test_agents_that_lease_in_turns_never_overspend(w, agents: int, spend: int, request: int) -> None:
    leased = 0
    for _ in range(20):
        now = [
            BudgetWindow(x.level, x.window, 10, x.limit_nanos, x.settled_nanos, x.outstanding_nanos + leased) for x in w
        ]
        answer = lease_size(now, active_agents=agents, recent_spend_nanos=spend, max_request_nanos=request)
        assert answer.amount_nanos == 0 or answer.amount_nanos >= request
        leased += answer.amount_nanos
    assert leased <= min(x.remaining_nanos for x in w)


@given(
    st.integers(0, 10_000),
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 1_000), max_size=12),
)
def test_shares_sum_to_the_limit_with_a_floor_of_one(limit: int, demand: dict[str, int]) -> None:
    shares = divide_limit(limit, demand)
    assert sum(shares.values()) == (limit if demand else 0)
    assert set(shares) == set(demand)
    if demand and limit >= len(demand):
        assert min(shares.values()) >= 1


def test_shares_follow_demand_and_keep_off_what_silent_agents_hold() -> None:
    assert divide_limit(102, {"a": 30, "b": 10}) == {"a": 76, "b": 26}
    # 52 are left: one each, and 50 in proportion 3 to 1 by largest remainder
    assert divide_limit(102, {"a": 30, "b": 10}, {"gone": 50}) == {"a": 39, "b": 13}
    assert divide_limit(10, {"a": 0, "b": 0}) == {"a": 5, "b": 5}
    assert divide_limit(1, {"a": 1, "b": 5}) == {"a": 0, "b": 1}
    assert divide_limit(5, {"a": 1}, {"gone": 9}) == {"a": 0}


def test_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        divide_limit(-1, {})


def test_of_agents_without_demand_only_two_shares_exist() -> None:
    nobody = divide_among(10, {}, 4)
    assert (dict(nobody.asking), nobody.floor, nobody.more) == ({}, 2, 2)
    scarce = divide_among(3, {5: 9, 7: 1}, 4)
    assert (scarce.asking, scarce.floor, scarce.more) == ({5: 1, 7: 1}, 0, 1)
    plenty = divide_among(12, {5: 3, 7: 1}, 4)
    assert (plenty.asking, plenty.floor, plenty.more) == ({5: 6, 7: 2}, 1, 0)
    assert divide_among(5, {}, 0).more == 0


def test_requests_that_stay_keep_their_agents_part() -> None:
    """Nobody came for a while to the first agent, where twelve requests go on."""
    assert divide_places(320, {2: 28}, {1: 12, 2: 16}, 2).asking == {1: 96, 2: 224}
    assert divide_places(320, {2: 28}, {}, 2).asking == {2: 319}


def test_who_holds_more_than_a_part_leaves_the_others_less_until_it_ends() -> None:
    full = divide_places(10, {2: 90}, {1: 10}, 3)
    assert (full.asking, full.floor, full.more) == ({1: 2, 2: 0}, 0, 0)
    ending = divide_places(10, {2: 90}, {1: 4}, 3)
    assert (ending.asking, ending.floor, ending.more) == ({1: 1, 2: 5}, 1, 0)
    assert divide_places(10, {2: 90}, {1: 1}, 3).asking == {1: 1, 2: 8}


COUNTED = st.dictionaries(st.integers(1, 9), st.integers(0, 40), max_size=9)


@given(st.integers(0, 200), COUNTED, COUNTED, st.integers(0, 5))
def test_parts_and_what_stays_beyond_them_never_exceed_the_limit(limit, asked, present, quiet) -> None:
    agents = len(asked.keys() | present.keys()) + quiet
    division = divide_places(limit, asked, present, agents)
    others = agents - len(division.asking)
    parts = sum(division.asking.values()) + division.floor * others + division.more
    beyond = sum(max(0, number - division.asking.get(agent, 0)) for agent, number in present.items())
    assert parts <= limit
    assert min([0, division.floor, division.more, *division.asking.values()]) == 0
    if sum(present.values()) <= limit and agents:
        assert parts + beyond == limit, "and nothing lies idle"


def test_an_agent_that_asks_has_a_demand() -> None:
    with pytest.raises(ValueError, match="positive demand"):
        divide_among(5, {1: 0}, 0)
