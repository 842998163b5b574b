"""Retries stay a bounded share of the traffic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.retry_budget import RetryBudget

SECOND = 1_000_000


def test_without_traffic_one_retry_per_ten_seconds() -> None:
    budget = RetryBudget()
    made = [t for t in range(60) if budget.try_retry(t * SECOND)]
    assert made == [0, 10, 20, 30, 40, 50]


def test_a_tenth_of_the_last_minute() -> None:
    budget = RetryBudget()
    for i in range(1_000):
        budget.count_request(i * 10_000)
    assert sum(budget.try_retry(10 * SECOND) for _ in range(500)) == 100
    assert budget.allowed(10 * SECOND) == 100


def test_the_minute_slides() -> None:
    budget = RetryBudget()
    for _ in range(1_000):
        budget.count_request(0)
    assert budget.allowed(59 * SECOND) == 100
    assert budget.allowed(60 * SECOND) == 6


def test_a_storm_of_failures_is_not_amplified() -> None:
    budget, retries = RetryBudget(), 0
    for i in range(6_000):
        budget.count_request(i * 10_000)
        retries += budget.try_retry(i * 10_000)
    assert retries <= 600 + 6


def test_share_must_be_one() -> None:
    with pytest.raises(ValueError, match="share_ppm"):
        RetryBudget(-1)


steps = st.lists(
    st.tuples(st.sampled_from(["request", "requests", "fail", "fail"]), st.integers(0, 4_000_000)), max_size=200
)


@given(steps)
def test_retries_of_any_minute_are_a_tenth_of_its_requests_or_one_per_ten_seconds(made) -> None:
    """Seconds are counted whole, so the budget looks back 59 to 60 seconds: what it sees lies within one minute."""
    budget, now_us = RetryBudget(), 0
    requests: list[int] = []
    retries: list[int] = []
    for what, later_us in made:
        now_us += later_us
        if what == "fail":
            if budget.try_retry(now_us):
                recent = sum(now_us - at <= 59 * SECOND for at in retries)
                of_minute = sum(now_us - at < 60 * SECOND for at in requests)
                beyond = recent + 1 > of_minute // 10
                assert recent + 1 <= max(of_minute // 10, 6)
                assert not beyond or not any(now_us - at < 9 * SECOND for at in retries)
                retries.append(now_us)
        else:
            for _ in range(1 if what == "request" else 25):
                budget.count_request(now_us)
                requests.append(now_us)
