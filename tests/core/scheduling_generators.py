"""Fleets, arrivals and incidents for the properties of the scheduler."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from controlplane.core.class_queue import SchedulingClass
from controlplane.core.fairness import WorkPolicy, WorkUnit
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.slot_states import Band
from controlplane.core.slots import ClassKind, Isolation, SlotSpec
from tests.core.scheduling_runs import Fleet, Incident

SECOND_US = 1_000_000
KV_TOKENS = (None, 100, 160)
KV_MOST = 100
"""No request needs more than the smallest slot has."""


@st.composite
def fleets(draw: st.DrawFn, isolation: Isolation | None = None) -> Fleet:
    """Two or three classes, two to five slots, any isolation design; each kind has a slot at home."""
    design = draw(st.sampled_from(list(Isolation))) if isolation is None else isolation
    work = WorkPolicy(draw(st.sampled_from(list(WorkUnit))))
    aging = draw(st.sampled_from([None, 50_000, 400_000]))
    bounds = draw(st.sampled_from([(), (20_000,), (10_000, 40_000)]))
    share = draw(st.sampled_from([0, 100_000, 300_000])) if design is Isolation.SHARED else 0
    timeout = draw(st.sampled_from([None, 600_000]))
    options = {"work": work, "aging_us": aging, "size_bounds_gpu_us": bounds, "queue_timeout_us": timeout}
    classes = [
        SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE, **options),
        SchedulingClass(slug="bulk", kind=ClassKind.BATCH, min_share_ppm=share, **options),
    ]
    if draw(st.booleans()):
        classes.append(SchedulingClass(slug="embed", kind=ClassKind.INTERACTIVE, precedence=1, **options))
    flex = [Band.FLEX] if design is Isolation.RESERVED else []
    bands = [Band.INTERACTIVE, Band.BATCH, *flex, *draw(st.lists(st.sampled_from(list(Band)), max_size=3))]
    slots = [
        SlotSpec(f"s{at}", draw(st.integers(1, 3)), band, draw(st.sampled_from(KV_TOKENS)))
        for at, band in enumerate(bands)
    ]
    if design is Isolation.DEDICATED and draw(st.booleans()):
        slots.append(SlotSpec("own", 2, Band.INTERACTIVE, None, classes[-1].slug))
    return Fleet(tuple(classes), tuple(slots), design, draw(st.sampled_from([0, 20_000, 2_000_000])))


def arrivals(
    fleet: Fleet, seed: int, count: int = 70, tenants: str = "abc", gap_us: int = 12_000
) -> list[QueuedRequest]:
    """Requests that come at random, of every size, some with a cached prefix, a deadline or none."""
    rng, at_us, made = random.Random(seed), 0, []
    for number in range(count):
        at_us += rng.choice([0, rng.randint(0, 2 * gap_us)])
        workload_class = rng.choice(fleet.classes)
        output = rng.randint(1, 40)
        made.append(
            QueuedRequest(
                number,
                rng.choice(tenants),
                workload_class.slug,
                at_us,
                prompt_tokens=rng.randint(1, 200),
                output_tokens=output,
                kv_tokens=rng.randint(1, KV_MOST),
                gpu_us=rng.randint(1_000, 60_000),
                deadline_us=rng.choice([None, at_us + rng.randint(0, SECOND_US)]),
                preemptible=workload_class.kind is ClassKind.BATCH and rng.random() < 0.6,
                fits_drain=workload_class.kind is ClassKind.BATCH and rng.random() < 0.4,
                streamed=rng.random() < 0.7,
                cached_tokens=rng.choice([None, None, {spec.name: rng.randint(0, 9) for spec in fleet.slots}]),
            )
        )
    return made


incidents = st.lists(
    st.builds(
        Incident,
        st.integers(0, 900_000),
        st.sampled_from(
            ["die", "recover", "lend", "lend", "recall", "home", "cancel", "cancel", "cancel", "fail", "fail"]
        ),
        st.integers(0, 1_000),
    ),
    min_size=3,
    max_size=25,
).map(lambda found: sorted(found, key=lambda incident: incident.at_us))


def backlog(
    workload_class: SchedulingClass,
    tenant: str,
    seed: int,
    *,
    count: int,
    prompt_most: int,
    output_most: int,
    gpu_us_most: int,
    first_id: int,
    at_us: int = 0,
) -> list[QueuedRequest]:
    """Requests of one tenant, all at once, so that it goes on waiting."""
    rng = random.Random(seed)
    return [
        QueuedRequest(
            first_id + number,
            tenant,
            workload_class.slug,
            at_us,
            prompt_tokens=rng.randint(1, prompt_most),
            output_tokens=rng.randint(0, output_most),
            gpu_us=rng.randint(gpu_us_most // 4, gpu_us_most),
        )
        for number in range(count)
    ]
