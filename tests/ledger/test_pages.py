"""Finance pages, CSV and REST: sums that add up as printed, who may see what, statements per page."""

import csv
import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.db.models import F
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.audit.actors import Actor
from controlplane.core.money import cents_of
from controlplane.core.period import day_windows, load_zone, parse_period, to_us
from controlplane.ledger.attribution import attribute
from controlplane.ledger.models import AttributionInterval, AttributionLine, RateCard
from controlplane.ledger.pages import headline, pivot, statement, time_table
from controlplane.ledger.queries import Charge, CostRow, checks, cost_rows, costs_of, day_costs
from controlplane.ledger.ranges import around, read_range
from controlplane.ledger.rates import add_rate_card
from controlplane.tenants.models import Installation, Tenant
from controlplane.usage.models import RollupDay, RollupDelta, RollupQuarter
from controlplane.usage.rollups import billing_zone, local_day
from tests import factories
from tests.ledger.fleet_rows import HOUR, ONE_HOUR, make_fleet, worked_example

DAY = "period=2026-11-20"


def roll_up(fleet, tenant, class_, *, model=RollupQuarter, at=HOUR, version=0, requests=10, nanos=(1, 0, 2, 0), **more):
    """A row of a level; a quarter is in its day too, as a fold leaves them."""
    column = "quarter" if model is RollupQuarter else "minute"
    key = {
        "pool_id": fleet.pool.pk, "tenant_id": fleet.tenants[tenant].pk, "class_id": fleet.classes[class_].pk,
        "model_id": fleet.pool.model_id, "rate_version": version, "outcome": 1,
    }  # fmt: skip
    sums = {
        "requests": requests, "prompt_tokens": 1_000, "cached_tokens": 100, "output_tokens": 200, "gpu_us": 5_000_000,
        "charge_prompt_nanos": nanos[0], "charge_cached_nanos": nanos[1], "charge_output_nanos": nanos[2],
        "charge_gpu_nanos": nanos[3],
    }  # fmt: skip
    if model is RollupQuarter:
        day = {**key, "day": local_day(billing_zone(), to_us(at))}
        if not RollupDay.objects.filter(**day).update(**{name: F(name) + value for name, value in sums.items()}):
            RollupDay.objects.create(**day, **sums, stages=b"")
    return model.objects.create(**{column: at}, **key, **sums, stages=b"", **more)


@pytest.fixture
def example(db):
    fleet = worked_example(idle_policy="platform", lend_price_share_ppm=400_000)
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, HOUR + timedelta(hours=2))
    roll_up(fleet, "a", "chat", nanos=(9_000_000_001, 250_000_000, 3_000_000_000, 0))
    roll_up(fleet, "c", "bulk", at=HOUR + timedelta(hours=2), nanos=(5_000_000, 0, 0, 0))
    # what is not folded yet counts too
    roll_up(fleet, "b", "chat", model=RollupDelta, at=HOUR + timedelta(minutes=59), nanos=(4_000_000_000, 0, 0, 7))
    return fleet


@pytest.fixture
def finance(example):
    return factories.person("finance")


def page(client, address):
    response = client.get(address)
    assert response.status_code == 200, response.content[:500]
    return response


def test_the_headline_says_where_the_cost_went(finance):
    response = page(finance, f"/finance/?{DAY}")
    text = response.content.decode()
    top = response.context["top"]
    assert (top.fleet_cents, top.used_cents, top.idle_cents) == (2000, 1313, 687)
    assert response.context["agrees"]
    assert "Lines add up to the fleet cost exactly" in text
    assert "Billing zone UTC" in text and "24 h" in text
    assert "Cost = use + idle borne + lending." in text
    assert [part.value for part in top.tenants] == ["5.63", "5.00", "2.50"]


def test_what_is_not_attributed_yet_says_what_to_do(finance):
    text = page(finance, "/finance/?period=2026-01").content.decode()
    assert "Nothing was attributed in this period" in text
    assert "Fleet cost =" not in text


def test_unpriced_time_is_a_dash_and_a_sentence(db):
    fleet = make_fleet("i1", rate_nanos=None)
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, HOUR + timedelta(hours=2))
    response = page(factories.person("finance"), f"/finance/?{DAY}")
    text = response.content.decode()
    assert response.context["top"] is None
    assert "1.0 slot-hours have no rate" in text
    assert "Partly unpriced" in text
    interval = AttributionInterval.objects.get()
    assert "No rate was in force" in page(response.client, f"/finance/intervals/{interval.pk}/").content.decode()


