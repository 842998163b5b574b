"""Weighted virtual token counter: which backlogged tenant goes next.

After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). A tenant's counter grows by work / weight:
prompt work when a request is dispatched, output work as it is produced. The backlogged tenant with the least counter
is served; one that becomes backlogged is lifted to the least counter among the backlogged (or to that of the tenant
that left last), so idle time earns no credit.

Counters are integers: work is multiplied by scale / weight, so equal service gives equal counters and ties are real.
They only grow while output is produced, so a heap keyed by the last known value holds lower bounds, and the least
counter is found by refreshing the top until it stays on top: O(log n) amortised for every operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from controlplane.core.class_queue import RequestQueue

DEFAULT_SCALE: Final = 720_720
"""Divisible by 1 to 16, so that the usual weights divide it exactly."""


class WorkUnit(StrEnum):
    """What counts as service."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    GPU_TIME = "gpu_time"


@dataclass(frozen=True, slots=True)
class WorkPolicy:
    """The unit of work and, for tokens, what a prompt and an output token count."""

    unit: WorkUnit = WorkUnit.TOKENS
    w_prompt: int = 1
    w_output: int = 2

    def at_dispatch(self, prompt_tokens: int) -> int:
        """Work charged when a request is dispatched."""
        if self.unit is WorkUnit.TOKENS:
            return self.w_prompt * prompt_tokens
        return 1 if self.unit is WorkUnit.REQUESTS else 0

    def afterwards(self, output_tokens: int, gpu_us: int) -> int:
        """Work charged while a request runs."""
        if self.unit is WorkUnit.TOKENS:
            return self.w_output * output_tokens
        return gpu_us if self.unit is WorkUnit.GPU_TIME else 0


class LinearWork:
    """Work of one running request whose total is known and whose progress is not: charged linearly over a span."""

    __slots__ = ("charged", "span_us", "started_us", "total")

    def __init__(self, total: int, started_us: int, span_us: int) -> None:
        self.total = total
        self.started_us = started_us
        self.span_us = span_us
        self.charged = 0

    def due(self, now_us: int) -> int:
        """Work produced since it was last asked for, up to `now_us`."""
        elapsed = now_us - self.started_us
        if elapsed >= self.span_us:
            produced = self.total
        else:
            produced = self.total * elapsed // self.span_us if elapsed > 0 else 0
        due = produced - self.charged
        self.charged = produced
        return due


class FairTenant:
    """One tenant of a fair queue: its counter and whether it waits."""

    __slots__ = ("accrued_us", "backlog", "backlogged", "counter", "heap_key", "linear", "multiplier", "slug", "weight")

    def __init__(self, slug: str, weight: Fraction, multiplier: int) -> None:
        self.slug = slug
        self.weight = weight
        self.multiplier = multiplier
        self.counter = 0
        self.backlogged = False
        self.heap_key: int | None = None
        self.linear: list[LinearWork] = []
        self.accrued_us = -1
        self.backlog: RequestQueue | None = None
        """What waits of it, for whoever keeps the requests; set when it becomes backlogged."""

    def __lt__(self, other: FairTenant) -> bool:
        """Heap entries of one tenant may tie; their order does not matter."""
        return False

    def accrue(self, now_us: int) -> int:
        """Charge output produced up to `now_us` and return the counter."""
        if now_us != self.accrued_us:
            # One dispatch asks several times at one instant: the work is done once.
            self.accrued_us = now_us
            for work in self.linear:
                self.counter += work.due(now_us)
        return self.counter


