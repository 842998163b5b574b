"""What the scheduler promises at every instant of a run, each promise in a class of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from controlplane.core.class_queue import SchedulingClass
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.slot_states import Band, SlotState
from controlplane.core.slots import ClassKind, Isolation
from tests.core.scheduling_runs import Before, Invariant, Run

BEST_EFFORT_US = 1 << 62


def size_class(request: QueuedRequest, spec: SchedulingClass) -> int:
    return sum(request.gpu_us > bound for bound in spec.size_bounds_gpu_us)


def is_aged(request: QueuedRequest, spec: SchedulingClass, now_us: int) -> bool:
    return spec.aging_us is not None and now_us - request.arrival_us > spec.aging_us


def head_of(run: Run, tenant: str, spec: SchedulingClass, queued: tuple[QueuedRequest, ...]) -> QueuedRequest | None:
    """The head of a tenant's queue by the rules: aged, then preempted, then size or deadline, then arrival."""
    own = [request for request in queued if (request.tenant, request.class_slug) == (tenant, spec.slug)]
    aged = [request for request in own if is_aged(request, spec, run.now_us)]
    returned = [request for request in own if request.attempt > 1]
    if aged or returned:
        return min(aged or returned, key=lambda request: request.order)
    if spec.kind is ClassKind.BATCH:
        return min(
            own, key=lambda r: (BEST_EFFORT_US if r.deadline_us is None else r.deadline_us, r.order), default=None
        )
    return min(own, key=lambda r: (size_class(r, spec), r.order), default=None)


def others(request: QueuedRequest, before: Before) -> list[QueuedRequest]:
    """Requests of the same tenant and class that waited when it was started."""
    return [
        other
        for other in before.queued
        if other is not request and (other.tenant, other.class_slug) == (request.tenant, request.class_slug)
    ]


class PlacesAndMemory(Invariant):
    """A slot never holds more than its places and its memory, and starts nothing while it admits nothing."""

    def started(self, run: Run, request: QueuedRequest, before: Before) -> None:
        slot = run.slots[request.slot_index]
        assert len(slot.running) <= slot.spec.places
        assert slot.free_kv_tokens >= 0
        assert slot.ready and slot.state in (SlotState.HOME, SlotState.LENT)


class IsolationHolds(Invariant):
    """Interactive floor slots never admit batch in `reserved` and `dedicated`; every slot serves whom it should."""

    def started(self, run: Run, request: QueuedRequest, before: Before) -> None:
        slot, spec = run.slots[request.slot_index], run.fleet.workload_class(request.class_slug)
        assert run.serves(request.slot_index, spec)
        if run.fleet.isolation is not Isolation.SHARED and slot.spec.home_class is None:
            assert not (slot.spec.band is Band.INTERACTIVE and spec.kind is ClassKind.BATCH)
        if run.fleet.isolation is Isolation.RESERVED and slot.state is SlotState.LENT:
            assert request.preemptible or request.fits_drain


class AgedGoFirst(Invariant):
    """Within a tenant and class no younger request overtakes one that is older than the aging bound."""

    def started(self, run: Run, request: QueuedRequest, before: Before) -> None:
        spec = run.fleet.workload_class(request.class_slug)
        for other in others(request, before):
            assert not (is_aged(other, spec, run.now_us) and other.order < request.order)


class BatchByDeadline(Invariant):
    """Batch requests of a tenant go by deadline, but for aged and for preempted ones."""

    def started(self, run: Run, request: QueuedRequest, before: Before) -> None:
        spec = run.fleet.workload_class(request.class_slug)
        if spec.kind is not ClassKind.BATCH or request.attempt > 1 or is_aged(request, spec, run.now_us):
            return
        own = BEST_EFFORT_US if request.deadline_us is None else request.deadline_us
        for other in others(request, before):
            theirs = BEST_EFFORT_US if other.deadline_us is None else other.deadline_us
            assert (own, request.order) < (theirs, other.order) and other.attempt == 1


class SmallestFirst(Invariant):
    """Interactive requests of a tenant go by size class and arrival, but for aged and for preempted ones."""

    def started(self, run: Run, request: QueuedRequest, before: Before) -> None:
        spec = run.fleet.workload_class(request.class_slug)
        if spec.kind is not ClassKind.INTERACTIVE or request.attempt > 1 or is_aged(request, spec, run.now_us):
            return
        for other in others(request, before):
            assert other.attempt == 1
            assert (size_class(request, spec), request.order) < (size_class(other, spec), other.order)


class LeastWorkThenPrefix(Invariant):
    """Of the slots that could take it: the least outstanding work; within 10 % of it, the longest cached prefix.

    Judged while no slot is kept for anybody: who may take a kept slot is judged elsewhere.
    """

    def started(self, run: Run, request: QueuedRequest, before: Before) -> None:
        kept_now = any(slot.reserved_for is not None for slot in run.scheduler.slots)
        if kept_now or before.reserved_for.count(None) < len(before.reserved_for):
            return
        spec = run.fleet.workload_class(request.class_slug)
        could = [
            index
            for index in range(len(run.slots))
            if before.free_places[index] > 0
            and run.serves(index, spec)
            and before.free_kv_tokens[index] >= request.kv_tokens
            and may_lend(run, index, request)
        ]
        chosen, least = before.outstanding_us[request.slot_index], min(before.outstanding_us[i] for i in could)
        cached = request.cached_tokens or {}
        if not cached:
            assert chosen <= least
            return
        assert chosen * 100 <= least * 110
        near = [i for i in could if before.outstanding_us[i] * 100 <= least * 110]
        prefix = [cached.get(run.slots[i].spec.name, 0) for i in near]
        assert cached.get(run.slots[request.slot_index].spec.name, 0) >= max(prefix)