def test_a_period_that_is_none_says_so_and_shows_the_present_one(finance):
    text = page(finance, "/finance/?period=October").content.decode()
    assert "This period cannot be shown" in text
    assert finance.get("/finance/costs.csv?from=2026-13-01").status_code == 400


def test_a_leaf_opens_its_days_a_day_its_hours_an_hour_its_events(finance):
    response = page(finance, f"/finance/?{DAY}&tenant=a&class=chat&pool=chat-70b")
    interval = AttributionInterval.objects.get()
    assert f"/finance/intervals/{interval.pk}/" in response.content.decode()
    text = page(finance, f"/finance/intervals/{interval.pk}/").content.decode()
    assert "tenant:a:chat:direct" in text and "fleet:chat-70b" in text
    assert "Lines add up to the cost of the pool hour exactly" in text
    assert "attribution:chat-70b:2026-11-20T10:00:00Z#1" in text


def test_the_csv_adds_up_to_the_nano(finance):
    fleet = make_fleet("i1 b1", slug="code-7b", model="code", rate_nanos=333_333_333)
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, HOUR + timedelta(hours=2))
    response = finance.get(f"/finance/costs.csv?{DAY}")
    rows = list(csv.DictReader(io.StringIO(b"".join(response.streaming_content).decode())))
    assert sum(Decimal(row["cost"]) for row in rows) == Decimal("20.666666666")
    assert sum(int(row["slot_microseconds"]) for row in rows) == 10 * 3_600_000_000
    assert {row["local_day"] for row in rows} == {"2026-11-20"}
    assert {row["tenant"] for row in rows} == {"a", "b", "c", "platform"}


def test_text_that_a_spreadsheet_would_run_is_inert(example):
    AttributionLine.objects.filter(tenant_slug="a").update(class_slug="=HYPERLINK(1)")
    finance = factories.person("finance")
    body = b"".join(finance.get(f"/finance/costs.csv?{DAY}").streaming_content).decode()
    assert "'=HYPERLINK(1)" in body
    assert ",=HYPERLINK" not in body
    # a lend income is negative and stays a number
    assert ",-0.5," in body


def test_the_book_is_shown_with_its_balance(finance):
    text = page(finance, "/finance/ledger/").content.decode()
    assert "Balanced" in text and "platform:chat:flex_not_lent" in text
    assert "2026-11" in text
    assert finance.get("/finance/ledger/?period=1999-01").status_code == 404


def test_statements_add_sums_of_rounded_charges_with_open_ones(finance):
    response = page(finance, f"/finance/statements/?{DAY}")
    assert [(row["tenant"].slug, row["charges"]) for row in response.context["rows"]][:3] == [
        ("a", "12.25"), ("b", "4.00"), ("c", "0.01"),
    ]  # fmt: skip
    assert response.context["total"] == "16.26"


def test_statements_are_paged_searched_and_still_add_up(example, finance):
    for number in range(60):
        row = factories.tenant(f"x{number:02}", name=f"Extra {number}")
        example.tenants[row.slug] = row
        roll_up(example, row.slug, "chat", nanos=(3_333_333 + number, 0, 0, 0))
    seen, cents, cursor = [], 0, ""
    while True:
        response = page(finance, f"/finance/statements/?{DAY}&cursor={cursor}")
        rows = response.context["rows"]
        seen += [row["tenant"].slug for row in rows]
        cents += sum(_cents(row["charges"]) for row in rows)
        if not (cursor := response.context["page"].next_cursor):
            break
        assert len(rows) == 50
    everybody = Tenant.objects.count()
    assert len(seen) == len(set(seen)) == everybody == response.context["tenants"]
    assert seen[:5] == ["a", "b", "c", "x59", "x58"], "most first"
    assert cents == _cents(response.context["total"])
    found = page(finance, f"/finance/statements/?{DAY}&q=extra+7")
    assert [row["tenant"].slug for row in found.context["rows"]] == ["x07"]
    assert found.context["total"] == response.context["total"], "the sum is that of all"
    assert 'name="period" value="2026-11-20"' in found.content.decode()
    assert "No tenant matches" in page(finance, f"/finance/statements/?{DAY}&q=nobody").content.decode()
    assert finance.get(f"/finance/statements/?{DAY}&cursor=x").status_code == 400


