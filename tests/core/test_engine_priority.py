"""Priorities as levels: the same direction, without gaps."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.engine_priority import priority_levels


def test_a_lower_number_is_served_earlier_and_level_1_is_the_highest() -> None:
    assert priority_levels([100, 10, 50, 10]) == {10: 1, 50: 2, 100: 3}
    assert priority_levels([]) == {}


@given(st.lists(st.integers(0, 10_000), min_size=1))
def test_levels_keep_the_order_and_have_no_gaps(priorities: list[int]) -> None:
    levels = priority_levels(priorities)
    assert sorted(levels.values()) == list(range(1, len(set(priorities)) + 1))
    ordered = sorted(levels)
    assert [levels[priority] for priority in ordered] == sorted(levels.values())
