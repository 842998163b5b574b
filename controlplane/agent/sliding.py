"""Sliding windows of what happens on an agent: presence for Little's law, rates, refusals. Instants never go back.

Every request passes here several times, so windows keep running sums, and what they were when each step began: adding
and reading cost the same however long the window is.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Final, NamedTuple

WINDOW_US: Final = 300_000_000
STEP_US: Final = 5_000_000
STEP_FIGURES: Final = 5
CLOSE_UP_AT: Final = 16 * STEP_FIGURES
"""So much of what is over may stand at the front of a presence's steps before it is taken out."""


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
        "_arrivals", "_departures", "_first", "_integral_us", "_last_us", "_residence_us", "_step_end_us", "_steps",
        "present", "started_us",
    )  # fmt: skip

    def __init__(self, now_us: int) -> None:
        self._steps: array[int] = array("q")
        """Each step with something in it, and the sums since the start as they were when it began: five numbers of
        eight bytes a step. As tuples, a thousand of these took ten megabytes more after five minutes of load."""
        self._first = 0
        """Where the window begins in them."""
        self._step_end_us = 0
        self._arrivals = self._departures = self._residence_us = self._integral_us = 0
        self._last_us = now_us
        self.started_us = now_us
        self.present = 0

    def _begin_step(self, now_us: int) -> None:
        step, steps = now_us // STEP_US, self._steps
        self._step_end_us = (step + 1) * STEP_US
        steps.extend((step, self._arrivals, self._departures, self._residence_us, self._integral_us))
        oldest, first = step - WINDOW_US // STEP_US, self._first
        while steps[first] < oldest:
            first += STEP_FIGURES
        if first >= CLOSE_UP_AT:
            del steps[:first]
            first = 0
        self._first = first

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
        steps, first = self._steps, self._first
        return self._arrivals == steps[first + 1] and self._departures == steps[first + 2]

    def sums(self, now_us: int) -> PresenceSums:
        """Sums over the window that ends now."""
        sums = PresenceSums(self.started_us)
        self._advance(now_us)
        steps, first = self._steps, self._first
        sums.present = self.present
        sums.arrivals = self._arrivals - steps[first + 1]
        sums.departures = self._departures - steps[first + 2]
        sums.residence_us = self._residence_us - steps[first + 3]
        sums.integral_us = self._integral_us - steps[first + 4]
        return sums


class WindowCount:
    """Counts by name over a window, in steps of a second."""

    __slots__ = ("_counts", "_last", "_last_count", "_second_end_us", "_seconds", "_started_us", "_totals",
                 "_window_s")  # fmt: skip

    def __init__(self, window_s: int, now_us: int) -> None:
        self._window_s = window_s
        self._started_us = now_us
        self._second_end_us = 0
        self._counts: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        """Of all seconds of the window."""
        self._last = ""
        self._last_count = 0
        """How often the last name came in a row, which is not in the counts yet."""
        self._seconds: deque[tuple[int, dict[str, int]]] = deque()

    def add(self, name: str, now_us: int, count: int = 1) -> None:
        if now_us >= self._second_end_us:
            self._begin_second(now_us)
        if name is not self._last:
            self._note()
            self._last = name
        self._last_count += count

    def _begin_second(self, now_us: int) -> None:
        self._note()
        second = now_us // 1_000_000
        self._second_end_us = (second + 1) * 1_000_000
        self._forget(second)
        self._counts = {}
        self._seconds.append((second, self._counts))

    def _note(self) -> None:
        if self._last_count:
            counts, totals = self._counts, self._totals
            counts[self._last] = counts.get(self._last, 0) + self._last_count
            totals[self._last] = totals.get(self._last, 0) + self._last_count
            self._last_count = 0

    def totals(self, now_us: int) -> dict[str, int]:
        """Counts of the window that ends now."""
        self._note()
        self._forget(now_us // 1_000_000)
        return {name: count for name, count in self._totals.items() if count}

    def per_s(self, name: str, now_us: int) -> float:
        """Rate over the window, or over the time since the start when that is shorter."""
        span_s = max(1.0, min(float(self._window_s), (now_us - self._started_us) / 1e6))
        self._note()
        self._forget(now_us // 1_000_000)
        return self._totals.get(name, 0) / span_s

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._window_s:
            totals = self._totals
            for name, count in self._seconds.popleft()[1].items():
                totals[name] -= count


DEMAND_WINDOW_S: Final = 10


class DemandTotals(NamedTuple):
    """Requests that were asked for, their tokens, how many of them were refused, and how many requests are here now."""

    requests: int
    tokens: int
    refused: int
    present: int


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
        """What was asked for in the window that ends now, and who is here; None where nothing was and nobody is."""
        self._forget(now_us // 1_000_000)
        if not self._demand:
            return DemandTotals(0, 0, 0, self.present) if self.present else None
        _, requests, tokens, refused = self._demand[0]
        return DemandTotals(self._requests - requests, self._tokens - tokens, self._refused - refused, self.present)

    def add_to(self, of_tenant: PresenceSums, of_class: PresenceSums, now_us: int) -> None:
        """Add the window that ends now to what is summed up."""
        self._advance(now_us)
        steps, first = self._steps, self._first
        arrivals, departures = self._arrivals - steps[first + 1], self._departures - steps[first + 2]
        residence_us, integral_us = self._residence_us - steps[first + 3], self._integral_us - steps[first + 4]
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
