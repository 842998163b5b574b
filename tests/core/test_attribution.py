from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.attribution import (
    NO_CLASS,
    PLATFORM,
    Attribution,
    IdleMethod,
    IdlePolicy,
    LineKind,
    PoolInterval,
    Usage,
    attribute,
)
from controlplane.core.idle_time import Band, IdleCause, OwnedState, OwnerInterval, SlotTenure

HOUR = 3_600_000_000
RATE = 2_500_000_000
CLASSES = ("chat", "bulk", "embed")


def slot(name: str, class_: str | None, band: Band | None = None, **kind: Any) -> SlotTenure:
    return SlotTenure(name, (OwnerInterval(class_, 0, HOUR, **kind),), band)


def pool(slots: list[SlotTenure], usage: list[Usage], **more: Any) -> PoolInterval:
    return PoolInterval(0, HOUR, RATE, slots, usage, **more)


@st.composite
def pools(draw: st.DrawFn) -> PoolInterval:
    """Pools with owners that tile, usage that may disagree with the meter, every policy and price."""
    slots = []
    for name in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, HOUR - 1), max_size=3)))
        edges = [0, *cuts, HOUR]
        owners = tuple(
            OwnerInterval(
                draw(st.sampled_from([*CLASSES, None])),
                left,
                right,
                draw(st.sampled_from(OwnedState)),
                draw(st.sampled_from([*CLASSES, None])),
            )
            for left, right in pairwise(edges)
        )
        slots.append(SlotTenure(f"s{name}", owners, draw(st.sampled_from([*Band, None]))))
    by_slot = draw(st.booleans())
    usage = [
        Usage(
            draw(st.sampled_from("abcd")),
            draw(st.sampled_from(CLASSES)),
            us,
            draw(st.sampled_from(slots)).slot if by_slot else None,
            draw(st.integers(0, us)),
        )
        for us in draw(st.lists(st.integers(0, HOUR // 2), max_size=6))
    ]
    weights = st.dictionaries(st.sampled_from("abcd"), st.fractions(0, 10, max_denominator=50), max_size=3)
    policy = IdlePolicy(
        draw(st.sampled_from(IdleMethod)),
        draw(st.dictionaries(st.sampled_from(CLASSES), st.sampled_from(IdleMethod), max_size=2)),
        draw(st.dictionaries(st.sampled_from(Band), st.sampled_from(IdleMethod), max_size=2)),
        draw(st.dictionaries(st.sampled_from([*CLASSES, NO_CLASS]), weights, max_size=3)),
    )
    start, end = draw(st.tuples(st.integers(0, HOUR // 2), st.integers(HOUR // 2 + 1, HOUR)))
    rate = draw(st.integers(0, 10**11))
    return PoolInterval(start, end, rate, slots, usage, policy, draw(st.fractions(0, 1, max_denominator=100)))


@settings(max_examples=120)
@given(pools())
def test_lines_add_up_to_the_cost_of_the_pool_always(interval: PoolInterval) -> None:
    result = attribute(interval)
    owned_us = len(interval.slots) * (interval.end_us - interval.start_us)
    assert result.total_nanos == round(Fraction(owned_us * interval.rate_nanos_per_slot_hour, HOUR))
    assert result.owned_us == owned_us
    assert sum(line.nanos for line in result.lines) == result.total_nanos
    kinds = result.by_kind()
    assert kinds.get(LineKind.LEND_PRICE, 0) + kinds.get(LineKind.LEND_INCOME, 0) == 0
    idle = [line.nanos for line in result.lines if line.kind in set(IdleCause)]
    assert min(idle, default=0) >= 0
    assert attribute(interval) == result


@settings(max_examples=60, deadline=None)
@given(pools())
def test_the_order_of_the_input_changes_nothing(interval: PoolInterval) -> None:
    turned = PoolInterval(
        interval.start_us,
        interval.end_us,
        interval.rate_nanos_per_slot_hour,
        interval.slots[::-1],
        interval.usage[::-1],
        interval.idle,
        interval.lend_price_share,
    )
    first, second = attribute(interval), attribute(turned)
    assert first.lines == second.lines
    assert sorted(first.findings, key=repr) == sorted(second.findings, key=repr)


def test_busy_time_belongs_to_the_class_that_used_it() -> None:
    result = attribute(
        pool([slot("s", None), slot("t", None)], [Usage("a", "chat", HOUR), Usage("b", "bulk", HOUR // 2)])
    )
    assert result.by_tenant() == {"a": RATE, "b": RATE // 2, PLATFORM: RATE // 2}
    assert {(line.tenant, line.class_, line.kind) for line in result.lines} == {
        ("a", "chat", "direct"),
        ("b", "bulk", "direct"),
        (PLATFORM, NO_CLASS, "unused"),
    }


def test_shared_idle_goes_by_weights_only_where_they_are_given() -> None:
    policy = IdlePolicy(IdleMethod.USAGE, weights={NO_CLASS: {"a": Fraction(1), "b": Fraction(4)}})
    result = attribute(pool([slot("s", None)], [], idle=policy))
    assert result.by_tenant() == {"a": RATE // 5, "b": 4 * RATE // 5}


def test_a_meter_that_disagrees_is_unobserved_and_never_clamped() -> None:
    slots = [slot("s", "chat", Band.INTERACTIVE_FLOOR), slot("t", "chat", Band.INTERACTIVE_FLOOR)]
    result = attribute(pool(slots, [Usage("a", "chat", HOUR + 1, "s"), Usage("b", "chat", HOUR // 2, "t")]))
    (finding,) = result.findings
    assert (finding.slots, finding.owned_us, finding.busy_us) == (("s",), HOUR, HOUR + 1)
    assert result.by_kind()[IdleCause.UNOBSERVED] == RATE
    assert result.by_kind()[LineKind.DIRECT] == RATE // 2
    assert result.total_nanos == 2 * RATE
    assert result.busy_us == HOUR + 1 + HOUR // 2


def test_missing_samples_are_a_cause_and_idle_is_never_negative() -> None:
    gap = HOUR // 3
    owners = (OwnerInterval("chat", 0, gap, OwnedState.UNOBSERVED), OwnerInterval("chat", gap, HOUR))
    seen = SlotTenure("s", owners, Band.INTERACTIVE_FLOOR)
    result = attribute(pool([seen], [Usage("a", "chat", HOUR // 2, "s")], idle=IdlePolicy(IdleMethod.PLATFORM)))
    kinds = result.by_kind()
    assert kinds[IdleCause.UNOBSERVED] == round(Fraction(RATE, 3))
    assert kinds[IdleCause.INTERACTIVE_FLOOR_UNUSED] == round(Fraction(RATE, 6))


@pytest.mark.parametrize(
    ("owner", "band", "cause"),
    [
        ({"state": OwnedState.UNOBSERVED, "lender": "chat"}, Band.FLEX, IdleCause.UNOBSERVED),
        ({"state": OwnedState.BROKEN}, Band.BATCH_FLOOR, IdleCause.BROKEN),
        ({"state": OwnedState.WARMING}, Band.FLEX, IdleCause.WARMING),
        ({"state": OwnedState.DRAINING, "lender": "chat"}, Band.FLEX, IdleCause.DRAINING),
        ({"lender": "chat"}, Band.FLEX, IdleCause.LENT_UNUSED),
        ({}, Band.BATCH_FLOOR, IdleCause.BATCH_FLOOR_UNUSED),
        ({}, Band.INTERACTIVE_FLOOR, IdleCause.INTERACTIVE_FLOOR_UNUSED),
        ({}, Band.FLEX, IdleCause.FLEX_NOT_LENT),
        ({}, None, IdleCause.UNUSED),
    ],
)
def test_the_first_cause_that_holds_names_idle_time(owner: dict[str, Any], band: Band | None, cause: IdleCause) -> None:
    result = attribute(pool([slot("s", "bulk", band, **owner)], []))
    assert result.by_kind() == {cause: RATE}
    assert result.by_tenant() == {PLATFORM: RATE}


def lent(share: Fraction, usage: list[Usage], **more: Any) -> Attribution:
    owners = (
        OwnerInterval("bulk", 0, HOUR // 4, lender="chat"),
        OwnerInterval("bulk", HOUR // 4, HOUR // 2, OwnedState.DRAINING, "chat"),
        OwnerInterval("chat", HOUR // 2, HOUR),
    )
    return attribute(pool([SlotTenure("f", owners, Band.FLEX)], usage, lend_price_share=share, **more))


def test_a_loan_is_a_pair_of_lines_whose_sum_is_zero() -> None:
    usage = [Usage("c", "bulk", HOUR // 4, "f"), Usage("a", "chat", HOUR // 4, "f")]
    result = lent(Fraction(1, 5), usage)
    price = RATE // 10  # a fifth of the half hour, drain included
    loan = [(line.tenant, line.class_, line.kind, line.nanos) for line in result.lines if line.kind.startswith("lend")]
    assert loan == [("a", "chat", "lend_income", -price), ("c", "bulk", "lend_price", price)]
    plain = lent(Fraction(0), usage).by_tenant()
    assert result.by_tenant() == {"a": plain["a"] - price, "c": plain["c"] + price}
    assert result.total_nanos == RATE


def test_a_loan_without_tenants_is_between_the_platform_and_itself() -> None:
    assert lent(Fraction(1), []).by_tenant() == {PLATFORM: RATE}


def test_repeated_work_is_a_line_of_its_own() -> None:
    result = attribute(pool([slot("s", "chat")], [Usage("a", "chat", HOUR, repeated_us=HOUR // 5)]))
    assert result.by_kind() == {LineKind.DIRECT: 4 * RATE // 5, LineKind.REPEATED_WORK: RATE // 5}


def test_a_gpu_that_is_busy_a_fifth_of_the_hour_costs_all_of_it() -> None:
    """What is used costs its time, what is not used is idle and costs the rest: the two are never one figure."""
    used = [Usage("a", "chat", HOUR // 5, "s")]
    result = attribute(PoolInterval(0, HOUR, 10 * 10**9, [slot("s", "chat", Band.INTERACTIVE_FLOOR)], used))
    assert (result.total_nanos, result.by_tenant()) == (10 * 10**9, {"a": 10 * 10**9})
    assert result.by_kind() == {LineKind.DIRECT: 2 * 10**9, IdleCause.INTERACTIVE_FLOOR_UNUSED: 8 * 10**9}


@settings(max_examples=80)
@given(pools())
def test_idle_is_nothing_only_where_every_owned_microsecond_was_used(interval: PoolInterval) -> None:
    """Idle is what use leaves of the same slots, never a figure of its own that names could fail to match."""
    exact = replace(interval, rate_nanos_per_slot_hour=HOUR, lend_price_share=Fraction(0))
    result = attribute(exact)
    kinds = result.by_kind()
    direct = kinds.get(LineKind.DIRECT, 0) + kinds.get(LineKind.REPEATED_WORK, 0)
    assert sum(kinds.get(cause, 0) for cause in IdleCause) == result.owned_us - direct
    assert direct <= result.busy_us
    if not result.findings:
        assert direct == result.busy_us


@settings(max_examples=80)
@given(st.lists(st.integers(1, 999_999), max_size=6), st.sampled_from([730, 1_460, 2_190]), st.integers(0, 3))
def test_prices_of_any_slices_recompose_the_price_of_the_gpu(cuts: list[int], monthly: int, busy: int) -> None:
    """However a GPU is cut and whoever uses its slices, they cost what it costs, to the nano."""
    edges = [0, *sorted(set(cuts)), 1_000_000]
    slices = [
        SlotTenure(f"m{at}", (OwnerInterval("chat", 0, HOUR),), None, Fraction(right - left, 1_000_000))
        for at, (left, right) in enumerate(pairwise(edges))
    ]
    rate = monthly * 10**9 // 730
    usage = [Usage("a", "chat", HOUR // (at + 2), f"m{at}") for at in range(min(busy, len(slices)))]
    assert attribute(PoolInterval(0, HOUR, rate, slices, usage)).total_nanos == rate
    by_slice = [attribute(PoolInterval(0, HOUR, rate, [one], [])).total_nanos for one in slices]
    assert sum(by_slice) == rate


def test_slices_of_a_gpu_add_up_to_the_gpu() -> None:
    quarter = [SlotTenure(f"m{at}", (OwnerInterval("chat", 0, HOUR),), None, Fraction(1, 4)) for at in range(4)]
    usage = [Usage("a", "chat", HOUR, f"m{at}") for at in range(3)]
    result = attribute(pool(quarter, usage, idle=IdlePolicy(IdleMethod.PLATFORM)))
    assert result.total_nanos == RATE
    assert result.by_tenant() == {"a": 3 * RATE // 4, PLATFORM: RATE // 4}
    mixed = [quarter[0], slot("whole", "chat")]
    with pytest.raises(ValueError, match="name the slot"):
        attribute(pool(mixed, [Usage("a", "chat", 1)]))


def test_a_day_of_hours_weighs_by_cost_and_not_by_ratio() -> None:
    def hour(rate: int, share: Fraction) -> dict[str, int]:
        usage = [Usage("a", "chat", int(HOUR * share)), Usage("b", "chat", HOUR - int(HOUR * share))]
        return attribute(PoolInterval(0, HOUR, rate, [slot("s", "chat")], usage)).by_tenant()

    first, second = hour(10 * 10**9, Fraction(9, 10)), hour(90 * 10**9, Fraction(1, 10))
    assert first["a"] + second["a"] == 18 * 10**9
    assert Fraction(first["a"] + second["a"], 100 * 10**9) == Fraction(18, 100)


def test_ownership_must_tile_the_tenure() -> None:
    def attributed(owners: tuple[OwnerInterval, ...], *tenures: tuple[int, int]) -> Attribution:
        return attribute(pool([SlotTenure("s", owners, tenures=tenures)], []))

    first, second = OwnerInterval("chat", 0, 10), OwnerInterval("chat", 20, 30)
    with pytest.raises(ValueError, match="no owner from 10 to 20"):
        attributed((first, second))
    with pytest.raises(ValueError, match="must not overlap"):
        attributed((first, OwnerInterval("bulk", 9, 30)))
    with pytest.raises(ValueError, match="do not tile"):
        attributed((first,), (0, 11))
    with pytest.raises(ValueError, match="tenures that overlap"):
        attributed((first,), (0, 10), (5, 11))
    assert attributed((second, first), (0, 10), (20, 30)).owned_us == 20
    assert attributed((first, OwnerInterval("bulk", 10, 30)), (0, 20), (20, 30)).owned_us == 30


def test_a_class_may_have_used_more_than_it_owned_as_long_as_the_slot_did_not() -> None:
    owners = (OwnerInterval("bulk", 0, HOUR // 2, lender="chat"), OwnerInterval("chat", HOUR // 2, HOUR))
    usage = [Usage("c", "bulk", HOUR // 2 + 1_000, "f")]
    result = attribute(pool([SlotTenure("f", owners, Band.FLEX)], usage, idle=IdlePolicy(IdleMethod.PLATFORM)))
    assert result.findings == ()
    assert result.by_kind()[IdleCause.FLEX_NOT_LENT] == round(Fraction(RATE * (HOUR // 2 - 1_000), HOUR))
