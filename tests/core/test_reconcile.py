import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.explain_reconcile import explain
from controlplane.core.reconcile import (
    CostLine,
    EstimateCheck,
    InvoiceCategory,
    MatchKey,
    MeterStatus,
    SequenceGap,
    SlotMinute,
    bridge,
    check_meters,
    heartbeat_coverage,
    sequence_gaps,
    variance,
)

CASES = json.loads((Path(__file__).parent / "data" / "variances.json").read_text())
DECIMALS = st.integers(0, 10**9).map(lambda n: Fraction(n, 10**4))
KEYS = st.sampled_from("abcd").map(lambda day: MatchKey("cloud", "acct", "gpu-hour", "eu", day))
LINES = st.lists(st.builds(CostLine, KEYS, DECIMALS, st.fractions(-(10**12), 10**12)), max_size=8)
INVOICE = st.lists(
    st.builds(CostLine, KEYS, DECIMALS, st.fractions(-(10**12), 10**12), st.sampled_from(InvoiceCategory)), max_size=12
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_difference_is_price_and_quantity(case: dict[str, Any]) -> None:
    answer = explain({"book": case["book"], "invoice": case["invoice"]})
    assert [answer[f"{part}_variance"] for part in ("price", "quantity", "total")] == case["variance"]
    assert answer["total_variance_nanos"] == answer["invoice_nanos"] - answer["book_nanos"]


@pytest.mark.parametrize("value", [None, "1,000", True, [], "2.5 EUR"])
def test_an_unusable_quantity_is_named(value: object) -> None:
    book = {"quantity": value, "unit_price": "1"}
    with pytest.raises(ValueError, match=r"book\.quantity: "):
        explain({"book": book, "invoice": book})
    with pytest.raises(ValueError, match="invoice: is missing"):
        explain({"book": {"quantity": 1, "unit_price": 1}})


@given(DECIMALS, DECIMALS, DECIMALS, DECIMALS)
def test_variances_add_up_to_the_difference(
    book_q: Fraction, book_p: Fraction, inv_q: Fraction, inv_p: Fraction
) -> None:
    result = variance(book_q, book_p, inv_q, inv_p)
    assert result.total_nanos == round(inv_q * inv_p * 10**9) - round(book_q * book_p * 10**9)
    assert abs(result.quantity_nanos - (inv_q - book_q) * book_p * 10**9) <= 1
    assert abs(result.price_nanos - (inv_p - book_p) * inv_q * 10**9) <= 2


@settings(max_examples=80)
@given(LINES, INVOICE)
def test_every_line_of_an_invoice_lands_somewhere(book: list[CostLine], invoice: list[CostLine]) -> None:
    result = bridge(book, invoice)
    assert result.residual_nanos == 0
    assert abs(result.invoice_nanos - sum((line.nanos for line in invoice), Fraction(0))) <= len(invoice) + 1


def test_tax_and_support_are_steps_of_the_bridge_and_not_variance() -> None:
    key, lone = MatchKey("cloud", "a", "gpu", "eu", "2026-10-01"), MatchKey("cloud", "a", "gpu", "eu", "2026-10-02")
    book = [CostLine(key, Fraction(10), Fraction(25 * 10**9)), CostLine(lone, Fraction(1), Fraction(7))]
    invoice = [
        CostLine(key, Fraction(10), Fraction(26 * 10**9)),
        CostLine(key, Fraction(1), Fraction(5 * 10**9), InvoiceCategory.TAX),
        CostLine(MatchKey("", "", "", "", ""), Fraction(0), Fraction(-2 * 10**9), InvoiceCategory.CREDIT),
    ]
    result = bridge(book, invoice)
    assert (result.price_variance_nanos, result.quantity_variance_nanos) == (10**9, 0)
    assert result.category_nanos == {InvoiceCategory.CREDIT: -2 * 10**9, InvoiceCategory.TAX: 5 * 10**9}
    assert result.unmatched_book_nanos == {lone: 7}
    assert result.unmatched_invoice_nanos == {}


def test_what_was_not_reported_is_unknown_and_never_zero() -> None:
    at = [SlotMinute("s1", minute) for minute in range(5)]
    checks = check_meters(at, {at[0]: 5, at[1]: 5, at[2]: 5}, {at[0]: 5, at[1]: 6, at[3]: 0})
    statuses = [check.status for check in checks]
    assert statuses == [MeterStatus.AGREE, MeterStatus.DIFFERS, *[MeterStatus.UNKNOWN] * 3]


def test_gaps_in_reports_are_named() -> None:
    assert sequence_gaps([1, 2, 2, 5, 9], 1, 10) == [SequenceGap(3, 4), SequenceGap(6, 8), SequenceGap(10, 10)]
    assert sequence_gaps([], 3, 4) == [SequenceGap(3, 4)]
    assert sequence_gaps(range(1, 11), 1, 10) == []
    assert heartbeat_coverage([0, 1, 25, 31, 40], 0, 40, 10) == Fraction(3, 4)
    with pytest.raises(ValueError, match="over zero"):
        heartbeat_coverage([], 0, 0, 10)


def test_bias_says_what_it_does_to_the_next_estimates() -> None:
    check = EstimateCheck("acme", "chat", 100, 1_000, 50, 80)
    assert (check.bias, check.admission_factor, check.difference_nanos) == (10, 4, 30)
    assert EstimateCheck("acme", "chat", 0, 5, 0, 0).bias is None
    assert EstimateCheck("acme", "chat", 0, 5, 0, 0).admission_factor == 1
    assert EstimateCheck("acme", "chat", 100, 1, 0, 0).admission_factor == Fraction(1, 4)
