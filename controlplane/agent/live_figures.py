"""What the control plane sees of this agent now: slots, classes and tenants with their rates, waits and ages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from controlplane.agent.direct_work import DirectBacklog
from controlplane.agent.sliding import Flow, PresenceSums, WindowCount
from controlplane.core.class_queue import ClassQueue
from controlplane.core.histogram import Histogram, WindowHistogram
from controlplane.core.slot_states import SlotState
from controlplane.core.slots import UNBOUNDED_KV
from controlplane.wire.report import ClassLive, Demand, EngineLive, LiveFigures, SlotLive, TenantLive

if TYPE_CHECKING:
    from controlplane.agent.call import Call
    from controlplane.agent.engine import Engine

ADMITTED: Final = "admitted"

Row = TypeVar("Row")


class ClassFigures:
    """Sliding figures of one class."""

    __slots__ = ("recent", "refused", "started_us", "ttft", "wait")

    def __init__(self, now_us: int) -> None:
        self.started_us = now_us
        self.recent = WindowCount(60, now_us)
        self.refused = WindowCount(60, now_us)
        self.wait = WindowHistogram()
        self.ttft = WindowHistogram()


class Figures:
    """Counters that the engine feeds and a report reads."""

    def __init__(self) -> None:
        self.classes: dict[int, ClassFigures] = {}
        self.flows: dict[tuple[int, int], Flow] = {}
        """By key and class."""
        self.direct = DirectBacklog()

    def of_class(self, class_id: int, now_us: int) -> ClassFigures:
        figures = self.classes.get(class_id)
        if figures is None:
            figures = self.classes[class_id] = ClassFigures(now_us)
        return figures

    def _flow_of(self, call: Call, now_us: int) -> Flow:
        key_id, class_id = call.key.live.id, call.klass.policy.id
        flow = self.flows.get((key_id, class_id))
        if flow is None:
            flow = self.flows[key_id, class_id] = Flow(call.tenant.policy.id, key_id, class_id, now_us)
        return flow

    def admitted(self, call: Call, now_us: int) -> None:
        """A request that stays until it has departed."""
        class_id = call.klass.policy.id
        flow = self.flows.get((call.key.live.id, class_id)) or self._flow_of(call, now_us)
        call.flow = flow
        flow.admit(call.prompt_tokens + call.n * call.expected_output, now_us)
        figures = self.classes.get(class_id) or self.of_class(class_id, now_us)
        figures.recent.add(ADMITTED, now_us)
        self.direct.add(call)

    def departed(self, call: Call, now_us: int) -> None:
        if call.flow is not None:
            call.flow.depart(now_us, now_us - call.arrived_us)
        self.direct.remove(call)

    def refused(self, call: Call, reason: str, now_us: int, *, as_wait_us: int | None) -> None:
        """A refusal; for want of room it also counts as a wait of the class's bound."""
        flow = self._flow_of(call, now_us)
        flow.refuse(call.prompt_tokens + call.n * call.expected_output, now_us)
        figures = self.of_class(flow.class_id, now_us)
        figures.refused.add(reason, now_us)
        if as_wait_us is not None:
            figures.wait.record(as_wait_us, now_us)


def waiting_ages(queue: ClassQueue, now_us: int) -> list[int]:
    """Present ages of everything that waits in a class."""
    ages_us = [max(0, now_us - request.arrival_us) for request in queue.waiting.values()]
    if queue.returned:
        ages_us += [max(0, now_us - request.arrival_us) for request in queue.returned.values()]
    return ages_us


class Picture(NamedTuple):
    """What a report says of the present besides what it counts."""

    demand: list[Demand]
    figures: LiveFigures


ROWS_PER_STEP: Final = 64
"""Flows or tenants between two looks at what else there is to do: some 300 us."""


