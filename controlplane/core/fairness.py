"""Weighted virtual token counter: which backlogged tenant goes next.

After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). A tenant's counter grows by work / weight:
prompt work when a request is dispatched, output work as it is produced. The backlogged tenant with the least counter
is served; one that becomes backlogged is lifted to the least counter among the backlogged (or to that of the tenant
that left last), so idle time earns no credit.

Counters are integers: work is multiplied by scale / weight, so equal service gives equal counters and ties are real.
They only grow while output is produced, so a heap keyed by the last known value holds lower bounds, and the least
counter is found by refreshing the top until it stays on top: O(log n) amortised for every operation. The heap is one of
the tenants themselves, which know where they stand in it: machine code compares their fields, where entries of the
library's heaps are objects that the interpreter compares.

Ties go to the first slug. In the heap a number stands for it, the tenant's place among the slugs: with ten thousand
tenants nothing of a tenant is in a near cache, and two slugs are two objects more to fetch for each comparison.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from controlplane.core.native import i64, native

if TYPE_CHECKING:
    from controlplane.core.class_queue import RequestQueue

DEFAULT_SCALE: Final = 720_720
"""Divisible by 1 to 16, so that the usual weights divide it exactly."""
PLACE_GAP: Final = 1 << 32
"""Between the places of neighbours at first; one that comes between them gets the middle."""
NOWHERE: Final = -1
"""Where a tenant stands that is not in the heap."""


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


@native(acyclic=True)
class LinearWork:
    """Work of one running request whose total is known and whose progress is not: charged linearly over a span."""

    __slots__ = ("at", "charged", "span_us", "started_us", "total")

    def __init__(self, total: int, started_us: int, span_us: int, at: i64 = 0) -> None:
        self.at = at
        """Its place in its tenant's list."""
        self.begin(total, started_us, span_us)

    def begin(self, total: int, started_us: int, span_us: int) -> None:
        """Another request's work."""
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

    __slots__ = ("accrued_us", "backlog", "backlogged", "counter", "heap_at", "heap_key", "linear", "multiplier",
                 "place", "running", "slug", "weight")  # fmt: skip

    def __init__(self, slug: str, weight: Fraction, multiplier: int, place: int) -> None:
        self.slug = slug
        self.place = place
        """The greater the slug among those of its queue, the greater this is."""
        self.weight = weight
        self.multiplier = multiplier
        self.counter = 0
        self.backlogged = False
        self.heap_key = 0
        self.heap_at: i64 = NOWHERE
        """Where it stands in the heap, by its `heap_key`."""
        self.linear: list[LinearWork] = []
        """The first `running` of them are work that goes on; the others wait to be used again."""
        self.running: i64 = 0
        self.accrued_us = -1
        self.backlog: RequestQueue | None = None
        """What waits of it, for whoever keeps the requests."""

    def accrue(self, now_us: int) -> int:
        """Charge output produced up to `now_us` and return the counter."""
        if now_us != self.accrued_us:
            # One dispatch asks several times at one instant: the work is done once.
            self.accrued_us = now_us
            running = self.running
            if running:
                linear, counter, at = self.linear, self.counter, running
                while at > 0:
                    at -= 1
                    counter += linear[at].due(now_us)
                self.counter = counter
        return self.counter


