"""The scheduler: what it promises about classes, slots, memory and order."""

import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from controlplane.core.admission import ClassView, Decision, KeyView, Snapshot, TenantView, decide
from controlplane.core.class_queue import SchedulingClass
from controlplane.core.fairness import WorkPolicy, WorkUnit
from controlplane.core.pricing import RateCard
from controlplane.core.queued_request import Phase, QueuedRequest
from controlplane.core.reasons import Reason
from controlplane.core.scheduling import Scheduler
from controlplane.core.slot_states import Band, SlotState
from controlplane.core.slots import ClassKind, Isolation, SlotSpec
from tests.core.scheduling_generators import arrivals, fleets
from tests.core.scheduling_worlds import BATCH, CHAT, ask, scheduler


def reserved(places: int = 4) -> Scheduler:
    bands = {"i1": Band.INTERACTIVE, "b1": Band.BATCH, "f1": Band.FLEX}
    specs = [SlotSpec(name, places, band) for name, band in bands.items()]
    return Scheduler((CHAT, BATCH), specs, Isolation.RESERVED)


def offer(s: Scheduler, *requests: QueuedRequest, now: int = 0) -> list:
    for request in requests:
        s.offer(request, now)
    return dispatch(s, now)


def dispatch(s: Scheduler, now: int = 0) -> list:
    started = []
    while (request := s.next_dispatch(now)) is not None:
        started.append(request.id)
    return started


def where(s: Scheduler) -> dict:
    return {slot.spec.name: sorted(slot.running) for slot in s.slots}


def observed(s: Scheduler, slug: str = "chat", now: int = 0, tenant: str = "a", kv: int = 0, **bounds) -> Snapshot:
    snapshot = Snapshot(now, KeyView(), TenantView(tenant), ClassView(slug, **bounds), RateCard(0, 0, 0))
    s.observe(snapshot, kv_tokens=kv, gpu_us=100)
    return snapshot


# -- classes, tenants, requests


def test_interactive_goes_before_batch_whatever_came_first() -> None:
    s = scheduler()
    assert offer(s, ask("running")) == ["running"]
    offer(s, ask("b", slug="batch", at=0), ask("c", at=1))
    s.release("running", 5)
    assert dispatch(s, 5) == ["c"]


def test_smaller_precedence_goes_first_inside_a_kind() -> None:
    low = SchedulingClass(slug="alpha", kind=ClassKind.INTERACTIVE, precedence=2)
    high = SchedulingClass(slug="omega", kind=ClassKind.INTERACTIVE, precedence=1)
    assert offer(scheduler((low, high), places=2), ask("x", slug="alpha"), ask("y", slug="omega")) == ["y", "x"]


def test_tenants_take_turns_by_weight() -> None:
    s = scheduler()
    s.set_weight("chat", "b", 3)
    ids = [ask(f"{tenant}{i}", tenant, prompt_tokens=90) for tenant in "ab" for i in range(4)]
    order = offer(s, *ids)
    while s.requests:
        s.release(order[-1], 1, output_tokens=0)
        order += dispatch(s, 1)
    assert order == ["a0", "b0", "b1", "b2", "a1", "b3", "a2", "a3"]


def test_output_that_was_produced_counts_before_the_request_ends() -> None:
    s = scheduler(places=2)
    offer(s, ask("a0", "a", prompt_tokens=10), ask("b0", "b", prompt_tokens=10))
    offer(s, ask("a1", "a", prompt_tokens=10), ask("b1", "b", prompt_tokens=10), now=1)
    s.produced("a0", 500)
    s.release("b0", 2, output_tokens=5)
    assert dispatch(s, 2) == ["b1"]


def test_what_ends_is_charged_for_what_it_was() -> None:
    s = scheduler((SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE, work=WorkPolicy(WorkUnit.GPU_TIME)),))
    offer(s, ask("x", gpu_us=1_000))
    s.release("x", 200, gpu_us=300)
    assert s.class_queue("chat").fair.tenants["a"].counter == 300 * s.class_queue("chat").fair.scale