def picture_steps(engine: Engine, now_us: Callable[[], int]) -> Generator[None, None, Picture]:
    """The whole picture, in steps of bounded work: with a thousand tenants it takes longer than a request should wait.

    Each step has its own instant and leaves everything as a request may find it.
    """
    sums = _Sums()
    flows = engine.figures.flows
    for some in _parts(list(flows.items())):
        at_us = now_us()
        for place, flow in some:
            if sums.add(flow, at_us):
                del flows[place]
        yield
    at_us = now_us()
    queues = [_ClassQueue.at(engine, queue) for queue in engine.scheduler.classes]
    slots = [_slot_live(engine, name) for name in sorted(engine.slots)]
    classes = [_class_live(engine, one.queue, sums.by_class, at_us) for one in queues]
    by_class = {one.class_id: one for one in queues}
    tenants: list[TenantLive] = []
    for rows in _parts(list(sums.by_tenant.items())):
        yield
        at_us = now_us()
        for (class_id, tenant_id), presence in rows:
            row = _tenant_live(engine, by_class.get(class_id), class_id, tenant_id, presence, at_us)
            if row is not None:
                tenants.append(row)
    figures = LiveFigures(at_us=at_us, slots=slots, classes=classes, tenants=tenants, engine=_engine_live(engine))
    return Picture(sums.demand(), figures)


def _parts(rows: list[Row]) -> Iterable[list[Row]]:
    return (rows[at : at + ROWS_PER_STEP] for at in range(0, len(rows), ROWS_PER_STEP))


def picture(engine: Engine, now_us: int) -> Picture:
    """The whole picture of an instant, at once."""
    steps = picture_steps(engine, lambda: now_us)
    try:
        while True:
            next(steps)
    except StopIteration as whole:
        found: Picture = whole.value
        return found


class _Sums:
    """Flows added up: presence by class and by class and tenant, demand by tenant, key and class."""

    def __init__(self) -> None:
        self.by_class: dict[int, PresenceSums] = {}
        self.by_tenant: dict[tuple[int, int], PresenceSums] = {}
        self._demand: tuple[dict[int, list[int]], ...] = ({}, {}, {})

    def add(self, flow: Flow, now_us: int) -> bool:
        """Count a flow in; True for one that was quiet for all windows and can be forgotten."""
        totals = flow.demand(now_us)
        if totals is not None:
            requests, tokens, refused, present = totals
            tenants, keys, classes = self._demand
            for sums, number in ((tenants, flow.tenant_id), (keys, flow.key_id), (classes, flow.class_id)):
                sum_ = sums.get(number)
                if sum_ is None:
                    sums[number] = [requests, tokens, refused, present]
                else:
                    sum_[0] += requests
                    sum_[1] += tokens
                    sum_[2] += refused
                    sum_[3] += present
        if not flow.present and flow.quiet(now_us):
            return totals is None
        class_id, place = flow.class_id, (flow.class_id, flow.tenant_id)
        of_tenant = self.by_tenant.get(place)
        if of_tenant is None:
            of_tenant = self.by_tenant[place] = PresenceSums(flow.started_us)
        of_class = self.by_class.get(class_id)
        if of_class is None:
            of_class = self.by_class[class_id] = PresenceSums(flow.started_us)
        flow.add_to(of_tenant, of_class, now_us)
        return False

    def demand(self) -> list[Demand]:
        """Demand of the last 10 s, and who is here, by tenant, key and class."""
        return [
            Demand(scope, number, *totals)
            for scope, sums in zip("tkc", self._demand, strict=True)
            for number, totals in sums.items()
        ]


class _ClassQueue(NamedTuple):
    """A class's queue, and the arrivals of what waits in it by tenant."""

    class_id: int
    queue: ClassQueue
    arrivals_us: dict[str, list[int]]

    @classmethod
    def at(cls, engine: Engine, queue: ClassQueue) -> _ClassQueue:
        return cls(engine.registry.class_id(queue.spec.slug), queue, _waiting_arrivals(queue))


def _engine_live(engine: Engine) -> EngineLive | None:
    watch = engine.readiness.watch
    if watch is None:
        return None
    reading = watch.reading
    if not reading.engine and reading.gpu_used_bytes is None:
        return None
    return EngineLive(
        engine=reading.engine,
        running=reading.running,
        waiting=reading.waiting,
        kv_used=reading.kv_used,
        gpu_used_bytes=reading.gpu_used_bytes,
        gpu_total_bytes=reading.gpu_total_bytes,
        inferences=watch.batched.get("inferences"),
        executions=watch.batched.get("executions"),
    )


