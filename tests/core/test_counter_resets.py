import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.counter_resets import increase


@pytest.mark.parametrize(
    ("series", "total"),
    [([10, 20, 5, 8], 18), ([], 0), ([7], 0), ([0, 0], 0), ([5, 0, 0, 3], 3), ([1.5, 2.0, 0.25], 0.75)],
)
def test_a_reading_below_the_last_counts_from_zero(series: list[float], total: float) -> None:
    assert increase(series) == total


@given(st.lists(st.lists(st.integers(0, 100), min_size=1), min_size=1))
def test_an_increase_is_what_each_life_of_the_process_counted(lives: list[list[int]]) -> None:
    readings, expected, last = [], 0, None
    for steps in lives:
        value = 0
        for step in steps:
            value += step
            readings.append(value)
        # a life whose first reading is not below the last one of the life before cannot be told apart
        if last is not None and readings[-len(steps)] >= last:
            return
        expected += value if last is not None else value - steps[0]
        last = value
    assert increase(readings) == expected
