"""Forecasts of spend: unknown without a week of days, exact for even spend, and right four times out of five."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.period import US_PER_HOUR
from controlplane.core.spend_forecast import DAYS_MIN, DaySpend, Piece, forecast_spend, student_t

DAY_US = 24 * US_PER_HOUR


def sample(values, first_weekday=0):
    return [DaySpend((first_weekday + number) % 7, value) for number, value in enumerate(values)]


def ahead(days, first_weekday=0):
    return [Piece(n * DAY_US, (n + 1) * DAY_US, (first_weekday + n) % 7) for n in range(days)]


def test_less_than_a_week_of_days_is_unknown():
    assert forecast_spend(sample([5] * (DAYS_MIN - 1)), ahead(3), settled_nanos=1, limit_nanos=100) is None
    assert forecast_spend(sample([5] * DAYS_MIN), ahead(3), settled_nanos=1, limit_nanos=100) is not None


def test_even_spend_is_a_straight_line_to_the_limit():
    found = forecast_spend(sample([100] * 10), ahead(20), settled_nanos=500, limit_nanos=1_250)
    assert (found.low_nanos, found.point_nanos, found.high_nanos, found.days) == (2_500, 2_500, 2_500, 10)
    assert found.point_us == found.earliest_us == found.latest_us == 7 * DAY_US + DAY_US // 2


def test_a_limit_that_lasts_has_no_instant_and_one_that_is_used_up_is_reached_at_once():
    lasts = forecast_spend(sample([100] * 10), ahead(5), settled_nanos=0, limit_nanos=501)
    assert (lasts.point_us, lasts.earliest_us, lasts.latest_us) == (None, None, None)
    over = forecast_spend(sample([100] * 10), ahead(5), settled_nanos=700, limit_nanos=501)
    assert (over.point_us, over.earliest_us, over.latest_us) == (0, 0, 0)


def test_from_three_weeks_on_a_weekend_is_a_weekend():
    week = [100, 100, 100, 100, 100, 0, 0]
    weekend = forecast_spend(sample(week * 3), ahead(2, first_weekday=5), settled_nanos=7, limit_nanos=10**6)
    monday = forecast_spend(sample(week * 3), ahead(1, first_weekday=0), settled_nanos=7, limit_nanos=10**6)
    assert weekend.point_nanos == 7 and monday.point_nanos == 107
    early = forecast_spend(sample(week * 2), ahead(2, first_weekday=5), settled_nanos=0, limit_nanos=10**6)
    assert early.point_nanos > 100


def test_quantiles_are_those_of_the_table():
    for freedom, expected in ((4, 1.533), (6, 1.440), (10, 1.372), (20, 1.325), (27, 1.314)):
        assert student_t(0.9, freedom) == pytest.approx(expected, abs=0.001)


def test_a_piece_that_leaves_a_gap_is_an_error():
    with pytest.raises(ValueError, match="tile"):
        forecast_spend(sample([1] * 9), [ahead(1)[0], Piece(DAY_US + 1, 2 * DAY_US, 1)], settled_nanos=0, limit_nanos=9)


@pytest.mark.parametrize("history,to_come,seed", [(7, 5, 1), (14, 10, 2), (28, 20, 3)])
def test_four_of_five_outcomes_lie_inside(history, to_come, seed):
    chance, inside, tries = random.Random(seed), 0, 2_000
    for _ in range(tries):
        mean = [1_000 + 400 * (weekday < 5) for weekday in range(7)] if history >= 21 else [1_200] * 7
        days = [DaySpend(n % 7, round(chance.gauss(mean[n % 7], 150))) for n in range(history)]
        found = forecast_spend(days, ahead(to_come), settled_nanos=0, limit_nanos=10**9)
        outcome = sum(chance.gauss(mean[n % 7], 150) for n in range(to_come))
        inside += found.low_nanos <= outcome <= found.high_nanos
    assert 0.77 < inside / tries < 0.83


@given(
    st.lists(st.integers(0, 10**12), min_size=7, max_size=28),
    st.integers(1, 31),
    st.integers(0, 6),
    st.integers(0, 10**13),
    st.integers(0, 10**14),
)
def test_the_interval_holds_the_point_and_never_falls_under_what_is_settled(values, days, weekday, settled, limit):
    found = forecast_spend(sample(values), ahead(days, weekday), settled_nanos=settled, limit_nanos=limit)
    assert settled <= found.low_nanos <= found.point_nanos <= found.high_nanos
    end = days * DAY_US
    instants = [end + 1 if at is None else at for at in (found.earliest_us, found.point_us, found.latest_us)]
    assert instants == sorted(instants) and all(0 <= at <= end + 1 for at in instants)
    for at, nanos in ((found.point_us, found.point_nanos), (found.earliest_us, found.high_nanos)):
        assert (at is None) == (nanos < limit) or abs(nanos - limit) <= 1