def test_batch_goes_by_deadline() -> None:
    s = scheduler()
    first = offer(s, ask("r", slug="batch"))
    late, early = ask("late", slug="batch", deadline_us=900), ask("early", slug="batch", deadline_us=100)
    offer(s, late, early, ask("never", slug="batch"))
    order = []
    for _ in range(3):
        s.release((first + order)[-1], 1)
        order += dispatch(s, 1)
    assert order == ["early", "late", "never"]


# -- isolation designs


def test_shared_slots_serve_any_class() -> None:
    assert offer(scheduler(slots=2), ask("b", slug="batch"), ask("c")) == ["c", "b"]


def test_dedicated_slots_serve_their_home_class_only() -> None:
    other = SchedulingClass(slug="embed", kind=ClassKind.INTERACTIVE)
    specs = [
        SlotSpec("i", 2, Band.INTERACTIVE),
        SlotSpec("e", 2, Band.INTERACTIVE, home_class="embed"),
        SlotSpec("b", 2, Band.BATCH),
    ]
    s = Scheduler((CHAT, other, BATCH), specs, Isolation.DEDICATED)
    offer(s, *(ask(f"c{i}") for i in range(3)), *(ask(f"e{i}", slug="embed") for i in range(5)), ask("b", slug="batch"))
    assert where(s) == {"i": ["c0", "c1"], "e": ["e0", "e1"], "b": ["b"]}


def test_reserved_keeps_batch_off_the_floor_and_the_flex_slot_at_home() -> None:
    s = reserved(places=1)
    offer(s, *(ask(f"b{i}", slug="batch", preemptible=True) for i in range(3)))
    assert where(s) == {"i1": [], "b1": ["b0"], "f1": []}
    assert offer(s, ask("c0"), ask("c1"), ask("c2")) == ["c0", "c1"]
    assert where(s)["b1"] == ["b0"]


def test_a_lent_slot_takes_only_batch_that_can_be_home_in_time() -> None:
    s = reserved(places=1)
    s.set_slot("f1", 0, state=SlotState.LENT)
    s.offer(ask("held", slug="batch"), 0)
    dispatch(s)
    assert offer(s, ask("slow", slug="batch")) == []
    assert offer(s, ask("fits", "b", slug="batch", fits_drain=True)) == ["fits"]
    s.release("fits", 1)
    assert offer(s, ask("safe", "b", slug="batch", preemptible=True), now=1) == ["safe"]
    assert where(s) == {"i1": [], "b1": ["held"], "f1": ["safe"]}


@pytest.mark.parametrize("state", [SlotState.DRAINING, SlotState.CANCELLING, SlotState.OVERDUE, SlotState.LOST])
def test_a_slot_on_its_way_home_admits_nothing(state: SlotState) -> None:
    s = reserved()
    s.set_slot("f1", 0, state=state)
    s.set_slot("i1", 0, ready=False)
    s.set_slot("b1", 0, ready=False)
    assert offer(s, ask("c"), ask("b", slug="batch", preemptible=True)) == []
    s.set_slot("f1", 5, state=SlotState.HOME)
    assert dispatch(s, 5) == ["c"]


def test_minimum_share_is_refused_where_the_floor_is_the_share() -> None:
    shared = SchedulingClass(slug="batch", kind=ClassKind.BATCH, min_share_ppm=100_000)
    with pytest.raises(ValueError, match="shared pools only"):
        Scheduler((CHAT, shared), [SlotSpec("s", 1, Band.BATCH)], Isolation.RESERVED)


def test_names_must_be_distinct() -> None:
    with pytest.raises(ValueError, match="distinct names"):
        Scheduler((CHAT, CHAT), [], Isolation.SHARED)


# -- memory


def test_another_tenant_passes_a_head_that_does_not_fit_its_own_does_not() -> None:
    """B holds memory, C waits for it at the head, A needs little: A runs."""
    s = scheduler(places=3, kv=100)
    offer(s, ask("B", "b", kv_tokens=80))
    assert offer(s, ask("C", "c", kv_tokens=50), ask("C2", "c", at=1, kv_tokens=1), ask("A", "d", kv_tokens=20)) == [
        "A"
    ]