class FairQueue:
    """Virtual token counters of the tenants of one class on one agent.

    The caller keeps the requests. `join` when a tenant's first request is queued, then for a dispatch at an instant:
    `settle(now)`, `least(now)`, and either `served` when the tenant goes on waiting or `leave` when nothing of it is
    queued. To look past a tenant, `pop_least` takes it out and `push` puts it back.
    """

    __slots__ = ("_heap", "_in_heap", "_joining", "_last_left", "_slugs", "joined", "scale", "tenants")

    def __init__(self, scale: int = DEFAULT_SCALE) -> None:
        if scale <= 0:
            raise ValueError(f"scale must be positive, got {scale}")
        self.scale = scale
        self.tenants: dict[str, FairTenant] = {}
        self._heap: list[FairTenant] = []
        """The first `_in_heap` of them: by key, those of equal ones by place. A list that grows and shrinks by one asks
        for memory each time, so this one keeps its length."""
        self._in_heap: i64 = 0
        self._slugs: list[str] = []
        """Of all tenants, in order."""
        self._joining: list[FairTenant] = []
        """The first `joined` of them became backlogged since the last dispatch instant."""
        self.joined: i64 = 0
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
            found = self.tenants[slug] = FairTenant(slug, exact, multiplier, self._place_for(slug))
        else:
            found.weight, found.multiplier = exact, multiplier
        return found

    def _place_for(self, slug: str) -> int:
        """A place between those of its neighbours."""
        slugs = self._slugs
        at = bisect_left(slugs, slug)
        if at == len(slugs):
            place = self.tenants[slugs[-1]].place + PLACE_GAP if at else 0
        elif at == 0:
            place = self.tenants[slugs[0]].place - PLACE_GAP
        else:
            before = self.tenants[slugs[at - 1]].place
            place = (before + self.tenants[slugs[at]].place) // 2
            if place == before:
                self._spread()
                return self._place_for(slug)
        slugs.insert(at, slug)
        return place

    def _spread(self) -> None:
        """Nothing is left between two places: all get new ones, in the same order."""
        for number, slug in enumerate(self._slugs):
            self.tenants[slug].place = number * PLACE_GAP

    def forget(self, slug: str) -> None:
        """Drop a tenant that has nothing queued and nothing running (removed by policy)."""
        tenant = self.tenants.get(slug)
        if tenant is None or tenant.backlogged or tenant.running:
            return
        if self._last_left is not tenant:
            del self.tenants[slug]
            self._slugs.remove(slug)

    def join(self, tenant: FairTenant) -> None:
        """A tenant became backlogged; it is lifted at the next dispatch instant, not before."""
        if tenant.backlogged:
            return
        tenant.backlogged = True
        joining, joined = self._joining, self.joined
        if joined < len(joining):
            joining[joined] = tenant
        else:
            joining.append(tenant)
        self.joined = joined + 1

    def settle(self, now_us: int) -> None:
        """Lift those who joined since the last dispatch instant; all who join at one instant are lifted alike."""
        joining, joined = self._joining, self.joined
        if not joined:
            return
        first, floor = self.least(now_us), 0
        if first is None:
            first = self._last_left
        if first is not None:
            floor = first.accrue(now_us)
        at: i64 = 0
        while at < joined:
            tenant = joining[at]
            at += 1
            if not tenant.backlogged:
                continue
            tenant.accrue(now_us)
            if first is not None and tenant.counter < floor:
                tenant.counter = floor
            self.push(tenant)
        self.joined = 0

    def push(self, tenant: FairTenant) -> None:
        """Put a backlogged tenant where its present counter belongs."""
        tenant.heap_key = tenant.counter
        at = tenant.heap_at
        if at < 0:
            count = self._in_heap
            if count == len(self._heap):
                self._heap.append(tenant)
            self._in_heap = count + 1
            self._rise(tenant, count)
            return
        self._rise(tenant, at)
        if tenant.heap_at == at:
            self._sink(tenant, at)

    def _rise(self, tenant: FairTenant, at: i64) -> None:
        """From where nobody stands up to where it belongs."""
        heap, key = self._heap, tenant.heap_key
        while at > 0:
            above = (at - 1) >> 1
            other = heap[above]
            if other.heap_key < key or (other.heap_key == key and other.place <= tenant.place):
                break
            heap[at] = other
            other.heap_at = at
            at = above
        heap[at] = tenant
        tenant.heap_at = at

    def _sink(self, tenant: FairTenant, at: i64) -> None:
        """From where nobody stands down to where it belongs."""
        heap, key, count = self._heap, tenant.heap_key, self._in_heap
        below = 2 * at + 1
        while below < count:
            other = heap[below]
            if below + 1 < count:
                next_to = heap[below + 1]
                least = other.heap_key
                if next_to.heap_key < least or (next_to.heap_key == least and next_to.place < other.place):
                    other, below = next_to, below + 1
            if key < other.heap_key or (key == other.heap_key and tenant.place <= other.place):
                break
            heap[at] = other
            other.heap_at = at
            at, below = below, 2 * below + 1
        heap[at] = tenant
        tenant.heap_at = at

    def _take_out(self, tenant: FairTenant) -> None:
        heap, at = self._heap, tenant.heap_at
        if at < 0:
            return
        tenant.heap_at = NOWHERE
        count = self._in_heap - 1
        self._in_heap = count
        last = heap[count]
        if last is not tenant:
            self._sink(last, at)
            if last.heap_at == at:
                self._rise(last, at)

    def least(self, now_us: int) -> FairTenant | None:
        """The backlogged tenant with the least counter at `now_us`, where it stands; ties go to the first slug."""
        heap = self._heap
        while self._in_heap:
            tenant = heap[0]
            counter = tenant.accrue(now_us) if tenant.running else tenant.counter
            if counter == tenant.heap_key:
                return tenant
            tenant.heap_key = counter
            self._sink(tenant, 0)
            if heap[0] is tenant:
                return tenant
        return None

    def served(self, tenant: FairTenant) -> None:
        """The tenant that `least` has just named was served and goes on waiting, at its present counter."""
        tenant.heap_key = tenant.counter
        self._sink(tenant, tenant.heap_at)

    def pop_least(self, now_us: int) -> FairTenant | None:
        """Take out the backlogged tenant with the least counter at `now_us`; ties go to the first slug."""
        tenant = self.least(now_us)
        if tenant is not None:
            self._take_out(tenant)
        return tenant

    def peek_least(self, now_us: int) -> FairTenant | None:
        """A tenant whose turn it is, without lifting anyone: that is for dispatch instants only."""
        tenant = self.least(now_us)
        if tenant is not None:
            return tenant
        joining = self._joining[: self.joined]
        return min((t for t in joining if t.backlogged), key=lambda t: t.slug, default=None)

    def leave(self, tenant: FairTenant) -> None:
        """Its last queued request was dispatched; output still to come goes on counting."""
        tenant.backlogged = False
        self._take_out(tenant)
        self._last_left = tenant

    def pass_by(self, tenant: FairTenant, now_us: int) -> None:
        """Where nobody waits: what `join`, `settle`, `least` and `leave` at one instant would do for the only one."""
        last = self._last_left
        tenant.accrue(now_us)
        if last is not None:
            floor = last.accrue(now_us)
            if tenant.counter < floor:
                tenant.counter = floor
        self.joined = 0
        self._last_left = tenant

    def withdraw(self, tenant: FairTenant) -> None:
        """Its last queued request was cancelled: it waits no more, and nobody is lifted to its counter for that."""
        tenant.backlogged = False
        self._take_out(tenant)

    def charge(self, tenant: FairTenant, work: int) -> None:
        """Add work to a counter; negative work (a reconciled estimate, a preempted attempt) takes it back."""
        tenant.counter += work * tenant.multiplier
        if work < 0 and tenant.heap_at >= 0:
            # Keys must stay lower bounds.
            self.push(tenant)

    def start_linear(self, tenant: FairTenant, work: int, now_us: int, span_us: int) -> LinearWork:
        """Charge `work` over the `span_us` from `now_us` on, as time passes."""
        works, at, total = tenant.linear, tenant.running, work * tenant.multiplier
        if at < len(works):
            linear = works[at]
            linear.begin(total, now_us, span_us)
        else:
            linear = LinearWork(total, now_us, span_us, at)
            works.append(linear)
        tenant.running = at + 1
        tenant.accrued_us = -1
        return linear

    def stop_linear(self, tenant: FairTenant, linear: LinearWork, work: int | None) -> None:
        """The request ended having done `work`: replace what was charged linearly by that (None: leave it)."""
        self.forget_linear(tenant, linear)
        if work is not None:
            self.correct(tenant, linear, work)

    def forget_linear(self, tenant: FairTenant, linear: LinearWork) -> None:
        """The request ended; what was charged so far stays. What goes on after this may take its object."""
        works, at, last_at = tenant.linear, linear.at, tenant.running - 1
        tenant.running = last_at
        if at != last_at:
            # The last one takes its place: their order means nothing, and nobody has to be searched.
            last = works[last_at]
            works[at], works[last_at] = last, linear
            last.at, linear.at = at, last_at

    def correct(self, tenant: FairTenant, linear: LinearWork, work: int) -> None:
        """Replace what was charged linearly for a request that has ended by the work that it did."""
        correction = work * tenant.multiplier - linear.charged
        tenant.counter += correction
        if correction < 0 and tenant.heap_at >= 0:
            self.push(tenant)
