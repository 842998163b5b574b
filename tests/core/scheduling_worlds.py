"""A small world around the production scheduler: slots that share their time evenly, and arrivals to run through it.

A request of gpu_us g ends when its even share of its slot's time has added up to g. Everything is measured beside the
scheduler, from what ran when, so that its promises are checked against the world and not against its own books.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.core.class_queue import SchedulingClass
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.scheduling import Scheduler
from controlplane.core.slot_states import Band
from controlplane.core.slots import ClassKind, Isolation, SlotSpec

CHAT = SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE)
BATCH = SchedulingClass(slug="batch", kind=ClassKind.BATCH)


@dataclass
class Run:
    """What happened: starts in order, GPU time delivered per class, and ends."""

    started: list[tuple[int, QueuedRequest]] = field(default_factory=list)
    ended: dict[str | int, int] = field(default_factory=dict)
    delivered_us: dict[str, float] = field(default_factory=dict)
    samples: list[tuple[int, dict[str, float]]] = field(default_factory=list)


def run_world(
    scheduler: Scheduler,
    arrivals: list[QueuedRequest],
    *,
    until_us: int,
    after_event: Callable[[int], None] | None = None,
) -> Run:
    """Run arrivals (sorted by instant) until `until_us`; `after_event` sees every instant after its dispatches."""
    run, left, now, seen = Run(), {}, 0, 0
    while True:
        while seen < len(arrivals) and arrivals[seen].arrival_us <= now:
            scheduler.offer(arrivals[seen], now)
            seen += 1
        while (started := scheduler.next_dispatch(now)) is not None:
            run.started.append((now, started))
            left[started.id] = float(started.gpu_us)
        if after_event is not None:
            after_event(now)
        following = _next_instant(scheduler, left, now, arrivals[seen].arrival_us if seen < len(arrivals) else None)
        if following is None or following > until_us:
            return run
        _advance(scheduler, left, run, following - now)
        now = following
        for request_id in [request_id for request_id, rest in left.items() if rest <= 1e-6]:
            request = scheduler.requests[request_id]
            scheduler.release(request_id, now, output_tokens=request.output_tokens, gpu_us=request.gpu_us)
            del left[request_id]
            run.ended[request_id] = now
        run.samples.append((now, dict(run.delivered_us)))


def _next_instant(scheduler: Scheduler, left: dict, now: int, arrival_us: int | None) -> int | None:
    instants = [] if arrival_us is None else [arrival_us]
    for slot in scheduler.slots:
        if slot.running:
            shortest = min(left[request_id] for request_id in slot.running)
            instants.append(now + max(1, -int(-shortest * len(slot.running) // 1)))
    return min(instants, default=None)


def _advance(scheduler: Scheduler, left: dict, run: Run, elapsed_us: int) -> None:
    for slot in scheduler.slots:
        for request in slot.running.values():
            done = min(left[request.id], elapsed_us / len(slot.running))
            left[request.id] -= done
            run.delivered_us[request.class_slug] = run.delivered_us.get(request.class_slug, 0.0) + done


def scheduler(
    classes=(CHAT, BATCH), isolation=Isolation.SHARED, slots: int = 1, places: int = 1, kv: int | None = None, **options
) -> Scheduler:
    specs = [SlotSpec(f"s{i}", places, Band.INTERACTIVE, kv) for i in range(slots)]
    return Scheduler(classes, specs, isolation, **options)


def ask(id, tenant="a", slug="chat", at=0, **figures) -> QueuedRequest:
    return QueuedRequest(id, tenant, slug, at, **{"gpu_us": 100, **figures})
