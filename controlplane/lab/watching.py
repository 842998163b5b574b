"""How far a question is: told by the runs it is made of, so that whoever waits sees something move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Tell = Callable[[float, int], None]
"""(share of the run that is on, runs that are over)"""

STEP: Final = 0.01


class Watch:
    """Counts runs and tells each hundredth of one; `tell` is called in the run, so it must be quick."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._span_us = 1
        self._told = 0.0
        self.runs = 0

    def begin(self, span_us: int) -> None:
        """Another run, of so much simulated time."""
        self._span_us, self._told = max(1, span_us), 0.0
        self._tell(0.0, self.runs)

    def at(self, elapsed_us: int) -> None:
        """The run has simulated so much."""
        share = min(1.0, elapsed_us / self._span_us)
        if share >= self._told + STEP:
            self._told = share
            self._tell(share, self.runs)

    def end(self) -> None:
        """The run is over."""
        self.runs += 1
        self._tell(0.0, self.runs)
