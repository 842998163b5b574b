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


class PresenceSums(NamedTuple):
    """Sums over a window; those of several presences add up."""

    arrivals: int = 0
    departures: int = 0
    residence_us: int = 0
    integral_us: int = 0

    def plus(self, other: PresenceSums) -> PresenceSums:
        return PresenceSums(
            self.arrivals + other.arrivals,
            self.departures + other.departures,
            self.residence_us + other.residence_us,
            self.integral_us + other.integral_us,
        )

    def figures(self, started_us: int, now_us: int) -> PresenceFigures:
        """As rates and means, for something that is watched since `started_us`."""
        span_us = max(1, min(WINDOW_US, now_us - started_us))
        return PresenceFigures(
            self.arrivals * 1e6 / span_us,
            self.departures * 1e6 / span_us,
            self.residence_us // self.departures if self.departures else None,
            self.integral_us / span_us,
            self.departures,
        )


class Presence:
    """Arrivals, departures, residence and the time integral of the number present over 5 minutes."""

    __slots__ = (
        "_arrivals", "_departures", "_integral_us", "_last_us", "_residence_us", "_step_end_us", "_steps", "present",
        "started_us",
    )  # fmt: skip

    def __init__(self, now_us: int) -> None:
        self._steps: deque[tuple[int, PresenceSums]] = deque()
        """Each step with something in it, and the sums since the start as they were when it began."""
        self._step_end_us = 0
        self._arrivals = self._departures = self._residence_us = self._integral_us = 0
        self._last_us = now_us
        self.started_us = now_us
        self.present = 0

    def _begin_step(self, now_us: int) -> None:
        step, steps = now_us // STEP_US, self._steps
        self._step_end_us = (step + 1) * STEP_US
        steps.append((step, PresenceSums(self._arrivals, self._departures, self._residence_us, self._integral_us)))
        oldest = step - WINDOW_US // STEP_US
        while steps[0][0] < oldest:
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
        if now_us >= self._step_end_us:
            self._begin_step(now_us)
        self._integral_us += self.present * (now_us - self._last_us)
        self._last_us = now_us
        self._departures += 1
        self._residence_us += residence_us
        self.present -= 1

    def quiet(self, now_us: int) -> bool:
        """Nobody is here, and nobody came or left in the window."""
        if self.present:
            return False
        self._advance(now_us)
        before = self._steps[0][1]
        return self._arrivals == before.arrivals and self._departures == before.departures

    def sums(self, now_us: int) -> PresenceSums:
        """Sums over the window that ends now."""
        self._advance(now_us)
        before = self._steps[0][1]
        return PresenceSums(
            self._arrivals - before.arrivals,
            self._departures - before.departures,
            self._residence_us - before.residence_us,
            self._integral_us - before.integral_us,
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
    """Requests that were asked for, their tokens, and how many of them were refused; several add up."""

    requests: int = 0
    tokens: int = 0
    refused: int = 0

    def plus(self, other: DemandTotals) -> DemandTotals:
        return DemandTotals(self.requests + other.requests, self.tokens + other.tokens, self.refused + other.refused)


class Flow(Presence):
    """The requests of one key in one class: their presence, and the demand of the last 10 s in steps of a second.

    One object for both, which a request looks up once: everything coarser is added up where it is read.
    """

    __slots__ = ("_demand", "_refused", "_requests", "_second_end_us", "_tokens", "class_id", "key_id", "tenant_id")

    def __init__(self, tenant_id: int, key_id: int, class_id: int, now_us: int) -> None:
        super().__init__(now_us)
        self.tenant_id = tenant_id
        self.key_id = key_id
        self.class_id = class_id
        self._requests = self._tokens = self._refused = 0
        self._second_end_us = 0
        self._demand: deque[tuple[int, DemandTotals]] = deque()
        """Each second with something in it, and the totals since the start as they were when it began."""

    def _begin_second(self, now_us: int) -> None:
        second = now_us // 1_000_000
        self._second_end_us = (second + 1) * 1_000_000
        self._forget(second)
        self._demand.append((second, DemandTotals(self._requests, self._tokens, self._refused)))

    def admit(self, tokens: int, now_us: int) -> None:
        """A request of so many tokens was asked for and is here."""
        if now_us >= self._second_end_us:
            self._begin_second(now_us)
        self._requests += 1
        self._tokens += tokens
        # `arrive`, without the calls: every request passes here.
        if now_us >= self._step_end_us:
            self._begin_step(now_us)
        self._integral_us += self.present * (now_us - self._last_us)
        self._last_us = now_us
        self._arrivals += 1
        self.present += 1

    def refuse(self, tokens: int, now_us: int) -> None:
        """A request of so many tokens was asked for and refused."""
        if now_us >= self._second_end_us:
            self._begin_second(now_us)
        self._requests += 1
        self._tokens += tokens
        self._refused += 1

    def demand(self, now_us: int) -> DemandTotals:
        """What was asked for in the window that ends now."""
        self._forget(now_us // 1_000_000)
        if not self._demand:
            return DemandTotals()
        requests, tokens, refused = self._demand[0][1]
        return DemandTotals(self._requests - requests, self._tokens - tokens, self._refused - refused)

    def _forget(self, second: int) -> None:
        while self._demand and self._demand[0][0] <= second - DEMAND_WINDOW_S:
            self._demand.popleft()
