"""The scheduler of one agent: class, then tenant, then request, then slot. Synchronous, no clock, no I/O.

The agent wraps it with its event loop and the lab with a virtual clock; the same calls give the same decisions.
After anything that may let a request start (`offer`, `release`, `cancel`, `requeue`, `set_slot`), call
`next_dispatch(now)` until it answers None.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from controlplane.core.admission_snapshot import Overload, Snapshot
from controlplane.core.class_queue import NEVER_US, ClassQueue, SchedulingClass
from controlplane.core.fairness import FairTenant
from controlplane.core.minimum_share import MinimumShare
from controlplane.core.preemption import choose_victims
from controlplane.core.queued_request import ENDED, QUEUED, RUNNING, Phase, QueuedRequest
from controlplane.core.slot_choice import choose_slot, first_to_free, memory_may_fit, takes
from controlplane.core.slot_states import SlotState
from controlplane.core.slots import NO_END_US, UNBOUNDED_KV, Isolation, RunningSlot, SlotSpec, serves

MAY_DISPLACE: Final = Overload.CANCEL
DEFAULT_RESERVE_AFTER_US: Final = 2_000_000


class Scheduler:
    """Queues, slots and what runs where, for the slots of one agent in one pool.

    Raises ValueError for repeated names, a minimum share outside `shared` pools, and requests that it does not hold.
    """

    __slots__ = (
        "_asked", "_asked_slug", "_by_slug", "_largest_kv", "_open", "_reserve_due_us", "_serving_places", "_share",
        "_slot_by_name", "classes", "isolation", "requests", "reserve_after_us", "slots",
    )  # fmt: skip

    def __init__(
        self,
        classes: Sequence[SchedulingClass],
        slots: Sequence[SlotSpec],
        isolation: Isolation,
        *,
        reserve_after_us: int = DEFAULT_RESERVE_AFTER_US,
    ) -> None:
        if len({spec.slug for spec in classes}) != len(classes) or len({spec.name for spec in slots}) != len(slots):
            raise ValueError("classes and slots need distinct names")
        if isolation is not Isolation.SHARED and any(spec.min_share_ppm for spec in classes):
            raise ValueError(f"a minimum share applies in shared pools only; in {isolation} the floor is the share")
        ordered = sorted(classes, key=lambda spec: (spec.rank, spec.slug))
        self.classes = tuple(ClassQueue(spec, index) for index, spec in enumerate(ordered))
        self.slots = tuple(RunningSlot(spec, index, len(classes)) for index, spec in enumerate(slots))
        self.isolation = isolation
        self.reserve_after_us = reserve_after_us
        self.requests: dict[str | int, QueuedRequest] = {}
        self._by_slug = {queue.spec.slug: queue for queue in self.classes}
        self._asked: ClassQueue | None = None
        self._asked_slug = ""
        """The queue that was asked for last: a request asks for the same one several times."""
        self._slot_by_name = {slot.spec.name: slot for slot in self.slots}
        self._share = MinimumShare([queue.spec.min_share_ppm for queue in self.classes])
        self._open = (1 << len(slots)) - 1
        """Bits of the slots with a free place."""
        self._reserve_due_us = NEVER_US
        """No head is due for a reservation before this instant."""
        largest = max((slot.kv_tokens for slot in self.slots), default=0)
        self._largest_kv = None if largest >= UNBOUNDED_KV else largest
        self._serving_places = 0
        self._remap()

    # -- what changes the queues -------------------------------------------------------------------------------------

    def class_queue(self, slug: str) -> ClassQueue:
        """The queue of a class; KeyError for one that this pool does not have."""
        asked = self._asked
        if slug is self._asked_slug and asked is not None:
            return asked
        queue = self._by_slug[slug]
        self._asked, self._asked_slug = queue, slug
        return queue

    def set_weight(self, class_slug: str, tenant: str, weight: int | Fraction) -> None:
        """Set a tenant's weight in a class."""
        self._by_slug[class_slug].set_weight(tenant, weight)

    def offer(self, request: QueuedRequest, now_us: int) -> None:
        """Queue an admitted request; whether it starts at once is for `next_dispatch` to say."""
        queue = self.class_queue(request.class_slug)
        self._take(request)
        if self._share.active:
            self._account(now_us)
        request.class_index = queue.index
        queue.push(request, now_us)

    def start_at_once(self, request: QueuedRequest, now_us: int) -> bool:
        """Start an admitted request that waits for nobody: in one step what `offer` and `next_dispatch` would do.

        False, and nothing has happened, where it must queue: something waits, no slot takes it, or there is more to
        decide than where it runs.
        """
        queue = self.class_queue(request.class_slug)
        if self._share.active or now_us >= self._reserve_due_us or queue.kv_floor_home or queue.kv_floor_lent:
            return False
        if not self._open & queue.slot_mask or self.anything_queued():
            return False
        slot = choose_slot(request, queue, self._open, self.classes)
        if slot is None:
            return False
        self._take(request)
        request.class_index = queue.index
        self._start(request, slot, queue, now_us)
        queue.passes(request, now_us)
        return True

    def _take(self, request: QueuedRequest) -> None:
        """Hold a request from now on. Raises ValueError for one whose id is held already."""
        requests = self.requests
        count = len(requests)
        requests.setdefault(request.id, request)
        if len(requests) == count:
            raise ValueError(f"request {request.id!r} is already here")

    def adopt(self, request: QueuedRequest, slot_name: str, now_us: int) -> None:
        """Take over a request that runs on a slot already, from the scheduler of the policy before this one."""
        queue, slot = self._by_slug[request.class_slug], self._slot_by_name[slot_name]
        self._account(now_us)
        request.class_index, request.slot_index, request.reserved_slot_index = queue.index, slot.index, -1
        request.fair = queue.fair.tenant(request.tenant, 1 if request.fair is None else request.fair.weight)
        self.requests[request.id] = request
        if slot.start(request, now_us):
            self._open &= ~slot.bit
        queue.running += 1

    def produced(self, request_id: str | int, output_tokens: int) -> None:
        """A running request sent output; from now on it is not preempted. One that a revision took away is nobody's."""
        request = self.requests.get(request_id)
        if request is not None:
            request.bytes_sent = True
            self.classes[request.class_index].produced(request, output_tokens)

    def release(
        self,
        request_id: str | int,
        now_us: int,
        *,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        gpu_us: int | None = None,
    ) -> QueuedRequest:
        """A running request ended, however; figures not given count as estimated, output as produced so far."""
        request = self._held(request_id, RUNNING)
        queue = self.classes[request.class_index]
        self._stop(request, queue, now_us)
        work: int | None = None
        if output_tokens is not None or gpu_us is not None:
            work = queue.work_of(
                request.prompt_tokens if prompt_tokens is None else prompt_tokens,
                request.output_tokens if output_tokens is None else output_tokens,
                request.gpu_us if gpu_us is None else gpu_us,
            )
        queue.reconcile(request, now_us, work)
        return self._ended(request)

    def finish(self, request: QueuedRequest, now_us: int, prompt_tokens: int, output_tokens: int, gpu_us: int) -> None:
        """`release` with all figures, by whoever has the request that runs."""
        queue = self.classes[request.class_index]
        self._stop(request, queue, now_us)
        queue.settle(request, queue.work_of(prompt_tokens, output_tokens, gpu_us))
        self._ended(request)

    def cancel(self, request_id: str | int, now_us: int) -> QueuedRequest:
        """Take out a request, queued or running; its handle says in which phase it was by `slot_index` (-1: queued)."""
        request = self.requests.get(request_id)
        if request is None:
            raise ValueError(f"request {request_id!r} is not here")
        if request.phase is RUNNING:
            return self.release(request_id, now_us)
        self._account(now_us)
        self._unreserve(request)
        self.classes[request.class_index].withdraw(request)
        return self._ended(request)

    def requeue(self, request_id: str | int, now_us: int) -> QueuedRequest:
        """A running request was preempted or is retried: to the head of its queue, attempt + 1, same arrival."""
        request = self._held(request_id, RUNNING)
        queue = self.classes[request.class_index]
        self._stop(request, queue, now_us)
        # It will be charged again when it is dispatched again; its tenant does not pay twice in turns.
        queue.reconcile(request, now_us, 0)
        request.attempt += 1
        request.bytes_sent = request.reclaiming = False
        request.slot_index = -1
        queue.push_back(request, now_us)
        return request

    def timed_out(self, now_us: int) -> list[QueuedRequest]:
        """Take out and return the requests that have waited longer than their class's queue timeout."""
        late = [request for queue in self.classes for request in queue.timed_out(now_us)]
        for request in late:
            self.cancel(request.id, now_us)
        return late

    def set_slot(self, name: str, now_us: int, *, state: SlotState | None = None, ready: bool | None = None) -> None:
        """A slot was lent, recalled, drained, or became ready or not."""
        slot = self._slot_by_name[name]
        self._account(now_us)
        slot.state = slot.state if state is None else state
        slot.ready = slot.ready if ready is None else ready
        self._remap()

    def anything_queued(self) -> bool:
        """Whether anything waits: where nothing does, nothing can start and nobody has to give way."""
        for queue in self.classes:  # noqa: SIM110  asked after every start and end, where a generator costs most
            if queue.queued:
                return True
        return False

    def batch_closed(self, slot_name: str, shape: str) -> None:
        """Requests of a shape on a slot wait for no others any more; a slot that has left has no batches."""
        slot = self._slot_by_name.get(slot_name)
        if slot is not None:
            slot.open_batches.discard(shape)

    # -- what runs next ----------------------------------------------------------------------------------------------

    def next_dispatch(self, now_us: int) -> QueuedRequest | None:
        """Start the next request and return it with its `slot_index`; None when nothing can start at this instant."""
        classes = self.classes
        if self._share.active:
            self._account(now_us)
            classes = self._class_order()
        if now_us >= self._reserve_due_us:
            self._reserve_due(now_us)
        open_slots = self._open
        for queue in classes:
            if queue.queued and open_slots & queue.slot_mask:
                request = self._dispatch_from(queue, now_us)
                if request is not None:
                    return request
        return None

    def victims(self, now_us: int) -> tuple[QueuedRequest, ...]:
        """Running batch requests to cancel so that a waiting interactive one can start; () when none should be.

        Only in `shared` pools. Each is marked: it counts as on its way, is named once, and comes back by `requeue`
        when its cancellation is confirmed (or by `release` when it ended first).
        """
        if self.isolation is not Isolation.SHARED:
            return ()
        chosen = choose_victims(self.classes, self.slots, self._protected, now_us)
        for request in chosen:
            request.reclaiming = True
        return chosen

    def _class_order(self) -> tuple[ClassQueue, ...]:
        share, places = self._share, self._serving_places
        first = [
            queue
            for queue in self.classes
            if queue.queued
            and share.deficits_us[queue.index] > 0
            and queue.running < share.place_bound(queue.index, places)
        ]
        if not first:
            return self.classes
        first.sort(key=lambda queue: -share.deficits_us[queue.index])
        return (*first, *(queue for queue in self.classes if queue not in first))

    def _dispatch_from(self, queue: ClassQueue, now_us: int) -> QueuedRequest | None:
        """Start the head of the first tenant in fair order whose head fits one of the open slots.

        A head that does not fit is passed by other tenants, not by its own.
        """
        open_slots = self._open
        if (queue.kv_floor_home or queue.kv_floor_lent) and not memory_may_fit(queue, open_slots, now_us):
            return None
        fair = queue.fair
        if fair.joined:
            fair.settle(now_us)
        tenant = fair.least(now_us)
        if tenant is None:
            return None
        head = queue.head_of(tenant, now_us)
        slot = choose_slot(head, queue, open_slots, self.classes)
        if slot is None:
            return self._scan(queue, open_slots, now_us)
        self._start(head, slot, queue, now_us)
        queue.dispatched(tenant, head, now_us)
        return head

    def _scan(self, queue: ClassQueue, open_slots: int, now_us: int) -> QueuedRequest | None:
        """The tenants one after the other, because the first one's head does not fit."""
        fair = queue.fair
        passed: list[FairTenant] = []
        heads: list[QueuedRequest] = []
        floor_home = floor_lent = UNBOUNDED_KV
        started: QueuedRequest | None = None
        while (tenant := fair.least(now_us)) is not None:
            head = queue.head_of(tenant, now_us)
            slot = choose_slot(head, queue, open_slots, self.classes)
            if slot is not None:
                self._start(head, slot, queue, now_us)
                queue.dispatched(tenant, head, now_us)
                started = head
                break
            fair.pop_least(now_us)
            passed.append(tenant)
            floor_home = min(floor_home, head.kv_tokens)
            if head.may_run_lent:
                floor_lent = min(floor_lent, head.kv_tokens)
            heads.append(head)
        for tenant in passed:
            fair.push(tenant)
        for head in heads:
            if head.blocked_since_us is None:
                head.blocked_since_us = now_us
        if started is not None:
            # The scan ended early: who was passed before and stands behind its end is still blocked.
            passed_now = {head.id for head in heads}
            heads += [head for head in queue.blocked if head.id not in passed_now]
        self._set_blocked(queue, heads)
        if started is None:
            queue.kv_floor_home, queue.kv_floor_lent = floor_home, floor_lent
            queue.floor_until_us = min((queue.head_until_us(tenant, now_us) for tenant in passed), default=NEVER_US)
        return started

    def _start(self, request: QueuedRequest, slot: RunningSlot, queue: ClassQueue, now_us: int) -> None:
        if request.reserved_slot_index >= 0:
            self._unreserve(request)
        if slot.start(request, now_us):
            self._open &= ~slot.bit
        queue.running += 1
        request.phase = RUNNING
        request.slot_index = slot.index
        request.started_us = now_us

    def _set_blocked(self, queue: ClassQueue, heads: list[QueuedRequest]) -> None:
        """Remember heads that were passed and have no slot kept for them, and when the first of them is to get one."""
        queue.blocked = [
            head
            for head in heads
            if head.phase is QUEUED and head.reserved_slot_index < 0 and head.blocked_since_us is not None
        ]
        since_us = min(
            (head.blocked_since_us for head in queue.blocked if head.blocked_since_us is not None), default=-1
        )
        queue.reserve_due_us = NEVER_US if since_us < 0 else since_us + self.reserve_after_us
        if queue.reserve_due_us < self._reserve_due_us:
            self._reserve_due_us = queue.reserve_due_us

    def _reserve_due(self, now_us: int) -> None:
        """Heads that others have passed for long enough: the slot that frees its memory first is kept for each."""
        for queue in self.classes:
            if now_us < queue.reserve_due_us or all(slot.reserved_for is not None for slot in queue.slots):
                continue
            for head in sorted(self._overdue(queue, now_us), key=lambda head: self._turn(head, now_us)):
                slot = first_to_free(head, queue)
                if slot is not None:
                    slot.reserved_for = head
                    head.reserved_slot_index = slot.index
            self._set_blocked(queue, queue.blocked)
        self._reserve_due_us = min((queue.reserve_due_us for queue in self.classes), default=NEVER_US)

    def _overdue(self, queue: ClassQueue, now_us: int) -> list[QueuedRequest]:
        since_us = now_us - self.reserve_after_us
        return [
            head
            for head in queue.blocked
            if head.phase is QUEUED and head.blocked_since_us is not None and head.blocked_since_us <= since_us
        ]

    @staticmethod
    def _turn(head: QueuedRequest, now_us: int) -> tuple[int, str]:
        """Tenants in fair order: who is owed most gets a slot kept first."""
        return (0 if head.fair is None else head.fair.accrue(now_us)), head.tenant

    # -- what admission looks at -------------------------------------------------------------------------------------

    def observe(
        self,
        snapshot: Snapshot,
        *,
        kv_tokens: int,
        gpu_us: int,
        deadline_us: int | None = None,
        may_run_lent: bool = False,
    ) -> None:
        """Fill the queue's part of an admission snapshot for a request of its class and tenant."""
        now_us = snapshot.now_us
        if now_us >= self._reserve_due_us:
            self._reserve_due(now_us)
        queue, largest = self.class_queue(snapshot.workload_class.slug), self._largest_kv
        snapshot.largest_slot_kv_tokens = largest
        free_kv, first_end_us = 0, NO_END_US
        for slot in queue.slots:
            if slot.kv_free > free_kv:
                free_kv = slot.kv_free
            if slot.first_end_us < first_end_us:
                first_end_us = slot.first_end_us
        snapshot.free_kv_tokens = None if largest is None else free_kv
        snapshot.queue_depth = queue.queued
        snapshot.serving_slots = queue.serving_slots
        if self._open & queue.slot_mask:
            tenant, first_end_us = snapshot.tenant.slug, now_us
            for slot in queue.slots:
                if slot.bit & self._open and takes(slot, queue, kv_tokens, may_run_lent, tenant, self.classes):
                    if queue.leads(tenant, gpu_us, deadline_us, now_us):
                        snapshot.free_now = True
                        return
                    break
        work_ahead_gpu_us = 0
        for other in queue.ahead:
            work_ahead_gpu_us += other.queued_gpu_us
        snapshot.work_ahead_gpu_us = work_ahead_gpu_us
        snapshot.first_free_us = first_end_us - now_us if now_us < first_end_us < NO_END_US else 0
        if snapshot.workload_class.overload is MAY_DISPLACE:
            snapshot.displaceable_id = self.displaceable(queue.spec.slug)

    def displaceable(self, class_slug: str) -> str | int | None:
        """The newest queued request of strictly lower precedence than the class, of any tenant, lowest class first."""
        own = self._by_slug[class_slug]
        for queue in reversed(self.classes):
            if queue.rank <= own.rank:
                return None
            if queue.queued:
                newest = queue.newest()
                return None if newest is None else newest.id
        return None

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _account(self, now_us: int) -> None:
        share = self._share
        if share.active and now_us > share.settled_us:
            share.settle(now_us, self.slots, [queue.queued for queue in self.classes], self._serving_places)

    def _protected(self, queue: ClassQueue) -> int:
        """Running places of a class that its minimum share keeps from preemption."""
        if not self._share.active or self._share.deficits_us[queue.index] <= 0:
            return 0
        return self._share.place_bound(queue.index, self._serving_places)

    def _held(self, request_id: str | int, phase: Phase) -> QueuedRequest:
        request = self.requests.get(request_id)
        if request is None or request.phase is not phase:
            raise ValueError(f"request {request_id!r} is not {phase.name.lower()} here")
        return request

    def _stop(self, request: QueuedRequest, queue: ClassQueue, now_us: int) -> None:
        if self._share.active:
            self._account(now_us)
        slot = self.slots[request.slot_index]
        if slot.stop(request):
            self._open |= slot.bit
        queue.running -= 1

    def _ended(self, request: QueuedRequest) -> QueuedRequest:
        request.phase = ENDED
        del self.requests[request.id]
        return request

    def _unreserve(self, request: QueuedRequest) -> None:
        if request.reserved_slot_index >= 0:
            self.slots[request.reserved_slot_index].reserved_for = None
            request.reserved_slot_index = -1
            for queue in self.classes:
                queue.kv_floor_home = queue.kv_floor_lent = 0

    def _remap(self) -> None:
        """Work out again which slot serves which class, and whose work stands ahead of whose."""
        for slot in self.slots:
            slot.mask = 0
            slot.on_loan = slot.state is SlotState.LENT and self.isolation is Isolation.RESERVED
            for queue in self.classes if slot.ready else ():
                spec, kind = slot.spec, queue.spec.kind
                if serves(
                    self.isolation,
                    band=spec.band,
                    state=slot.state,
                    home_class=spec.home_class,
                    class_slug=queue.spec.slug,
                    kind=kind,
                ):
                    slot.mask |= 1 << queue.index
            if slot.reserved_for is not None and not slot.mask & (1 << slot.reserved_for.class_index):
                self._unreserve(slot.reserved_for)
        self._serving_places = sum(slot.places for slot in self.slots if slot.mask)
        for queue in self.classes:
            queue.slots = serving = tuple(slot for slot in self.slots if slot.mask & (1 << queue.index))
            queue.slot_mask = sum(slot.bit for slot in serving)
            queue.serving_slots = len(serving)
            queue.serving_places = sum(slot.places for slot in serving)
            queue.kv_floor_home = queue.kv_floor_lent = 0
        for queue in self.classes:
            queue.ahead = tuple(
                other
                for other in self.classes
                if other is queue or (other.rank <= queue.rank and other.slot_mask & queue.slot_mask)
            )
