"""Sliding windows of what happens on an agent: presence for Little's law, rates, refusals. Instants never go back.

Every request passes here several times, so windows keep running sums, and what they were when each step began: adding
and reading cost the same however long the window is.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from msgspec import Struct

WINDOW_US: Final = 300_000_000
STEP_US: Final = 5_000_000


class PresenceFigures(Struct, frozen=True, gc=False):
    """Rates per second and means over the window (or since the start, when that is shorter)."""

    arrivals_per_s: float
    departures_per_s: float
    residence_mean_us: int | None
    present_mean: float
    departures: int


class _Sums(NamedTuple):
    """Sums since the start, as they were when a step began."""

    step: int
    arrivals: int
    departures: int
    residence_us: int
    integral_us: int


class Presence:
    """Arrivals, departures, residence and the time integral of the number present over 5 minutes."""

    __slots__ = (
        "_arrivals", "_departures", "_integral_us", "_last_us", "_residence_us", "_started_us", "_step_end_us",
        "_steps", "present",
    )  # fmt: skip

    def __init__(self, now_us: int) -> None:
        self._steps: deque[_Sums] = deque()
        self._step_end_us = 0
        self._arrivals = self._departures = self._residence_us = self._integral_us = 0
        self._last_us = now_us
        self._started_us = now_us
        self.present = 0

    def _begin_step(self, now_us: int) -> None:
        step, steps = now_us // STEP_US, self._steps
        self._step_end_us = (step + 1) * STEP_US
        steps.append(_Sums(step, self._arrivals, self._departures, self._residence_us, self._integral_us))
        oldest = step - WINDOW_US // STEP_US
        while steps[0].step < oldest:
            steps.popleft()

    def _advance(self, now_us: int) -> None:
        if now_us >= self._step_end_us:
            self._begin_step(now_us)
        self._integral_us += self.present * (now_us - self._last_us)
        self._last_us = now_us

    def arrive(self, now_us: int) -> None:
        self._advance(now_us)
        self._arrivals += 1
        self.present += 1

    def depart(self, now_us: int, residence_us: int) -> None:
        self._advance(now_us)
        self._departures += 1
        self._residence_us += residence_us
        self.present -= 1

    def quiet(self, now_us: int) -> bool:
        """Nobody is here, and nobody came or left in the window."""
        if self.present:
            return False
        self._advance(now_us)
        before = self._steps[0]
        return self._arrivals == before.arrivals and self._departures == before.departures

    def figures(self, now_us: int) -> PresenceFigures:
        self._advance(now_us)
        before = self._steps[0]
        span_us = max(1, min(WINDOW_US, now_us - self._started_us))
        departures = self._departures - before.departures
        return PresenceFigures(
            (self._arrivals - before.arrivals) * 1e6 / span_us,
            departures * 1e6 / span_us,
            (self._residence_us - before.residence_us) // departures if departures else None,
            (self._integral_us - before.integral_us) / span_us,
            departures,
        )


class WindowCount:
    """Counts by name over a window, in steps of a second."""

    __slots__ = ("_counts", "_second", "_seconds", "_started_us", "_window_s")

    def __init__(self, window_s: int, now_us: int) -> None:
        self._window_s = window_s
        self._started_us = now_us
        self._second = -1
        self._counts: dict[str, int] = {}
        self._seconds: deque[tuple[int, dict[str, int]]] = deque()

    def add(self, name: str, now_us: int, count: int = 1) -> None:
        second = now_us // 1_000_000
        if second != self._second:
            self._forget(second)
            self._second, self._counts = second, {}
            self._seconds.append((second, self._counts))
        counts = self._counts
        counts[name] = counts.get(name, 0) + count

    def totals(self, now_us: int) -> dict[str, int]:
        """Counts of the window that ends now."""
        self._forget(now_us // 1_000_000)
        totals: dict[str, int] = {}
        for _, counts in self._seconds:
            for name, count in counts.items():
                totals[name] = totals.get(name, 0) + count
        return totals

    def per_s(self, name: str, now_us: int) -> float:
        """Rate over the window, or over the time since the start when that is shorter."""
        span_s = max(1.0, min(float(self._window_s), (now_us - self._started_us) / 1e6))
        return self.totals(now_us).get(name, 0) / span_s

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._window_s:
            self._seconds.popleft()


DEMAND_WINDOW_S: Final = 10


class DemandTotals(NamedTuple):
    """Requests that were asked for, their tokens, and how many of them were refused."""

    requests: int = 0
    tokens: int = 0
    refused: int = 0


class DemandWindow:
    """Demand of the last 10 s, in steps of a second."""

    __slots__ = ("_refused", "_requests", "_second", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._requests = self._tokens = self._refused = 0
        self._second = -1
        self._seconds: deque[tuple[int, int, int, int]] = deque()
        """Each second with something in it, and the sums as they were when it began."""

    def add(self, tokens: int, now_us: int, *, refused: bool) -> None:
        """Count one request."""
        second = now_us // 1_000_000
        if second != self._second:
            self._second = second
            self._forget(second)
            self._seconds.append((second, self._requests, self._tokens, self._refused))
        self._requests += 1
        self._tokens += tokens
        self._refused += refused

    def totals(self, now_us: int) -> DemandTotals:
        """What the window that ends now adds up to."""
        self._forget(now_us // 1_000_000)
        if not self._seconds:
            return DemandTotals()
        _, requests, tokens, refused = self._seconds[0]
        return DemandTotals(self._requests - requests, self._tokens - tokens, self._refused - refused)

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - DEMAND_WINDOW_S:
            self._seconds.popleft()
