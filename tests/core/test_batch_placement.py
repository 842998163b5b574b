"""Requests that run together are put together: they join an open batch of their shape before slots are compared."""

from controlplane.core.queued_request import QueuedRequest
from controlplane.core.scheduling import Scheduler
from controlplane.core.slot_states import Band
from controlplane.core.slots import Isolation, SlotSpec
from tests.core.scheduling_worlds import CHAT


def scheduler() -> Scheduler:
    return Scheduler((CHAT,), [SlotSpec(name, 2, Band.INTERACTIVE) for name in ("s1", "s2")], Isolation.SHARED)


def put(s: Scheduler, number: int, shape: str = "") -> str:
    """The slot on which a request starts."""
    s.offer(QueuedRequest(number, "acme", "chat", number, gpu_us=1_000, batch_shape=shape), number)
    started = s.next_dispatch(number)
    assert started is not None and started.id == number
    return s.slots[started.slot_index].spec.name


def test_a_request_joins_the_batch_of_its_shape_that_is_open() -> None:
    s = scheduler()
    assert put(s, 1, "short") == "s1"
    s.slots[0].open_batches.add("short")
    assert put(s, 2, "short") == "s1", "although the other slot has nothing to do"


def test_another_shape_goes_where_there_is_less_work() -> None:
    s = scheduler()
    put(s, 1, "short")
    s.slots[0].open_batches.add("short")
    assert put(s, 2, "long") == "s2"
    assert put(s, 3) in ("s1", "s2")


def test_a_batch_on_a_full_slot_is_joined_by_nobody() -> None:
    s = scheduler()
    s.slots[0].open_batches.add("short")
    assert [put(s, number, "short") for number in (1, 2, 3)] == ["s1", "s1", "s2"]


def test_once_it_has_closed_the_least_work_decides_again() -> None:
    s = scheduler()
    put(s, 1, "short")
    s.slots[0].open_batches.add("short")
    s.batch_closed("s1", "short")
    s.batch_closed("a slot that left", "short")
    assert put(s, 2, "short") == "s2"
