"""Seeded synthetic traffic from figures fitted to public traces.

Token counts are drawn from quantile tables of the Azure LLM inference trace "code" of 2023 (CC-BY-4.0; Patel et al.,
"Splitwise", ISCA 2024), whose lognormal fit is poor, and of the Mooncake conversation trace (Apache-2.0). Arrivals are
a gamma renewal process whose gaps have the given coefficient of variation.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from controlplane.lab.traces import TraceRequest

Quantiles = tuple[tuple[float, float], ...]

CODE_PROMPT: Quantiles = (
    (0, 3), (1, 17), (5, 75), (10, 147), (20, 386), (30, 770), (40, 1075), (50, 1469), (60, 1909), (70, 2433),
    (80, 3192), (90, 5188), (95, 7303), (99, 7436), (100, 7437),
)  # fmt: skip
CODE_OUTPUT: Quantiles = (
    (0, 6), (5, 6), (10, 7), (20, 8), (30, 9), (40, 11), (50, 13), (60, 16), (70, 20), (80, 29), (90, 55), (95, 90),
    (99, 251), (99.9, 825), (100, 1899),
)  # fmt: skip
CONVERSATION_PROMPT: Quantiles = (
    (0, 891), (5, 901), (10, 964), (20, 1662), (30, 3263), (40, 4993), (50, 6909), (60, 9570), (70, 13196), (80, 17869),
    (90, 27367), (95, 39551), (99, 85400), (100, 126195),
)  # fmt: skip
CONVERSATION_OUTPUT: Quantiles = (
    (0, 1), (5, 10), (10, 24), (20, 100), (30, 213), (40, 291), (50, 350), (60, 399), (70, 447), (80, 504), (90, 597),
    (95, 698), (99, 1119), (100, 2000),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Burst:
    """`factor` times the rate for `length_s`, first at `first_s`, again every `every_s`."""

    first_s: float
    every_s: float
    length_s: float
    factor: float

    def factor_at(self, at_s: float) -> float:
        since = at_s - self.first_s
        return self.factor if since >= 0 and since % self.every_s < self.length_s else 1.0


def draw(quantiles: Quantiles, rng: Random) -> int:
    """A value of the table's distribution, straight lines between its points."""
    share = rng.random() * 100
    at = max(1, bisect_left(quantiles, (share, 0.0)))
    (low, low_value), (high, high_value) = quantiles[at - 1], quantiles[min(at, len(quantiles) - 1)]
    if high == low:
        return round(low_value)
    return round(low_value + (high_value - low_value) * (share - low) / (high - low))


def arrivals(
    *,
    rate_per_s: float,
    variation: float,
    rng: Random,
    factor_at: Callable[[float], float] = lambda at_s: 1.0,
) -> Iterator[float]:
    """Endless arrival instants in seconds from 0; `variation` is the gaps' coefficient of variation."""
    if rate_per_s <= 0 or variation <= 0:
        raise ValueError("rate and variation are positive")
    shape = 1 / variation**2
    at_s = 0.0
    while True:
        at_s += rng.gammavariate(shape, 1 / (shape * rate_per_s)) / factor_at(at_s)
        yield at_s


def requests(
    *,
    rate_per_s: float,
    variation: float,
    prompt: Quantiles,
    output: Quantiles,
    rng: Random,
    burst: Burst | None = None,
    prompt_max: int | None = None,
    output_max: int | None = None,
) -> Iterator[TraceRequest]:
    """An endless seeded trace; draws over a maximum are cut to it."""
    factor_at = burst.factor_at if burst else (lambda at_s: 1.0)
    for at_s in arrivals(rate_per_s=rate_per_s, variation=variation, rng=rng, factor_at=factor_at):
        tokens = draw(prompt, rng), draw(output, rng)
        yield TraceRequest(
            round(at_s * 1_000_000),
            min(tokens[0], prompt_max or tokens[0]),
            max(1, min(tokens[1], output_max or tokens[1])),
        )
