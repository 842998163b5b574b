"""A new scheduler for a new revision, with everything that waited or ran under the old one."""

from __future__ import annotations

from controlplane.core.class_queue import SchedulingClass
from controlplane.core.fairness import WorkPolicy, WorkUnit
from controlplane.core.queued_request import Phase, QueuedRequest
from controlplane.core.scheduling import Scheduler
from controlplane.core.slot_states import Band
from controlplane.core.slots import ClassKind, Isolation, SlotSpec
from controlplane.wire.policy import ClassPolicy, PolicyDocument, SlotPolicy

SECOND_US = 1_000_000


def scheduling_class(policy: ClassPolicy, document: PolicyDocument) -> SchedulingClass:
    """The scheduling side of a class. Interactive may wait as long as its stage timeout, batch until its deadline."""
    pool = document.pool
    kind = ClassKind(policy.kind)
    shared = pool.isolation == Isolation.SHARED
    timeout_s = policy.default_deadline_s if kind is ClassKind.BATCH else policy.stage_timeout_s
    return SchedulingClass(
        slug=policy.slug,
        kind=kind,
        precedence=policy.priority,
        min_share_ppm=policy.min_share_ppm if shared else 0,
        work=WorkPolicy(WorkUnit(pool.fairness_unit), pool.prompt_weight, pool.output_weight),
        size_bounds_gpu_us=tuple(bound * 1000 for bound in pool.sizes.gpu_ms),
        aging_us=pool.sizes.aging_s * SECOND_US or None,
        queue_timeout_us=timeout_s * SECOND_US or None,
    )


def slot_spec(slot: SlotPolicy, document: PolicyDocument) -> SlotSpec:
    """The scheduling side of a slot."""
    pool, band = document.pool, Band(slot.band)
    home = pool.batch_class if band is Band.BATCH else pool.interactive_class
    return SlotSpec(slot.name, slot.places, band, slot.kv_tokens or None, home or None)


def build(document: PolicyDocument, own_slots: list[SlotPolicy]) -> Scheduler:
    """An empty scheduler of a revision for this agent's slots."""
    return Scheduler(
        [scheduling_class(policy, document) for policy in document.classes],
        [slot_spec(slot, document) for slot in own_slots],
        Isolation(document.pool.isolation),
        reserve_after_us=document.pool.sizes.reserve_after_ms * 1000,
    )


def same_shape(old: Scheduler, new: Scheduler) -> bool:
    """Whether only weights differ, so that the old scheduler can go on."""
    return (
        old.isolation is new.isolation
        and old.reserve_after_us == new.reserve_after_us
        and [queue.spec for queue in old.classes] == [queue.spec for queue in new.classes]
        and [slot.spec for slot in old.slots] == [slot.spec for slot in new.slots]
    )


class Moved:
    """What became of the requests of the old scheduler."""

    def __init__(self) -> None:
        self.homeless: list[QueuedRequest] = []
        """Queued in a class that is gone."""
        self.adrift: list[QueuedRequest] = []
        """Running on a slot, or in a class, that is gone: they run to their end outside the scheduler."""


def move(old: Scheduler, new: Scheduler, now_us: int) -> Moved:
    """Carry counters, waiting and running requests over. Slot states are the caller's to set again."""
    moved = Moved()
    for request in old.requests.values():
        _settle_linear(request, now_us)
    _carry_counters(old, new)
    slots = {slot.spec.name: slot for slot in new.slots}
    slugs = {queue.spec.slug for queue in new.classes}
    for request in sorted(old.requests.values(), key=lambda r: r.order):
        slot = slots.get(old.slots[request.slot_index].spec.name) if request.slot_index >= 0 else None
        gone = request.class_slug not in slugs
        if request.phase is Phase.RUNNING:
            if gone or slot is None:
                moved.adrift.append(request)
            else:
                new.adopt(request, slot.spec.name, now_us)
        elif gone:
            moved.homeless.append(request)
        else:
            _forget_place(request)
            new.offer(request, now_us)
    return moved


def _settle_linear(request: QueuedRequest, now_us: int) -> None:
    """What was charged as time passed is charged for good; the rest is reconciled when the request ends."""
    if request.linear is not None and request.fair is not None:
        request.fair.accrue(now_us)
        request.charged_work += request.linear.charged // request.fair.multiplier
        request.linear = None


def _forget_place(request: QueuedRequest) -> None:
    request.phase = Phase.NEW
    request.slot_index = request.reserved_slot_index = -1
    request.fair, request.linear, request.charged_work = None, None, 0


def _carry_counters(old: Scheduler, new: Scheduler) -> None:
    before = {queue.spec.slug: queue for queue in old.classes}
    for queue in new.classes:
        known = before.get(queue.spec.slug)
        for slug, tenant in known.fair.tenants.items() if known is not None else ():
            queue.set_weight(slug, tenant.weight)
            queue.fair.tenant(slug, tenant.weight).counter = tenant.counter
