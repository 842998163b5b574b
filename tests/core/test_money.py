import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.money import (
    NANOS_PER_CENT,
    ceil_ratio,
    cents_of,
    distribute,
    distribute_cents,
    format_cents,
    format_nanos,
    parse_decimal,
    parse_nanos,
    round_half_even,
    round_ratio,
    share_cents,
    split_by_counts,
    split_largest_remainder,
)

NANOS = st.integers(-(10**21), 10**21)
FRACTIONS = st.fractions(min_value=-(10**12), max_value=10**12, max_denominator=10**9)
PARTS = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), FRACTIONS, min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("text", "nanos"),
    [("14880.00", 14_880_000_000_000), ("-0.000000001", -1), ("2.5e-7", 250), ("+3", 3_000_000_000), (" 1. ", 10**9)],
)
def test_decimal_strings_are_read_exactly(text: str, nanos: int) -> None:
    assert parse_nanos(text) == nanos


@pytest.mark.parametrize(
    "text", ["", "1,000.00", "$5", "NaN", "inf", "1e999", "0x10", "1.2.3", "9" * 61, "--1", "٣x", "１２"]
)
def test_anything_but_a_plain_decimal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"decimal number|too many digits"):
        parse_decimal(text)


def test_money_finer_than_a_nano_is_refused_unless_the_digits_are_zero() -> None:
    assert parse_nanos("1.0000000000") == 10**9
    with pytest.raises(ValueError, match="nine decimals"):
        parse_nanos("0.0000000005")


@given(NANOS)
def test_format_and_parse_round_trip(nanos: int) -> None:
    assert parse_nanos(format_nanos(nanos)) == nanos


def test_formats_keep_the_sign_and_at_least_two_decimals() -> None:
    assert [format_nanos(n) for n in (0, -500_000_000, 1, 2_500_000_000)] == ["0.00", "-0.50", "0.000000001", "2.50"]
    assert format_nanos(3_000_000_000, places_min=0) == "3"
    assert [format_cents(c) for c in (0, -150, 7, 1_488_000)] == ["0.00", "-1.50", "0.07", "14880.00"]


@given(NANOS, st.integers(1, 10**12))
def test_rounding_is_half_even_and_the_same_for_both_signs(numerator: int, denominator: int) -> None:
    rounded = round_ratio(numerator, denominator)
    assert rounded == round_half_even(Fraction(numerator, denominator))
    assert round_ratio(-numerator, denominator) == -rounded
    assert 0 <= ceil_ratio(numerator, denominator) - Fraction(numerator, denominator) < 1


def test_a_charge_and_its_full_credit_cancel_at_every_half() -> None:
    for halves in range(-10_000, 10_000):
        assert round_ratio(halves, 2) + round_ratio(-halves, 2) == 0
        assert cents_of(halves * 5_000_000) + cents_of(-halves * 5_000_000) == 0
    assert [round_ratio(halves, 2) for halves in (1, 3, 5, -1, -3)] == [0, 2, 2, 0, -2]


def test_remainders_go_to_the_largest_fraction_and_ties_to_the_first_key() -> None:
    assert split_largest_remainder(100, {"z": 1, "x": 1, "y": 1}) == {"x": 34, "y": 33, "z": 33}
    assert split_largest_remainder(-100, {"z": 1, "x": 1, "y": 1}) == {"x": -34, "y": -33, "z": -33}
    assert split_largest_remainder(10, {"a": Fraction(1, 3), "b": Fraction(2, 3)}) == {"a": 3, "b": 7}
    assert split_largest_remainder(0, {"a": 0}) == {"a": 0}


def test_splits_without_a_positive_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="no weight is positive"):
        split_largest_remainder(1, {"a": 0})
    with pytest.raises(ValueError, match="negative"):
        split_largest_remainder(1, {"a": 2, "b": -1})
    with pytest.raises(ValueError, match="add up to"):
        distribute(3, {"a": Fraction(1), "b": Fraction(1)})


@given(st.integers(-(10**15), 10**15), st.dictionaries(st.text(max_size=3), st.integers(0, 10**9), min_size=1))
def test_a_split_adds_up_and_stays_within_one_of_the_exact_share(total: int, weights: dict[str, int]) -> None:
    whole = sum(weights.values())
    if not whole:
        return
    parts = split_largest_remainder(total, weights)
    assert sum(parts.values()) == total
    assert all(abs(parts[key] - Fraction(total * weight, whole)) < 1 for key, weight in weights.items())


@given(PARTS)
def test_distributing_signed_quotas_adds_up_and_is_symmetric(quotas: dict[str, Fraction]) -> None:
    total = round_half_even(sum(quotas.values(), Fraction(0)))
    parts = distribute(total, quotas)
    assert sum(parts.values()) == total
    assert all(abs(parts[key] - quota) < 1 for key, quota in quotas.items())
    negated = distribute(-total, {key: -quota for key, quota in quotas.items()})
    assert negated == {key: -part for key, part in parts.items()}


def test_printed_cents_add_up_to_the_printed_total() -> None:
    thirds = {"x": 333_333_334, "y": 333_333_333, "z": 333_333_333}
    assert distribute_cents(thirds) == {"x": 34, "y": 33, "z": 33}


@given(st.dictionaries(st.text("abc", max_size=2), NANOS, max_size=9), st.booleans())
def test_cents_are_shared_as_exact_quotas_are_distributed(column: dict[str, int], up: bool) -> None:
    exact = Fraction(sum(column.values()), NANOS_PER_CENT)
    total = math.ceil(exact) if up else math.floor(exact)
    wanted = distribute(total, {key: Fraction(nanos, NANOS_PER_CENT) for key, nanos in column.items()})
    assert list(share_cents(total, column).items()) == list(wanted.items())


def test_a_total_that_is_not_of_the_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot distribute 3 cents"):
        share_cents(3, {"a": 2 * NANOS_PER_CENT})


@given(st.dictionaries(st.text("abc", max_size=3), NANOS, min_size=1, max_size=20))
def test_cents_of_any_column_add_up(column: dict[str, int]) -> None:
    assert sum(distribute_cents(column).values()) == cents_of(sum(column.values()))


@given(st.integers(0, 10**15), st.dictionaries(st.integers(0, 99), st.integers(0, 1_000), min_size=1, max_size=9))
def test_a_split_by_counts_is_the_exact_split(total: int, counts: dict[int, int]) -> None:
    if not any(counts.values()):
        with pytest.raises(ValueError, match="nor all counts 0"):
            split_by_counts(total, counts)
        return
    exact = split_largest_remainder(total, {key: Fraction(count) for key, count in counts.items()})
    assert list(split_by_counts(total, counts).items()) == list(exact.items())


@pytest.mark.parametrize(("total", "counts"), [(-1, {"a": 1}), (5, {"a": 2, "b": -1}), (5, {})])
def test_a_split_by_counts_refuses_what_is_no_count(total: int, counts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        split_by_counts(total, counts)