def test_a_statement_names_the_versions_of_its_rates(example):
    card = RateCard.objects.create(
        class_slug="chat", model=example.pool.model, effective_from=HOUR, prompt_nanos_per_mtok=1_400_000_000,
        cached_nanos_per_mtok=260_000_000, output_nanos_per_mtok=4_400_000_000, created_at=HOUR, created_by="test",
    )  # fmt: skip
    roll_up(example, "a", "chat", version=card.pk, nanos=(1_000_000, 0, 0, 0))
    response = page(factories.person("finance"), f"/finance/statements/a/?{DAY}")
    made = response.context["statement"]
    assert [row.charge.rate_version for row in made.rows] == [0, card.pk]
    assert made.total_nanos == 12_250_000_001 + 1_000_000
    assert "1.40" in response.content.decode()


def test_what_had_no_rate_card_is_unknown_and_not_zero(example):
    roll_up(example, "c", "chat", requests=3, nanos=(0, 0, 0, 0))
    client = factories.person("finance")
    response = page(client, f"/finance/statements/c/?{DAY}")
    rows = {row.charge.class_: row.values for row in response.context["statement"].rows}
    assert set(rows["chat"]) == {"—"} and rows["bulk"][-1] == "0.00"
    assert "3 requests ended without a rate card in force" in response.content.decode()
    body = client.get(f"/api/v1/reports/charges/?{DAY}&tenant=c").json()
    assert {row["workload_class"]: row["charge_nanos"] for row in body["rows"]} == {
        "chat": None, "bulk": 5_000_000,
    }  # fmt: skip
    assert (body["charge_nanos"], body["unpriced_requests"]) == (5_000_000, 3)
    free = RateCard.objects.create(
        class_slug="chat", model=example.pool.model, effective_from=HOUR, prompt_nanos_per_mtok=0,
        cached_nanos_per_mtok=0, output_nanos_per_mtok=0, created_at=HOUR, created_by="test",
    )  # fmt: skip
    roll_up(example, "b", "bulk", version=free.pk, nanos=(0, 0, 0, 0))
    text = page(client, f"/finance/statements/b/?{DAY}").content.decode()
    assert "without a rate card" not in text and "0.00" in text, "a price of 0 is known"


def test_a_new_card_never_moves_what_was_charged(example):
    client = factories.person("finance")
    before = client.get(f"/api/v1/reports/charges/?{DAY}").json()
    values = {"prompt_nanos_per_mtok": 9_000_000_000, "output_nanos_per_mtok": 9_000_000_000}
    for factor in (1, 2):
        add_rate_card(
            class_slug="chat", model=example.pool.model.name, actor=Actor(id=None, name="fin", role="finance"),
            values={name: factor * nanos for name, nanos in values.items()}, now=HOUR + timedelta(days=factor),
            reason="dearer",
        )  # fmt: skip
    assert client.get(f"/api/v1/reports/charges/?{DAY}").json() == before


def test_a_tenants_member_sees_its_own_statement_and_nothing_else(example):
    member = factories.person("tenant", tenant_row=example.tenants["a"])
    assert page(member, f"/finance/statements/a/?{DAY}").context["statement"].requests == 10
    for address in ("b/", "nobody/"):
        assert member.get(f"/finance/statements/{address}?{DAY}").status_code == 404
    for address in ("/finance/", "/finance/ledger/", "/finance/statements/", "/finance/costs.csv"):
        assert member.get(address).status_code == 403
    assert member.get("/finance/intervals/1/").status_code == 403
    assert member.get("/api/v1/reports/attribution/").status_code == 403
    body = member.get(f"/api/v1/reports/charges/?{DAY}").json()
    assert {row["tenant"] for row in body["rows"]} == {"a"}
    assert member.get("/api/v1/reports/charges/?tenant=b").status_code == 404


