"""Numbers of a generation: above everything that any generation before may have given out.

A database that is restored from a backup does not know what was given out after the backup was made: epochs, fences,
revisions, ids. Giving one of them out again would make two things of one name, and agents refuse a number that does not
grow. So each restore begins a new generation, and what it gives out begins that much higher.
"""

from __future__ import annotations

from typing import Final

STEP: Final = 2**20
"""By how much epochs, fences, terms and sequences move on with each generation. Between a backup and its restore no
slot is lent a million times, no agent starts so often and no policy is pushed so often; rows that are made faster
(records) have no number of this kind. 2,047 of them fit the 32 bits of the narrowest of these columns."""
LIVE_STEP: Final = 2**40
"""Numbers of the live list have 64 bits, and 2**53 of them are exact in every reader of JSON. A generation never comes
to its end, so that a number says of which generation it is."""
GENERATIONS_MOST: Final = (2**31 - 1) // STEP


def next_generation(saved: int, replaced: int | None) -> int:
    """The generation of a restored database: after the saved one and after the one that it replaces.

    Raises ValueError where numbers of 32 bits do not go on.
    """
    generation = max(saved, replaced or 0) + 1
    if generation > GENERATIONS_MOST:
        raise ValueError(f"generation {generation} is over {GENERATIONS_MOST}: its epochs do not fit their column")
    return generation


def moved_by(saved: int, generation: int) -> int:
    """How far numbers of a saved generation move on for a later one. Raises ValueError for one that is not later."""
    if generation <= saved:
        raise ValueError(f"generation {generation} does not follow generation {saved}")
    return (generation - saved) * STEP


def epoch_after(epoch: int, generation: int) -> int:
    """The next epoch of an agent: in the first generation the one after, in a later one at least the first of it."""
    return max(epoch, (generation - 1) * STEP) + 1


def live_floor(generation: int) -> int:
    """The last number of the live list before a generation's own; 0 for the first generation."""
    return (generation - 1) * LIVE_STEP


def same_live_list(since: int, last: int) -> bool:
    """Whether a list that was taken through `since` goes on to `last`: neither ahead of it nor of a generation before.

    Nothing (0) goes on to nothing.
    """
    return max(0, (last - 1) // LIVE_STEP * LIVE_STEP) < since <= last
