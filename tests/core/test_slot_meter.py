from collections import defaultdict
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.slot_meter import US_PER_MINUTE, Run, SlotMeter, share_gpu_time

SPANS = st.lists(
    st.tuples(
        st.integers(0, 5 * US_PER_MINUTE), st.integers(0, 3 * US_PER_MINUTE), st.integers(1, 5), st.sampled_from("abc")
    ),
    min_size=1,
    max_size=25,
)


def runs_of(spans: list[tuple[int, int, int, str]]) -> list[Run]:
    return [
        Run(f"r{at}", start, start + length, weight, tenant, "chat" if at % 2 else "bulk")
        for at, (start, length, weight, tenant) in enumerate(spans)
    ]


def exact_shares(runs: list[Run]) -> dict[str, Fraction]:
    edges = sorted({edge for run in runs for edge in (run.start_us, run.end_us)})
    shares = {run.request_id: Fraction(0) for run in runs}
    for left, right in pairwise(edges):
        here = [run for run in runs if run.start_us <= left and run.end_us >= right]
        whole = sum(run.weight for run in here)
        for run in here:
            shares[run.request_id] += Fraction((right - left) * run.weight, whole)
    return shares


def busy_us(runs: list[Run]) -> int:
    edges = sorted({edge for run in runs for edge in (run.start_us, run.end_us)})
    return sum(
        right - left
        for left, right in pairwise(edges)
        if any(run.start_us <= left and run.end_us >= right for run in runs)
    )


@settings(max_examples=150, deadline=None)
@given(SPANS)
def test_shares_add_up_to_the_busy_time_exactly_and_stay_fair(spans: list[tuple[int, int, int, str]]) -> None:
    runs = runs_of(spans)
    shares = share_gpu_time(runs)
    assert sum(shares.values()) == busy_us(runs)
    exact = exact_shares(runs)
    # a reading settles each minute, and a settlement moves less than two microseconds; so does each end beside a run
    assert all(abs(shares[name] - exact[name]) <= 2 * (9 + 2) for name in shares)
    assert min(shares.values()) >= 0


def events_of(runs: list[Run]) -> list[tuple[int, int, Run]]:
    """(instant, kind, run) in order; kind 1 is a start."""
    return sorted(
        [(run.end_us, 0 if run.end_us > run.start_us else 2, run) for run in runs]
        + [(run.start_us, 1, run) for run in runs],
        key=lambda event: (event[0], event[1], event[2].request_id),
    )


@settings(max_examples=150, deadline=None)
@given(SPANS, st.integers(1, 100_000_000))
def test_collected_minutes_add_up_however_often_they_are_read(
    spans: list[tuple[int, int, int, str]], every_us: int
) -> None:
    runs = runs_of(spans)
    events = events_of(runs)
    meter, shares, busy = SlotMeter(), defaultdict(int), defaultdict(int)
    totals: dict[str, int] = {}

    def collect(at_us: int) -> None:
        minutes = meter.collect(at_us)
        per_minute: dict[int, int] = defaultdict(int)
        for key, us in minutes.gpu_us_by_key.items():
            assert us > 0
            shares[key] += us
            per_minute[key[0]] += us
        assert per_minute == minutes.busy_us_by_minute
        for minute, us in minutes.busy_us_by_minute.items():
            busy[minute] += us

    reading = 0
    for at_us, kind, run in events:
        while reading + every_us <= at_us and at_us // every_us < 200:
            reading += every_us
            collect(reading)
        if kind == 1:
            meter.start(run.request_id, at_us, tenant=run.tenant, class_=run.class_, weight=run.weight)
        else:
            totals[run.request_id] = meter.end(run.request_id, at_us)
    collect(events[-1][0])
    assert sum(busy.values()) == meter.busy_us == busy_us(runs) == sum(totals.values())
    assert all(us <= US_PER_MINUTE and minute % US_PER_MINUTE == 0 for minute, us in busy.items())
    by_tenant: dict[tuple[str, str], int] = defaultdict(int)
    for (_, tenant, class_), us in shares.items():
        by_tenant[tenant, class_] += us
    by_run: dict[tuple[str, str], int] = defaultdict(int)
    for run in runs:
        by_run[run.tenant, run.class_] += totals[run.request_id]
    assert all(by_tenant[key] == us for key, us in by_run.items())