@pytest.mark.parametrize("role", ["admin", "finance", "oncall", "viewer"])
def test_staff_may_read_finance(example, role):
    client = factories.person(role)
    for address in ("/finance/", "/finance/ledger/", "/finance/statements/", "/finance/statements/a/"):
        page(client, address)


def test_nobody_reads_finance_without_signing_in(client, db):
    assert client.get("/finance/").status_code == 302
    assert client.get("/api/v1/reports/attribution/").status_code in (401, 403)


def test_reports_carry_the_same_sums(finance):
    body = finance.get(f"/api/v1/reports/attribution/?{DAY}").json()
    assert body["fleet_nanos"] == body["attributed_nanos"] == 20_000_000_000
    assert sum(row["amount_nanos"] for row in body["rows"]) == 20_000_000_000
    charged = finance.get(f"/api/v1/reports/charges/?{DAY}").json()
    assert charged["charge_nanos"] == 12_250_000_001 + 4_000_000_007 + 5_000_000
    assert finance.get("/api/v1/reports/charges/?period=x").status_code == 400


@pytest.mark.parametrize(
    ("address", "most"),
    [
        (f"/finance/?{DAY}", 18),
        (f"/finance/?{DAY}&tenant=a&class=chat&pool=chat-70b", 20),
        (f"/finance/statements/?{DAY}", 14),
        (f"/finance/statements/a/?{DAY}", 14),
        ("/finance/ledger/", 9),
    ],
)
def test_pages_take_a_fixed_number_of_statements(finance, django_assert_max_num_queries, address, most):
    fleet = make_fleet("i1 b1", slug="code-7b", model="code")
    attribute(fleet.pool, HOUR, HOUR + timedelta(hours=6), HOUR + timedelta(hours=8))
    with django_assert_max_num_queries(most):
        page(finance, address)


def assert_same_sums(rows, days):
    """What a page of a span reads in place of every day's rows adds up to the same."""
    whole: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        sums = whole.setdefault((row.pool, row.tenant, row.class_, row.line), [0, 0])
        sums[0], sums[1] = sums[0] + row.slot_us, sums[1] + (row.nanos or 0)
    assert whole and whole == {
        (row.pool, row.tenant, row.class_, row.line): [row.slot_us, row.nanos or 0]
        for row in costs_of([row.tenant for row in rows], days)
    }
    for apart in ([], ["a"], ["a", "b", "platform"]):
        cells: dict[tuple[str, str, str], int] = {}
        for row in rows:
            key = row.day, row.tenant if row.tenant in apart else "", row.line
            cells[key] = cells.get(key, 0) + (row.nanos or 0)
        assert cells == {(day, tenant, line): nanos for day, tenant, line, nanos in day_costs(days, apart)}


def test_sums_of_a_span_are_those_of_its_days(example):
    """Of several tenants, classes and lines, with hours that had no rate."""
    zone = load_zone(Installation.objects.get().billing_zone)
    span = window_of(AttributionInterval.objects.order_by("starts_at"))
    AttributionLine.objects.filter(interval=AttributionInterval.objects.first()).update(amount_nanos=None)
    days = day_windows(zone, *span)
    assert_same_sums(cost_rows(days), days)


def window_of(intervals):
    return intervals.first().starts_at - timedelta(days=2), intervals.last().ends_at + timedelta(days=2)


def test_months_are_their_days_in_the_billing_zone(db):
    """A month is the sum of its days, and a day of the zone is not a UTC day."""
    fleet = make_fleet("i1", since=datetime(2026, 10, 24, 18, tzinfo=UTC), rate_nanos=1_000_000_007)
    for zone in ("Europe/Berlin", "Asia/Kolkata"):
        Installation.objects.update(billing_zone=zone)
        AttributionInterval.objects.all().delete()
        attribute(fleet.pool, fleet.pool.cost_rates.get().effective_from, datetime(2026, 10, 26, tzinfo=UTC), HOUR)
        month = parse_period(load_zone(zone), "2026-10")
        days = day_windows(load_zone(zone), month.start, month.end)
        rows = cost_rows(days)
        assert sum(row.nanos for row in rows) == checks(month).intervals_nanos
        assert_same_sums(rows, days)
        for day in days:
            same = [row for row in rows if row.day == day.label]
            assert sum(row.nanos for row in same) == checks(day).intervals_nanos
            assert sum(row.nanos for row in cost_rows([day])) == checks(day).intervals_nanos


