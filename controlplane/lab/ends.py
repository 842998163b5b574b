"""What runs in a simulation, in the order in which it ends.

A binary heap of the calls themselves, which know their places: machine code compares their fields, where numbers in a
heap of the library's are objects that the interpreter compares. So one that ends early leaves at once.
"""

from __future__ import annotations

from controlplane.core.native import i64
from controlplane.lab.calls import Call


class Ends:
    """`calls` is the heap: the first one ends first; of one instant the one that was dispatched first.

    A call that is added has a `run` and knows in `ends_us` when it ends; both stay as they are until it is removed.
    """

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self._rise(call, len(self.calls) - 1)

    def remove(self, call: Call) -> None:
        """Take out a call that was added."""
        calls, place = self.calls, call.place
        last = calls.pop()
        if last is call:
            return
        self._sink(last, place)
        if last.place == place:
            self._rise(last, place)

    def _rise(self, call: Call, place: i64) -> None:
        """From a place that is free up to where it belongs."""
        calls, ends_us, run = self.calls, call.ends_us, call.run
        while place > 0:
            above = (place - 1) >> 1
            other = calls[above]
            if other.ends_us < ends_us or (other.ends_us == ends_us and other.run < run):
                break
            calls[place] = other
            other.place = place
            place = above
        calls[place] = call
        call.place = place

    def _sink(self, call: Call, place: i64) -> None:
        """From a place that is free down to where it belongs."""
        calls, ends_us, run = self.calls, call.ends_us, call.run
        count: i64 = len(calls)
        below = 2 * place + 1
        while below < count:
            other = calls[below]
            if below + 1 < count:
                beside = calls[below + 1]
                if beside.ends_us < other.ends_us or (beside.ends_us == other.ends_us and beside.run < other.run):
                    other, below = beside, below + 1
            if ends_us < other.ends_us or (ends_us == other.ends_us and run < other.run):
                break
            calls[place] = other
            other.place = place
            place, below = below, 2 * below + 1
        calls[place] = call
        call.place = place
