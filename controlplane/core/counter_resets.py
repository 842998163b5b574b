"""Increase of a monotone counter that starts again from zero when its process restarts."""

from collections.abc import Iterable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def increase(series: Iterable[Number]) -> Number | int:
    """Total increase over readings in time order; a reading below the one before it counts from zero.

    10, 20, 5, 8 has increased by 10 + 5 + 3 = 18. Fewer than two readings have no increase.
    """
    total: Number | int = 0
    previous: Number | None = None
    for value in series:
        if previous is not None:
            total += value if value < previous else value - previous
        previous = value
    return total
