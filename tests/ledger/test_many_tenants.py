"""Finance pages of many tenants: the costliest alone, the others as one row, and every column adds up as printed."""

from datetime import timedelta

import pytest

from controlplane.core.period import day_windows, load_zone
from controlplane.ledger import pages
from controlplane.ledger.models import AttributionInterval, AttributionLine
from controlplane.ledger.named_costs import named_costs
from controlplane.ledger.pages import COLUMNS, PLATFORM, TENANTS_SHOWN, pivot, unfold
from controlplane.ledger.queries import OTHERS, Charge, CostRow, charges, costs_of, span_costs
from controlplane.tenants.models import Installation
from tests import factories
from tests.ledger.test_pages import DAY, example

MANY = TENANTS_SHOWN + 70
__all__ = ["example"]


def rows_of(count: int) -> list[CostRow]:
    used = [CostRow("2026-11-01", "p", f"t{n:03}", "chat", "direct", 1_000 + n, n * 7_777_777) for n in range(count)]
    idle = [CostRow("2026-11-01", "p", f"t{n:03}", "chat", "flex_not_lent", 10, n * 333_333) for n in range(count)]
    return [*used, *idle, CostRow("2026-11-01", "p", PLATFORM, "", "broken", 77, 12_345_678_901)]


def charges_of(count: int) -> list[Charge]:
    return [
        Charge(f"t{n:03}", "chat", "m", "p", 1, 5, 10, 0, 10, 1_000, 3_333_333, 0, 1_111_111, 0) for n in range(count)
    ]


@pytest.fixture
def whole(monkeypatch):
    """The table that shows every tenant alone."""
    with monkeypatch.context() as patch:
        patch.setattr(pages, "TENANTS_SHOWN", 10 * MANY)
        return pivot(rows_of(MANY), charges_of(MANY))


def test_the_costliest_are_shown_and_the_others_are_one_row_before_the_platform(whole):
    table = pivot(rows_of(MANY), charges_of(MANY))
    tops = [row for row in table.rows if row.level == 0]
    assert [row.key for row in tops] == [
        *(f"t{n:03}" for n in range(MANY - 1, MANY - 1 - TENANTS_SHOWN, -1)), OTHERS, PLATFORM,
    ]  # fmt: skip
    others = tops[-2]
    assert (others.title, others.children, others.class_, others.pool) == ("70 others", [], "", "")
    assert others.requests == 70 * 5
    assert others.slot_us == sum(row.slot_us for row in whole.rows if row.level == 0 and "t" <= row.key < "t070")


def test_every_column_adds_up_as_printed_and_to_the_same_total_as_all(whole):
    table = pivot(rows_of(MANY), charges_of(MANY))
    assert table.total.cents == whole.total.cents
    assert (table.total.requests, table.total.slot_us) == (whole.total.requests, whole.total.slot_us)
    for column in COLUMNS:
        assert sum(row.cents[column] for row in table.rows if row.level == 0) == table.total.cents[column]
    assert [row.level for row in table.rows if row.tenant == OTHERS] == [0]


def test_who_was_asked_for_is_shown_however_little_it_costs():
    table = pivot(rows_of(MANY), charges_of(MANY), "t001")
    unfold(table, "t001/chat/p")
    mine = [row for row in table.rows if row.tenant == "t001"]
    assert [(row.level, row.open or row.opened) for row in mine] == [(0, True), (1, True), (2, True)]
    assert next(row for row in table.rows if row.key == OTHERS).title == "69 others"


def test_as_many_as_are_shown_have_no_others():
    table = pivot(rows_of(TENANTS_SHOWN), [])
    assert OTHERS not in {row.key for row in table.rows}


def test_the_page_says_how_many_others_there_are_and_where_each_is(example, monkeypatch, django_assert_max_num_queries):
    monkeypatch.setattr(pages, "TENANTS_SHOWN", 1)
    client = factories.person("finance")
    client.get(f"/finance/?{DAY}")
    with django_assert_max_num_queries(25):
        response = client.get(f"/finance/?{DAY}")
    tops = [row for row in response.context["pivot"].rows if row.level == 0]
    assert [row.key for row in tops][1:] in ([OTHERS], [OTHERS, PLATFORM])
    assert tops[1].title in ("1 other", "2 others")
    page = response.content.decode()
    assert f"{tops[1].title}<" in page and "each in the CSV" in page


LINES = ("direct", "repeated_work", "flex_not_lent", "broken", "lend_price", "lend_income")


@pytest.fixture
def many_lines(example):
    """An hour of seven tenants in two pools with every kind of line, some of which had no rate."""
    first = AttributionInterval.objects.order_by("starts_at").first()
    again = AttributionInterval.objects.create(
        pool=factories.pool("other"), starts_at=first.starts_at, ends_at=first.ends_at, method="usage",
        attributed_at=first.ends_at,
    )  # fmt: skip
    AttributionLine.objects.bulk_create(
        AttributionLine(
            interval=interval, tenant_slug=f"t{n}", class_slug="chat" if n % 2 else "", line=line, gpu_us=100 + n,
            amount_nanos=None if (n + at) % 5 == 0 or n == 6 else (n * 7 + at - 9) * 1_234_567_891,
        )
        for number, interval in enumerate((first, again))
        for n in range(number, 7)
        for at, line in enumerate(LINES)
        if (n + at) % 4
    )  # fmt: skip
    zone = load_zone(Installation.objects.get().billing_zone)
    return day_windows(zone, first.starts_at - timedelta(days=1), first.ends_at + timedelta(days=1))


@pytest.mark.parametrize("selected", ["", "t1", "t6", "nobody"])
@pytest.mark.parametrize(("shown", "leading"), [(1, 1), (2, 1), (1, 3), (4, 2), (50, 4)])
def test_what_is_read_of_the_named_shows_what_all_rows_would(many_lines, monkeypatch, selected, shown, leading):
    monkeypatch.setattr(pages, "TENANTS_SHOWN", shown)
    monkeypatch.setattr(pages, "LEADING_TENANTS", leading)
    days = many_lines
    rows = costs_of([one.tenant for one in span_costs(days).tenants], days)
    charged = charges(days[0].start, days[-1].end)
    assert charged and {row.nanos for row in rows} >= {None}
    found = named_costs(days, selected, with_charges=True)
    assert pages.headline(found.rows, found.hidden_used) == pages.headline(rows)
    assert pages.leading(found.rows) == pages.leading(rows)
    assert pivot(found.rows, found.charged, selected, found.hidden) == pivot(rows, charged, selected)
    fleet_nanos = sum(row.nanos or 0 for row in rows)
    assert sum(row.nanos or 0 for row in found.rows) == fleet_nanos
    assert sum(one.nanos for one in found.charged) == sum(one.nanos for one in charged)
    top = pages.headline(rows)
    whole = pages.idle_rows([row for row in rows if row.is_idle], top, fleet_nanos)
    assert pages.idle_rows(found.idle, top, fleet_nanos) == whole
    assert (found.hidden > 0) == (shown < 50)
