"""How long to wait before the next try."""

import random
from typing import Final

FIRST_S: Final = 0.5
MAX_S: Final = 10.0


def backoff_s(failures: int) -> float:
    """Jitter over an exponential bound (AWS architecture blog, "Exponential Backoff And Jitter", 2015)."""
    bound = min(MAX_S, FIRST_S * 2 ** min(failures, 10))
    return random.uniform(bound / 4, bound)  # noqa: S311  spreading load, not a secret
