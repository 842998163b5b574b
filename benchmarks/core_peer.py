"""What the scheduler's choice is compared with: the textbook way, and the least that the same choice can cost.

The textbook's virtual token counter looks at every waiting tenant to find the least counter and at every slot to find
the least work; it knows one class, no memory, no size classes, no limits. The limit keeps tenants in a heap and does
one replacement in it, one queue operation and one dictionary entry per dispatch, and checks nothing at all.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heapreplace
from time import perf_counter_ns

WORK = 1_500
"""Work of one request, prompt and output together."""


class Textbook:
    """Counters in a dictionary; `min` over those who wait, as the method is written down."""

    def __init__(self, tenants: int, slots: int) -> None:
        self.counters = {f"tenant-{at:05}": at for at in range(tenants)}
        self.queues = {slug: deque(range(10)) for slug in self.counters}
        self.outstanding = dict.fromkeys(range(slots), 0)

    def dispatch(self) -> int:
        """One dispatch of a tenant that goes on waiting; its nanoseconds."""
        began = perf_counter_ns()
        counters, queues = self.counters, self.queues
        slug = min((slug for slug in counters if queues[slug]), key=lambda slug: (counters[slug], slug))
        request = queues[slug].popleft()
        slot = min(self.outstanding, key=self.outstanding.__getitem__)
        self.outstanding[slot] += WORK
        counters[slug] += WORK
        ended = perf_counter_ns()
        queues[slug].append(request)
        return ended - began


class Limit:
    """A heap of counters, and nothing else."""

    def __init__(self, tenants: int) -> None:
        self.heap = [(at, f"tenant-{at:05}") for at in range(tenants)]
        heapify(self.heap)
        self.queues = {slug: deque(range(10)) for _, slug in self.heap}
        self.running: dict[int, str] = {}

    def dispatch(self) -> int:
        """One dispatch of a tenant that goes on waiting; its nanoseconds."""
        began = perf_counter_ns()
        counter, slug = self.heap[0]
        request = self.queues[slug].popleft()
        self.running[request] = slug
        heapreplace(self.heap, (counter + WORK, slug))
        ended = perf_counter_ns()
        self.queues[slug].append(request)
        return ended - began
