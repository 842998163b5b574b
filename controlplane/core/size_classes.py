"""Which request of one tenant and class goes next: size classes with aging, or deadlines.

Interactive: the smallest size class first, first come first served inside it. Batch: the earliest deadline first,
best effort last. In both a request older than `aging_us` goes before everything younger, so that within one tenant and
class it is overtaken by no younger one; and a preempted request goes back to the head of its queue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Final, Generic, Protocol, TypeVar

DEFAULT_BOUNDS_GPU_US: Final = (250_000, 2_000_000)
"""Upper bounds of all size classes but the last, in estimated gpu_us: three classes by default."""
BEST_EFFORT_US: Final = 1 << 62
"""Stands for the deadline of a request that has none."""


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


def _append_in_order(queue: OrderedDict[str | int, R], request: R) -> None:
    """Keep a queue in (arrival, id) order; arrivals nearly always come in it already."""
    last = next(reversed(queue.values()), None)
    queue[request.id] = request
    if last is not None and request.order < last.order:
        for item in sorted(queue.values(), key=lambda r: r.order):
            queue.move_to_end(item.id)


class SizeClassQueue(Generic[R]):
    """Requests of one tenant in an interactive class."""

    __slots__ = ("_aging_us", "_by_size", "_count", "_returned")

    def __init__(self, size_classes: int, aging_us: int | None) -> None:
        self._by_size: tuple[OrderedDict[str | int, R], ...] = tuple(OrderedDict() for _ in range(size_classes))
        self._returned: OrderedDict[str | int, R] = OrderedDict()
        self._aging_us = aging_us
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: R) -> None:
        """Queue a new request behind its size class."""
        _append_in_order(self._by_size[request.size_class], request)
        self._count += 1

    def push_back(self, request: R) -> None:
        """Put a preempted request back at the head."""
        _append_in_order(self._returned, request)
        self._count += 1

    def remove(self, request: R) -> None:
        """Take a queued request out, wherever it stands."""
        if self._by_size[request.size_class].pop(request.id, None) is None:
            del self._returned[request.id]
        self._count -= 1

    def head(self, now_us: int) -> R | None:
        """The request that goes next at `now_us`; it stays queued."""
        best: R | None = None
        oldest: R | None = None
        for queue in (self._returned, *self._by_size):
            if queue:
                first = next(iter(queue.values()))
                if best is None:
                    best = oldest = first
                elif oldest is not None and first.order < oldest.order:
                    oldest = first
        if oldest is not None and self._aging_us is not None and now_us - oldest.arrival_us > self._aging_us:
            return oldest
        return best

    def leads(self, size_class: int, now_us: int) -> bool:
        """Whether a request of that size class that arrived now would be the head."""
        head = self.head(now_us)
        if head is None:
            return True
        aged = self._aging_us is not None and now_us - head.arrival_us > self._aging_us
        return not aged and not self._returned and size_class < head.size_class


class DeadlineQueue(Generic[R]):
    """Requests of one tenant in a batch class."""

    __slots__ = ("_aging_us", "_by_arrival", "_heap", "_returned")

    def __init__(self, aging_us: int | None) -> None:
        self._heap: list[tuple[int, tuple[int, str | int], R]] = []
        self._by_arrival: OrderedDict[str | int, R] = OrderedDict()
        self._returned: OrderedDict[str | int, R] = OrderedDict()
        self._aging_us = aging_us

    def __len__(self) -> int:
        return len(self._by_arrival) + len(self._returned)

    def push(self, request: R) -> None:
        """Queue a new request by its deadline."""
        _append_in_order(self._by_arrival, request)
        heappush(self._heap, self._entry(request))

    def push_back(self, request: R) -> None:
        """Put a preempted request back at the head."""
        _append_in_order(self._returned, request)

    def remove(self, request: R) -> None:
        """Take a queued request out, wherever it stands."""
        if self._by_arrival.pop(request.id, None) is None:
            del self._returned[request.id]
        elif len(self._heap) > 2 * len(self._by_arrival) + 16:
            self._heap = [self._entry(item) for item in self._by_arrival.values()]
            heapify(self._heap)

    def head(self, now_us: int) -> R | None:
        """The request that goes next at `now_us`; it stays queued."""
        if self._aging_us is not None:
            firsts = [next(iter(queue.values())) for queue in (self._by_arrival, self._returned) if queue]
            oldest = min(firsts, key=lambda r: r.order, default=None)
            if oldest is not None and now_us - oldest.arrival_us > self._aging_us:
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
