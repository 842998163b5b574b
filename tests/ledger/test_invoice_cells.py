"""Numbers and dates of providers' files: exact, in the file's own notation, never guessed."""

from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.ledger.invoice_cells import CellError, DayOrder, DecimalMark, Notation, cell, instant, number

EXACT = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20, places=18)


@given(EXACT)
def test_a_number_is_read_back_exactly_in_both_notations(value):
    text = f"{value:f}"
    assert number(text, DecimalMark.POINT) == value
    assert number(text.replace(".", ","), DecimalMark.COMMA) == value
    assert number(f"{value:,f}", DecimalMark.POINT) == value
    grouped = f"{value:,f}".replace(",", "_").replace(".", ",").replace("_", ".")
    assert number(grouped, DecimalMark.COMMA) == value


@pytest.mark.parametrize(
    ("text", "mark", "value"),
    [
        ("5.64902E-05", DecimalMark.POINT, "0.0000564902"),
        ("1,5e3", DecimalMark.COMMA, "1500"),
        ("-0.00000080000", DecimalMark.POINT, "-0.0000008"),
        ("1 234,50", DecimalMark.COMMA, "1234.5"),
        ("\u221212.5", DecimalMark.POINT, "-12.5"),
        (".5", DecimalMark.POINT, "0.5"),
        ("0.123456789012345678", DecimalMark.POINT, "0.123456789012345678"),
    ],
)
def test_notations_that_providers_use(text, mark, value):
    assert number(text, mark) == Decimal(value)


@pytest.mark.parametrize("text", ["12,3.4,5", "EUR 5", "1.2.3", "inf", "nan", "0x10", "1e99", "9" * 40, "--5", "1,23"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(CellError):
        number(text, DecimalMark.POINT)


@pytest.mark.parametrize("text", ["NULL", "null", "", "  ", "N/A", "-", "None"])
def test_the_many_words_for_nothing(text):
    assert cell(text) == ""


def seen(numbers=(), dates=()):
    notation = Notation()
    for text in numbers:
        notation.see_number(text)
    for text in dates:
        notation.see_date(text)
    return notation


def test_one_value_settles_the_notation_of_a_file():
    assert seen(["1,234", "12,5"]).mark is DecimalMark.COMMA
    assert seen(["1,234", "12.5"]).mark is DecimalMark.POINT
    assert seen(["0,001"]).mark is DecimalMark.COMMA
    assert seen(["1.234,5"]).mark is DecimalMark.COMMA
    assert seen(["1,234.5"]).mark is DecimalMark.POINT


def test_what_nothing_settles_stays_open_and_contradictions_are_named():
    open_ = seen(["1,234", "7"])
    assert open_.mark is None and open_.ambiguous_number == "1,234"
    assert "12,5" in seen(["12.5", "12,5"]).conflict
    assert seen(dates=["4/1/25"]).ambiguous_date == "4/1/25"
    assert seen(dates=["4/1/25", "4/13/25"]).order is DayOrder.MONTH_FIRST
    assert seen(dates=["13/4/2025"]).order is DayOrder.DAY_FIRST
    assert seen(dates=["01.10.2026"]).order is DayOrder.DAY_FIRST
    assert "31/1/2025" in seen(dates=["1/31/2025", "31/1/2025"]).conflict
    assert not seen(dates=["5/5/25"]).ambiguous_date


@pytest.mark.parametrize(
    ("text", "order", "wanted"),
    [
        ("2026-10-31", None, date(2026, 10, 31)),
        ("2026-10-31 22:00:00", None, datetime(2026, 10, 31, 22, tzinfo=UTC)),
        ("2026-10-31T22:00:00Z", None, datetime(2026, 10, 31, 22, tzinfo=UTC)),
        ("2026-10-31T22:00:00+02:00", None, datetime(2026, 10, 31, 20, tzinfo=UTC)),
        ("09/21/2023", DayOrder.MONTH_FIRST, date(2023, 9, 21)),
        ("1.10.26", DayOrder.DAY_FIRST, date(2026, 10, 1)),
        ("5/5/25", None, date(2025, 5, 5)),
    ],
)
def test_dates(text, order, wanted):
    assert instant(text, order) == wanted


@pytest.mark.parametrize("text", ["4/1/25", "2026-13-01", "yesterday", "31/31/2026", "20261"])
def test_what_is_no_day_is_refused(text):
    with pytest.raises(CellError):
        instant(text, None)