class FairQueue:
    """Virtual token counters of the tenants of one class on one agent.

    The caller keeps the requests. `join` when a tenant's first request is queued, then for a dispatch at an instant:
    `settle(now)`, `least(now)`, and either `served` when the tenant goes on waiting or `leave` when nothing of it is
    queued. To look past a tenant, `pop_least` takes it out and `push` puts it back.
    """

    __slots__ = ("_heap", "_last_left", "joining", "scale", "tenants")

    def __init__(self, scale: int = DEFAULT_SCALE) -> None:
        if scale <= 0:
            raise ValueError(f"scale must be positive, got {scale}")
        self.scale = scale
        self.tenants: dict[str, FairTenant] = {}
        self._heap: list[tuple[int, str, FairTenant]] = []
        self.joining: list[FairTenant] = []
        """Those who became backlogged since the last dispatch instant."""
        self._last_left: FairTenant | None = None

    def tenant(self, slug: str, weight: int | Fraction = 1) -> FairTenant:
        """The tenant of that slug, made on first use; a new weight holds from now on."""
        found = self.tenants.get(slug)
        if found is not None and found.weight == weight:
            return found
        exact = Fraction(weight)
        if exact <= 0:
            raise ValueError(f"the weight of tenant {slug!r} must be positive, got {weight}")
        multiplier = max(1, round(self.scale / exact))
        if found is None:
            found = self.tenants[slug] = FairTenant(slug, exact, multiplier)
        else:
            found.weight, found.multiplier = exact, multiplier
        return found

    def forget(self, slug: str) -> None:
        """Drop a tenant that has nothing queued and nothing running (removed by policy)."""
        tenant = self.tenants.get(slug)
        if tenant is None or tenant.backlogged or tenant.linear:
            return
        if self._last_left is not tenant:
            del self.tenants[slug]

    def join(self, tenant: FairTenant) -> None:
        """A tenant became backlogged; it is lifted at the next dispatch instant, not before."""
        if tenant.backlogged:
            return
        tenant.backlogged = True
        self.joining.append(tenant)

    def settle(self, now_us: int) -> None:
        """Lift those who joined since the last dispatch instant; all who join at one instant are lifted alike."""
        joining = self.joining
        if not joining:
            return
        first = self.least(now_us) or self._last_left
        floor = None if first is None else first.accrue(now_us)
        for tenant in joining:
            if not tenant.backlogged:
                continue
            tenant.accrue(now_us)
            if floor is not None and tenant.counter < floor:
                tenant.counter = floor
            self.push(tenant)
        joining.clear()

    def push(self, tenant: FairTenant) -> None:
        """Put a backlogged tenant back at its present counter."""
        tenant.heap_key = key = tenant.counter
        heappush(self._heap, (key, tenant.slug, tenant))

    def least(self, now_us: int) -> FairTenant | None:
        """The backlogged tenant with the least counter at `now_us`, where it stands; ties go to the first slug."""
        heap = self._heap
        while heap:
            key, slug, tenant = heap[0]
            if tenant.heap_key != key:
                heappop(heap)
                continue
            counter = tenant.accrue(now_us) if tenant.linear else tenant.counter
            if counter == key:
                return tenant
            tenant.heap_key = counter
            heapreplace(heap, (counter, slug, tenant))
        return None

    def served(self, tenant: FairTenant) -> None:
        """The tenant that `least` has just named was served and goes on waiting, at its present counter."""
        tenant.heap_key = key = tenant.counter
        heapreplace(self._heap, (key, tenant.slug, tenant))

    def pop_least(self, now_us: int) -> FairTenant | None:
        """Take out the backlogged tenant with the least counter at `now_us`; ties go to the first slug."""
        tenant = self.least(now_us)
        if tenant is not None:
            heappop(self._heap)
            tenant.heap_key = None
        return tenant

    def peek_least(self, now_us: int) -> FairTenant | None:
        """A tenant whose turn it is, without lifting anyone: that is for dispatch instants only."""
        tenant = self.least(now_us)
        if tenant is not None:
            return tenant
        return min((t for t in self.joining if t.backlogged), key=lambda t: t.slug, default=None)

    def leave(self, tenant: FairTenant) -> None:
        """Its last queued request was dispatched; output still to come goes on counting."""
        tenant.backlogged = False
        tenant.heap_key = None
        self._last_left = tenant

    def pass_by(self, tenant: FairTenant, now_us: int) -> None:
        """Where nobody waits: what `join`, `settle`, `least` and `leave` at one instant would do for the only one."""
        last = self._last_left
        tenant.accrue(now_us)
        if last is not None:
            floor = last.accrue(now_us)
            if tenant.counter < floor:
                tenant.counter = floor
        self.joining.clear()
        self._last_left = tenant

    def withdraw(self, tenant: FairTenant) -> None:
        """Its last queued request was cancelled: it waits no more, and nobody is lifted to its counter for that."""
        tenant.backlogged = False
        tenant.heap_key = None

    def charge(self, tenant: FairTenant, work: int) -> None:
        """Add work to a counter; negative work (a reconciled estimate, a preempted attempt) takes it back."""
        tenant.counter += work * tenant.multiplier
        if work < 0 and tenant.heap_key is not None:
            # Keys must stay lower bounds: the old entry is stale, a new one stands lower.
            self.push(tenant)

    def start_linear(self, tenant: FairTenant, work: int, now_us: int, span_us: int) -> LinearWork:
        """Charge `work` over the `span_us` from `now_us` on, as time passes."""
        linear = LinearWork(work * tenant.multiplier, now_us, span_us)
        tenant.linear.append(linear)
        tenant.accrued_us = -1
        return linear

    def stop_linear(self, tenant: FairTenant, linear: LinearWork, work: int | None) -> None:
        """The request ended having done `work`: replace what was charged linearly by that (None: leave it)."""
        tenant.linear.remove(linear)
        if work is None:
            return
        correction = work * tenant.multiplier - linear.charged
        tenant.counter += correction
        if correction < 0 and tenant.heap_key is not None:
            self.push(tenant)
