"""What each slot was when, and whether it worked: for idle time by cause and for the picture of a night.

A slot may be away for a while: broken, warming up, or not there at all, which is nobody's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from controlplane.core.idle_time import IdleCause
from controlplane.core.slot_states import Band, SlotState

ABSENT: Final = "absent"
"""Nobody owns the slot: its time counts for nothing."""
Away = IdleCause | str | None
"""Why a slot takes nothing: a cause of idle time, `ABSENT`, or None where it is there."""
ON_THE_WAY: Final = frozenset({SlotState.DRAINING, SlotState.CANCELLING, SlotState.OVERDUE})


class Timeline:
    """States of slots from the start on, by index and name; a slot begins at home with nothing on it.

    Instants never go back. `read` closes the books at an instant and may be called once more later.
    """

    def __init__(self, slots: Sequence[tuple[str, str]], start_us: int) -> None:
        self.names = [name for name, _ in slots]
        self.bands = [Band(band) for _, band in slots]
        self.moves: dict[str, list[tuple[int, SlotState]]] = {name: [(start_us, SlotState.HOME)] for name in self.names}
        self._busy_since: list[int | None] = [None] * len(slots)
        self._away: list[Away] = [None] * len(slots)
        self._busy_us: list[dict[tuple[SlotState, Away], int]] = [{} for _ in slots]
        self._held_us: list[dict[tuple[SlotState, Away], int]] = [{} for _ in slots]
        self._held_since = [start_us] * len(slots)

    def note(self, name: str, state: SlotState, at_us: int) -> None:
        """A slot is in a state from an instant on."""
        moves = self.moves[name]
        if moves[-1][1] is not state:
            self._settle(self.names.index(name), at_us)
            moves.append((at_us, state))

    def away(self, index: int, why: Away, at_us: int) -> None:
        """A slot takes nothing from an instant on, or again something (None)."""
        self._settle(index, at_us)
        self._away[index] = why

    def cause_away(self, index: int) -> Away:
        """Why a slot takes nothing now."""
        return self._away[index]

    def _key(self, index: int) -> tuple[SlotState, Away]:
        return self.moves[self.names[index]][-1][1], self._away[index]

    def began(self, index: int, at_us: int) -> None:
        """The first request on an idle slot."""
        self._busy_since[index] = at_us

    def stopped(self, index: int, at_us: int) -> None:
        """The last request left the slot."""
        since_us = self._busy_since[index]
        if since_us is not None:
            busy, key = self._busy_us[index], self._key(index)
            busy[key] = busy.get(key, 0) + at_us - since_us
            self._busy_since[index] = None

    def _settle(self, index: int, at_us: int) -> None:
        key, held = self._key(index), self._held_us[index]
        held[key] = held.get(key, 0) + at_us - self._held_since[index]
        self._held_since[index] = at_us
        if self._busy_since[index] is not None:
            self.stopped(index, at_us)
            self._busy_since[index] = at_us

    def read(self, until_us: int, *, banded: bool) -> list[tuple[str, Band, int, dict[IdleCause, int]]]:
        """By slot: name, band, busy time and idle time by cause; they add up to the time that it was there.

        Without bands (a `shared` pool) idle time has no owner.
        """
        found = []
        for index, (name, band) in enumerate(zip(self.names, self.bands, strict=True)):
            self._settle(index, until_us)
            idle: dict[IdleCause, int] = {}
            for (state, away), held_us in self._held_us[index].items():
                if away == ABSENT:
                    continue
                cause = IdleCause(away) if away else cause_of(band, state) if banded else IdleCause.UNUSED
                left_us = held_us - self._busy_us[index].get((state, away), 0)
                if left_us:
                    idle[cause] = idle.get(cause, 0) + left_us
            found.append((name, band, sum(self._busy_us[index].values()), idle))
        return found

    def stretches(self, name: str, until_us: int) -> list[tuple[int, int, SlotState]]:
        """(from, to, state) without gaps up to an instant; empty ones are left out."""
        moves = self.moves[name]
        ends = [at_us for at_us, _ in moves[1:]] + [until_us]
        return [(at_us, end_us, state) for (at_us, state), end_us in zip(moves, ends, strict=True) if end_us > at_us]


def cause_of(band: Band, state: SlotState) -> IdleCause:
    """Why a ready slot in that state idles, as the attribution of cost names it."""
    if state in ON_THE_WAY:
        return IdleCause.DRAINING
    if state is SlotState.LENT:
        return IdleCause.LENT_UNUSED
    if state is SlotState.LOST:
        return IdleCause.UNOBSERVED
    return {
        Band.INTERACTIVE: IdleCause.INTERACTIVE_FLOOR_UNUSED,
        Band.FLEX: IdleCause.FLEX_NOT_LENT,
        Band.BATCH: IdleCause.BATCH_FLOOR_UNUSED,
    }[band]