def may_lend(run: Run, index: int, request: QueuedRequest) -> bool:
    lent = run.fleet.isolation is Isolation.RESERVED and run.slots[index].state is SlotState.LENT
    return not lent or request.preemptible or request.fits_drain


def could_start(run: Run, request: QueuedRequest, before: Before) -> bool:
    """Whether a head fits a slot that is open to it and kept for nobody, before the call and after it."""
    spec = run.fleet.workload_class(request.class_slug)
    return any(
        before.free_places[index] > 0
        and run.serves(index, spec)
        and before.free_kv_tokens[index] >= request.kv_tokens
        and may_lend(run, index, request)
        and before.reserved_for[index] is None
        and run.scheduler.slots[index].reserved_for is None
        for index in range(len(run.slots))
    )


class NothingIdles(Invariant):
    """When dispatching ends, no head fits a slot that is open to it and kept for nobody."""

    def settled(self, run: Run) -> None:
        before = run._before()
        for tenant, slug in {(request.tenant, request.class_slug) for request in before.queued}:
            head = head_of(run, tenant, run.fleet.workload_class(slug), before.queued)
            assert head is not None
            assert not could_start(run, head, before)


class InteractiveFirst(Invariant):
    """Batch starts before an interactive head that could start only within its minimum share of the places."""

    def started(self, run: Run, request: QueuedRequest, before: Before) -> None:
        own = run.fleet.workload_class(request.class_slug)
        if own.kind is not ClassKind.BATCH:
            return
        heads = [
            head_of(run, tenant, run.fleet.workload_class(slug), before.queued)
            for tenant, slug in {(r.tenant, r.class_slug) for r in before.queued}
            if run.fleet.workload_class(slug).kind is ClassKind.INTERACTIVE
        ]
        if any(head is not None and could_start(run, head, before) for head in heads):
            assert own.min_share_ppm
            assert running_of(run, own) <= share_places(run, own)


def running_of(run: Run, spec: SchedulingClass) -> int:
    return sum(request.class_slug == spec.slug for slot in run.slots for request in slot.running.values())


def share_places(run: Run, spec: SchedulingClass) -> int:
    """ceil(min_share x places of the slots that serve anybody)."""
    places = sum(
        slot.spec.places
        for index, slot in enumerate(run.slots)
        if any(run.serves(index, workload_class) for workload_class in run.fleet.classes)
    )
    return -(-spec.min_share_ppm * places // 1_000_000)


class OnlySafePreemption(Invariant):
    """Only in shared pools, only batch that is retry_safe, only while nothing was sent, only for one who waits."""

    def preempted(self, run: Run, request: QueuedRequest) -> None:
        assert run.fleet.isolation is Isolation.SHARED
        assert request.preemptible and not run.sent_tokens[request.id]
        assert run.fleet.workload_class(request.class_slug).kind is ClassKind.BATCH
        kinds = {run.fleet.workload_class(waiting.class_slug).kind for waiting in run.queued.values()}
        assert ClassKind.INTERACTIVE in kinds


@dataclass
class PassedForSoLong(Invariant):
    """A head that does not fit is passed for `reserve_after_us` at most; then a slot is kept for it until it starts.

    For one class whose requests are streamed and fail nowhere. Passed is a head whose tenant had the smaller counter
    when another tenant's request was started. `longest_us` is the longest time from a slot being kept to the start.
    """

    longest_us: int
    passed_us: dict[int, int] = field(default_factory=dict)
    kept_us: dict[int, int] = field(default_factory=dict)

    def started(self, run: Run, request: QueuedRequest, before: Before) -> None:
        (spec,) = run.fleet.classes
        tenants = run.scheduler.class_queue(spec.slug).fair.tenants
        own = tenants[request.tenant]
        counter = own.counter - request.charged_work * own.multiplier
        holder = before.reserved_for[request.slot_index]
        assert holder in (None, request.id) or run.offered[holder].tenant == request.tenant
        for tenant in {waiting.tenant for waiting in before.queued} - {request.tenant}:
            head = head_of(run, tenant, spec, before.queued)
            assert head is not None
            if tenants[tenant].counter >= counter:
                continue
            since = self.passed_us.setdefault(head.id, run.now_us)
            if run.now_us - since > run.fleet.reserve_after_us:
                kept = {slot.reserved_for.id for slot in run.scheduler.slots if slot.reserved_for is not None}
                assert head.id in kept or None not in before.reserved_for, "passed for too long"
        if request.id in self.kept_us:
            assert run.now_us - self.kept_us[request.id] <= self.longest_us

    def settled(self, run: Run) -> None:
        for slot in run.scheduler.slots:
            if slot.reserved_for is not None:
                self.kept_us.setdefault(slot.reserved_for.id, run.now_us)


@dataclass
class Gaps(Invariant):
    """Differences of weighted work between every two tenants since both wait, for as long as both do."""

    weights: dict[str, int]
    found: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    began: dict[tuple[str, str], float] = field(default_factory=dict)

    def settled(self, run: Run) -> None:
        waiting = {request.tenant for request in run.queued.values()}
        for pair in combinations(sorted(self.weights), 2):
            if waiting.issuperset(pair):
                done = [run.work.get(tenant, 0.0) / self.weights[tenant] for tenant in pair]
                gap = done[0] - done[1]
                self.found.setdefault(pair, []).append(gap - self.began.setdefault(pair, gap))
            else:
                self.began.pop(pair, None)
