"""Numbers of a later generation are above all of an earlier one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core import generations as g

generation = st.integers(1, g.GENERATIONS_MOST - 1)


@given(generation, st.integers(0, g.STEP - 1), st.integers(1, g.STEP - 1))
def test_epochs_of_a_restored_database_are_above_all_that_were_given_out(before, restored, given_out):
    """The backup knew `restored` epochs of its generation, and agents saw as many as `given_out` more."""
    first = (before - 1) * g.STEP
    lost = first + min(restored + given_out, g.STEP)
    assert g.epoch_after(first + restored, before + 1) > lost
    assert g.epoch_after(first + restored, before) == first + restored + 1, "without a restore it is the next one"
    assert g.epoch_after(first + restored, before + 1) < 2**31


@given(generation, st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_live_list_of_another_generation_or_ahead_is_replaced(at, has, last):
    floor, later = g.live_floor(at), g.live_floor(at + 1)
    assert g.same_live_list(floor + has, floor + last) == (0 < has <= last)
    assert not g.same_live_list(floor + has, later + 1 + last), "numbers of before mean something else"
    assert not g.same_live_list(0, last)


def test_generations_grow_over_what_is_saved_and_what_is_replaced_and_have_an_end():
    assert (g.next_generation(1, None), g.next_generation(1, 1), g.next_generation(1, 5)) == (2, 2, 6)
    assert g.moved_by(1, 2) == g.STEP and g.moved_by(2, 5) == 3 * g.STEP
    with pytest.raises(ValueError, match="does not follow"):
        g.moved_by(2, 2)
    assert g.next_generation(g.GENERATIONS_MOST - 1, None) == g.GENERATIONS_MOST
    with pytest.raises(ValueError, match="do not fit"):
        g.next_generation(g.GENERATIONS_MOST, None)