def test_a_head_that_age_alone_puts_first_starts_though_nothing_else_happened() -> None:
    batch = SchedulingClass(slug="batch", kind=ClassKind.BATCH, aging_us=50)
    s = scheduler((batch,), places=3, kv=100)
    offer(s, ask("r", "z", "batch", kv_tokens=80))
    old = ask("old", slug="batch", at=2, kv_tokens=10, deadline_us=99)
    assert offer(s, old, ask("urgent", slug="batch", at=40, kv_tokens=40, deadline_us=10), now=40) == []
    assert dispatch(s, 52) == []
    assert dispatch(s, 53) == ["old"]


def test_past_the_bound_the_slot_that_frees_first_is_kept_for_the_head() -> None:
    s = scheduler(slots=2, places=9, kv=100)
    offer(s, ask("r1", "b", kv_tokens=80, gpu_us=9_000_000), ask("r2", "b", kv_tokens=80, gpu_us=5_000_000))
    offer(s, ask("big", "c", kv_tokens=60))
    assert offer(s, ask("s1", "d", kv_tokens=5), now=1_999_999) == ["s1"]
    # blocked for 2 s: the slot of r2 ends first and takes nobody else
    offer(s, ask("s2", "d", kv_tokens=5), now=2_000_000)
    offer(s, ask("s3", "d", kv_tokens=5), now=2_000_000)
    (holder,) = [slot for slot in s.slots if slot.reserved_for is not None]
    assert "r2" in holder.running and holder.reserved_for.id == "big"
    assert {s.requests[i].slot_index for i in ("s2", "s3")} == {1 - holder.index}
    s.release("r2", 5_000_000)
    assert dispatch(s, 5_000_000) == ["big"]
    assert s.requests["big"].slot_index == holder.index and holder.reserved_for is None


def test_one_head_being_served_does_not_make_another_wait_anew() -> None:
    s = scheduler(places=9, kv=100)
    offer(s, ask("r1", "b", kv_tokens=60, gpu_us=9_000_000), ask("r2", "b", kv_tokens=35, gpu_us=8_000_000))
    offer(s, ask("middle", "c", kv_tokens=30), ask("big", "d", kv_tokens=95))
    assert dispatch(s, 2_000_000) == []
    assert s.slots[0].reserved_for.id == "middle"
    s.release("r2", 2_000_001)
    assert dispatch(s, 2_000_001) == ["middle"]
    # passed as long as the first, and nothing is kept for anybody any more: now it is its turn
    assert offer(s, ask("small", "e", kv_tokens=5), now=2_000_001) == []
    assert s.slots[0].reserved_for.id == "big"


def test_a_reservation_never_keeps_out_a_higher_class() -> None:
    s = scheduler(places=9, kv=100, reserve_after_us=0)
    offer(s, ask("r", slug="batch", kv_tokens=80))
    offer(s, ask("big", "c", slug="batch", kv_tokens=60))
    offer(s, ask("x", "d", slug="batch", kv_tokens=20), now=1)
    assert s.slots[0].reserved_for is not None
    assert "c" in offer(s, ask("c", kv_tokens=0), now=2)


@pytest.mark.parametrize("end", ["cancel", "slot"])
def test_a_reservation_ends_with_its_request_or_its_slot(end: str) -> None:
    s = scheduler(places=9, kv=100, reserve_after_us=0)
    offer(s, ask("r", kv_tokens=80))
    offer(s, ask("big", "c", kv_tokens=60))
    assert offer(s, ask("x", "d", kv_tokens=20), now=1) == []
    assert s.slots[0].reserved_for is not None
    if end == "cancel":
        s.cancel("big", 2)
    else:
        s.set_slot("s0", 2, ready=False)
    assert s.slots[0].reserved_for is None


def test_less_outstanding_work_first_and_a_cached_prefix_within_ten_percent() -> None:
    s = scheduler(slots=3, places=9)
    offer(s, ask("a", gpu_us=1_000), ask("b", gpu_us=1_090), ask("c", gpu_us=5_000))
    assert offer(s, ask("warm", cached_tokens={"s1": 700, "s2": 900}, gpu_us=1)) == ["warm"]
    assert s.requests["warm"].slot_index == 1
    offer(s, ask("cold", gpu_us=1))
    assert s.requests["cold"].slot_index == 0


