"""Which request of one tenant and class goes next: size classes with aging, or deadlines.

Interactive: the smallest size class first, first come first served inside it. Batch: the earliest deadline first,
best effort last. In both a request older than `aging_us` goes before everything younger, so that within one tenant and
class it is overtaken by no younger one; and a preempted request goes back to the head of its queue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from heapq import heapify, heappop, heappush
from typing import Final, Generic, Protocol, TypeVar

DEFAULT_BOUNDS_GPU_US: Final = (250_000, 2_000_000)
"""Upper bounds of all size classes but the last, in estimated gpu_us: three classes by default."""
BEST_EFFORT_US: Final = 1 << 62
"""Stands for the deadline of a request that has none."""
NO_ARRIVAL_US: Final = 1 << 62
"""Later than every arrival."""


class Sized(Protocol):
    """What ordering needs of a request; `order` is (arrival_us, id)."""

    id: str | int
    arrival_us: int
    deadline_us: int | None
    size_class: int
    order: tuple[int, str | int]


R = TypeVar("R", bound=Sized)


def size_class_of(gpu_us: int, bounds_gpu_us: tuple[int, ...]) -> int:
    """Index of the size class of an estimated cost: the first whose bound is not under it."""
    return bisect_left(bounds_gpu_us, gpu_us)


def _append_in_order(lane: deque[R], request: R) -> None:
    """Keep a lane in (arrival, id) order; arrivals nearly always come in it already."""
    at = len(lane)
    while at and request.order < lane[at - 1].order:
        at -= 1
    if at == len(lane):
        lane.append(request)
    else:
        lane.insert(at, request)


class SizeClassQueue(Generic[R]):
    """Requests of one tenant in an interactive class: a lane of preempted ones, then one per size class.

    Only the first of a lane is ever dispatched. One that leaves from the middle is named in `_gone` and skipped when
    it comes to the front, so that a cancellation does not search. `_oldest_us` is no later than the earliest arrival:
    until that one is old, nothing is, and the heads of the other lanes need not be looked at.
    """

    __slots__ = ("_aging_us", "_gone", "_lanes", "_oldest_us", "count")

    def __init__(self, size_classes: int, aging_us: int | None) -> None:
        self._lanes: tuple[deque[R], ...] = tuple(deque() for _ in range(size_classes + 1))
        self._gone: set[str | int] = set()
        self._aging_us = aging_us
        self._oldest_us = NO_ARRIVAL_US
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def push(self, request: R) -> None:
        """Queue a new request behind its size class."""
        if self._gone and request.id in self._gone:
            self._sweep()
        if request.arrival_us < self._oldest_us:
            self._oldest_us = request.arrival_us
        _append_in_order(self._lanes[request.size_class + 1], request)
        self.count += 1

    def passed(self, arrival_us: int, now_us: int) -> None:
        """A request that arrived then came and went at once, the only one: what `push`, `head`, `remove` leave."""
        aged = self._aging_us is not None and self._oldest_us < now_us - self._aging_us
        if aged or arrival_us < self._oldest_us:
            self._oldest_us = arrival_us

    def push_back(self, request: R) -> None:
        """Put a preempted request back at the head."""
        if self._gone and request.id in self._gone:
            self._sweep()
        if request.arrival_us < self._oldest_us:
            self._oldest_us = request.arrival_us
        _append_in_order(self._lanes[0], request)
        self.count += 1

    def remove(self, request: R) -> None:
        """Take a queued request out, wherever it stands."""
        lane, returned = self._lanes[request.size_class + 1], self._lanes[0]
        if lane and lane[0] is request:
            lane.popleft()
        elif returned and returned[0] is request:
            returned.popleft()
        else:
            self._gone.add(request.id)
            if len(self._gone) > self.count // 2 + 16:
                self._sweep()
        self.count -= 1

    def head(self, now_us: int) -> R | None:
        """The request that goes next at `now_us`; it stays queued."""
        if self._gone:
            self._clear_fronts()
        if self._aging_us is not None and self._oldest_us < now_us - self._aging_us:
            oldest = min((lane[0] for lane in self._lanes if lane), key=lambda r: r.order, default=None)
            self._oldest_us = NO_ARRIVAL_US if oldest is None else oldest.arrival_us
            if self._oldest_us < now_us - self._aging_us:
                return oldest
        for lane in self._lanes:
            if lane:
                return lane[0]
        return None

    def ages_at_us(self, now_us: int) -> int:
        """The last instant at which the head is sure to be the present one, unless a request comes or goes."""
        if self._aging_us is None or self._oldest_us + self._aging_us < now_us:
            return NO_ARRIVAL_US
        return self._oldest_us + self._aging_us

    def leads(self, size_class: int, now_us: int) -> bool:
        """Whether a request of that size class that arrived now would be the head."""
        head = self.head(now_us)
        if head is None:
            return True
        aged = self._aging_us is not None and now_us - head.arrival_us > self._aging_us
        return not aged and not self._lanes[0] and size_class < head.size_class

    def _clear_fronts(self) -> None:
        gone = self._gone
        for lane in self._lanes:
            while lane and lane[0].id in gone:
                gone.discard(lane.popleft().id)

    def _sweep(self) -> None:
        for lane in self._lanes:
            kept = [request for request in lane if request.id not in self._gone]
            lane.clear()
            lane.extend(kept)
        self._gone.clear()


def _add_in_order(queue: OrderedDict[str | int, R], request: R) -> None:
    last = next(reversed(queue.values()), None)
    queue[request.id] = request
    if last is not None and request.order < last.order:
        for item in sorted(queue.values(), key=lambda r: r.order):
            queue.move_to_end(item.id)


class DeadlineQueue(Generic[R]):
    """Requests of one tenant in a batch class; `_oldest_us` is no later than the earliest arrival."""

    __slots__ = ("_aging_us", "_by_arrival", "_heap", "_oldest_us", "_returned", "count")

    def __init__(self, aging_us: int | None) -> None:
        self._heap: list[tuple[int, tuple[int, str | int], R]] = []
        self._by_arrival: OrderedDict[str | int, R] = OrderedDict()
        self._returned: OrderedDict[str | int, R] = OrderedDict()
        self._aging_us = aging_us
        self._oldest_us = NO_ARRIVAL_US
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def push(self, request: R) -> None:
        """Queue a new request by its deadline."""
        _add_in_order(self._by_arrival, request)
        heappush(self._heap, self._entry(request))
        if request.arrival_us < self._oldest_us:
            self._oldest_us = request.arrival_us
        self.count += 1

    def passed(self, arrival_us: int, now_us: int) -> None:
        """A request that arrived then came and went at once, the only one: what `push`, `head`, `remove` leave."""
        aged = self._aging_us is not None and self._oldest_us < now_us - self._aging_us
        if aged or arrival_us < self._oldest_us:
            self._oldest_us = arrival_us

    def push_back(self, request: R) -> None:
        """Put a preempted request back at the head."""
        _add_in_order(self._returned, request)
        if request.arrival_us < self._oldest_us:
            self._oldest_us = request.arrival_us
        self.count += 1

    def remove(self, request: R) -> None:
        """Take a queued request out, wherever it stands."""
        if self._by_arrival.pop(request.id, None) is None:
            del self._returned[request.id]
        elif len(self._heap) > 2 * len(self._by_arrival) + 16:
            self._heap = [self._entry(item) for item in self._by_arrival.values()]
            heapify(self._heap)
        self.count -= 1

    def head(self, now_us: int) -> R | None:
        """The request that goes next at `now_us`; it stays queued."""
        if self._aging_us is not None and self._oldest_us < now_us - self._aging_us:
            firsts = (next(iter(queue.values())) for queue in (self._by_arrival, self._returned) if queue)
            oldest = min(firsts, key=lambda r: r.order, default=None)
            self._oldest_us = NO_ARRIVAL_US if oldest is None else oldest.arrival_us
            if self._oldest_us < now_us - self._aging_us:
                return oldest
        if self._returned:
            return next(iter(self._returned.values()))
        heap = self._heap
        while heap:
            request = heap[0][2]
            if self._by_arrival.get(request.id) is request:
                return request
            heappop(heap)
        return None

    def ages_at_us(self, now_us: int) -> int:
        """The last instant at which the head is sure to be the present one, unless a request comes or goes."""
        if self._aging_us is None or self._oldest_us + self._aging_us < now_us:
            return NO_ARRIVAL_US
        return self._oldest_us + self._aging_us

    def leads(self, deadline_us: int | None, now_us: int) -> bool:
        """Whether a request with that deadline that arrived now would be the head."""
        head = self.head(now_us)
        if head is None:
            return True
        aged = self._aging_us is not None and now_us - head.arrival_us > self._aging_us
        theirs = BEST_EFFORT_US if head.deadline_us is None else head.deadline_us
        return not aged and not self._returned and deadline_us is not None and deadline_us < theirs

    @staticmethod
    def _entry(request: R) -> tuple[int, tuple[int, str | int], R]:
        deadline = BEST_EFFORT_US if request.deadline_us is None else request.deadline_us
        return deadline, request.order, request
