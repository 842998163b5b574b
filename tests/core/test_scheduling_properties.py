"""What the scheduler promises, over generated fleets, arrivals and failures, in all three isolation designs."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from controlplane.core.class_queue import SchedulingClass
from controlplane.core.fairness import WorkPolicy, WorkUnit
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.slot_states import Band
from controlplane.core.slots import ClassKind, Isolation, SlotSpec
from tests.core.scheduling_generators import SECOND_US, arrivals, backlog, fleets, incidents
from tests.core.scheduling_invariants import (
    AgedGoFirst,
    BatchByDeadline,
    Gaps,
    InteractiveFirst,
    IsolationHolds,
    LeastWorkThenPrefix,
    NothingIdles,
    OnlySafePreemption,
    PassedForSoLong,
    PlacesAndMemory,
    SmallestFirst,
)
from tests.core.scheduling_runs import ATTEMPTS_MAX, Fleet, Incident, Run

seeds = st.integers(0, 10**6)
# A run is a fifth of a second: a failing one is reported as found, not shrunk for minutes.
bounded = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


def everything() -> tuple:
    return (
        PlacesAndMemory(),
        IsolationHolds(),
        AgedGoFirst(),
        BatchByDeadline(),
        SmallestFirst(),
        LeastWorkThenPrefix(),
        NothingIdles(),
        InteractiveFirst(),
        OnlySafePreemption(),
    )


@pytest.mark.parametrize("isolation", list(Isolation))
@given(data=st.data(), seed=seeds, wrong=incidents)
@settings(bounded, max_examples=60)
def test_every_promise_holds_at_every_instant_whatever_fails(isolation, data, seed: int, wrong: list[Incident]) -> None:
    fleet = data.draw(fleets(isolation))
    run = Run(fleet, everything())
    run.play(arrivals(fleet, seed), wrong, until_us=SECOND_US)
    assert_nothing_lost(run)
    run.drain()
    assert_nothing_lost(run)
    assert not run.scheduler.requests and set(run.ended) == set(run.offered)


def assert_nothing_lost(run: Run) -> None:
    """Each request has ended once, waits or runs, in one place; it was started once per attempt and never after."""
    running = [request_id for slot in run.slots for request_id in slot.running]
    assert len(running) == len(set(running))
    assert sorted([*run.ended, *run.queued, *running]) == sorted(run.offered)
    assert set(run.scheduler.requests) == set(run.queued) | set(running)
    starts: dict[int, int] = {}
    for _, request_id in run.starts:
        starts[request_id] = starts.get(request_id, 0) + 1
    for request_id, request in run.offered.items():
        waits = request_id in run.queued or run.ended.get(request_id) in ("cancelled", "timed out")
        assert starts.get(request_id, 0) in ((request.attempt - 1, request.attempt) if waits else (request.attempt,))
        if run.ended.get(request_id) == "completed":
            assert starts[request_id] <= ATTEMPTS_MAX + run.preempted.count(request_id)


@given(seed=seeds, slots=st.integers(1, 3), places=st.integers(2, 4), tenants=st.integers(2, 6))
@settings(bounded, max_examples=60)
def test_a_head_short_of_memory_is_passed_for_reserve_after_at_most(seed, slots, places, tenants) -> None:
    chat = SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE)
    specs = tuple(SlotSpec(f"s{at}", places, Band.INTERACTIVE, 100) for at in range(slots))
    fleet = Fleet((chat,), specs, Isolation.SHARED, reserve_after_us=60_000)
    rng, made, at_us = random.Random(seed), [], 0
    for number in range(120):
        at_us += rng.randint(0, 12_000)
        tenant = rng.randrange(tenants)
        # one tenant asks for nearly a whole slot, the others for little
        kv_tokens = rng.randint(60, 100) if tenant == 0 else rng.randint(1, 30)
        made.append(QueuedRequest(number, str(tenant), "chat", at_us, prompt_tokens=rng.randint(1, 99),
                                  output_tokens=9, kv_tokens=kv_tokens, gpu_us=rng.randint(5_000, 40_000)))  # fmt: skip
    run = Run(fleet, (PassedForSoLong(longest_us=places * 40_000 + 1_000), NothingIdles(), PlacesAndMemory()))
    run.play(made, until_us=10**9)
    assert len(run.ended) == len(made)


@pytest.mark.parametrize("unit", list(WorkUnit))
@given(
    seed=seeds,
    weights=st.tuples(*[st.integers(1, 8)] * 3),
    places=st.integers(1, 5),
    prompt_most=st.integers(1, 400),
    output_most=st.integers(1, 200),
)
@example(seed=763, weights=(1, 1, 1), places=1, prompt_most=211, output_most=87)
@settings(bounded, max_examples=20)
def test_waiting_tenants_stay_within_the_bound_of_the_method(
    unit: WorkUnit, seed, weights, places, prompt_most, output_most
) -> None:
    """|W_a / w_a - W_b / w_b| <= 2 max(w_prompt x largest prompt, w_output x M) / the smaller weight, at every instant.

    Counted since both wait: a and b from the start, c after a long absence that earned it nothing. Work is what the
    world did, not what the counters say. M is the most that can be running at once, in the unit of work:
    tokens (as the paper has it the prompts too: they hold the places), or GPU time, or nothing where requests are
    counted (a request then counts 1 at its start). When c comes,
    the others' counters already differ by up to a prompt and M, so a gap that begins there may reach twice their sum.
    """
    work, gpu_us_most, weight_of = WorkPolicy(unit), 20_000, dict(zip("abc", weights, strict=True))
    chat = SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE, work=work)
    figures = {"prompt_most": prompt_most, "output_most": output_most, "gpu_us_most": gpu_us_most}
    made = [
        request
        for at, tenant in enumerate("abc")
        for request in backlog(chat, tenant, seed + at, count=(120, 120, 50)[at], first_id=1_000 * at,
                               at_us=600_000 if tenant == "c" else 0, **figures)
    ]  # fmt: skip
    gaps = Gaps(weight_of)
    run = Run(Fleet((chat,), (SlotSpec("s", places, Band.INTERACTIVE),), Isolation.SHARED), (gaps,))
    for tenant, weight in weight_of.items():
        run.scheduler.set_weight("chat", tenant, weight)
    run.play(sorted(made, key=lambda request: request.order), until_us=10**9)
    prompt = work.at_dispatch(prompt_most)
    running = work.afterwards(prompt_most + output_most, gpu_us_most) * places
    assert len(gaps.found["a", "b"]) > 50 and gaps.found["a", "c"]
    for (one, other), found in gaps.found.items():
        bound = 2 * (prompt + running if other == "c" else max(prompt, running)) / min(weight_of[one], weight_of[other])
        half = len(found) // 2
        for part in (found[:half], found[half:]):  # as true late as early: it does not grow with time
            assert max(map(abs, part), default=0) <= bound + 1e-6


@given(
    seed=seeds,
    slots=st.integers(1, 3),
    places=st.integers(1, 3),
    share=st.sampled_from([50_000, 100_000, 250_000]),
    load=st.sampled_from([1.5, 3.0]),
)
@example(seed=1, slots=3, places=3, share=250_000, load=1.5)
@settings(bounded, max_examples=6)
def test_batch_gets_its_minimum_share_of_any_ten_minutes(seed: int, slots: int, places: int, share: int, load) -> None:
    """Twenty minutes of interactive load at 150 % and more: batch is served its share, on no more places than that."""
    window_us, largest_us, until_us = 600 * SECOND_US, 10 * SECOND_US, 1_260 * SECOND_US
    chat = SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE)
    batch = SchedulingClass(slug="batch", kind=ClassKind.BATCH, min_share_ppm=share)
    specs = tuple(SlotSpec(f"s{at}", places, Band.INTERACTIVE) for at in range(slots))
    fleet = Fleet((chat, batch), specs, Isolation.SHARED)
    rng = random.Random(seed)
    made = []
    for slug, of_capacity in (("chat", load), ("batch", 1.0)):
        for number in range(int(until_us * slots * of_capacity / (largest_us * 0.6))):
            at_us = 0 if number < 4 * slots * places else int(number * largest_us * 0.6 / (slots * of_capacity))
            made.append(QueuedRequest(len(made), rng.choice("abc"), slug, at_us,
                                      gpu_us=rng.randint(largest_us // 5, largest_us)))  # fmt: skip
    held: list[int] = []

    class Held(InteractiveFirst):
        def settled(self, run: Run) -> None:
            assert {request.class_slug for request in run.queued.values()} == {"chat", "batch"}
            held.append(sum(request.class_slug == "batch" for slot in run.slots for request in slot.running.values()))

    run = Run(fleet, (Held(),))
    run.play(sorted(made, key=lambda request: request.order), until_us=until_us)
    assert max(held) <= -(-share * slots * places // 1_000_000)
    end, slack = 0, slots * places * largest_us
    worst = float("inf")
    for start_us, before in run.samples:
        while end < len(run.samples) and run.samples[end][0] < start_us + window_us:
            end += 1
        if end == len(run.samples):
            break
        after = run.samples[end][1]
        batch_us, chat_us = (after[slug] - before[slug] for slug in ("batch", "chat"))
        worst = min(worst, batch_us - share / 1e6 * (batch_us + chat_us))
        assert batch_us >= share / 1e6 * (batch_us + chat_us) - slack
        assert chat_us > 0
    assert worst < float("inf"), "no window of ten minutes was measured"