# -- what admission sees


def test_one_place_and_three_to_wait_of_five_at_once() -> None:
    def arrive(s: Scheduler, count: int) -> list:
        answers = []
        for i in range(count):
            answer = decide(observed(s, max_queue=3))
            answers.append(answer.reason or answer.decision)
            if answer.decision is not Decision.REJECT:
                offer(s, ask(f"n{i}"))
        return answers

    assert arrive(scheduler(), 5) == [Decision.ADMIT] + [Decision.QUEUE] * 3 + [Reason.QUEUE_FULL]
    busy = scheduler()
    offer(busy, ask("running"))
    assert arrive(busy, 5) == [Decision.QUEUE] * 3 + [Reason.QUEUE_FULL] * 2


def test_wait_counts_work_of_the_same_or_higher_precedence_on_shared_slots() -> None:
    s = scheduler(slots=2)
    offer(s, ask("r1", gpu_us=700), ask("r2", gpu_us=900))
    offer(s, ask("c", gpu_us=300), ask("b", slug="batch", gpu_us=5_000))
    chat, batch = observed(s, now=100), observed(s, "batch", now=100)
    assert (chat.work_ahead_gpu_us, chat.first_free_us, chat.serving_slots) == (300, 600, 2)
    assert batch.work_ahead_gpu_us == 5_300


def test_in_reserved_the_other_kinds_work_is_not_ahead() -> None:
    s = reserved(places=1)
    offer(s, *(ask(f"c{i}", gpu_us=100) for i in range(9)))
    assert observed(s, "batch").work_ahead_gpu_us == 0


def test_largest_slot_counts_ready_or_not_free_memory_only_ready() -> None:
    s = Scheduler((CHAT,), [SlotSpec("x", 1, Band.FLEX, 50), SlotSpec("y", 1, Band.FLEX, 90)], Isolation.SHARED)
    s.set_slot("y", 0, ready=False)
    snapshot = observed(s)
    assert (snapshot.largest_slot_kv_tokens, snapshot.free_kv_tokens, snapshot.serving_slots) == (90, 50, 1)


def test_displaceable_is_the_newest_of_strictly_lower_precedence() -> None:
    s = scheduler()
    offer(s, ask("running"))
    assert s.displaceable("chat") is None
    offer(s, ask("b1", slug="batch"), ask("b2", "z", slug="batch", at=1), ask("c"))
    assert s.displaceable("chat") == "b2"
    assert s.displaceable("batch") is None
    assert s.cancel("b2", 3).phase is Phase.ENDED
    assert s.displaceable("chat") == "b1"


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_free_now_is_what_the_scheduler_then_does(seed: int) -> None:
    rng = random.Random(seed)
    classes = (CHAT, SchedulingClass(slug="bulk", kind=ClassKind.BATCH))
    s = Scheduler(
        classes,
        [SlotSpec(f"s{i}", rng.randint(1, 3), rng.choice(list(Band)), rng.choice([None, 60])) for i in range(3)],
        rng.choice([Isolation.SHARED, Isolation.RESERVED]),
        reserve_after_us=50,
    )
    now = 0
    for i in range(80):
        now += rng.randint(0, 40)
        slug, tenant, kv = rng.choice(["chat", "bulk"]), rng.choice("abc"), rng.randint(1, 60)
        snapshot = Snapshot(now, KeyView(), TenantView(tenant), ClassView(slug), RateCard(0, 0, 0))
        s.observe(snapshot, kv_tokens=kv, gpu_us=100, may_run_lent=True)
        started = offer(s, ask(i, tenant, slug, now, kv_tokens=kv, fits_drain=True), now=now)
        assert snapshot.free_now == (i in started)
        running = [r.id for r in s.requests.values() if r.phase is Phase.RUNNING]
        if running and rng.random() < 0.5:
            s.release(rng.choice(running), now)
            dispatch(s, now)
        if rng.random() < 0.1:
            state = rng.choice([SlotState.HOME, SlotState.LENT, SlotState.DRAINING])
            s.set_slot(rng.choice(["s0", "s1", "s2"]), now, state=state)
            dispatch(s, now)


