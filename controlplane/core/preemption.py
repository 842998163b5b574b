"""Which running batch requests to cancel so that a waiting interactive request can start.

Only where it is safe: the class is retry_safe, the backend cancels promptly, and no byte of the response was sent. The
set is minimal and deterministic: lowest class first, then the least work wasted, on the slot where that costs least.
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
    """The first single victim that is enough, else victims in order until it is enough, without any to spare."""
    going = [request for request in slot.running.values() if request.reclaiming]
    places = len(slot.running) - len(going) - slot.places + 1
    memory = head.kv_tokens - slot.kv_free - sum(request.kv_tokens for request in going)
    if places <= 0 and memory <= 0:
        return ()
    for request in candidates:
        if room[request.class_index] > 0 and places <= 1 and request.kv_tokens >= memory:
            return (request,)
    plan: list[QueuedRequest] = []
    freed = 0
    for request in candidates:
        if len(plan) >= places and freed >= memory:
            break
        if room[request.class_index] > 0:
            room[request.class_index] -= 1
            plan.append(request)
            freed += request.kv_tokens
    if len(plan) < places or freed < memory:
        return ()
    for request in tuple(plan):
        if len(plan) > max(places, 1) and freed - request.kv_tokens >= memory:
            plan.remove(request)
            freed -= request.kv_tokens
    return tuple(plan)
