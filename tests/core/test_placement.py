"""Placement: least work, no herding on stale signals, longest prefix among the near."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.placement import SlotSignal, place

NOW = 10_000_000


def choose(*signals: SlotSignal, model: str | None = "m", kv: int = 10, rng: Random | None = None) -> str | None:
    found = place(signals, model=model, kv_tokens=kv, now_us=NOW, rng=rng or Random(1))
    return None if found is None else found.slot


def slot(name: str, work: int, **changes) -> SlotSignal:
    return SlotSignal(name, work, changes.pop("at", NOW), **changes)


def test_least_work_wins_and_the_name_breaks_ties() -> None:
    assert choose(slot("b", 5), slot("a", 9), slot("c", 5)) == "b"


def test_slots_that_may_not_take_it_are_skipped() -> None:
    assert (
        choose(
            slot("a", 0, ready=False),
            slot("b", 0, draining=True),
            slot("c", 0, models=frozenset({"x"})),
            slot("d", 0, free_kv_tokens=9),
            slot("e", 99, models=frozenset({"m"}), free_kv_tokens=10),
        )
        == "e"
    )
    assert choose(slot("a", 0, ready=False)) is None


def test_the_longest_prefix_within_ten_percent() -> None:
    assert choose(slot("a", 100), slot("b", 110, cached_prefix_tokens=50)) == "b"
    assert choose(slot("a", 100), slot("b", 111, cached_prefix_tokens=50)) == "a"


def test_fresh_signals_are_compared_in_full_stale_ones_two_at_a_time() -> None:
    fresh = [slot(f"s{i}", i) for i in range(8)]
    assert {choose(*fresh, rng=Random(seed)) for seed in range(50)} == {"s0"}
    at_the_edge = [slot(f"s{i}", i, at=NOW - 250_000) for i in range(8)]
    assert {choose(*at_the_edge, rng=Random(seed)) for seed in range(50)} == {"s0"}
    stale = [slot(f"s{i}", i, at=NOW - 250_001) for i in range(8)]
    rng = Random(7)
    counts = Counter(choose(*stale, rng=rng) for _ in range(2_000))
    # the least loaded of two random ones: the best slot gets 1/4 of them, the worst none
    assert 400 < counts["s0"] < 600
    assert counts["s7"] == 0


def test_the_same_seed_chooses_the_same() -> None:
    stale = [slot(f"s{i}", i, at=0) for i in range(8)]
    once, again = Random(3), Random(3)
    assert [choose(*stale, rng=once) for _ in range(20)] == [choose(*stale, rng=again) for _ in range(20)]


signals = st.lists(
    st.builds(
        SlotSignal,
        st.just(""),
        st.integers(0, 1_000),
        st.integers(NOW - 500_000, NOW),
        ready=st.booleans(),
        draining=st.booleans(),
        models=st.sampled_from([None, frozenset({"m"}), frozenset({"x"})]),
        free_kv_tokens=st.sampled_from([None, 5, 10, 50]),
        cached_prefix_tokens=st.sampled_from([0, 0, 30, 90]),
    ),
    max_size=7,
)


def named(given_signals: list[SlotSignal]) -> list[SlotSignal]:
    for at, signal in enumerate(given_signals):
        signal.slot = f"s{at}"
    return given_signals


@given(signals, st.booleans(), st.integers(0, 10**6))
def test_whoever_is_chosen_may_take_it_and_is_near_the_least(given_signals, all_fresh: bool, seed: int) -> None:
    candidates = named(given_signals)
    if all_fresh:
        for signal in candidates:
            signal.signal_at_us = max(signal.signal_at_us, NOW - 250_000)
    able = [
        s
        for s in candidates
        if s.ready and not s.draining and s.models != frozenset({"x"}) and s.free_kv_tokens in (None, 10, 50)
    ]
    found = place(candidates, model="m", kv_tokens=10, now_us=NOW, rng=Random(seed))
    assert (found is None) == (not able)
    if found is None:
        return
    assert found in able
    if all(NOW - s.signal_at_us <= 250_000 for s in able) or len(able) <= 2:
        near = [s for s in able if s.outstanding_gpu_us * 100 <= min(a.outstanding_gpu_us for a in able) * 110]
        assert found in near
        assert found.cached_prefix_tokens == max(s.cached_prefix_tokens for s in near)
    else:
        # one of two picked: at least one other is no better
        assert any(found.outstanding_gpu_us * 100 <= s.outstanding_gpu_us * 110 for s in able if s is not found)


@given(st.integers(3, 10), st.integers(0, 10**6))
def test_stale_signals_do_not_herd(count: int, seed: int) -> None:
    """Of many who read the same old figures, the slot that looks best gets 2 in n, not all of them."""
    stale = [slot(f"s{i}", i, at=NOW - 250_001) for i in range(count)]
    rng = Random(seed)
    counts = Counter(choose(*stale, rng=rng) for _ in range(600))
    assert abs(counts["s0"] / 600 - 2 / count) < 0.12
    assert not counts[f"s{count - 1}"]