def _state(s: Scheduler, now: int) -> object:
    """Everything that later decisions depend on."""
    return (
        [(r.id, r.phase, r.slot_index, r.expected_end_us, r.charged_work, r.attempt) for r in s.requests.values()],
        [(q.queued, q.queued_gpu_us, q.running, q.kv_floor_home, q.kv_floor_lent, q.reserve_due_us) for q in s.classes],
        [(slot.kv_free, slot.outstanding_gpu_us, slot.first_end_us, slot.class_counts) for slot in s.slots],
        [
            {t.slug: (t.accrue(now), t.backlogged, t.multiplier, t.running) for t in q.fair.tenants.values()}
            for q in s.classes
        ],
        s.timed_out(now),
    )


@given(fleets(), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_starting_at_once_is_queueing_and_being_next(fleet, seed: int) -> None:
    """Two schedulers see the same; one starts at once what it can. They never differ in anything."""
    rng, now, at_once = random.Random(seed), 0, 0
    pair = [Scheduler(fleet.classes, fleet.slots, fleet.isolation, reserve_after_us=50_000) for _ in range(2)]
    for s in pair:
        for queue in s.classes:
            s.set_weight(queue.spec.slug, "a", 3)
    for mine, theirs in zip(arrivals(fleet, seed), arrivals(fleet, seed), strict=True):
        now = max(now, mine.arrival_us)
        plain, quick = pair
        plain.offer(theirs, now)
        first = plain.next_dispatch(now)
        if quick.start_at_once(mine, now):
            at_once += 1
            assert first is not None and first.id == mine.id
        else:
            quick.offer(mine, now)
            second = quick.next_dispatch(now)
            assert (None if first is None else first.id) == (None if second is None else second.id)
        assert [r.id for r in dispatched(plain, now)] == [r.id for r in dispatched(quick, now)]
        assert _state(plain, now) == _state(quick, now)
        for _ in range(rng.choice([0, 1, 1, 2])):
            running = [r.id for r in plain.requests.values() if r.phase is Phase.RUNNING]
            if not running:
                break
            now += rng.randint(0, 9_000)
            ended, end, output = rng.choice(running), rng.choice(["release", "requeue", "cancel"]), rng.randint(0, 40)
            for s in pair:
                if end == "release":
                    s.release(ended, now, prompt_tokens=3, output_tokens=output, gpu_us=500)
                else:
                    getattr(s, end)(ended, now)
            assert [r.id for r in dispatched(plain, now)] == [r.id for r in dispatched(quick, now)]
            assert _state(plain, now) == _state(quick, now)
    event(f"at once: {at_once // 10}0s")


def dispatched(s: Scheduler, now: int) -> list[QueuedRequest]:
    return list(iter(lambda: s.next_dispatch(now), None))


# -- ends


def test_queue_timeout_takes_out_those_who_waited_longer() -> None:
    timed = SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE, queue_timeout_us=100)
    s = scheduler((timed,))
    offer(s, ask("r"), ask("w1"))
    offer(s, ask("w2", at=50), now=50)
    assert s.timed_out(100) == []
    assert [r.id for r in s.timed_out(101)] == ["w1"]
    s.requeue("r", 102)
    assert [r.id for r in s.timed_out(10_000)] == ["w2"]
    assert list(s.requests) == ["r"]


def test_one_queued_request_is_still_there_long_after_without_arrivals() -> None:
    s = scheduler()
    offer(s, ask("r"), ask("w", "quiet"))
    s.release("r", 10**12)
    assert dispatch(s, 10**12) == ["w"]


def test_cancelling_one_leaves_the_tenants_others_waiting() -> None:
    s = scheduler()
    offer(s, ask("r", "z"))
    offer(s, ask("w1"), ask("w2"))
    assert s.cancel("w1", 1).slot_index == -1
    s.release("r", 2)
    assert dispatch(s, 2) == ["w2"]
    s.set_slot("s0", 3, ready=False)
    offer(s, ask("w3"), ask("w4"))
    s.release("w2", 3)
    s.next_dispatch(3)
    s.cancel("w3", 4)
    s.set_slot("s0", 5, ready=True)
    assert dispatch(s, 5) == ["w4"]


