"""Order within one tenant and class."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.size_classes import DeadlineQueue, SizeClassQueue, size_class_of


def request(id: int, arrival: int, size: int = 0, deadline: int | None = None):
    return SimpleNamespace(id=id, arrival_us=arrival, size_class=size, deadline_us=deadline, order=(arrival, id))


def drain(queue, now: int) -> list[int]:
    order = []
    while (head := queue.head(now)) is not None:
        queue.remove(head)
        order.append(head.id)
    assert len(queue) == 0
    return order


@pytest.mark.parametrize(("gpu_us", "size"), [(0, 0), (250_000, 0), (250_001, 1), (2_000_000, 1), (2_000_001, 2)])
def test_three_size_classes_by_default(gpu_us: int, size: int) -> None:
    assert size_class_of(gpu_us, (250_000, 2_000_000)) == size


def test_smallest_first_then_first_come() -> None:
    queue = SizeClassQueue(3, None)
    for item in (request(1, 0, 2), request(2, 1, 0), request(3, 2, 1), request(4, 3, 0)):
        queue.push(item)
    assert drain(queue, 10**9) == [2, 4, 3, 1]


def test_a_request_older_than_the_aging_bound_goes_first() -> None:
    queue = SizeClassQueue(3, 100)
    queue.push(request(1, 0, 2))
    queue.push(request(2, 90, 0))
    assert queue.head(100).id == 2
    assert queue.head(101).id == 1


def test_same_instant_goes_by_id_however_it_is_pushed() -> None:
    queue = SizeClassQueue(1, None)
    for item in (request(3, 5), request(1, 5), request(2, 5)):
        queue.push(item)
    assert drain(queue, 5) == [1, 2, 3]


def test_preempted_goes_back_to_the_head_but_not_before_an_aged_one() -> None:
    queue = SizeClassQueue(2, 100)
    queue.push(request(1, 0, 1))
    queue.push(request(3, 60, 0))
    queue.push_back(request(2, 50, 1))
    assert queue.head(80).id == 2
    assert queue.head(101).id == 1


def test_deadlines_first_best_effort_last() -> None:
    queue = DeadlineQueue(None)
    for item in (request(1, 0, deadline=None), request(2, 1, deadline=900), request(3, 2, deadline=500)):
        queue.push(item)
    queue.push_back(request(4, 1, deadline=999))
    assert drain(queue, 10) == [4, 3, 2, 1]


def test_aging_holds_for_batch_as_well() -> None:
    queue = DeadlineQueue(100)
    queue.push(request(1, 0, deadline=None))
    queue.push(request(2, 50, deadline=60))
    assert queue.head(100).id == 2
    assert queue.head(101).id == 1


def test_removed_entries_do_not_pile_up() -> None:
    queue = DeadlineQueue(None)
    for i in range(1_000):
        item = request(i, i, deadline=10_000 + i)
        queue.push(item)
        if i:
            queue.remove(item)
    assert len(queue) == 1
    assert len(queue._heap) < 40


def test_leads_says_whether_a_newcomer_would_be_the_head() -> None:
    queue = SizeClassQueue(3, 100)
    assert queue.leads(2, 0)
    queue.push(request(1, 0, 1))
    assert queue.leads(0, 50) and not queue.leads(1, 50) and not queue.leads(0, 101)
    batch = DeadlineQueue(None)
    batch.push(request(1, 0, deadline=100))
    assert batch.leads(99, 1) and not batch.leads(100, 1) and not batch.leads(None, 1)


operations = st.lists(
    st.tuples(st.sampled_from(["push", "take", "cancel"]), st.integers(0, 2), st.integers(0, 40), st.integers(0, 300)),
    max_size=60,
)


many_steps = st.lists(
    st.tuples(st.sampled_from(["push", "push", "push", "take", "give back", "cancel"]), st.integers(0, 2),
              st.integers(0, 40), st.integers(0, 10**6)),
    max_size=120,
)  # fmt: skip


@given(many_steps, st.sampled_from([50, 10**6, None]))
def test_the_head_is_what_a_plain_list_of_those_who_wait_says(steps, aging: int | None) -> None:
    queue, waiting, taken, now = SizeClassQueue(3, aging), [], [], 0
    for number, (what, size, step, which) in enumerate(steps):
        now += step
        if what == "push":
            waiting.append(item := request(number, now, size))
            item.lane = size + 1
            queue.push(item)
        elif what == "take" and waiting:
            taken.append(head := queue.head(now))
            waiting.remove(head)
            queue.remove(head)
        elif what == "give back" and taken:
            waiting.append(item := taken.pop(which % len(taken)))
            item.lane = 0
            queue.push_back(item)
        elif what == "cancel" and waiting:
            queue.remove(waiting.pop(which % len(waiting)))
        aged = [] if aging is None else [item for item in waiting if now - item.arrival_us > aging]
        head = min(aged or waiting, key=lambda item: item.order if aged else (item.lane, item.order), default=None)
        assert queue.head(now) is head
        assert len(queue) == len(waiting)
        assert queue.leads(0, now) == (head is None or (not aged and head.lane > 1))


def test_of_many_that_leave_from_the_middle_the_others_stay_in_order() -> None:
    queue = SizeClassQueue(3, None)
    items = [request(number, number, max(0, number - 87)) for number in range(90)]
    for item in items:
        queue.push(item)
    for item in items[1:88]:
        queue.remove(item)
        assert queue._gone is None or len(queue._gone) <= 46, "they do not pile up"
    assert drain(queue, 0) == [0, 88, 89]
    assert queue._gone is None


def test_one_that_left_from_the_middle_may_come_again() -> None:
    queue = SizeClassQueue(3, None)
    for number in range(3):
        queue.push(request(number, number, 1))
    queue.remove(request(1, 1, 1))
    queue.push(request(1, 5, 0))
    assert drain(queue, 9) == [1, 0, 2]


@given(operations, st.booleans(), st.integers(0, 100))
@settings(max_examples=200)
def test_an_aged_request_is_overtaken_by_no_younger_one(operations, batch: bool, aging: int) -> None:
    queue = DeadlineQueue(aging) if batch else SizeClassQueue(3, aging)
    waiting, now, next_id = {}, 0, 0
    for what, size, step, deadline in operations:
        now += step
        if what == "push":
            item = request(next_id, now, size, None if deadline > 250 else now + deadline)
            next_id += 1
            waiting[item.id] = item
            queue.push(item)
        elif waiting and what == "cancel":
            queue.remove(waiting.pop(min(waiting)))
        elif waiting:
            head = queue.head(now)
            aged = [item for item in waiting.values() if now - item.arrival_us > aging]
            assert all(item.order >= head.order for item in aged)
            queue.remove(waiting.pop(head.id))
        assert len(queue) == len(waiting)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), max_size=12), st.booleans())
def test_one_that_passes_at_once_leaves_what_queueing_and_leaving_does(steps, sized: bool) -> None:
    queued, passed = [SizeClassQueue(3, 100) if sized else DeadlineQueue(100) for _ in range(2)]
    now = 0
    for number, (later, waited) in enumerate(steps):
        now += later
        one = request(number, max(0, now - waited))
        queued.push(one)
        assert queued.head(now) is one
        queued.remove(one)
        passed.passed(one.arrival_us, now)
        assert queued.ages_at_us(now) == passed.ages_at_us(now)
