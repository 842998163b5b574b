from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.binomial import clopper_pearson, regularised_incomplete_beta


def at_least(k: int, n: int, p: float) -> float:
    return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_each_bound_leaves_a_tail_of_two_and_a_half_percent(case: tuple[int, int]) -> None:
    k, n = case
    interval = clopper_pearson(k, n)
    assert 0 <= interval.low <= k / n <= interval.high <= 1
    if k:
        assert at_least(k, n, interval.low) == pytest.approx(0.025, rel=1e-6)
    if k < n:
        assert 1 - at_least(k + 1, n, interval.high) == pytest.approx(0.025, rel=1e-6)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5_000_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_bounds_of_any_size_hold_what_they_say(case: tuple[int, int]) -> None:
    """The tail of a bound is the beta function at it: 2.5 %, as near as the float next to the bound allows."""
    k, n = case
    interval = clopper_pearson(k, n)
    assert 0 <= interval.low <= k / n <= interval.high <= 1
    if k:
        assert regularised_incomplete_beta(k, n - k + 1, interval.low) == pytest.approx(0.025, rel=1e-5)
    if k < n:
        assert regularised_incomplete_beta(k + 1, n - k, interval.high) == pytest.approx(0.975, rel=1e-5)


def test_known_intervals() -> None:
    # 0 of n: 1 - 0.025^(1/n); published value for 8 of 100
    assert clopper_pearson(0, 100).high == pytest.approx(1 - 0.025 ** (1 / 100), rel=1e-9)
    assert clopper_pearson(8, 100).low == pytest.approx(0.03517, abs=5e-5)
    assert clopper_pearson(8, 100).high == pytest.approx(0.15156, abs=5e-5)


def test_many_events_narrow_the_interval() -> None:
    few, many = clopper_pearson(10, 1_000), clopper_pearson(100_000, 10_000_000)
    assert few.low < many.low < 0.01 < many.high < few.high
    assert many.high - many.low == pytest.approx(2 * 1.96 * (0.01 * 0.99 / 1e7) ** 0.5, rel=1e-2)


def test_the_beta_function_is_symmetric() -> None:
    for a, b, x in ((2.0, 3.0, 0.4), (50.0, 1.0, 0.97), (1_000.0, 9_000.0, 0.1)):
        total = regularised_incomplete_beta(a, b, x) + regularised_incomplete_beta(b, a, 1 - x)
        assert total == pytest.approx(1.0, abs=1e-10)
    assert regularised_incomplete_beta(1, 1, -1) == 0
    assert regularised_incomplete_beta(1, 1, 2) == 1


@pytest.mark.parametrize("case", [(1, 0), (-1, 5), (6, 5)])
def test_what_is_not_a_proportion_is_refused(case: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not a proportion"):
        clopper_pearson(*case)
