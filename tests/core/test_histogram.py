import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.histogram import (
    COUNT_MAX_PACKED,
    ZERO_INDEX,
    Histogram,
    WindowHistogram,
    bucket_index,
    lower_edge_us,
    merge_all,
    rank_of,
    upper_edge_us,
)

DURATIONS = st.one_of(st.integers(0, 100), st.integers(0, 10**12))
SAMPLES = st.lists(DURATIONS, max_size=60)


def histogram_of(samples: list[int]) -> Histogram:
    histogram = Histogram()
    for us in samples:
        histogram.record(us)
    return histogram


@given(SAMPLES, st.lists(DURATIONS.flatmap(lambda us: st.lists(st.just(us), max_size=4)), max_size=20))
def test_many_at_once_count_as_one_by_one(before: list[int], runs: list[list[int]]) -> None:
    together, samples = histogram_of(before), [us for run in runs for us in run]
    together.record_all(samples)
    assert together == histogram_of(before + samples)


@given(st.integers(1, 2**48))
def test_a_duration_lies_in_its_bucket_and_the_scheme_is_within_2_2_percent(us: int) -> None:
    index = bucket_index(us)
    low, high = lower_edge_us(index), lower_edge_us(index + 1)
    assert low < us * (1 + 1e-12)
    assert us <= high * (1 + 1e-12)
    middle = 2 * low * high / (low + high)
    assert abs(middle - us) / us <= 0.0222
    assert us <= upper_edge_us(index) <= us * 2 ** (1 / 16)


@pytest.mark.parametrize("octave", range(48))
def test_powers_of_two_close_their_bucket(octave: int) -> None:
    assert bucket_index(2**octave) == 16 * octave - 1
    assert upper_edge_us(bucket_index(2**octave)) == 2**octave
    if octave >= 5:
        assert bucket_index(2**octave + 1) == 16 * octave


@pytest.mark.parametrize("octave", range(40))
def test_every_edge_is_where_whole_numbers_have_it(octave: int) -> None:
    for step in range(16):
        index = 16 * octave + step
        edge = int(2 ** ((index + 1) / 16))
        for us in range(max(1, edge - 2), edge + 3):
            # us <= 2^((i + 1) / 16) without a root: us^16 <= 2^(i + 1)
            found = bucket_index(us)
            assert us**16 <= 1 << found + 1 and (found < 0 or us**16 > 1 << found)


def test_zero_has_its_own_bucket_and_a_negative_duration_is_refused() -> None:
    assert bucket_index(0) == ZERO_INDEX
    assert histogram_of([0, 0, 0, 8]).quantile_us(0.5) == 0
    with pytest.raises(ValueError, match="never negative"):
        bucket_index(-1)


@given(SAMPLES, SAMPLES, SAMPLES)
def test_merging_is_adding_in_any_order(a: list[int], b: list[int], c: list[int]) -> None:
    left = merge_all([merge_all([histogram_of(a), histogram_of(b)]), histogram_of(c)])
    right = merge_all([histogram_of(c), merge_all([histogram_of(b), histogram_of(a)])])
    assert left == right == histogram_of(a + b + c)
    assert left.count == len(a + b + c)


@given(SAMPLES, SAMPLES)
def test_every_form_round_trips_and_joined_bytes_merge(a: list[int], b: list[int]) -> None:
    first, second = histogram_of(a), histogram_of(b)
    assert Histogram.from_sparse(first.to_sparse()) == first
    assert Histogram.from_bytes(first.to_bytes() + second.to_bytes()) == merge_all([first, second])
    assert len(first.to_bytes()) == 6 * len(first.counts)


def test_counts_past_the_packed_width_keep_their_value() -> None:
    histogram = Histogram([(100, 3 * COUNT_MAX_PACKED + 7)])
    assert Histogram.from_bytes(histogram.to_bytes()) == histogram