@pytest.mark.parametrize(
    ("given_", "zone", "hours", "title"),
    [
        ({"period": "2026-10"}, "Europe/Berlin", "745", "October 2026"),
        ({"period": "2026-11"}, "America/New_York", "721", "November 2026"),
        ({"period": "2026-10-25"}, "Europe/Berlin", "25", "Sun 25 Oct 2026"),
        ({"period": "2026-W44"}, "Asia/Kolkata", "168", "Week 44, 2026"),
        ({"from": "2026-10-24", "to": "2026-10-25"}, "Europe/Berlin", "49", "Sat 24 Oct 2026 to Sun 25 Oct 2026"),
        ({}, "UTC", "720", "November 2026"),
    ],
)
def test_ranges_are_local_days(given_, zone, hours, title):
    shown = read_range(given_, zone, HOUR)
    assert (shown.hours, shown.title) == (hours, title)
    before, after = around(shown)
    assert before.window.end == shown.window.start
    assert after.window.start == shown.window.end


@pytest.mark.parametrize(
    "given_",
    [
        {"period": "2026-13"},
        {"from": "x"},
        {"from": "2026-02-02", "to": "2026-02-01"},
        {"from": "2026-01-01", "to": "2026-12-31"},
    ],
)
def test_ranges_that_cannot_be_shown_say_what_to_write(given_):
    with pytest.raises(ValueError, match=r"write|choose|month"):
        read_range(given_, "UTC", HOUR)


LINES = ["direct", "repeated_work", "flex_not_lent", "draining", "unobserved"]
some_rows = st.lists(
    st.builds(
        CostRow,
        day=st.sampled_from(["2026-11-01", "2026-11-02", "2026-11-03"]),
        pool=st.sampled_from(["p", "q"]),
        tenant=st.sampled_from(["a", "b", "c", "d", "e", "f", "platform"]),
        class_=st.sampled_from(["chat", "bulk", ""]),
        line=st.sampled_from(LINES),
        slot_us=st.integers(0, 10**10),
        nanos=st.integers(0, 10**12),
    ),
    min_size=1,
    max_size=40,
)


def _cents(text: str) -> int:
    return 0 if text == "—" else int(text.replace(",", "").replace(".", "").replace("−", "-"))


@settings(max_examples=120, deadline=None)
@given(some_rows)
def test_every_printed_column_adds_up(rows):
    fleet_cents = cents_of(sum(row.nanos for row in rows))
    top = headline(rows)
    assert top.fleet_cents == fleet_cents == top.used_cents + top.idle_cents
    assert sum(part.cents for part in top.tenants) == top.used_cents
    assert sum(part.cents for part in top.causes) == top.idle_cents
    table = pivot(rows, [])
    assert table.total.cents["cost"] == fleet_cents
    assert (table.total.cents["direct"], table.total.cents["idle"]) == (top.used_cents, top.idle_cents)
    for level in range(3):
        for column in ("direct", "idle", "lending", "cost", "charges", "margin"):
            at_level = sum(row.cents[column] for row in table.rows if row.level == level)
            assert at_level == table.total.cents[column]
    days = ["2026-11-01", "2026-11-02", "2026-11-03"]
    cells = [(row.day, row.tenant, row.line, row.nanos) for row in rows]
    by_day = time_table(days, cells, ["a", "b"], unit="EUR", step="day")
    for at in range(len(by_day.columns)):
        assert sum(_cents(values[at]) for _, values in by_day.rows) == _cents(by_day.totals[at])
    assert sum(_cents(text) for text in by_day.totals[:-1]) == _cents(by_day.totals[-1]) == fleet_cents


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 3), *[st.integers(0, 10**11)] * 4), max_size=12))
def test_every_column_of_a_statement_adds_up(parts):
    made = statement([Charge("a", class_, "m", "p", version, 1, 2, 3, 4, 5, *n) for class_, version, *n in parts])
    assert sum(_cents(row.values[-1]) for row in made.rows) == made.totals["total"]
    assert sum(made.totals[name] for name in ("prompt", "cached", "output", "gpu")) == made.totals["total"]
    for at in range(4):
        assert sum(_cents(row.values[at]) for row in made.rows) == _cents(made.total_values[at])
