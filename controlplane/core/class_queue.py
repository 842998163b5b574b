"""The queue of one workload class on one agent: its tenants in fair order, each with its own requests in order."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from controlplane.core.fairness import FairQueue, FairTenant, WorkPolicy, WorkUnit
from controlplane.core.queued_request import QUEUED, QueuedRequest
from controlplane.core.size_classes import DEFAULT_BOUNDS_GPU_US, DeadlineQueue, SizeClassQueue, size_class_of
from controlplane.core.slots import ClassKind, RunningSlot

NEVER_US: Final = 1 << 61
"""Compiled code compares numbers below 2**62 itself, and every other one through the interpreter."""

RequestQueue = SizeClassQueue | DeadlineQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingClass:
    """The scheduling side of a workload class.

    Interactive goes before batch, and inside a kind a smaller `precedence` first. `min_share_ppm` counts in `shared`
    pools only. `aging_us` and `queue_timeout_us` None switch those rules off.
    """

    slug: str
    kind: ClassKind
    precedence: int = 0
    min_share_ppm: int = 0
    work: WorkPolicy = WorkPolicy()  # noqa: RUF009  frozen, one instance is enough
    size_bounds_gpu_us: tuple[int, ...] = DEFAULT_BOUNDS_GPU_US
    aging_us: int | None = None
    queue_timeout_us: int | None = None

    @property
    def rank(self) -> tuple[bool, int]:
        """Precedence across kinds: the smaller goes first."""
        return self.kind is ClassKind.BATCH, self.precedence


class ClassQueue:
    """Requests of one class that wait, in the order in which they would run; counts of those that wait and run.

    `kv_floor_home` and `kv_floor_lent` are lower bounds on the KV tokens that any head needs (the second on those that
    a lent slot may take): under them no scan can find a request that fits. 0 means not known; after `floor_until_us`
    age alone may have made another request the head. `blocked` are the heads
    that the last scan passed and that have no reservation, `reserve_due_us` is when the first of them gets one.
    `slots` serve the class now, `slot_mask` has their bits; `ahead` are the classes whose queued work goes before or
    with this one's.
    """

    __slots__ = (
        "_linear",
        "_per_output_token",
        "_per_prompt_token",
        "_per_request",
        "_weights",
        "ahead",
        "blocked",
        "fair",
        "floor_until_us",
        "index",
        "kv_floor_home",
        "kv_floor_lent",
        "queued",
        "queued_gpu_us",
        "rank",
        "reserve_due_us",
        "returned",
        "running",
        "serving_places",
        "serving_slots",
        "slot_mask",
        "slots",
        "spec",
        "waiting",
    )

    def __init__(self, spec: SchedulingClass, index: int) -> None:
        self.spec = spec
        self.index = index
        self.rank = spec.rank
        self.fair = FairQueue()
        self._weights: dict[str, int | Fraction] = {}
        self.waiting: dict[str | int, QueuedRequest] = {}
        self.returned: dict[str | int, QueuedRequest] = {}
        self.queued = 0
        self.queued_gpu_us = 0
        self.running = 0
        self.ahead: tuple[ClassQueue, ...] = ()
        self.slots: tuple[RunningSlot, ...] = ()
        self.slot_mask = 0
        self.serving_slots = 0
        self.serving_places = 0
        self.kv_floor_home = 0
        self.kv_floor_lent = 0
        self.floor_until_us = NEVER_US
        self.blocked: list[QueuedRequest] = []
        self.reserve_due_us = NEVER_US
        # What a request, a prompt token and an output token count, and whether output counts with time alone.
        work = spec.work
        tokens = work.unit is WorkUnit.TOKENS
        self._per_request = 1 if work.unit is WorkUnit.REQUESTS else 0
        self._per_prompt_token = work.w_prompt if tokens else 0
        self._per_output_token = work.w_output if tokens else 0
        self._linear = work.unit is WorkUnit.GPU_TIME

    def set_weight(self, tenant: str, weight: int | Fraction) -> None:
        """Set a tenant's weight; it holds for work from now on."""
        self._weights[tenant] = weight
        self.fair.tenant(tenant, weight)

    def push(self, request: QueuedRequest, now_us: int) -> None:
        """Queue a request that has just been admitted."""
        request.size_class = size_class_of(request.gpu_us, self.spec.size_bounds_gpu_us)
        request.fair = tenant = self._tenant(request.tenant)
        self._queue_of(tenant).push(request)
        self.waiting[request.id] = request
        self._entered(request, tenant, now_us)

    def push_back(self, request: QueuedRequest, now_us: int) -> None:
        """Put a preempted request back at the head of its tenant's queue."""
        request.fair = tenant = self._tenant(request.tenant)
        self._queue_of(tenant).push_back(request)
        self.returned[request.id] = request
        self._entered(request, tenant, now_us)

    def work_of(self, prompt_tokens: int, output_tokens: int, gpu_us: int) -> int:
        """Work of a whole request in the unit of the class."""
        if self._linear:
            return gpu_us
        return self._per_request + self._per_prompt_token * prompt_tokens + self._per_output_token * output_tokens

    def head_of(self, tenant: FairTenant, now_us: int) -> QueuedRequest:
        """The request of a backlogged tenant that goes next."""
        backlog = tenant.backlog
        head = None if backlog is None else backlog.head(now_us)
        if head is None:
            raise ValueError(f"tenant {tenant.slug!r} is backlogged without a request")
        return head

    def head_until_us(self, tenant: FairTenant, now_us: int) -> int:
        """The last instant at which a tenant's head is sure to be the present one, unless its queue changes."""
        return self._queue_of(tenant).ages_at_us(now_us)

    def dispatched(self, tenant: FairTenant, request: QueuedRequest, now_us: int) -> None:
        """Take out the head of the least tenant, charge its prompt and let the tenant stay or leave."""
        backlog = tenant.backlog
        assert backlog is not None, "it was named as the least, so it has one"
        self._take_out(request, backlog)
        self._charge(tenant, request, now_us)
        if backlog.count:
            self.fair.served(tenant)
        else:
            self.fair.leave(tenant)
        self.kv_floor_home = self.kv_floor_lent = 0

    def _charge(self, tenant: FairTenant, request: QueuedRequest, now_us: int) -> None:
        """Charge the prompt of a request that starts, and its output as far as only time tells of it."""
        request.charged_work = work = self._per_request + self._per_prompt_token * request.prompt_tokens
        tenant.counter += work * tenant.multiplier
        if self._linear or (self._per_output_token and not request.streamed):
            total = request.gpu_us if self._linear else self._per_output_token * request.output_tokens
            span_us = request.expected_end_us - now_us
            request.linear = self.fair.start_linear(tenant, total, now_us, span_us if span_us > 1 else 1)

    def passes(self, request: QueuedRequest, now_us: int) -> None:
        """A request that starts as it arrives, while nothing of its class waits: as `push` and `dispatched`."""
        request.size_class = size_class_of(request.gpu_us, self.spec.size_bounds_gpu_us)
        request.fair = tenant = self._tenant(request.tenant)
        self._queue_of(tenant).passed(request.arrival_us, now_us)
        request.enqueued_us = now_us
        request.blocked_since_us = None
        self.fair.pass_by(tenant, now_us)
        self._charge(tenant, request, now_us)

    def withdraw(self, request: QueuedRequest) -> None:
        """Take out a queued request that will not run: cancelled, displaced or timed out."""
        tenant = request.fair
        assert tenant is not None, "what is queued is somebody's"
        backlog = self._queue_of(tenant)
        self._take_out(request, backlog)
        if not backlog.count:
            self.fair.withdraw(tenant)
        self.kv_floor_home = self.kv_floor_lent = 0

    def produced(self, request: QueuedRequest, output_tokens: int) -> None:
        """Charge output that a streamed request has just produced."""
        tenant = request.fair
        if request.linear is None and tenant is not None:
            work = self._per_output_token * output_tokens
            request.charged_work += work
            tenant.counter += work * tenant.multiplier

    def reconcile(self, request: QueuedRequest, now_us: int, actual_work: int | None) -> None:
        """The request stopped running: its tenant ends charged with the actual work, or with what is charged so far."""
        if actual_work is not None:
            self.settle(request, actual_work)
            return
        tenant, linear = request.fair, request.linear
        if tenant is not None and linear is not None:
            tenant.counter += linear.due(now_us)
            self.fair.forget_linear(tenant, linear)
            request.linear = None
        request.charged_work = 0

    def settle(self, request: QueuedRequest, actual_work: int) -> None:
        """The request stopped running: its tenant ends charged with the actual work."""
        tenant, linear = request.fair, request.linear
        if tenant is None:
            return
        charged = request.charged_work
        request.charged_work = 0
        if linear is not None:
            # What its other requests have produced meanwhile is charged when somebody asks whose turn it is.
            request.linear = None
            self.fair.forget_linear(tenant, linear)
            self.fair.correct(tenant, linear, actual_work - charged)
        elif actual_work != charged:
            self.fair.charge(tenant, actual_work - charged)

    def leads(self, tenant: str, gpu_us: int, deadline_us: int | None, now_us: int) -> bool:
        """Whether a request that arrived now would be the head of its tenant's queue."""
        known = self.fair.tenants.get(tenant)
        backlog = None if known is None else known.backlog
        if backlog is None or not backlog.count:
            return True
        if isinstance(backlog, DeadlineQueue):
            return backlog.leads(deadline_us, now_us)
        return backlog.leads(size_class_of(gpu_us, self.spec.size_bounds_gpu_us), now_us)

    def newest(self) -> QueuedRequest | None:
        """The newest queued request; one that has run before only when there is no other."""
        queue = self.waiting or self.returned
        return next(reversed(queue.values())) if queue else None

    def oldest_arrival_us(self) -> int | None:
        """Arrival of the request that has waited longest."""
        firsts = [next(iter(queue.values())).arrival_us for queue in (self.waiting, self.returned) if queue]
        return min(firsts, default=None)

    def timed_out(self, now_us: int) -> list[QueuedRequest]:
        """Requests that have waited longer than the class allows; what has run before is not timed out."""
        timeout_us = self.spec.queue_timeout_us
        late: list[QueuedRequest] = []
        if timeout_us is not None:
            for request in self.waiting.values():
                if now_us - request.enqueued_us <= timeout_us:
                    break
                late.append(request)
        return late

    def _tenant(self, slug: str) -> FairTenant:
        tenant = self.fair.tenants.get(slug)
        return self.fair.tenant(slug, self._weights.get(slug, 1)) if tenant is None else tenant

    def _queue_of(self, tenant: FairTenant) -> RequestQueue:
        backlog = tenant.backlog
        if backlog is None:
            if self.spec.kind is ClassKind.BATCH:
                backlog = DeadlineQueue(self.spec.aging_us)
            else:
                backlog = SizeClassQueue(len(self.spec.size_bounds_gpu_us) + 1, self.spec.aging_us)
            tenant.backlog = backlog
        return backlog

    def _take_out(self, request: QueuedRequest, backlog: RequestQueue) -> None:
        """The request is queued no more; `backlog` is that of its tenant."""
        backlog.remove(request)
        if self.returned and request.id in self.returned:
            del self.returned[request.id]
        else:
            del self.waiting[request.id]
        self.queued -= 1
        self.queued_gpu_us -= request.gpu_us

    def _entered(self, request: QueuedRequest, tenant: FairTenant, now_us: int) -> None:
        if not tenant.backlogged:
            self.fair.join(tenant)
        request.phase = QUEUED
        request.enqueued_us = now_us
        request.blocked_since_us = None
        self.queued += 1
        self.queued_gpu_us += request.gpu_us
        if self.kv_floor_home or self.kv_floor_lent:
            kv_tokens = request.kv_tokens
            if kv_tokens < self.kv_floor_home:
                self.kv_floor_home = kv_tokens
            if kv_tokens < self.kv_floor_lent and request.may_run_lent:
                self.kv_floor_lent = kv_tokens
