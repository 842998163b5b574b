"""Numbers as people read them, and the filters over them."""

from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from django.template import Context, Template
from hypothesis import given
from hypothesis import strategies as st

from controlplane.web import numerals
from controlplane.web.numerals import DASH, MINUS

NB = numerals.NBSP


def render(source: str, **context) -> str:
    return Template("{% load flexband %}" + source).render(Context(context))


@pytest.mark.parametrize(
    ("nanos", "shown"),
    [
        (0, "0.00"),
        (None, DASH),
        (114_834_300_000_000, "114,834.30"),
        (-1_289_520_000_000, "−1,289.52"),
        (5_000_000, "0.01"),
        (4_999_999, "<0.01"),
        (-4_999_999, "−<0.01"),
        (1_005_000_000, "1.01"),
        (-995_000_000, "−1.00"),
        (9_223_372_036_854_775_807, "9,223,372,036.85"),
    ],
)
def test_money(nanos, shown):
    assert numerals.money(nanos) == shown


def test_money_with_currency_and_sign():
    assert numerals.money(1_500_000_000, "EUR") == f"1.50{NB}EUR"
    assert numerals.money(1_500_000_000, signed=True) == "+1.50"
    assert numerals.money(0, signed=True) == "0.00"
    assert numerals.money(None, "EUR") == DASH


@pytest.mark.parametrize(
    ("nanos", "shown"),
    [(0, "0.00"), (1, "0.000000001"), (-1_500_000, "−0.0015"), (2_500_000_000, "2.50"), (10**12, "1,000.00")],
)
def test_money_exact(nanos, shown):
    assert numerals.money_exact(nanos) == shown


@given(st.integers(min_value=-(10**18), max_value=10**18))
def test_exact_money_reads_back_and_never_shows_a_false_zero(nanos):
    text = numerals.money_exact(nanos).replace(",", "").replace(MINUS, "-")
    assert Decimal(text) * numerals.NANOS_PER_UNIT == nanos
    assert (numerals.money(nanos) == "0.00") == (nanos == 0)


@given(st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=8)), st.integers(0, 4))
def test_fixed_never_fails_and_shows_what_is_no_number_as_a_dash(value, decimals):
    text = numerals.fixed(value, decimals)
    assert text
    if isinstance(value, float) and value != value:
        assert text == DASH


@pytest.mark.parametrize(
    ("us", "shown"),
    [
        (None, DASH),
        (0, f"0.0{NB}ms"),
        (400, f"0.4{NB}ms"),
        (12_000, f"12{NB}ms"),
        (410_000, f"410{NB}ms"),
        (2_345_678, f"2.34{NB}s"),
        (18_900_000, f"18{NB}s"),
        (59_999_999, f"59{NB}s"),
        (657_000_000, f"10{NB}min 57{NB}s"),
        (3_600_000_000, f"1{NB}h"),
        (90_061_000_000, f"1{NB}d 1{NB}h"),
        (-18_000_000, f"−18{NB}s"),
    ],
)
def test_duration(us, shown):
    assert numerals.duration(us) == shown


def test_filters():
    assert render("{{ a|us_ms:1 }} {{ b|percent:1 }} {{ c|count }}", a=188_400, b=0.9896, c=1_676_893) == (
        f"188.4 99.0{NB}% 1,676,893"
    )
    assert (
        render("{{ none|count }}{{ none|percent }}{{ none|rate }}{{ none|us_ms }}{{ none|dash }}", none=None)
        == DASH * 5
    )
    assert render("{{ zero|dash }} {{ zero|count }}", zero=0) == "0 0"
    assert render("{{ n|signed }}", n=-309) == "−309"


@pytest.mark.parametrize(
    ("ratio", "length"),
    [(None, "0%"), (0.5, "50%"), (2, "100%"), (-1, "0%"), (float("nan"), "0%"), (1 / 3, "33.333%"), ("x", "0%")],
)
def test_css_percent_is_always_a_safe_length(ratio, length):
    assert render("{{ r|css_percent }}", r=ratio) == length


def test_iso_keeps_utc_on_hover_and_leaves_the_zone_to_the_viewer():
    at = datetime(2026, 11, 12, 12, 0, 5, tzinfo=UTC)
    html = render('{% iso at "time" %}', at=at)
    assert 'datetime="2026-11-12T12:00:05.000Z"' in html
    assert 'title="2026-11-12 12:00:05 UTC"' in html
    assert 'data-form="time"' in html
    assert ">12:00:05 UTC<" in html


def test_iso_in_the_billing_zone_is_left_alone_by_the_script():
    at = datetime(2026, 10, 24, 23, 30, tzinfo=UTC)
    html = render('{% iso at "datetime" "Europe/Berlin" %}', at=at)
    assert ">25 Oct 2026 01:30:00<" in html
    assert "data-form" not in html
    assert 'data-zone="Europe/Berlin"' in html
    assert render("{% iso day %}", day=date(2026, 10, 25)) == '<time datetime="2026-10-25">25 Oct 2026</time>'
    assert render("{% iso none %}", none=None) == DASH


def test_ago_uses_the_pages_now_and_distrusts_the_future():
    at = datetime(2026, 11, 12, 12, 0, tzinfo=UTC)
    now = datetime(2026, 11, 12, 12, 1, 52, tzinfo=UTC)
    assert f">1{NB}min 52{NB}s ago<" in render("{% ago at %}", at=at, now=now)
    future = render("{% ago at %}", at=now, now=at)
    assert DASH in future
    assert "0 s" not in future
