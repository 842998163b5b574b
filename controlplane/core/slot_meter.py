"""GPU time of concurrent requests on one slot: who used each microsecond that the slot was busy.

At each instant the slot's time is shared among the running requests in proportion to their weights. The meter keeps one
virtual clock per slot that advances by elapsed time / total weight (generalised processor sharing, Parekh and Gallager
1993), so that a start or an end costs O(1) whatever runs beside it. All numbers are integers: what a division leaves
over is carried to the next share and settled whenever the meter is read, at each minute and when the slot falls idle,
so that the shares of a slot add up to its busy time exactly, per minute and in all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from controlplane.core.native import native

Name = str | int
US_PER_MINUTE: Final = 60_000_000
_FRACTION_BITS: Final = 32
_FRACTION_MASK: Final = (1 << _FRACTION_BITS) - 1


@dataclass(frozen=True, slots=True)
class SlotMinutes:
    """What a meter booked since it was last collected; keys hold the start of the UTC minute in microseconds.

    For each minute the shares in `gpu_us_by_key` (minute, tenant, class) add up to `busy_us_by_minute`.
    """

    gpu_us_by_key: dict[tuple[int, Name, str], int]
    busy_us_by_minute: dict[int, int]


@native(free_list_len=1)
class Stay:
    """One request that runs on the slot, for its meter alone to change.

    Those that run are a chain in the order in which they began: nothing has to be looked up to begin or to end.
    """

    __slots__ = ("after", "before", "booked_us", "request_id", "runs", "used_by", "used_in", "virtual", "weight")

    def __init__(self, request_id: Name, used_by: Name = "", used_in: str = "", weight: int = 1) -> None:
        self.request_id = request_id
        self.used_by = used_by
        self.used_in = used_in
        self.weight = weight
        self.virtual = 0
        self.booked_us = 0
        self.runs = False
        self.before: Stay | None = None
        self.after: Stay | None = None


class SlotMeter:
    """Shares of one slot's busy time; instants are UTC microseconds that never go back, weights positive integers.

    `by_minute` False keeps no shares for `collect`, where nobody asks for them: the time of each request is the same.
    """

    __slots__ = (
        "_busy", "_by_minute", "_carry", "_first", "_given_us", "_last", "_minute_busy_us", "_minute_end_us", "_named",
        "_now_us", "_rest", "_shares", "_unsettled_us", "_virtual", "_weight", "busy_us", "running",
    )  # fmt: skip

    def __init__(self, *, by_minute: bool = True) -> None:
        self._by_minute = by_minute
        self._named: dict[Name, Stay] = {}
        """Those that `start` began, by their ids."""
        self._first: Stay | None = None
        self._last: Stay | None = None
        self.running = 0
        """Number of requests that run now."""
        self._weight = 0
        self._virtual = 0
        self._rest = 0
        self._carry = 0
        self._now_us = 0
        self._minute_end_us = 0
        self._unsettled_us = 0
        self._given_us = 0
        self._shares: dict[tuple[int, Name, str], int] = {}
        self._busy: dict[int, int] = {}
        self._minute_busy_us = 0
        self.busy_us = 0

    def start(self, request_id: Name, at_us: int, tenant: Name = "", class_: str = "", weight: int = 1) -> Stay:
        """A request begins to run. Raises ValueError when it already runs, or for a weight below 1."""
        if weight < 1:
            raise ValueError(f"the weight of {request_id} must be a positive integer, not {weight}")
        if request_id in self._named:
            raise ValueError(f"{request_id} already runs on this slot")
        stay = Stay(request_id, tenant, class_, weight)
        self.begin(stay, at_us)
        self._named[request_id] = stay
        return stay

    def begin(self, stay: Stay, at_us: int) -> None:
        """As `start`, with the caller's own, which may have run before."""
        self._advance(at_us)
        if stay.runs:
            raise ValueError(f"{stay.request_id} already runs on this slot")
        stay.runs = True
        last = self._last
        if last is None:
            self._first = stay
        else:
            last.after, stay.before = stay, last
        self._last = stay
        self.running += 1
        self._weight += stay.weight
        stay.virtual, stay.booked_us = self._virtual, 0

    def end(self, request_id: Name, at_us: int) -> int:
        """A request stops; returns its gpu_us over its whole run. Raises KeyError when it does not run here."""
        return self.end_stay(self._named[request_id], at_us)

    def end_stay(self, stay: Stay, at_us: int) -> int:
        """As `end`, by what `start` returned."""
        self._advance(at_us)
        if self._named:
            self._named.pop(stay.request_id, None)
        before, after = stay.before, stay.after
        if before is None:
            self._first = after
        else:
            before.after, stay.before = after, None
        if after is None:
            self._last = before
        else:
            after.before, stay.after = before, None
        stay.runs = False
        self.running -= 1
        self._weight -= stay.weight
        if self._first is not None:
            self._book(stay, self._share_us(stay))
        else:
            self._book(stay, self._unsettled_us - self._given_us)
            self._reset()
        return stay.booked_us

    def reweigh(self, request_id: Name, at_us: int, weight: int) -> None:
        """The weight of a running request changes, for policies that weigh by tokens in flight."""
        if weight < 1:
            raise ValueError(f"the weight of {request_id} must be a positive integer, not {weight}")
        run = self._named[request_id]
        self._advance(at_us)
        self._book(run, self._share_us(run))
        self._weight += weight - run.weight
        run.weight = weight

    def collect(self, at_us: int) -> SlotMinutes:
        """Settle up to an instant, and take everything booked since the last call. O(running)."""
        self._advance(at_us)
        self._settle()
        self._end_minute()
        minutes = SlotMinutes(
            {key: us for key, us in self._shares.items() if us},
            {minute: us for minute, us in self._busy.items() if us},
        )
        self._shares = {}
        self._busy = {}
        return minutes

    def _advance(self, at_us: int) -> None:
        if at_us < self._now_us:
            raise ValueError(f"time went back on a slot meter: {at_us} after {self._now_us} us")
        while at_us >= self._minute_end_us:
            if self._minute_busy_us:
                self._end_minute()
            if self._first is None:
                self._now_us = at_us
                self._minute_end_us = at_us - at_us % US_PER_MINUTE + US_PER_MINUTE
                return
            elapsed_us, self._now_us = self._minute_end_us - self._now_us, self._minute_end_us
            self._accrue(elapsed_us)
            self._settle()
            self._end_minute()
            self._minute_end_us += US_PER_MINUTE
        elapsed_us = at_us - self._now_us
        if elapsed_us:
            self._now_us = at_us
            if self._weight:
                self._accrue(elapsed_us)

    def _end_minute(self) -> None:
        """Book the busy time of the present minute, which ends or is collected."""
        minute = self._minute_end_us - US_PER_MINUTE
        self._busy[minute] = self._busy.get(minute, 0) + self._minute_busy_us
        self._minute_busy_us = 0

    def _accrue(self, elapsed_us: int) -> None:
        """Time within one minute, in which something ran."""
        exact, weight = (elapsed_us << _FRACTION_BITS) + self._rest, self._weight
        step, self._rest = exact // weight, exact % weight
        self._virtual += step
        self._unsettled_us += elapsed_us
        self.busy_us += elapsed_us
        self._minute_busy_us += elapsed_us

    def _share_us(self, run: Stay) -> int:
        since = self._virtual - run.virtual
        # Nearly all weigh one, and the product of large numbers is dear.
        exact = (since if run.weight == 1 else run.weight * since) + self._carry
        self._carry = exact & _FRACTION_MASK
        run.virtual = self._virtual
        return exact >> _FRACTION_BITS

    def _book(self, run: Stay, us: int) -> None:
        run.booked_us += us
        self._given_us += us
        if not self._by_minute:
            return
        key = self._minute_end_us - US_PER_MINUTE, run.used_by, run.used_in
        self._shares[key] = self._shares.get(key, 0) + us

    def _settle(self) -> None:
        run, last = self._first, self._last
        while run is not None:
            self._book(run, self._unsettled_us - self._given_us if run is last else self._share_us(run))
            run = run.after
        if last is not None:
            self._reset()

    def _reset(self) -> None:
        """Everybody who runs has what is theirs: the clock begins anew, and numbers stay small for however long."""
        self._unsettled_us = self._given_us = self._rest = self._carry = self._virtual = 0
        run = self._first
        while run is not None:
            run.virtual = 0
            run = run.after


@dataclass(frozen=True, slots=True)
class Run:
    """One request's stay on a slot, [start_us, end_us)."""

    request_id: str
    start_us: int
    end_us: int
    weight: int = 1
    tenant: str = ""
    class_: str = ""


def share_gpu_time(runs: Iterable[Run]) -> dict[str, int]:
    """gpu_us of each of the requests that ran on one slot; they add up to the slot's busy time exactly.

    Raises ValueError when a run ends before it starts or an id runs twice at once.
    """
    meter = SlotMeter()
    events: list[tuple[int, int, str, Run]] = []
    for run in runs:
        if run.end_us < run.start_us:
            raise ValueError(f"{run.request_id} ends before it starts")
        # at one instant: runs that were there end, new ones start, empty ones end
        events.append((run.start_us, 1, run.request_id, run))
        events.append((run.end_us, 0 if run.end_us > run.start_us else 2, run.request_id, run))
    shares: dict[str, int] = {}
    for at_us, kind, request_id, run in sorted(events, key=lambda event: event[:3]):
        if kind == 1:
            meter.start(request_id, at_us, tenant=run.tenant, class_=run.class_, weight=run.weight)
        else:
            shares[request_id] = shares.get(request_id, 0) + meter.end(request_id, at_us)
    return shares
