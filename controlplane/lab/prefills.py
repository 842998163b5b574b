"""Prefills that hold up their slot: they follow each other there, and nothing is decoded meanwhile."""

from __future__ import annotations

from controlplane.lab.calls import Call


class Prefills:
    """Of all slots, by index. Whoever runs beside a prefill ends so much later than it was told at its start."""

    __slots__ = ("_begun_us", "_free_us")

    def __init__(self, slots: int) -> None:
        self._begun_us = [0] * slots
        """How much prefill was begun on a slot."""
        self._free_us = [0] * slots
        """When the last of it ends."""

    def begin(self, call: Call, prefill_us: int, now_us: int) -> int:
        """Time to its first token behind the prefills before it; what runs beside it ends so much later."""
        slot = call.slot_index
        free_us = max(now_us, self._free_us[slot]) + prefill_us
        self._free_us[slot] = free_us
        begun_us = self._begun_us[slot] + prefill_us
        self._begun_us[slot] = call.stalled_us = begun_us
        return free_us - now_us

    def late_us(self, call: Call) -> int:
        """How much later it ends, by what was begun beside it since this was asked last; 0: it ends now."""
        late_us = self._begun_us[call.slot_index] - call.stalled_us
        call.stalled_us += late_us
        return late_us