@given(SPANS)
def test_who_keeps_no_minutes_gives_each_request_the_same_time(spans: list[tuple[int, int, int, str]]) -> None:
    runs = runs_of(spans)
    told, untold = SlotMeter(), SlotMeter(by_minute=False)
    for at_us, kind, run in events_of(runs):
        if kind == 1:
            stay = untold.start(run.request_id, at_us, weight=run.weight)
            assert stay.request_id == run.request_id
            told.start(run.request_id, at_us, run.tenant, run.class_, run.weight)
        else:
            assert untold.end(run.request_id, at_us) == told.end(run.request_id, at_us)
    at_us = max((run.end_us for run in runs), default=0)
    assert not untold.collect(at_us).gpu_us_by_key and (told.collect(at_us).gpu_us_by_key or not told.busy_us)


def test_what_is_busy_for_days_is_counted_in_small_numbers() -> None:
    meter, day_us = SlotMeter(), 86_400_000_000
    meter.start("long", 0)
    for hour in range(48):
        meter.start(hour, hour * day_us // 24)
        meter.end(hour, hour * day_us // 24 + 1_000_000)
        assert meter._virtual <= US_PER_MINUTE << 32
    assert meter.end("long", 2 * day_us) == 2 * day_us - 48 * 500_000


def test_weights_share_each_instant() -> None:
    shares = share_gpu_time([Run("a", 0, 100, 3), Run("b", 0, 200, 1)])
    assert shares == {"a": 75, "b": 125}


def test_a_long_run_beside_many_short_ones_gathers_no_rounding() -> None:
    short = [Run(f"s{at}-{side}", at * 10, at * 10 + 10) for at in range(300) for side in "ab"]
    shares = share_gpu_time([Run("long", 0, 3_000), *short])
    # a third each: what divisions leave over must not pile up on the one that stays or the last to leave
    assert sum(shares.values()) == 3_000
    assert abs(shares.pop("long") - 1_000) <= 2
    assert set(shares.values()) <= {3, 4, 5}


def test_a_run_over_minutes_is_booked_minute_by_minute() -> None:
    meter = SlotMeter()
    meter.start("a", 30_000_000, tenant="acme", class_="chat")
    assert meter.end("a", 150_000_000) == 120_000_000
    minutes = meter.collect(150_000_000)
    booked = {
        (0, "acme", "chat"): 30_000_000,
        (60_000_000, "acme", "chat"): 60_000_000,
        (120_000_000, "acme", "chat"): 30_000_000,
    }
    assert minutes.gpu_us_by_key == booked
    assert minutes.busy_us_by_minute == {0: 30_000_000, 60_000_000: 60_000_000, 120_000_000: 30_000_000}
    assert meter.collect(200_000_000).gpu_us_by_key == {}


def test_a_weight_may_change_while_running() -> None:
    meter = SlotMeter()
    meter.start("a", 0)
    meter.start("b", 0)
    meter.reweigh("b", 100, 3)
    assert meter.end("a", 200) == 50 + 25
    assert meter.end("b", 200) == 50 + 75
    assert meter.running == 0


def test_illegal_calls_say_whose_fault_it_is() -> None:
    meter = SlotMeter()
    meter.start("a", 10)
    with pytest.raises(ValueError, match="already runs"):
        meter.start("a", 10)
    with pytest.raises(ValueError, match="positive integer"):
        meter.start("b", 10, weight=0)
    with pytest.raises(ValueError, match="went back"):
        meter.end("a", 9)
    with pytest.raises(ValueError, match="went back"):
        meter.start("b", 9)
    with pytest.raises(KeyError):
        meter.end("b", 10)
    with pytest.raises(ValueError, match="ends before"):
        share_gpu_time([Run("a", 2, 1)])