def test_calls_about_strangers_are_refused() -> None:
    s = scheduler()
    offer(s, ask("r"))
    for call in (lambda: s.cancel("x", 0), lambda: s.release("x", 0), lambda: s.requeue("x", 0)):
        with pytest.raises(ValueError, match="not"):
            call()
    with pytest.raises(ValueError, match="already here"):
        s.offer(ask("r"), 0)


operations = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "release", "cancel", "requeue", "lend", "recall", "timeout"]),
        st.integers(0, 10**6),
    ),
    max_size=80,
)


@given(operations, st.sampled_from([Isolation.SHARED, Isolation.RESERVED]))
@settings(max_examples=150, deadline=None)
def test_nothing_is_held_after_every_request_ended_and_floors_hold_throughout(operations, isolation) -> None:
    classes = (
        SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE, queue_timeout_us=300, aging_us=200),
        SchedulingClass(slug="batch", kind=ClassKind.BATCH, work=WorkPolicy(WorkUnit.GPU_TIME)),
    )
    bands = {"i1": Band.INTERACTIVE, "b1": Band.BATCH, "f1": Band.FLEX}
    s = Scheduler(classes, [SlotSpec(n, 2, b, 100) for n, b in bands.items()], isolation, reserve_after_us=40)
    now = 0
    for i, (what, number) in enumerate(operations):
        rng = random.Random(number)
        now += number % 50
        held = list(s.requests.values())
        running = [r.id for r in held if r.phase is Phase.RUNNING]
        if what == "offer":
            safe = rng.random() < 0.5
            slug = rng.choice(["chat", "batch"])
            request = ask(i, rng.choice("abc"), slug, now, kv_tokens=rng.randint(1, 100), preemptible=safe)
            s.offer(request, now)
        elif what in ("release", "requeue") and running:
            getattr(s, what)(rng.choice(running), now)
        elif what == "cancel" and held:
            s.cancel(rng.choice(held).id, now)
        elif what == "timeout":
            s.timed_out(now)
        elif what == "lend":
            s.set_slot("f1", now, state=SlotState.LENT)
        elif what == "recall":
            s.set_slot("f1", now, state=SlotState.HOME)
        before = {slot.spec.name: set(slot.running) for slot in s.slots}
        dispatch(s, now)
        for slot in s.slots:
            assert len(slot.running) <= slot.places
            assert slot.kv_free == slot.kv_tokens - sum(r.kv_tokens for r in slot.running.values()) >= 0
            new = [s.requests[x] for x in set(slot.running) - before[slot.spec.name]]
            if isolation is Isolation.RESERVED and slot.spec.band is Band.INTERACTIVE:
                assert all(r.class_slug == "chat" for r in slot.running.values())
            if isolation is Isolation.RESERVED and slot.state is SlotState.LENT:
                assert all(r.class_slug == "batch" and r.may_run_lent for r in new)
        for queue in s.classes:
            of_class = [r for r in s.requests.values() if r.class_index == queue.index]
            waiting = [r for r in of_class if r.phase is Phase.QUEUED]
            assert (queue.queued, queue.running) == (len(waiting), len(of_class) - len(waiting))
            assert queue.queued_gpu_us == sum(r.gpu_us for r in waiting)
    for request in list(s.requests.values()):
        s.cancel(request.id, now)
    for slot in s.slots:
        assert (slot.running, slot.kv_free, slot.outstanding_gpu_us) == ({}, slot.kv_tokens, 0)
        assert (slot.reserved_for, slot.class_counts) == (None, [0, 0])
    for queue in s.classes:
        assert (queue.queued, queue.running, queue.queued_gpu_us) == (0, 0, 0)
        assert not queue.waiting and not queue.returned
        assert all(not tenant.running and not tenant.backlogged for tenant in queue.fair.tenants.values())
