"""Slot time: exact per minute, told once, never taken back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.agent.meters import MeteredSlot

MINUTE_US = 60_000_000
START_US = 1_800_000_000_000_000

attempts = st.lists(
    st.tuples(st.integers(0, 200_000_000), st.integers(0, 90_000_000), st.booleans(), st.booleans()), max_size=8
)


@settings(max_examples=80, deadline=None)
@given(attempts, st.integers(3_000_001, 90_000_000))
def test_every_minutes_shares_add_up_to_its_busy_time(runs, every_us):
    """Whatever overlaps, is delivered, fails, and whenever reports are cut."""
    slot = MeteredSlot(7, START_US)
    events = []
    for serial, (at, length, delivered, charged) in enumerate(runs):
        begin_us, end_us = START_US + at, START_US + at + length
        events.append((begin_us, 0, serial, lambda s=serial, t=begin_us: slot.start(s, 1, 2, t)))
        if delivered:
            events.append((begin_us + length // 2, 1, serial, lambda s=serial: slot.delivered(s)))
        events.append((end_us, 2, serial, lambda s=serial, t=end_us, c=charged: slot.end(s, t, charged=c)))
    last_us = max([START_US, *(event[0] for event in events)]) + 1
    for at_us in range(START_US, last_us + every_us, every_us):
        events.append((at_us, 3, 0, lambda t=at_us: collect(t)))
    events.append((last_us + every_us, 3, 0, lambda: collect(last_us + every_us)))
    used: dict[int, int] = {}
    busy: dict[int, int] = {}
    observed: dict[int, int] = {}

    def collect(at_us: int) -> None:
        usage, meters = slot.collect(at_us, warming=False, broken=False)
        for row in usage:
            assert row.gpu_us > 0
            used[row.minute_us] = used.get(row.minute_us, 0) + row.gpu_us
        for meter in meters:
            assert meter.busy_us >= 0 <= meter.observed_us
            busy[meter.minute_us] = busy.get(meter.minute_us, 0) + meter.busy_us
            observed[meter.minute_us] = observed.get(meter.minute_us, 0) + meter.observed_us

    for _, _, _, act in sorted(events, key=lambda event: event[:3]):
        act()
    assert used == {minute: us for minute, us in busy.items() if us}
    assert max(observed.values()) <= MINUTE_US
    assert all(busy[minute] <= observed[minute] for minute in busy)
    assert not slot.holds_back


def test_repeated_work_is_told_apart_in_the_minutes_it_was_used():
    slot = MeteredSlot(7, START_US)
    slot.start(1, 10, 20, START_US)
    minute = START_US - START_US % MINUTE_US
    half_us = minute + MINUTE_US - START_US + 5_000_000
    assert slot.collect(START_US + 1_000_000, warming=False, broken=False)[0] == [], "not known yet who pays"
    slot.end(1, START_US + half_us, charged=False)
    usage, _ = slot.collect(START_US + half_us, warming=False, broken=False)
    assert [(row.minute_us, row.charged) for row in usage] == [(minute, False), (minute + MINUTE_US, False)]
    assert sum(row.gpu_us for row in usage) == half_us


def test_delivered_time_is_told_while_it_runs():
    slot = MeteredSlot(7, START_US)
    slot.start(1, 10, 20, START_US)
    slot.delivered(1)
    (row,), _ = slot.collect(START_US + 1_000_000, warming=False, broken=False)
    assert (row.charged, row.gpu_us) == (True, 1_000_000)
    assert slot.end(1, START_US + 3_000_000, charged=False) == 3_000_000
    (row,), _ = slot.collect(START_US + 3_000_000, warming=False, broken=False)
    assert (row.charged, row.gpu_us) == (True, 2_000_000), "what was told stays"


def test_warming_and_broken_are_observed_time():
    slot = MeteredSlot(7, START_US)
    (meter,) = slot.collect(START_US + 10, warming=True, broken=False)[1]
    assert (meter.observed_us, meter.warming_us, meter.broken_us, meter.busy_us) == (10, 10, 0, 0)
