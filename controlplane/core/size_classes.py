"""Which request of one tenant and class goes next: size classes with aging, or deadlines.

Interactive: the smallest size class first, first come first served inside it. Batch: the earliest deadline first,
best effort last. In both a request older than `aging_us` goes before everything younger, so that within one tenant and
class it is overtaken by no younger one; and a preempted request goes back to the head of its queue.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Final

from controlplane.core.native import i64
from controlplane.core.queued_request import QueuedRequest

DEFAULT_BOUNDS_GPU_US: Final = (250_000, 2_000_000)
"""Upper bounds of all size classes but the last, in estimated gpu_us: three classes by default."""
BEST_EFFORT_US: Final = 1 << 61
"""Stands for the deadline of a request that has none."""
NO_ARRIVAL_US: Final = 1 << 61
"""Later than every arrival."""


def size_class_of(gpu_us: int, bounds_gpu_us: tuple[int, ...]) -> int:
    """Index of the size class of an estimated cost: the first whose bound is not under it."""
    index = 0
    for bound_us in bounds_gpu_us:
        if gpu_us <= bound_us:
            break
        index += 1
    return index


def _is_before(one: QueuedRequest, other: QueuedRequest) -> bool:
    """By (arrival, id)."""
    if one.arrival_us != other.arrival_us:
        return one.arrival_us < other.arrival_us
    return one.order < other.order


COMPACT_AT: Final = 32
"""So many places at the front of a lane may be empty before it is looked at whether to close up."""


class _Lane:
    """Requests in (arrival, id) order; a list whose front is given up bit by bit, for compiled code has those.

    What a short one held stays as places for those who come next: asking for memory and giving it back for each costs
    more than the rest.
    """

    __slots__ = ("_end", "_first", "_places")

    def __init__(self) -> None:
        self._places: list[QueuedRequest | None] = []
        """With requests from `_first` up to `_end`, and with nobody before and after."""
        self._first: i64 = 0
        self._end: i64 = 0

    def front(self) -> QueuedRequest | None:
        first = self._first
        return self._places[first] if first < self._end else None

    def append(self, request: QueuedRequest) -> None:
        """Arrivals nearly always come in order already."""
        places, end = self._places, self._end
        if end:
            last = places[end - 1]
            if last is not None and _is_before(request, last):
                self._keep([*self.all(), request])
                self._places.sort(key=_order_of)
                return
        if end < len(places):
            places[end] = request
        else:
            places.append(request)
        self._end = end + 1

    def leave(self) -> bool:
        """The front one goes; whether it was the last one."""
        places, first, end = self._places, self._first, self._end
        places[first] = None
        first += 1
        if first == end:
            if end > COMPACT_AT:
                places.clear()
            self._first = self._end = 0
            return True
        if first >= COMPACT_AT and 2 * first >= end:
            del places[:first]
            self._end = end - first
            first = 0
        self._first = first
        return False

    def all(self) -> list[QueuedRequest]:
        """From front to back."""
        return [request for request in self._places if request is not None]

    def drop(self, gone: set[str | int]) -> None:
        """Those that are named go."""
        self._keep([request for request in self.all() if request.id not in gone])

    def _keep(self, requests: list[QueuedRequest]) -> None:
        self._places = [*requests]
        self._first, self._end = 0, len(requests)


def _order_of(request: QueuedRequest | None) -> tuple[int, str | int]:
    assert request is not None, "places are empty before the front only"
    return request.order


class SizeClassQueue:
    """Requests of one tenant in an interactive class: a lane of preempted ones, then one per size class.

    Only the first of a lane is ever dispatched. One that leaves from the middle is named in `_gone` and skipped when
    it comes to the front, so that a cancellation does not search. `_oldest_us` is no later than the earliest arrival:
    until that one is old, nothing is, and the heads of the other lanes need not be looked at.

    With ten thousand tenants none of this is in a near cache when its turn comes, so a lane and the names of those that
    are gone are made when they are first needed, and which lanes are empty stands in one number.
    """

    __slots__ = ("_aging_us", "_filled", "_gone", "_lanes", "_oldest_us", "count")

    def __init__(self, size_classes: int, aging_us: int | None) -> None:
        self._lanes: list[_Lane | None] = [None] * (size_classes + 1)
        self._filled = 0
        """Bits of the lanes that hold something."""
        self._gone: set[str | int] | None = None
        """None for nobody."""
        self._aging_us = aging_us
        self._oldest_us = NO_ARRIVAL_US
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def push(self, request: QueuedRequest) -> None:
        """Queue a new request behind its size class."""
        self._add(request, request.size_class + 1)

    def push_back(self, request: QueuedRequest) -> None:
        """Put a preempted request back at the head."""
        self._add(request, 0)

    def _add(self, request: QueuedRequest, at: int) -> None:
        if self._gone is not None and request.id in self._gone:
            self._sweep()
        if request.arrival_us < self._oldest_us:
            self._oldest_us = request.arrival_us
        lane = self._lanes[at]
        if lane is None:
            lane = self._lanes[at] = _Lane()
        lane.append(request)
        self._filled |= 1 << at
        self.count += 1

    def passed(self, arrival_us: int, now_us: int) -> None:
        """A request that arrived then came and went at once, the only one: what `push`, `head`, `remove` leave."""
        aged = self._aging_us is not None and self._oldest_us < now_us - self._aging_us
        if aged or arrival_us < self._oldest_us:
            self._oldest_us = arrival_us

    def remove(self, request: QueuedRequest) -> None:
        """Take a queued request out, wherever it stands."""
        at = request.size_class + 1
        if self._front(at) is request:
            self._leave(at)
        elif self._front(0) is request:
            self._leave(0)
        else:
            if self._gone is None:
                self._gone = set()
            self._gone.add(request.id)
            if len(self._gone) > self.count // 2 + 16:
                self._sweep()
        self.count -= 1

    def head(self, now_us: int) -> QueuedRequest | None:
        """The request that goes next at `now_us`; it stays queued."""
        if self._gone is not None:
            self._clear_fronts(self._gone)
        if self._aging_us is not None and self._oldest_us < now_us - self._aging_us:
            oldest: QueuedRequest | None = None
            for at in range(len(self._lanes)):
                front = self._front(at)
                if front is not None and (oldest is None or _is_before(front, oldest)):
                    oldest = front
            self._oldest_us = NO_ARRIVAL_US if oldest is None else oldest.arrival_us
            if self._oldest_us < now_us - self._aging_us:
                return oldest
        filled, at = self._filled, 0
        if not filled:
            return None
        while not filled & 1:
            filled >>= 1
            at += 1
        return self._front(at)

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
        return not aged and not self._filled & 1 and size_class < head.size_class

    def _front(self, at: int) -> QueuedRequest | None:
        lane = self._lanes[at] if self._filled & (1 << at) else None
        return None if lane is None else lane.front()

    def _leave(self, at: int) -> None:
        """The front one of a lane goes."""
        lane = self._lanes[at]
        assert lane is not None, "it has a front"
        if lane.leave():
            self._filled &= ~(1 << at)

    def _clear_fronts(self, gone: set[str | int]) -> None:
        for at in range(len(self._lanes)):
            while (front := self._front(at)) is not None and front.id in gone:
                self._leave(at)
                gone.discard(front.id)
        if not gone:
            self._gone = None

    def _sweep(self) -> None:
        gone, self._gone, self._filled = self._gone or set(), None, 0
        for at, lane in enumerate(self._lanes):
            if lane is not None:
                lane.drop(gone)
                if lane.front() is not None:
                    self._filled |= 1 << at


def _first(queue: OrderedDict[str | int, QueuedRequest]) -> QueuedRequest | None:
    for request in queue.values():
        return request
    return None


class DeadlineQueue:
    """Requests of one tenant in a batch class; `_oldest_us` is no later than the earliest arrival."""

    __slots__ = ("_aging_us", "_by_arrival", "_heap", "_latest_us", "_oldest_us", "_returned", "count")

    def __init__(self, aging_us: int | None) -> None:
        self._heap: list[tuple[int, int, str | int, QueuedRequest]] = []
        """By deadline, arrival and id."""
        self._by_arrival: OrderedDict[str | int, QueuedRequest] = OrderedDict()
        self._returned: OrderedDict[str | int, QueuedRequest] = OrderedDict()
        self._aging_us = aging_us
        self._oldest_us = NO_ARRIVAL_US
        self._latest_us = -1
        """No arrival in either of the two is later."""
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def _add(self, queue: OrderedDict[str | int, QueuedRequest], request: QueuedRequest) -> None:
        """Keep it in (arrival, id) order; arrivals nearly always come in it already."""
        last = None if request.arrival_us > self._latest_us else next(reversed(queue.values()), None)
        queue[request.id] = request
        if request.arrival_us > self._latest_us:
            self._latest_us = request.arrival_us
        if last is not None and request.order < last.order:
            for item in sorted(queue.values(), key=lambda r: r.order):
                queue.move_to_end(item.id)

    def push(self, request: QueuedRequest) -> None:
        """Queue a new request by its deadline."""
        self._add(self._by_arrival, request)
        heappush(self._heap, self._entry(request))
        if request.arrival_us < self._oldest_us:
            self._oldest_us = request.arrival_us
        self.count += 1

    def passed(self, arrival_us: int, now_us: int) -> None:
        """A request that arrived then came and went at once, the only one: what `push`, `head`, `remove` leave."""
        aged = self._aging_us is not None and self._oldest_us < now_us - self._aging_us
        if aged or arrival_us < self._oldest_us:
            self._oldest_us = arrival_us

    def push_back(self, request: QueuedRequest) -> None:
        """Put a preempted request back at the head."""
        self._add(self._returned, request)
        if request.arrival_us < self._oldest_us:
            self._oldest_us = request.arrival_us
        self.count += 1

    def remove(self, request: QueuedRequest) -> None:
        """Take a queued request out, wherever it stands."""
        if self._by_arrival.pop(request.id, None) is None:
            del self._returned[request.id]
        elif len(self._heap) > 2 * len(self._by_arrival) + 16:
            self._heap = [self._entry(item) for item in self._by_arrival.values()]
            heapify(self._heap)
        self.count -= 1

    def head(self, now_us: int) -> QueuedRequest | None:
        """The request that goes next at `now_us`; it stays queued."""
        if self._aging_us is not None and self._oldest_us < now_us - self._aging_us:
            oldest = _first(self._by_arrival)
            if self._returned:
                again = _first(self._returned)
                if oldest is None or (again is not None and _is_before(again, oldest)):
                    oldest = again
            self._oldest_us = NO_ARRIVAL_US if oldest is None else oldest.arrival_us
            if self._oldest_us < now_us - self._aging_us:
                return oldest
        if self._returned:
            return next(iter(self._returned.values()))
        heap = self._heap
        while heap:
            request = heap[0][3]
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
    def _entry(request: QueuedRequest) -> tuple[int, int, str | int, QueuedRequest]:
        deadline = BEST_EFFORT_US if request.deadline_us is None else request.deadline_us
        return deadline, request.arrival_us, request.id, request
