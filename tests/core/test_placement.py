"""Placement: least work, no herding on stale signals, longest prefix among the near."""

from collections import Counter
from random import Random

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
