"""Little's law as a light: does the number of requests present agree with arrival rate x residence?

L = lambda x W (Little 1961): 20 requests/s with 2 s average residence is 40 present. The law holds in steady state, so
the comparison is made only when arrivals and departures nearly balance and there are enough of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MIN_SAMPLES: Final = 50
GAP_SHARE: Final = 0.20
DRIFT_SHARE: Final = 0.10


class LittleVerdict(StrEnum):
    """The light's three states."""

    STEADY = "steady"
    GAP = "gap"
    NOT_STEADY = "not_steady"


@dataclass(frozen=True, slots=True)
class LittleLight:
    """Observed and expected number present, and what that says; `expected` is None while nothing has left."""

    verdict: LittleVerdict
    observed: float
    expected: float | None
    gap_share: float | None


def compare(
    *, observed_present: float, arrivals: int, departures: int, residence_us_sum: int, window_us: int
) -> LittleLight:
    """Compare the time-average number present with lambda x W over one window.

    `residence_us_sum` is the residence of the `departures` requests that left in the window. A gap over 20 % of the
    larger figure is flagged. Raises ValueError for an empty window or negative counts.
    """
    if window_us <= 0:
        raise ValueError(f"window_us must be positive, got {window_us}")
    if arrivals < 0 or departures < 0 or residence_us_sum < 0 or observed_present < 0:
        raise ValueError("counts and times of a window cannot be negative")
    expected = arrivals / window_us * (residence_us_sum / departures) if departures else None
    larger = max(observed_present, expected or 0.0)
    gap = abs(observed_present - expected) / larger if expected is not None and larger > 0 else None
    steady = arrivals >= MIN_SAMPLES and abs(arrivals - departures) < DRIFT_SHARE * arrivals
    if not steady or gap is None:
        return LittleLight(LittleVerdict.NOT_STEADY, observed_present, expected, gap)
    verdict = LittleVerdict.GAP if gap > GAP_SHARE else LittleVerdict.STEADY
    return LittleLight(verdict, observed_present, expected, gap)
