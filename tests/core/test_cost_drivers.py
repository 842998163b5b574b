from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.cost_drivers import Drivers, Measured, compare

MONTHS = st.dictionaries(
    st.sampled_from("abcd"), st.builds(Measured, st.integers(0, 10**9), st.integers(-(10**15), 10**15)), max_size=4
)


@given(MONTHS, MONTHS, st.integers(0, 10**12), st.integers(0, 10**12))
def test_drivers_add_up_to_the_difference_to_the_nano(
    before: dict[str, Measured], after: dict[str, Measured], idle_0: int, idle_1: int
) -> None:
    found = compare(before, after, idle_before=idle_0, idle_after=idle_1)
    whole = [sum(one.nanos for one in part.values()) for part in (before, after)]
    assert found.total_nanos == whole[1] - whole[0] + idle_1 - idle_0
    assert found.idle_nanos == idle_1 - idle_0


@given(MONTHS)
def test_the_same_month_has_no_driver(month: dict[str, Measured]) -> None:
    assert compare(month, month) == Drivers(0, 0, 0, 0)


@given(st.integers(1, 1_000), st.integers(1, 1_000), st.integers(2, 9))
def test_one_cause_at_a_time_is_named(quantity: int, price: int, times: int) -> None:
    before = {"a": Measured(quantity, quantity * price)}
    more = {"a": Measured(quantity * times, quantity * price * times)}
    dearer = {"a": Measured(quantity, quantity * price * times)}
    grown = quantity * price * (times - 1)
    assert compare(before, more) == Drivers(grown, 0, 0, 0)
    assert compare(before, dearer) == Drivers(0, 0, grown, 0)


def test_a_shift_to_the_dearer_model_is_mix() -> None:
    before = {"large": Measured(50, 500), "small": Measured(50, 50)}
    after = {"large": Measured(80, 800), "small": Measured(20, 20)}
    assert compare(before, after) == Drivers(0, 270, 0, 0)


def test_a_new_model_is_volume_and_mix_and_no_price() -> None:
    before = {"small": Measured(100, 100)}
    after = {"small": Measured(100, 100), "large": Measured(10, 100)}
    assert compare(before, after) == Drivers(10, 90, 0, 0)
    assert compare({}, after) == Drivers(200, 0, 0, 0)


def test_idle_is_a_driver_of_its_own() -> None:
    assert compare({}, {}, idle_before=5, idle_after=2) == Drivers(0, 0, 0, -3)
