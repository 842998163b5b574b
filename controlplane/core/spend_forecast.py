"""What a budget window will have spent at its end, and when its limit will be reached: a point and an 80 % interval.

The days before are a sample. From three weeks on each weekday has its own mean, since traffic of people rests at
weekends; before that one mean stands for all. The sum of k coming days has the variance of k days plus that of the
means themselves, and Student's t gives the interval (Hahn and Meeker, Statistical Intervals, on the mean of m future
observations). Days are taken as independent; with less than a week of them the answer is unknown rather than a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

from controlplane.core.period import US_PER_HOUR

DAYS_MIN = 7
DAYS_BY_WEEKDAY = 21
COVERAGE = 0.8
_US_PER_DAY = 24 * US_PER_HOUR


@dataclass(frozen=True, slots=True)
class DaySpend:
    """What one complete day was charged; `weekday` 0 is Monday."""

    weekday: int
    nanos: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the window that is to come, within one local day."""

    starts_us: int
    ends_us: int
    weekday: int


@dataclass(frozen=True, slots=True)
class SpendForecast:
    """Nanos at the window's end, low <= point <= high, and when the limit is reached at each of them (Unix us).

    An instant that is None lies behind the window's end: the limit lasts. `earliest_us` belongs to the high end.
    """

    point_nanos: int
    low_nanos: int
    high_nanos: int
    point_us: int | None
    earliest_us: int | None
    latest_us: int | None
    days: int


def forecast_spend(
    days: Sequence[DaySpend], ahead: Sequence[Piece], *, settled_nanos: int, limit_nanos: int
) -> SpendForecast | None:
    """The forecast of a window from complete days before; None where DAYS_MIN of them are not there.

    `ahead` tiles what is left of the window, in order. Raises ValueError for a piece that does not follow the last.
    """
    if len(days) < DAYS_MIN:
        return None
    sample = _Sample.of(days)
    lines = {name: _Line(settled_nanos, limit_nanos) for name in ("point", "high", "low")}
    length: dict[int, float] = {}
    squares = 0.0
    mean = float(settled_nanos)
    for before, piece in zip([None, *ahead], ahead, strict=False):
        if piece.ends_us <= piece.starts_us or (before is not None and piece.starts_us != before.ends_us):
            raise ValueError("the pieces ahead tile the rest of the window, in order")
        share = (piece.ends_us - piece.starts_us) / _US_PER_DAY
        group = sample.group(piece.weekday)
        length[group] = length.get(group, 0.0) + share
        squares += share * share
        mean += share * sample.means[group]
        half = sample.half_width(length, squares)
        for name, value in (("point", mean), ("high", mean + half), ("low", mean - half)):
            lines[name].to(value, piece)
    point, high, low = (lines[name] for name in ("point", "high", "low"))
    return SpendForecast(
        point.nanos, low.nanos, high.nanos, point.reached_us, high.reached_us, low.reached_us, len(days)
    )


@dataclass(slots=True)
class _Line:
    """A sum that never falls, followed until it reaches the limit."""

    value: float
    limit_nanos: int
    reached_us: int | None = None

    @property
    def nanos(self) -> int:
        return round(self.value)

    def to(self, value: float, piece: Piece) -> None:
        value = max(value, self.value)
        if self.reached_us is None and value >= self.limit_nanos:
            rise = value - self.value
            part = max(0.0, self.limit_nanos - self.value) / rise if rise > 0 else 0.0
            self.reached_us = piece.starts_us + round(part * (piece.ends_us - piece.starts_us))
        self.value = value


@dataclass(frozen=True, slots=True)
class _Sample:
    """Means by group (a weekday each, or all days as group 0), their sizes, and the spread within groups."""

    means: dict[int, float]
    sizes: dict[int, int]
    spread: float
    t: float

    @classmethod
    def of(cls, days: Sequence[DaySpend]) -> _Sample:
        by_weekday = len(days) >= DAYS_BY_WEEKDAY and len({day.weekday for day in days}) == 7
        groups: dict[int, list[int]] = {}
        for day in days:
            groups.setdefault(day.weekday if by_weekday else 0, []).append(day.nanos)
        means = {group: sum(values) / len(values) for group, values in groups.items()}
        rest = sum((value - means[group]) ** 2 for group, values in groups.items() for value in values)
        freedom = len(days) - len(groups)
        sizes = {group: len(values) for group, values in groups.items()}
        return cls(means, sizes, sqrt(rest / freedom), student_t((1 + COVERAGE) / 2, freedom))

    def group(self, weekday: int) -> int:
        return weekday if len(self.means) > 1 else 0

    def half_width(self, length: dict[int, float], squares: float) -> float:
        """Half of the interval of a sum over so many days of each group; `squares` adds the squares of its parts."""
        of_means = sum(part * part / self.sizes[group] for group, part in length.items())
        return self.t * self.spread * sqrt(squares + of_means)


def student_t(probability: float, freedom: int) -> float:
    """Quantile of Student's t for at least 4 degrees of freedom, to three decimals between 5 and 95 %.

    The expansion in powers of 1/freedom around the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
