"""Sliding windows of what happens on an agent: presence for Little's law, rates, refusals. Instants never go back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_US = 300_000_000
STEP_US = 5_000_000


@dataclass(frozen=True, slots=True)
class PresenceFigures:
    """Rates per second and means over the window (or since the start, when that is shorter)."""

    arrivals_per_s: float
    departures_per_s: float
    residence_mean_us: int | None
    present_mean: float
    departures: int


class _Step:
    __slots__ = ("arrivals", "departures", "integral_us", "number", "residence_us")

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrivals = self.departures = self.residence_us = self.integral_us = 0


class Presence:
    """Arrivals, departures, residence and the time integral of the number present over 5 minutes."""

    __slots__ = ("_last_us", "_started_us", "_steps", "present")

    def __init__(self, now_us: int) -> None:
        self._steps: deque[_Step] = deque()
        self._last_us = now_us
        self._started_us = now_us
        self.present = 0

    def _at(self, now_us: int) -> _Step:
        number = now_us // STEP_US
        steps = self._steps
        if not steps or steps[-1].number != number:
            steps.append(_Step(number))
            oldest = number - WINDOW_US // STEP_US
            while steps[0].number < oldest:
                steps.popleft()
        step = steps[-1]
        step.integral_us += self.present * (now_us - self._last_us)
        self._last_us = now_us
        return step

    def arrive(self, now_us: int) -> None:
        self._at(now_us).arrivals += 1
        self.present += 1

    def depart(self, now_us: int, residence_us: int) -> None:
        step = self._at(now_us)
        step.departures += 1
        step.residence_us += residence_us
        self.present -= 1

    def quiet(self, now_us: int) -> bool:
        """Nobody is here, and nobody came or left in the window."""
        self._at(now_us)
        return not self.present and not any(step.arrivals or step.departures for step in self._steps)

    def figures(self, now_us: int) -> PresenceFigures:
        self._at(now_us)
        span_us = max(1, min(WINDOW_US, now_us - self._started_us))
        arrivals = sum(step.arrivals for step in self._steps)
        departures = sum(step.departures for step in self._steps)
        residence = sum(step.residence_us for step in self._steps)
        integral = sum(step.integral_us for step in self._steps)
        return PresenceFigures(
            arrivals * 1e6 / span_us,
            departures * 1e6 / span_us,
            residence // departures if departures else None,
            integral / span_us,
            departures,
        )


class WindowCount:
    """Counts by name over a window, in steps of a second."""

    __slots__ = ("_seconds", "_started_us", "_window_s")

    def __init__(self, window_s: int, now_us: int) -> None:
        self._window_s = window_s
        self._started_us = now_us
        self._seconds: deque[tuple[int, dict[str, int]]] = deque()

    def add(self, name: str, now_us: int, count: int = 1) -> None:
        second = now_us // 1_000_000
        if not self._seconds or self._seconds[-1][0] != second:
            self._forget(second)
            self._seconds.append((second, {}))
        counts = self._seconds[-1][1]
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


DEMAND_WINDOW_S = 10


@dataclass(slots=True)
class DemandTotals:
    """Requests that were asked for, their tokens, and how many of them were refused."""

    requests: int = 0
    tokens: int = 0
    refused: int = 0


class DemandWindow:
    """Demand of the last 10 s, in steps of a second."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, DemandTotals]] = deque()

    def add(self, tokens: int, now_us: int, *, refused: bool) -> None:
        """Count one request."""
        second, seconds = now_us // 1_000_000, self._seconds
        if not seconds or seconds[-1][0] != second:
            self._forget(second)
            seconds.append((second, DemandTotals()))
        totals = seconds[-1][1]
        totals.requests += 1
        totals.tokens += tokens
        totals.refused += refused

    def totals(self, now_us: int) -> DemandTotals:
        """What the window that ends now adds up to."""
        self._forget(now_us // 1_000_000)
        sums = DemandTotals()
        for _, one in self._seconds:
            sums.requests += one.requests
            sums.tokens += one.tokens
            sums.refused += one.refused
        return sums

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - DEMAND_WINDOW_S:
            self._seconds.popleft()
