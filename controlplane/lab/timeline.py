"""What each slot was when: the stretches of its states, for idle time by cause and for the picture."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.core.slot_states import SlotState


class Timeline:
    """States of slots from the start on; a slot begins at home."""

    def __init__(self, slots: Iterable[tuple[str, str]], start_us: int) -> None:
        self.bands = dict(slots)
        self.moves: dict[str, list[tuple[int, SlotState]]] = {name: [(start_us, SlotState.HOME)] for name in self.bands}

    def note(self, name: str, state: SlotState, at_us: int) -> None:
        """A slot is in a state from an instant on."""
        moves = self.moves[name]
        if moves[-1][1] is not state:
            moves.append((at_us, state))

    def stretches(self, name: str, until_us: int) -> list[tuple[int, int, SlotState]]:
        """(from, to, state) without gaps up to an instant; empty ones are left out."""
        moves = self.moves[name]
        ends = [at_us for at_us, _ in moves[1:]] + [until_us]
        return [(at_us, end_us, state) for (at_us, state), end_us in zip(moves, ends, strict=True) if end_us > at_us]
