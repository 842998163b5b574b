"""The minimum share of a class where slots are shared: a deficit that grows while the class waits.

deficit += min_share x work delivered to all while the class is backlogged, -= work delivered to it, clamped to
[0, 60 s x places]. Delivered work is GPU time: at each instant a busy slot's time is shared evenly among the requests
running on it, so it needs no estimate. A class goes first only while its deficit is positive and fewer than
ceil(min_share x serving places) of its requests run; so it never holds more than that by this rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from controlplane.core.slots import RunningSlot

PPM: Final = 1_000_000
DEFICIT_BOUND_US: Final = 60_000_000


class MinimumShare:
    """Deficits per class, in microseconds of GPU time; statistics, therefore floats."""

    __slots__ = ("_settled_us", "active", "deficits_us", "shares_ppm")

    def __init__(self, shares_ppm: Sequence[int]) -> None:
        if any(share < 0 for share in shares_ppm) or sum(shares_ppm) > PPM:
            raise ValueError("minimum shares must be at least 0 and sum to at most 1")
        self.shares_ppm = tuple(shares_ppm)
        self.active = any(shares_ppm)
        self.deficits_us = [0.0] * len(self.shares_ppm)
        self._settled_us: int | None = None

    def settle(self, now_us: int, slots: Sequence[RunningSlot], queued: Sequence[int], places: int) -> None:
        """Account for the time since the last call, in which neither what ran nor who waited has changed."""
        since, self._settled_us = self._settled_us, now_us
        if since is None:
            return
        if now_us <= since:
            self._settled_us = since
            return
        elapsed = now_us - since
        delivered = [0.0] * len(self.deficits_us)
        busy_us = 0
        for slot in slots:
            running = len(slot.running)
            if running:
                busy_us += elapsed
                for index, count in enumerate(slot.class_counts):
                    if count:
                        delivered[index] += elapsed * count / running
        for index, share in enumerate(self.shares_ppm):
            if share:
                earned = share * busy_us / PPM if queued[index] else 0.0
                deficit = self.deficits_us[index] + earned - delivered[index]
                self.deficits_us[index] = min(max(deficit, 0.0), float(DEFICIT_BOUND_US * places))

    def place_bound(self, index: int, places: int) -> int:
        """ceil(min_share x serving places): the most places a class may hold by its minimum share."""
        return -(-self.shares_ppm[index] * places // PPM)