def _slot_live(engine: Engine, name: str) -> SlotLive:
    slot, running = engine.slots[name], engine.scheduled_slot(name)
    flex = engine.flex.slots.get(name)
    batch = [request for request in running.running.values() if engine.registry.is_batch(request.class_slug)]
    bounded = running.kv_tokens < UNBOUNDED_KV
    drain = engine.flex.drain_instants(name)
    return SlotLive(
        slot_id=slot.policy.id,
        state=slot.state,
        flex=(SlotState.HOME if flex is None else flex.state).value,
        fence=0 if flex is None else flex.grant.fence,
        running=len(running.running),
        running_batch=len(batch),
        running_batch_gpu_us=sum(request.gpu_us for request in batch),
        free_kv_tokens=max(0, running.kv_free) if bounded else 0,
        total_kv_tokens=running.kv_tokens if bounded else 0,
        stop_admit_us=drain.stop_admit_us,
        last_token_us=drain.last_token_us,
        home_us=drain.home_us,
    )


def _class_live(engine: Engine, queue: ClassQueue, sums: dict[int, PresenceSums], now_us: int) -> ClassLive:
    class_id = engine.registry.class_id(queue.spec.slug)
    figures = engine.figures.of_class(class_id, now_us)
    found = sums.get(class_id, PresenceSums(now_us))
    found.started_us = figures.started_us
    presence = found.figures(now_us)
    wait: Histogram = figures.wait.snapshot(now_us)
    wait.record_all(waiting_ages(queue, now_us))
    oldest_us = queue.oldest_arrival_us()
    head = next((request for waiting in (queue.returned, queue.waiting) for request in waiting.values()), None)
    call = None if head is None else engine.calls.get(int(head.id))
    return ClassLive(
        class_id=class_id,
        depth=queue.queued,
        oldest_age_us=None if oldest_us is None else max(0, now_us - oldest_us),
        running=queue.running,
        head_request_id="" if call is None else call.request_id,
        head_reason="" if head is None else _why_waiting(engine, queue),
        arrivals_per_s=presence.arrivals_per_s,
        departures_per_s=presence.departures_per_s,
        admitted_per_s_60s=figures.recent.per_s(ADMITTED, now_us),
        residence_mean_us=presence.residence_mean_us,
        present_mean=presence.present_mean,
        departures=presence.departures,
        refused_60s=figures.refused.totals(now_us),
        wait_60s=[(index, count) for index, count in wait.to_sparse()],
        ttft_60s=[(index, count) for index, count in figures.ttft.snapshot(now_us).to_sparse()],
        direct=engine.figures.direct.of_class(class_id),
    )


def _why_waiting(engine: Engine, queue: ClassQueue) -> str:
    """What keeps the head of a class from starting."""
    if not queue.serving_slots:
        return "no_serving_slot"
    serving = [slot for slot in engine.scheduler.slots if slot.mask & (1 << queue.index)]
    if all(len(slot.running) >= slot.places for slot in serving):
        return "places_taken"
    if any(slot.reserved_for is not None for slot in serving):
        return "slot_reserved"
    return "kv_memory"


def _waiting_arrivals(queue: ClassQueue) -> dict[str, list[int]]:
    """Arrivals of everything that waits in a class, by tenant."""
    arrivals: dict[str, list[int]] = {}
    for requests in (queue.waiting, queue.returned):
        for request in requests.values():
            arrivals.setdefault(request.tenant, []).append(request.arrival_us)
    return arrivals


def _tenant_live(
    engine: Engine, found: _ClassQueue | None, class_id: int, tenant_id: int, presence: PresenceSums, now_us: int
) -> TenantLive | None:
    """A tenant in a class; None for one that the policy has left out meanwhile."""
    slug = engine.registry.tenant_slug(tenant_id)
    if found is None or slug is None:
        return None
    fair = found.queue.fair.tenants.get(slug)
    arrivals_us = found.arrivals_us.get(slug, ())
    figures = presence.figures(now_us)
    learnt = engine.registry.estimates.get((tenant_id, class_id))
    if learnt is not None and learnt.expected_output is None:
        learnt = None
    oldest_us = min(arrivals_us, default=None)
    return TenantLive(
        class_id=class_id,
        tenant_id=tenant_id,
        depth=len(arrivals_us),
        oldest_age_us=None if oldest_us is None else max(0, now_us - oldest_us),
        running=max(0, presence.present - len(arrivals_us)),
        counter=0.0 if fair is None else fair.counter / found.queue.fair.scale,
        arrivals_per_s=figures.arrivals_per_s,
        departures_per_s=figures.departures_per_s,
        residence_mean_us=figures.residence_mean_us,
        present_mean=figures.present_mean,
        bias=None if learnt is None else learnt.bias,
        expected_output=None if learnt is None else learnt.expected_output,
        tokens_per_byte=None if learnt is None else learnt.tokens_per_byte,
    )
