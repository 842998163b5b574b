"""Which running batch requests to cancel so that a waiting interactive request can start.

Only where it is safe: the class is retry_safe, the backend cancels promptly, and no byte of the response was sent. The
set is as small as any that is enough, and deterministic: lowest class first, then the least work wasted, on the slot
where that costs least.
A request that has begun ATTEMPTS_MOST times is left to end: what has just begun again wastes least, and the same one
would be taken for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from controlplane.core.class_queue import ClassQueue
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.slots import ClassKind, RunningSlot

ATTEMPTS_MOST: Final = 4


def choose_victims(
    classes: Sequence[ClassQueue],
    slots: Sequence[RunningSlot],
    protected: Callable[[ClassQueue], int],
    now_us: int,
) -> tuple[QueuedRequest, ...]:
    """Victims for the first waiting interactive head; () when it need not or cannot be helped.

    `protected` gives the running places of a class that must not be taken. Requests already being reclaimed count as
    on their way: while they are as many as the interactive requests that wait, nothing more is taken.
    """
    interactive = [queue for queue in classes if queue.spec.kind is ClassKind.INTERACTIVE and queue.queued]
    on_the_way = sum(request.reclaiming for slot in slots for request in slot.running.values())
    if on_the_way >= sum(queue.queued for queue in interactive):
        return ()
    for queue in interactive:
        tenant = queue.fair.peek_least(now_us)
        if tenant is None:
            continue
        plans = _plans(queue.head_of(tenant, now_us), queue, classes, slots, protected, now_us)
        if plans:
            return min(plans, key=lambda plan: (len(plan), _wasted_us(plan, now_us), [r.order for r in plan]))
    return ()


def _wasted_us(plan: Sequence[QueuedRequest], now_us: int) -> int:
    return sum(now_us - request.started_us for request in plan)


def _plans(
    head: QueuedRequest,
    queue: ClassQueue,
    classes: Sequence[ClassQueue],
    slots: Sequence[RunningSlot],
    protected: Callable[[ClassQueue], int],
    now_us: int,
) -> list[tuple[QueuedRequest, ...]]:
    room = {other.index: other.running - _reclaiming(other, slots) - protected(other) for other in classes}
    plans = []
    for slot in slots:
        if not slot.mask & (1 << queue.index) or head.kv_tokens > slot.kv_tokens:
            continue
        candidates = [
            request
            for request in slot.running.values()
            if request.preemptible
            and not request.bytes_sent
            and not request.reclaiming
            and request.attempt < ATTEMPTS_MOST
            and classes[request.class_index].spec.kind is ClassKind.BATCH
        ]
        candidates.sort(key=lambda r: (-r.class_index, now_us - r.started_us, r.order))
        plan = _cheapest(head, slot, candidates, dict(room))
        if plan:
            plans.append(plan)
    return plans


def _reclaiming(queue: ClassQueue, slots: Sequence[RunningSlot]) -> int:
    return sum(r.reclaiming for slot in slots for r in slot.running.values() if r.class_index == queue.index)


def _cheapest(
    head: QueuedRequest, slot: RunningSlot, candidates: Sequence[QueuedRequest], room: dict[int, int]
) -> tuple[QueuedRequest, ...]:
    """As few victims as are enough, and of those sets the one whose members come first in order; () where none is."""
    going = [request for request in slot.running.values() if request.reclaiming]
    places = len(slot.running) - len(going) - slot.places + 1
    memory = head.kv_tokens - slot.kv_free - sum(request.kv_tokens for request in going)
    if places <= 0 and memory <= 0:
        return ()
    count = max(places, 1)
    while (most := _most_freed(candidates, count, room)) is not None and most < memory:
        count += 1
    if most is None:
        return ()
    plan: list[QueuedRequest] = []
    for at, request in enumerate(candidates):
        left = count - len(plan) - 1
        if left < 0:
            break
        if room[request.class_index] <= 0:
            continue
        room[request.class_index] -= 1
        rest = _most_freed(candidates[at + 1 :], left, room)
        if rest is not None and request.kv_tokens + rest >= memory:
            plan.append(request)
            memory -= request.kv_tokens
        else:
            room[request.class_index] += 1
    return tuple(plan)


def _most_freed(candidates: Sequence[QueuedRequest], count: int, room: dict[int, int]) -> int | None:
    """Memory that so many victims free at most, within what each class may lose; None where there are not so many."""
    room, freed = dict(room), 0
    for request in sorted(candidates, key=lambda request: -request.kv_tokens):
        if count and room[request.class_index] > 0:
            room[request.class_index] -= 1
            freed += request.kv_tokens
            count -= 1
    return None if count else freed
