"""Sliding windows of what happens on an agent: presence for Little's law, rates, refusals. Instants never go back.

Every request passes here several times, so windows keep running sums, and what they were when each step began: adding
and reading cost the same however long the window is.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

WINDOW_US: Final = 300_000_000
STEP_US: Final = 5_000_000


class PresenceFigures(NamedTuple):
    """Rates per second and means over the window (or since the start, when that is shorter)."""

    arrivals_per_s: float
    departures_per_s: float
    residence_mean_us: int | None
    present_mean: float
    departures: int


class PresenceSums:
    """Sums over a window of one presence or of several, watched since `started_us`."""

    __slots__ = ("arrivals", "departures", "integral_us", "present", "residence_us", "started_us")

    def __init__(self, started_us: int) -> None:
        self.started_us = started_us
        self.present = self.arrivals = self.departures = self.residence_us = self.integral_us = 0

    def figures(self, now_us: int) -> PresenceFigures:
        """As rates and means."""
        span_us = max(1, min(WINDOW_US, now_us - self.started_us))
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
        self._steps: deque[tuple[int, int, int, int, int]] = deque()
        """Each step with something in it, and the sums since the start as they were when it began."""
        self._step_end_us = 0
        self._arrivals = self._departures = self._residence_us = self._integral_us = 0
        self._last_us = now_us
        self.started_us = now_us
        self.present = 0

    def _begin_step(self, now_us: int) -> None:
        step, steps = now_us // STEP_US, self._steps
        self._step_end_us = (step + 1) * STEP_US
        steps.append((step, self._arrivals, self._departures, self._residence_us, self._integral_us))
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
        _, arrivals, departures, _, _ = self._steps[0]
        return self._arrivals == arrivals and self._departures == departures

    def sums(self, now_us: int) -> PresenceSums:
        """Sums over the window that ends now."""
        sums = PresenceSums(self.started_us)
        self._advance(now_us)
        _, arrivals, departures, residence_us, integral_us = self._steps[0]
        sums.present = self.present
        sums.arrivals = self._arrivals - arrivals
        sums.departures = self._departures - departures
        sums.residence_us = self._residence_us - residence_us
        sums.integral_us = self._integral_us - integral_us
        return sums


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

    requests: int
    tokens: int
    refused: int


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
        self._demand: deque[tuple[int, int, int, int]] = deque()
        """Each second with something in it, and the totals since the start as they were when it began."""

    def _begin_second(self, now_us: int) -> None:
        second = now_us // 1_000_000
        self._second_end_us = (second + 1) * 1_000_000
        self._forget(second)
        self._demand.append((second, self._requests, self._tokens, self._refused))

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

    def demand(self, now_us: int) -> DemandTotals | None:
        """What was asked for in the window that ends now; None where nothing was."""
        self._forget(now_us // 1_000_000)
        if not self._demand:
            return None
        _, requests, tokens, refused = self._demand[0]
        return DemandTotals(self._requests - requests, self._tokens - tokens, self._refused - refused)

    def add_to(self, of_tenant: PresenceSums, of_class: PresenceSums, now_us: int) -> None:
        """Add the window that ends now to what is summed up."""
        self._advance(now_us)
        _, arrivals, departures, residence_us, integral_us = self._steps[0]
        arrivals, departures = self._arrivals - arrivals, self._departures - departures
        residence_us, integral_us = self._residence_us - residence_us, self._integral_us - integral_us
        for sums in (of_tenant, of_class):
            sums.present += self.present
            sums.arrivals += arrivals
            sums.departures += departures
            sums.residence_us += residence_us
            sums.integral_us += integral_us
            if self.started_us < sums.started_us:
                sums.started_us = self.started_us

    def _forget(self, second: int) -> None:
        while self._demand and self._demand[0][0] <= second - DEMAND_WINDOW_S:
            self._demand.popleft()
