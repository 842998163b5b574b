"""Little's law as a light."""

import pytest

from controlplane.core.little import LittleVerdict, compare

WINDOW = 300_000_000


def look(present: float, arrivals: int = 6_000, departures: int = 6_000, residence_us: int = 2_000_000):
    return compare(
        observed_present=present,
        arrivals=arrivals,
        departures=departures,
        residence_us_sum=residence_us * departures,
        window_us=WINDOW,
    )


def test_twenty_a_second_for_two_seconds_is_forty_present() -> None:
    light = look(40)
    assert (light.verdict, light.expected, light.gap_share) == (LittleVerdict.STEADY, 40.0, 0.0)


def test_a_gap_of_a_fifth_of_the_larger_is_the_edge() -> None:
    assert look(50).verdict is LittleVerdict.STEADY
    assert look(50.1).verdict is LittleVerdict.GAP
    assert look(31.9).verdict is LittleVerdict.GAP


def test_not_compared_when_not_steady_or_too_few() -> None:
    assert look(40, departures=5_401).verdict is LittleVerdict.STEADY
    assert look(40, departures=5_400).verdict is LittleVerdict.NOT_STEADY
    assert look(0.3, arrivals=49, departures=49).verdict is LittleVerdict.NOT_STEADY
    assert look(0, arrivals=0, departures=0).expected is None


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window_us"):
        compare(observed_present=0, arrivals=0, departures=0, residence_us_sum=0, window_us=0)
