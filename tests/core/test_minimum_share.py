"""The deficit of a minimum share."""

import pytest

from controlplane.core.minimum_share import MinimumShare
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.slot_states import Band
from controlplane.core.slots import RunningSlot, SlotSpec


def busy(counts: list[int]) -> RunningSlot:
    slot = RunningSlot(SlotSpec("s", 9, Band.BATCH), 0, len(counts))
    for index, count in enumerate(counts):
        for n in range(count):
            request = QueuedRequest(f"{index}.{n}", "t", "c", 0)
            request.class_index = index
            slot.start(request, 0)
    return slot


def test_grows_while_waiting_and_falls_while_served() -> None:
    share = MinimumShare([0, 200_000])
    share.settle(0, [busy([2, 0])], [1, 1], 2)
    share.settle(1_000, [busy([2, 0])], [1, 1], 2)
    assert share.deficits_us[1] == pytest.approx(200)
    share.settle(2_000, [busy([1, 1])], [1, 1], 2)
    assert share.deficits_us[1] == 0.0


def test_waits_for_a_backlog_and_for_work() -> None:
    share = MinimumShare([0, 200_000])
    share.settle(0, [], [0, 0], 2)
    share.settle(1_000, [busy([2, 0])], [1, 0], 2)
    share.settle(2_000, [busy([0, 0])], [1, 1], 2)
    assert share.deficits_us == [0.0, 0.0]


def test_is_clamped_to_a_minute_of_all_places() -> None:
    share = MinimumShare([0, 900_000])
    share.settle(0, [], [0, 0], 2)
    share.settle(10**12, [busy([1, 0])], [1, 1], 2)
    assert share.deficits_us[1] == 120_000_000


def test_places_are_rounded_up() -> None:
    share = MinimumShare([0, 100_000])
    assert [share.place_bound(1, places) for places in (1, 10, 11, 40)] == [1, 1, 2, 4]
    assert share.place_bound(0, 40) == 0


def test_shares_must_fit_into_one() -> None:
    with pytest.raises(ValueError, match="at most 1"):
        MinimumShare([600_000, 500_000])
