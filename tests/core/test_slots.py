"""Which slot serves which class, and what a slot keeps of what runs on it."""

import pytest

from controlplane.core.queued_request import QueuedRequest
from controlplane.core.slot_states import Band, SlotState
from controlplane.core.slots import NO_END_US, ClassKind, Isolation, RunningSlot, SlotSpec, serves


def kinds(isolation: Isolation, band: Band, state: SlotState = SlotState.HOME, home: str | None = None) -> set[str]:
    return {
        slug
        for slug, kind in (("chat", ClassKind.INTERACTIVE), ("bulk", ClassKind.BATCH))
        if serves(isolation, band=band, state=state, home_class=home, class_slug=slug, kind=kind)
    }


def test_every_design_band_and_state() -> None:
    admitting = (SlotState.HOME, SlotState.LENT)
    for state in SlotState:
        for band in Band:
            assert kinds(Isolation.SHARED, band, state) == ({"chat", "bulk"} if state in admitting else set())
            if state not in admitting:
                assert kinds(Isolation.RESERVED, band, state) == set()
                assert kinds(Isolation.DEDICATED, band, state) == set()
    assert kinds(Isolation.RESERVED, Band.INTERACTIVE) == {"chat"}
    assert kinds(Isolation.RESERVED, Band.BATCH) == {"bulk"}
    assert kinds(Isolation.RESERVED, Band.FLEX) == {"chat"}
    assert kinds(Isolation.RESERVED, Band.FLEX, SlotState.LENT) == {"bulk"}
    assert kinds(Isolation.DEDICATED, Band.INTERACTIVE) == {"chat"}
    assert kinds(Isolation.DEDICATED, Band.BATCH) == {"bulk"}
    assert kinds(Isolation.DEDICATED, Band.BATCH, home="chat") == {"chat"}


def test_first_end_and_memory_follow_the_estimates() -> None:
    slot = RunningSlot(SlotSpec("s", 4, Band.FLEX, 100), 0, 1)
    one, two = (QueuedRequest(i, "t", "c", 0, gpu_us=g, kv_tokens=40) for i, g in ((1, 900), (2, 100)))
    for request in (one, two):
        request.class_index = 0
        slot.start(request, 0)
    # the second shares the slot with the first: twice its own time
    assert slot.first_end_us == 200
    assert [slot.memory_free_at_us(kv) for kv in (20, 60, 100, 101)] == [0, 200, 900, None]
    slot.stop(two)
    assert slot.first_end_us == 900
    slot.stop(one)
    assert (slot.first_end_us, slot.kv_free, slot.outstanding_gpu_us) == (NO_END_US, 100, 0)


def test_a_slot_needs_places_and_memory() -> None:
    with pytest.raises(ValueError, match="at least one place"):
        SlotSpec("s", 0, Band.FLEX)
    with pytest.raises(ValueError, match="KV memory"):
        SlotSpec("s", 1, Band.FLEX, 0)
