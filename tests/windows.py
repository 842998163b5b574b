"""Tests of what is counted per window of real time: they must not straddle its end."""

import time


def begin_in_one_window(window_s: int, needs_s: float) -> None:
    """Waits for the next window of wall-clock time when this one ends within `needs_s`."""
    left = window_s - time.time() % window_s
    if left < needs_s:
        time.sleep(left + 0.01)
