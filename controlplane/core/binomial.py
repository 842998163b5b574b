"""Exact confidence interval of a binomial proportion (Clopper and Pearson 1934), in plain Python."""

from dataclasses import dataclass
from functools import lru_cache
from math import exp, lgamma, log, log1p, sqrt
from statistics import NormalDist

_TINY = 1e-300
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a proportion, both in [0, 1]."""

    low: float
    high: float


def _continued_fraction(a: float, b: float, x: float) -> float:
    # modified Lentz evaluation (Numerical Recipes, 6.4); needs O(sqrt(max(a, b))) steps
    c = 1.0
    d = 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > _TINY else _TINY)
    value = d
    for m in range(1, 200 + 20 * int(max(a, b) ** 0.5)):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > _TINY else _TINY)
            c = 1.0 + numerator / c
            c = c if abs(c) > _TINY else _TINY
            value *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return value


def regularised_incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) for positive a and b."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x))
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _continued_fraction(a, b, x) / a
    return 1.0 - front * _continued_fraction(b, a, 1.0 - x) / b


def _beta_quantile(a: float, b: float, probability: float) -> float:
    """The x with I_x(a, b) = probability: Newton's steps from the normal approximation, halving where one leads out of
    what is known to hold x. Six steps where halving alone takes forty.
    """
    low, high = 0.0, 1.0
    log_beta = lgamma(a) + lgamma(b) - lgamma(a + b)
    spread = sqrt(a * b / (a + b + 1.0)) / (a + b)
    x = min(max(a / (a + b) + _NORMAL.inv_cdf(probability) * spread, 1e-9), 1.0 - 1e-9)
    for _ in range(200):
        over = regularised_incomplete_beta(a, b, x) - probability
        low, high = (low, x) if over > 0 else (x, high)
        slope = exp((a - 1.0) * log(x) + (b - 1.0) * log1p(-x) - log_beta)
        step = over / slope if slope > _TINY else 1.0
        if abs(step) <= 1e-13 * max(x, 1e-6) or high - low <= 1e-13 * max(high, 1e-6):
            break
        x = x - step if low < x - step < high else (low + high) / 2
    return x


@lru_cache(maxsize=8192)
def clopper_pearson(events: int, total: int, confidence: float = 0.95) -> Interval:
    """Interval of the proportion events / total; ValueError unless 0 <= events <= total and total > 0."""
    if total <= 0 or not 0 <= events <= total:
        raise ValueError(f"{events} of {total} is not a proportion")
    tail = (1.0 - confidence) / 2
    low = 0.0 if events == 0 else _beta_quantile(events, total - events + 1, tail)
    high = 1.0 if events == total else _beta_quantile(events + 1, total - events, 1.0 - tail)
    return Interval(low, high)
