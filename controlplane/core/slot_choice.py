"""Which of the open slots of a class takes a tenant's head: memory, loan, reservation, then work and cached prefix.

Work is what this process dispatched and has not seen end, known at this instant: there is no signal that could be old,
and so nothing is chosen at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from controlplane.core.class_queue import ClassQueue
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.slots import RunningSlot

NEAR_NUMERATOR: Final = 110
NEAR_DENOMINATOR: Final = 100


def choose_slot(
    request: QueuedRequest, queue: ClassQueue, open_slots: int, classes: Sequence[ClassQueue]
) -> RunningSlot | None:
    """Least outstanding work among the open slots (bits) that may take it; within 10 %, the longest cached prefix.

    A request that runs together with others joins a batch of its shape that is open: spread over the slots by
    their work, batches would never fill.
    """
    kv_tokens = request.kv_tokens
    if request.batch_shape:
        for slot in queue.slots:
            if (
                slot.bit & open_slots
                and request.batch_shape in slot.open_batches
                and takes(slot, queue, kv_tokens, request.may_run_lent, request.tenant, classes)
            ):
                return slot
    best: RunningSlot | None = None
    for slot in queue.slots:
        if not slot.bit & open_slots:
            continue
        if best is not None and slot.outstanding_gpu_us >= best.outstanding_gpu_us:
            continue
        # The plain case first: on this path a call per slot is most of the price.
        if slot.reserved_for is None and not slot.on_loan:
            if kv_tokens <= slot.kv_free:
                best = slot
        elif takes(slot, queue, kv_tokens, request.may_run_lent, request.tenant, classes):
            best = slot
    cached = request.cached_tokens
    if best is None or not cached:
        return best
    least = best.outstanding_gpu_us
    near = [
        slot
        for slot in queue.slots
        if slot.bit & open_slots
        and is_near(slot.outstanding_gpu_us, least)
        and takes(slot, queue, kv_tokens, request.may_run_lent, request.tenant, classes)
    ]
    return min(near, key=lambda slot: (-cached.get(slot.spec.name, 0), slot.outstanding_gpu_us, slot.index))


def is_near(outstanding_gpu_us: int, least_gpu_us: int) -> bool:
    """Within 10 % of the least outstanding work."""
    return outstanding_gpu_us * NEAR_DENOMINATOR <= least_gpu_us * NEAR_NUMERATOR


def takes(
    slot: RunningSlot,
    queue: ClassQueue,
    kv_tokens: int,
    may_run_lent: bool,
    tenant: str,
    classes: Sequence[ClassQueue],
) -> bool:
    """Whether an open slot that serves the class takes a tenant's head: memory, loan, reservation.

    A reservation holds against other tenants of its class and below. Its own tenant passes: should another of its
    requests have become the head, the reserved one could not start before it.
    """
    if kv_tokens > slot.kv_free:
        return False
    if slot.on_loan and not may_run_lent:
        return False
    holder = slot.reserved_for
    if holder is None:
        return True
    if holder.class_index == queue.index:
        return holder.tenant == tenant
    return queue.rank < classes[holder.class_index].rank


def first_to_free(request: QueuedRequest, queue: ClassQueue) -> RunningSlot | None:
    """Of the slots that serve the class and are kept for nobody, the one that frees the request's memory first."""
    best: RunningSlot | None = None
    best_at_us = 0
    for slot in queue.slots:
        if slot.reserved_for is not None or (slot.on_loan and not request.may_run_lent):
            continue
        at_us = slot.memory_free_at_us(request.kv_tokens)
        if at_us is not None and (best is None or at_us < best_at_us):
            best, best_at_us = slot, at_us
    return best


def memory_may_fit(queue: ClassQueue, open_slots: int, now_us: int) -> bool:
    """Whether the least memory that any head needs is free in an open slot, or may be: heads change with age."""
    if now_us > queue.floor_until_us:
        return True
    home_kv = lent_kv = -1
    for slot in queue.slots:
        if not slot.bit & open_slots:
            continue
        if not slot.on_loan:
            home_kv = max(home_kv, slot.kv_free)
        else:
            lent_kv = max(lent_kv, slot.kv_free)
    return home_kv >= queue.kv_floor_home or lent_kv >= queue.kv_floor_lent
