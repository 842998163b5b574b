"""How many batch items an agent takes: what its batch slots can run within the horizon, as they were seen to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

HORIZON_S: Final = 60
HALF_LIFE_S: Final = 15.0
KNOWN_ENDS: Final = 8
"""So many items have to end before their rate says anything."""
FIRST_PER_PLACE: Final = 256
"""Items for each place while no rate is known: then the estimate of their work is the bound that counts."""
LEAST_PER_PLACE: Final = 2
"""One that runs and one behind it: a slot never waits for a report, however long its items are."""
HELD_MAX: Final = 20_000
HELD_BYTES_MAX: Final = 64 * 1024 * 1024


class ServiceRate:
    """Items that end per second and place while there were items to run; the older, the less it counts.

    Times are microseconds of a clock that never goes back.
    """

    def __init__(self) -> None:
        self._ends = 0.0
        self._place_s = 0.0
        self._since_us: int | None = None

    def advance(self, now_us: int, *, places: int, busy: bool) -> None:
        """Time passed, with so many places; `busy` while any item was held."""
        since_us, self._since_us = self._since_us, now_us
        if since_us is None or not busy or not places or now_us <= since_us:
            return
        passed_s = (now_us - since_us) / 1e6
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        # What ended long ago stands for as little of the rate as the time in which it did.
        self._ends *= kept
        self._place_s = self._place_s * kept + passed_s * places

    def ended(self) -> None:
        self._ends += 1.0

    @property
    def per_place_s(self) -> float | None:
        """None while too few have ended."""
        if self._ends < KNOWN_ENDS or not self._place_s:
            return None
        return self._ends / self._place_s


@dataclass(frozen=True, slots=True)
class Held:
    """Items on the agent, waiting or running, with their estimated GPU time and the bytes of their bodies."""

    items: int
    gpu_us: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """Items beyond those that are held; `gpu_us` bounds their estimated work, -1 does not."""

    items: int
    gpu_us: int


NONE: Final = Room(0, 0)


def room_of(held: Held, *, slots: int, places: int, per_place_s: float | None) -> Room:
    """Room of some slots with so many places in all. Never negative."""
    if not places or held.bytes >= HELD_BYTES_MAX:
        return NONE
    least = LEAST_PER_PLACE * places
    by_rate = FIRST_PER_PLACE * places if per_place_s is None else math.ceil(per_place_s * places * HORIZON_S)
    most = min(max(by_rate, least), HELD_MAX)
    items = max(0, most - held.items)
    if not items:
        return NONE
    # So few are needed to keep the places busy, whatever their work is estimated at.
    gpu_us = -1 if most <= least else max(0, slots * HORIZON_S * 1_000_000 - held.gpu_us)
    return Room(items, gpu_us)
