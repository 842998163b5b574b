"""Preemption: only where it is safe, no more than needed, and not twice for the same need."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controlplane.core.class_queue import SchedulingClass
from controlplane.core.fairness import WorkPolicy, WorkUnit
from controlplane.core.preemption import ATTEMPTS_MOST
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.scheduling import Scheduler
from controlplane.core.slot_states import Band
from controlplane.core.slots import ClassKind, Isolation, SlotSpec

CLASSES = (
    SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE),
    SchedulingClass(slug="bulk", kind=ClassKind.BATCH, precedence=1),
    SchedulingClass(slug="scraps", kind=ClassKind.BATCH, precedence=2),
)


def world(
    places: int = 2, kv: int | None = None, slots: int = 1, classes=CLASSES, isolation=Isolation.SHARED
) -> Scheduler:
    return Scheduler(classes, [SlotSpec(f"s{i}", places, Band.BATCH, kv) for i in range(slots)], isolation)


def start(s: Scheduler, id: str, slug: str = "bulk", now: int = 0, kv: int = 0, safe: bool = True, tenant: str = "t"):
    s.offer(QueuedRequest(id, tenant, slug, now, gpu_us=100, kv_tokens=kv, prompt_tokens=7, preemptible=safe), now)
    s.next_dispatch(now)


def names(s: Scheduler, now: int = 50) -> list:
    return [request.id for request in s.victims(now)]


def test_the_newest_of_the_lowest_class_goes_first() -> None:
    s = world(places=3)
    start(s, "old scraps", "scraps", 0)
    start(s, "new scraps", "scraps", 9)
    start(s, "bulk", "bulk", 20)
    start(s, "c", "chat", 30)
    assert names(s) == ["new scraps"]


def test_nothing_is_taken_while_it_fits() -> None:
    s = world()
    start(s, "b")
    start(s, "c", "chat")
    assert names(s) == []


@pytest.mark.parametrize("why", ["not safe", "bytes sent", "interactive", "reserved pool"])
def test_what_must_not_be_cancelled_is_not(why: str) -> None:
    s = world(places=1, isolation=Isolation.RESERVED if why == "reserved pool" else Isolation.SHARED)
    start(s, "r", "chat" if why == "interactive" else "bulk", safe=why != "not safe")
    if why == "bytes sent":
        s.produced("r", 1)
    start(s, "c", "chat", 10)
    assert names(s) == []


def test_a_need_is_reclaimed_once() -> None:
    s = world(places=3)
    for name in ("b1", "b2", "b3"):
        start(s, name)
    start(s, "c1", "chat", 10)
    assert len(names(s)) == 1
    assert names(s, 60) == []
    start(s, "c2", "chat", 70)
    assert len(names(s, 70)) <= 1
    assert sum(r.reclaiming for r in s.requests.values()) <= 2


def test_a_need_is_not_reclaimed_again_on_another_slot() -> None:
    s = world(places=1, slots=2)
    start(s, "b1")
    start(s, "b2", tenant="u")
    start(s, "c", "chat", 10)
    assert len(names(s)) == 1
    assert names(s, 60) == []


def test_minimal_set_for_memory_on_the_cheapest_slot() -> None:
    s = world(places=9, kv=100)
    for name, kv in (("small", 20), ("middle", 30), ("large", 50)):
        start(s, name, kv=kv, tenant=name)
    start(s, "c", "chat", 10, kv=40)
    assert names(s) == ["large"]
    again = world(places=9, kv=100)
    for name, kv in (("x", 30), ("y", 30), ("z", 40)):
        start(again, name, kv=kv, tenant=name)
    start(again, "c", "chat", 10, kv=60)
    assert len(names(again)) == 2


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["bulk", "scraps"]), st.integers(1, 4), st.booleans()), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(0, 10),
)
@example([("bulk", 4, True), ("bulk", 2, True), ("bulk", 2, True), ("bulk", 2, True)], 5, 6)
def test_no_other_victims_would_be_fewer_nor_as_few_and_sooner_in_order(running, places: int, need: int) -> None:
    """Against every set of victims that there is: three small ones are not cancelled where a large and a small do."""
    s = world(places=places, kv=10)
    for at, (slug, kv, safe) in enumerate(running):
        start(s, f"r{at}", slug, at, kv=kv, safe=safe, tenant=f"t{at}")
    start(s, "c", "chat", len(running), kv=need)
    slot = s.slots[0]
    if "c" in slot.running:
        return
    can = sorted((r for r in slot.running.values() if r.preemptible), key=lambda r: (-r.class_index, 50 - r.started_us))
    free = slot.kv_free

    def enough(some) -> bool:
        return len(slot.running) - len(some) < places and free + sum(r.kv_tokens for r in some) >= need

    every = (some for count in range(1, len(can) + 1) for some in combinations(can, count))
    best = next((some for some in every if enough(some)), ())
    assert names(s) == [request.id for request in best]


def test_back_at_the_head_with_its_arrival_and_no_double_charge() -> None:
    s = world(places=1)
    start(s, "first")
    start(s, "second", now=1)
    start(s, "c", "chat", 10)
    assert names(s) == ["first"]
    victim = s.requeue("first", 55)
    assert (victim.attempt, victim.arrival_us, victim.reclaiming) == (2, 0, False)
    assert s.class_queue("bulk").fair.tenants["t"].counter == 0
    assert s.next_dispatch(55).id == "c"
    s.release("c", 60)
    assert s.next_dispatch(60).id == "first"


def test_linear_charges_are_taken_back_as_well() -> None:
    classes = (CLASSES[0], SchedulingClass(slug="bulk", kind=ClassKind.BATCH, work=WorkPolicy(WorkUnit.GPU_TIME)))
    s = world(places=1, classes=classes)
    start(s, "b")
    start(s, "b2", now=1, tenant="u")
    start(s, "c", "chat", 10)
    assert s.class_queue("bulk").fair.tenants["t"].accrue(50) > 0
    s.requeue("b", 50)
    assert s.class_queue("bulk").fair.tenants["t"].counter == 0


def test_a_class_within_its_minimum_share_is_left_alone() -> None:
    share = SchedulingClass(slug="bulk", kind=ClassKind.BATCH, min_share_ppm=500_000)
    s = world(places=2, classes=(CLASSES[0], share))
    for name in ("c1", "c2", "c3"):
        start(s, name, "chat")
    s.offer(QueuedRequest("b", "t", "bulk", 0, gpu_us=100, preemptible=True), 0)
    s.release("c1", 1_000)
    assert s.next_dispatch(1_000).id == "b"
    assert names(s, 1_001) == []


def test_a_class_that_keeps_its_share_is_passed_over_and_another_one_gives() -> None:
    """The protected class is the lower one and is looked at first: that ends nothing."""
    share = SchedulingClass(slug="scraps", kind=ClassKind.BATCH, precedence=2, min_share_ppm=500_000)
    s = world(places=2, classes=(*CLASSES[:2], share))
    start(s, "c1", "chat")
    start(s, "c2", "chat")
    start(s, "kept", "scraps")
    s.release("c1", 1_000)
    assert s.next_dispatch(1_000).id == "kept"
    s.release("c2", 1_001)
    start(s, "given", "bulk", 1_001)
    start(s, "c", "chat", 1_002)
    assert names(s, 1_003) == ["given"]


def test_the_same_request_gives_way_so_often_and_no_more_while_others_go_on() -> None:
    """What was cancelled begins again as the newest, which is what the next one cancels: it would never end."""
    s, given_way = world(places=2), Counter()
    start(s, "b1", now=0)
    start(s, "b2", now=1)
    for turn in range(20):
        now, chat = 100 * (turn + 1), f"c{turn}"
        s.offer(QueuedRequest(chat, "t", "chat", now, gpu_us=10), now)
        for victim in s.victims(now):
            given_way[victim.id] += 1
            s.requeue(victim.id, now)
        started = s.next_dispatch(now)
        if started is None:
            # everything that runs has given way often enough: the newcomer waits for an end
            assert given_way == {"b1": ATTEMPTS_MOST - 1, "b2": ATTEMPTS_MOST - 1}
            s.release("b1", now + 10)
            started = s.next_dispatch(now + 10)
            assert started is not None and started.id == chat, "newcomers go on"
            return
        assert started.id == chat
        s.release(chat, now + 50)
        assert s.next_dispatch(now + 50) is not None, "what gave way begins again at once"
    raise AssertionError(f"no end of it: {given_way}")
