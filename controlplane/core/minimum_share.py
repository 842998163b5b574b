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
UNSETTLED_US: Final = -1 << 61


class MinimumShare:
    """Deficits per class, in microseconds of GPU time; statistics, therefore floats."""

    __slots__ = ("_shared", "active", "deficits_us", "settled_us", "shares_ppm")

    def __init__(self, shares_ppm: Sequence[int]) -> None:
        if any(share < 0 for share in shares_ppm) or sum(shares_ppm) > PPM:
            raise ValueError("minimum shares must be at least 0 and sum to at most 1")
        self.shares_ppm = tuple(shares_ppm)
        self.active = any(shares_ppm)
        self.deficits_us = [0.0] * len(self.shares_ppm)
        self.settled_us = UNSETTLED_US
        self._shared = [(index, share) for index, share in enumerate(self.shares_ppm) if share]

    def settle(self, now_us: int, slots: Sequence[RunningSlot], queued: Sequence[int], places: int) -> None:
        """Account for the time since the last call, in which neither what ran nor who waited has changed."""
        since = self.settled_us
        if now_us <= since:
            return
        self.settled_us = now_us
        if since == UNSETTLED_US:
            return
        elapsed = now_us - since
        busy = [slot for slot in slots if slot.running]
        for index, share in self._shared:
            delivered = 0.0
            for slot in busy:
                count = slot.class_counts[index]
                if count:
                    delivered += elapsed * count / len(slot.running)
            earned = share * elapsed * len(busy) / PPM if queued[index] else 0.0
            deficit = self.deficits_us[index] + earned - delivered
            self.deficits_us[index] = min(max(deficit, 0.0), float(DEFICIT_BOUND_US * places))

    def place_bound(self, index: int, places: int) -> int:
        """ceil(min_share x serving places): the most places a class may hold by its minimum share."""
        return -(-self.shares_ppm[index] * places // PPM)
