"""Evening out what agents hold when nothing is left to lease: who has more than its part gives back what has not begun.

Without it, agents that share the last minute of a job end apart by up to that minute: one lost slots meanwhile, or was
slower than its rate had been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HORIZON_S: Final = 60
LEAST_S: Final = 3
"""Who holds less work than this is not asked: it would take as long to hand it over."""
LEAST_ITEMS: Final = 2


@dataclass(frozen=True, slots=True)
class Holding:
    """An agent's items, and those that it can run within HORIZON_S: what it holds and has room for."""

    held: int
    capacity: int


def excess(own: Holding, others: Sequence[Holding]) -> int:
    """How many items an agent should give back, so that all end at one time; 0 unless another has under half its part.

    It keeps its part in proportion to capacity, rounded up, so that nothing goes to and fro.
    """
    held = own.held + sum(other.held for other in others)
    capacity = own.capacity + sum(other.capacity for other in others)
    if own.held * HORIZON_S < LEAST_S * own.capacity:
        return 0
    if not any(2 * other.held * capacity < held * other.capacity for other in others):
        return 0
    more = own.held + -(held * own.capacity) // capacity
    if more < max(LEAST_ITEMS, own.held // 10):
        return 0
    # What comes back is leased again in proportion to room, rounded up, and the giver may be the first to ask.
    room = own.capacity - own.held + more
    free = room + sum(max(0, other.capacity - other.held) for other in others)
    return more if -(-more * room // free) < more else 0