@pytest.mark.parametrize("pairs", [[[1024, 1]], [[-2, 1]], [[5, -1]]])
def test_nonsense_from_the_wire_is_refused(pairs: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="bucket"):
        Histogram.from_sparse(pairs)


def test_a_torn_packed_histogram_is_refused() -> None:
    with pytest.raises(ValueError, match="6 bytes"):
        Histogram.from_bytes(b"\x00" * 7)


@given(st.lists(DURATIONS, min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.9, 0.95, 0.99, 1.0]))
def test_a_quantile_is_the_upper_edge_of_the_bucket_of_the_ranked_sample(samples: list[int], q: float) -> None:
    ranked = sorted(samples)[math.ceil(round(q * len(samples), 9)) - 1]
    assert histogram_of(samples).quantile_us(q) == upper_edge_us(bucket_index(ranked))


def test_ranks_are_free_of_float_error() -> None:
    assert rank_of(0.07, 100) == 7
    assert rank_of(0.95, 20) == 19
    assert rank_of(0.001, 3) == 1
    with pytest.raises(ValueError, match="quantile"):
        rank_of(0, 10)


def test_no_sample_has_no_quantile() -> None:
    assert Histogram().quantile_us(0.95) is None
    assert not Histogram()


def test_a_slow_agent_shows_in_the_fleet_percentile() -> None:
    agents = [histogram_of([100_000] * 1_000) for _ in range(7)] + [histogram_of([8_000_000] * 1_000)]
    p99_us = merge_all(agents).quantile_us(0.99)
    assert p99_us is not None
    assert 8_000_000 <= p99_us <= 8_000_000 * 2 ** (1 / 16)
    # what averaging the agents' percentiles would have shown
    average = sum(agent.quantile_us(0.99) or 0 for agent in agents) / len(agents)
    assert average < 1_200_000


def test_it_exports_as_an_opentelemetry_data_point() -> None:
    point = histogram_of([0, 1, 2, 2]).to_otel()
    assert point["scale"] == 4
    assert (point["count"], point["zero_count"]) == (4, 1)
    assert point["positive"]["offset"] == -1
    assert point["positive"]["bucket_counts"] == [1] + [0] * 15 + [2]
    assert Histogram().to_otel()["positive"] == {"offset": 0, "bucket_counts": []}


def test_count_at_most_never_overstates() -> None:
    histogram = histogram_of([10, 100, 1_000])
    assert histogram.count_at_most(100) == 1
    assert histogram.count_at_most(upper_edge_us(bucket_index(100))) == 2


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(0, 10**7)), min_size=1, max_size=60))
def test_a_window_holds_the_samples_of_its_steps(gaps: list[tuple[int, int]]) -> None:
    window = WindowHistogram(window_us=10_000_000, step_us=1_000_000)
    now, seen = 5_000_000_000, []
    for gap, us in gaps:
        now += gap
        window.record(us, now)
        seen.append((now, us))
        oldest = now // 1_000_000 - 10
        expected = histogram_of([us for at, us in seen if at // 1_000_000 >= oldest])
        assert window.snapshot(now) == expected
        assert window.quantile_us(0.95, now) == expected.quantile_us(0.95)
    assert not window.snapshot(now + 12_000_000)


def test_waiting_ages_are_samples_of_the_instant_only() -> None:
    window = WindowHistogram()
    window.record(1_000, 0)
    assert window.quantile_us(0.95, 0, waiting_us=[5_000_000]) == upper_edge_us(bucket_index(5_000_000))
    assert window.quantile_us(0.95, 0) == upper_edge_us(bucket_index(1_000))
    window.merge(histogram_of([9_000_000] * 99), 1_000_000)
    assert window.quantile_us(0.95, 1_000_000) == upper_edge_us(bucket_index(9_000_000))
    assert window.quantile_us(0.95, 200_000_000) is None
    with pytest.raises(ValueError, match="multiple"):
        WindowHistogram(window_us=10, step_us=3)
