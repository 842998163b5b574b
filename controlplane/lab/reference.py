"""An exact reference model of queueing: places, first come first served or priority, a floor and a bound on the queue.

No policy, no memory, no estimate: a request holds one place for its service time, nothing is preempted. Time is whole
ticks of whatever length; ends come before arrivals at one instant, and arrivals in their order. What the production
policy does is judged against this, and this against the FIFO recursion.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

NEVER: Final = 1 << 61
FREED: Final = (1 << 40) - 1
"""Low bits of an entry of the heap of ends: the request; the high bits are the instant."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Who goes first, and what may start.

    `interactive_floor` keeps so many places from batch: it may start only while fewer than places - floor run batch.
    `queue_bound` refuses an arrival that finds no free place and so many queued.
    """

    places: int
    priority: bool = False
    interactive_floor: int = 0
    queue_bound: int | None = None

    def __post_init__(self) -> None:
        if self.places < 1 or not 0 <= self.interactive_floor <= self.places:
            raise ValueError(f"a model needs a place, and a floor of at most {self.places} places")
        if self.queue_bound is not None and self.queue_bound < 0:
            raise ValueError("the bound on the queue is 0 or more")


@dataclass(frozen=True, slots=True)
class Served:
    """By request: the tick at which it started and ended, -1 for one that was refused."""

    started: array[int]
    ended: array[int]


def serve(at: Sequence[int], service: Sequence[int], is_batch: Sequence[int], rules: Rules) -> Served:
    """Run the model on arrivals in order; `service` is each request's time on its place."""
    if not rules.priority and not rules.interactive_floor:
        return _one_queue(at, service, rules)
    return _two_queues(at, service, is_batch, rules)


def _one_queue(at: Sequence[int], service: Sequence[int], rules: Rules) -> Served:
    """First come, first served, and every place is everybody's."""
    started, ended = (array("q", [-1]) * len(at) for _ in range(2))
    ends: list[int] = []
    queue: deque[int] = deque()
    free, bound = rules.places, NEVER if rules.queue_bound is None else rules.queue_bound
    next_end = NEVER
    for row, now in enumerate(at):
        while next_end <= now:
            if queue:
                head = queue.popleft()
                started[head] = next_end
                ended[head] = end = next_end + service[head]
                heappop(ends)
                heappush(ends, end)
            else:
                heappop(ends)
                free += 1
            next_end = ends[0] if ends else NEVER
        if free:
            free -= 1
            started[row] = now
            ended[row] = end = now + service[row]
            heappush(ends, end)
            if end < next_end:
                next_end = end
        elif len(queue) < bound:
            queue.append(row)
    while queue:
        head = queue.popleft()
        started[head] = now = heappop(ends)
        ended[head] = end = now + service[head]
        heappush(ends, end)
    return Served(started, ended)


def _two_queues(at: Sequence[int], service: Sequence[int], is_batch: Sequence[int], rules: Rules) -> Served:
    """Interactive and batch apart, for a priority or a floor."""
    started, ended = (array("q", [-1]) * len(at) for _ in range(2))
    ends: list[int] = []
    interactive: deque[int] = deque()
    batch: deque[int] = deque()
    free, bound = rules.places, NEVER if rules.queue_bound is None else rules.queue_bound
    batch_free = rules.places - rules.interactive_floor
    row, rows, now = 0, len(at), 0
    while row < rows or ends:
        if ends and (row >= rows or ends[0] >> 40 <= at[row]):
            entry = heappop(ends)
            now, gone = entry >> 40, entry & FREED
            free += 1
            batch_free += is_batch[gone]
        elif row < rows:
            now = at[row]
            if free or len(interactive) + len(batch) < bound:
                (batch if is_batch[row] else interactive).append(row)
            row += 1
        while free:
            of_batch = bool(batch) and batch_free > 0
            if interactive and (rules.priority or not of_batch or interactive[0] < batch[0]):
                head = interactive.popleft()
            elif of_batch:
                head = batch.popleft()
                batch_free -= 1
            else:
                break
            free -= 1
            started[head] = now
            ended[head] = end = now + service[head]
            heappush(ends, end << 40 | head)
    return Served(started, ended)


def fifo_recursion(at: Sequence[int], service: Sequence[int], places: int) -> list[int]:
    """Starts under first come, first served without a bound, by the recursion of Kiefer and Wolfowitz (1955).

    Each request starts when it has arrived and the first of the places is free; no events, no queue.
    """
    free_at = [0] * places
    starts = []
    for now, time in zip(at, service, strict=True):
        first = heappop(free_at)
        start = now if now > first else first
        starts.append(start)
        heappush(free_at, start + time)
    return starts
