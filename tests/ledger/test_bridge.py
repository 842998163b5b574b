"""From attributed cost to the invoice: every line of both lands in a named step, and nothing is left over."""

import io
import json
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import IntegrityError, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.ledger import proposals
from controlplane.ledger.bridge_pages import sku_lines, step_rows
from controlplane.ledger.bridging import lines_of_sku
from controlplane.ledger.invoices import ExchangeRate, import_invoice, withdraw_invoice
from controlplane.ledger.models import (
    AttributionInterval,
    AttributionLine,
    Invoice,
    InvoiceLine,
    LedgerEvent,
    PlannedExchangeRate,
    PoolSku,
    Proposal,
    Transfer,
)
from controlplane.ledger.posting import balances, trial_balance
from controlplane.ledger.reconciliation import reconcile, to_json
from tests.ledger.fleet_rows import make_fleet

FIN = Actor(id=None, name="fin", role="finance")
BOSS = Actor(id=None, name="boss", role="finance")
OCTOBER = datetime(2026, 10, 1, tzinfo=UTC)
NOW = datetime(2026, 11, 3, tzinfo=UTC)
HEADER = (
    "BilledCost,EffectiveCost,BillingCurrency,ChargeCategory,ServiceName,ChargePeriodStart,SkuId,ConsumedQuantity,"
    "ProviderName,RegionId"
)


def month(pool, *, slots=8, rate=2_500_000_000, tenants=(("a", 3), ("b", 1)), days=31, hours=24):
    """Attributed hours as attribution leaves them: lines of an interval add up to its cost."""
    nanos = slots * rate
    intervals = AttributionInterval.objects.bulk_create(
        AttributionInterval(
            pool=pool, starts_at=OCTOBER + timedelta(hours=n), ends_at=OCTOBER + timedelta(hours=n + 1), run=1,
            method="usage", state="priced", cost_nanos=nanos, owned_us=slots * 3_600_000_000, attributed_at=NOW,
            complete=True,
        )
        for n in range(days * hours)
    )  # fmt: skip
    whole = sum(weight for _, weight in tenants)
    AttributionLine.objects.bulk_create(
        AttributionLine(
            interval=row, tenant_slug=tenant, class_slug="chat", line="direct", amount_nanos=nanos * weight // whole
        )
        for row in intervals
        for tenant, weight in tenants
    )


def sku(pool, **values):
    given = {"sku": "H100-HOUR", "provider": "Nordgrid", "region": "de-1", **values}
    return PoolSku.objects.create(pool=pool, updated_at=NOW, updated_by="fin", **given)


def lines_of(hours="5940", price="2.55", *, days=31, extra=""):
    """An invoice of one line a day whose hours add up to `hours` exactly."""
    total, step = Decimal(hours), (Decimal(hours) / days).quantize(Decimal("0.01"))
    rows = []
    for day in range(1, days + 1):
        quantity = step if day < days else total - step * (days - 1)
        rows.append(
            f"{quantity * Decimal(price)},{quantity * Decimal(price)},EUR,Usage,GPU,2026-10-{day:02d} 00:00:00,"
            f"H100-HOUR,{quantity},Nordgrid,de-1"
        )
    return "\n".join([HEADER, *rows, extra]).strip() + "\n"


def take(text, **more):
    return import_invoice(
        io.BytesIO(text.encode()), file_name="ng.csv", period="2026-10", actor=FIN, now=NOW, **more
    ).invoice


@pytest.fixture
def fleet(db):
    made = make_fleet("i1", tenants="a b", since=OCTOBER)
    month(made.pool)
    sku(made.pool)
    return made


def amounts(found):
    return {step.name: step.nanos for step in found.bridge.steps if step.nanos}


def test_the_worked_example_from_a_file_to_price_and_quantity(fleet, tmp_path, capsys):
    path = tmp_path / "nordgrid.csv"
    path.write_text(lines_of())
    call_command("import_invoice", str(path), "--period", "2026-10", "--json")
    capsys.readouterr()
    call_command("reconcile", "--period", "2026-10", "--json")
    bridge = json.loads(capsys.readouterr().out)["bridge"]
    assert (bridge["book"], bridge["invoice"]) == ("14880.00", "15147.00")
    steps = {step["step"]: step["amount"] for step in bridge["steps"]}
    assert (steps.pop("price_variance"), steps.pop("quantity_variance")) == ("297.00", "-30.00")
    assert set(steps.values()) == {"0.00"}
    assert (bridge["difference"], bridge["residual"]) == ("267.00", "0.00")
    assert sum(Decimal(line["book_quantity"]) for line in bridge["matched"]) == 5952
    assert sum(Decimal(line["invoice_quantity"]) for line in bridge["matched"]) == 5940
    call_command("reconcile", "--period", "2026-10")
    assert "Price variance: 297.00" in capsys.readouterr().out


@pytest.mark.parametrize("period", ["October", "2026-W44", "2026-13", ""])
def test_the_command_takes_months_only(fleet, period):
    with pytest.raises(CommandError) as error:
        call_command("reconcile", "--period", period)
    assert error.value.returncode == 2


def test_every_category_and_both_sides_unmatched_are_steps_of_their_own(fleet):
    other = make_fleet("i1", tenants="a", since=OCTOBER, slug="lone", model="m2")
    month(other.pool, slots=1, rate=10**9, days=1)
    extra = "\n".join(
        f"{amount},0,EUR,{category},GPU,2026-10-05 00:00:00,{sku_},,Nordgrid,de-1"
        for amount, category, sku_ in (
            ("19.5", "Tax", "NULL"), ("-100", "Credit", "NULL"), ("7", "Purchase", "R"), ("3.25", "Usage", "NET"),
            ("2", "Adjustment", "NULL"),
        )
    )  # fmt: skip
    take(lines_of(extra=extra))
    found = reconcile("2026-10", now=NOW)
    got = amounts(found)
    assert got["tax"] == 19_500_000_000 and got["credit"] == -100 * 10**9
    assert got["commitment"] == 7 * 10**9 and got["other"] == 2 * 10**9
    assert got["unmatched_invoice"] == 3_250_000_000 and got["unmatched_book"] == -24 * 10**9
    assert found.bridge.closes and sum(got.values()) == found.bridge.difference_nanos
    assert found.bridge.invoice_nanos == 15_147 * 10**9 + 3_250_000_000 + 19_500_000_000 - 91 * 10**9


def test_an_invoice_that_was_withdrawn_counts_nowhere(fleet):
    invoice = take(lines_of())
    withdraw_invoice(invoice.pk, actor=FIN, now=NOW, reason="wrong account")
    found = reconcile("2026-10", now=NOW)
    assert found.bridge.invoice_nanos == 0 and not found.bridge.invoices and not found.within_tolerance
    assert amounts(found) == {"unmatched_book": -14_880 * 10**9}


def test_a_foreign_invoice_splits_off_what_the_exchange_rate_did(fleet):
    PlannedExchangeRate.objects.create(
        currency="USD", effective_from=date(2026, 1, 1), rate=Decimal("0.90"), created_at=NOW, created_by="fin"
    )
    PlannedExchangeRate.objects.create(
        currency="USD", effective_from=date(2026, 11, 1), rate=Decimal("0.5"), created_at=NOW, created_by="fin"
    )
    take(lines_of("5952", "2.80").replace("EUR", "USD"), exchange=ExchangeRate(Decimal("0.95"), date(2026, 10, 31)))
    found = reconcile("2026-10", now=NOW)
    # 5,952 h at 2.80 USD are 16,665.60 USD: 14,999.04 planned, 15,832.32 as invoiced
    assert amounts(found) == {"price_variance": 119_040_000_000, "exchange": 833_280_000_000}
    assert found.bridge.closes and found.bridge.invoice_nanos == 15_832_320_000_000


def test_without_a_planned_rate_there_is_no_exchange_difference(fleet):
    take(lines_of("5952", "2.80").replace("EUR", "USD"), exchange=ExchangeRate(Decimal("0.95"), date(2026, 10, 31)))
    assert "exchange" not in amounts(reconcile("2026-10", now=NOW))


def test_lines_without_a_quantity_are_price_alone_and_said(fleet):
    text = HEADER + "\n15000,15000,EUR,Usage,GPU,2026-10-05 00:00:00,H100-HOUR,,Nordgrid,de-1\n"
    take(text)
    found = reconcile("2026-10", now=NOW)
    assert len(found.bridge.keys_without_quantity) == 1
    assert amounts(found)["price_variance"] == 15_000 * 10**9 - 480 * 10**9
    assert "quantity_variance" not in amounts(found)


def test_a_pools_units_and_the_more_particular_name_decide_what_matches(fleet):
    PoolSku.objects.update(units_per_slot_hour=Decimal(2), provider="", region="")
    other = make_fleet("i1", tenants="a", since=OCTOBER, slug="fi", model="m2")
    month(other.pool, slots=1, rate=10**9, days=1)
    sku(other.pool, provider="", region="fi-1")
    text = (
        HEADER + "\n480,480,EUR,Usage,GPU,2026-10-01,H100-HOUR,384,Nordgrid,de-1\n"
        "24,24,EUR,Usage,GPU,2026-10-01,H100-HOUR,24,Nordgrid,fi-1\n"
    )
    take(text)
    found = reconcile("2026-10", now=NOW)
    assert amounts(found) == {"unmatched_book": -14_400 * 10**9}
    assert {line.book_quantity for line in found.bridge.bridge.matched} == {Fraction(384), Fraction(24)}


AMOUNTS = st.decimals(-(10**6), 10**6, places=12, allow_nan=False, allow_infinity=False)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            AMOUNTS, st.sampled_from(["usage", "tax", "credit", "support", "refund", "commitment", "other"]),
            st.integers(1, 31), st.sampled_from(["H100-HOUR", "NET"]),
            st.none() | st.decimals(0, 10**4, places=6, allow_nan=False, allow_infinity=False),
        ),
        max_size=12,
    ),
    st.none() | st.decimals("0.0001", "99", places=9),
)  # fmt: skip
def test_whatever_the_invoice_says_the_steps_leave_nothing_over(fleet, rows, rate):
    Invoice.objects.all().delete()
    invoice = Invoice.objects.create(
        period="2026-10", file_name="x", file_sha256="0", format="focus", currency="USD" if rate else "EUR",
        exchange_rate=rate, exchange_date=date(2026, 10, 31) if rate else None, lines_count=len(rows), imported_at=NOW,
        imported_by="fin",
    )  # fmt: skip
    InvoiceLine.objects.bulk_create(
        InvoiceLine(
            invoice=invoice, line=number, billed=billed, category=category, provider="Nordgrid", sku=name,
            region="de-1", day=date(2026, 10, day), quantity=quantity,
        )
        for number, (billed, category, day, name, quantity) in enumerate(rows)
    )  # fmt: skip
    found = reconcile("2026-10", now=NOW)
    assert found.bridge.closes
    exact = sum((Fraction(row[0]) for row in rows), Fraction(0)) * Fraction(rate or 1) * 10**9
    assert found.bridge.invoice_nanos == round(exact)
    assert found.bridge.book_nanos + sum(step.nanos for step in found.bridge.steps) == found.bridge.invoice_nanos


def propose(step="price_variance", spread="attribution", actor=FIN):
    return proposals.propose_variance(
        period="2026-10", step=step, spread=spread, actor=actor, now=NOW, reason="rate went up"
    )


def test_a_variance_is_booked_once_by_two_people_and_spread_like_the_cost(fleet):
    take(lines_of())
    row = propose()
    with pytest.raises(ValidationError, match="somebody else"):
        proposals.approve(row.pk, actor=FIN, now=NOW, reason="fine")
    assert not Transfer.objects.exists()
    for _ in range(3):
        done = proposals.approve(row.pk, actor=BOSS, now=NOW, reason="seen the invoice")
    assert done.state == Proposal.State.POSTED and LedgerEvent.objects.count() == 1
    assert balances("2026-10") == {
        "tenant:a:chat:price_variance": 222_750_000_000, "tenant:b:chat:price_variance": 74_250_000_000,
        "provider:price_variance": -297_000_000_000,
    }  # fmt: skip
    found = reconcile("2026-10", now=NOW)
    assert found.booked == {"price_variance": 297_000_000_000} and found.open_nanos == -30_000_000_000
    assert found.within_tolerance
    with pytest.raises(ValidationError, match="Nothing is left"):
        propose()
    assert [entry.action for entry in AuditEntry.objects.filter(noun="proposal").order_by("id")] == [
        "variance.propose", "variance.approve",
    ]  # fmt: skip


def test_a_variance_may_be_left_on_the_platform(fleet):
    take(lines_of())
    row = propose("quantity_variance", "platform")
    proposals.approve(row.pk, actor=BOSS, now=NOW, reason="ours")
    assert balances("2026-10") == {
        "platform::quantity_variance": -30_000_000_000, "provider:quantity_variance": 30_000_000_000
    }  # fmt: skip


def test_a_proposal_that_the_bridge_has_overtaken_is_not_posted(fleet):
    invoice = take(lines_of())
    row = propose()
    with pytest.raises(ValidationError, match="proposed already"):
        propose(actor=BOSS)
    withdraw_invoice(invoice.pk, actor=FIN, now=NOW, reason="replaced")
    take(lines_of("5940", "2.60"))
    with pytest.raises(ValidationError, match=r"594\.00 now"):
        proposals.approve(row.pk, actor=BOSS, now=NOW, reason="fine")
    proposals.reject(row.pk, actor=FIN, now=NOW, reason="stale")
    again = propose()
    assert proposals.approve(again.pk, actor=BOSS, now=NOW, reason="fine").amount_nanos == 594 * 10**9


def test_a_second_invoice_books_the_rest_only(fleet):
    take(lines_of("5940", "2.55"))
    proposals.approve(propose().pk, actor=BOSS, now=NOW, reason="first")
    extra = HEADER + "\n10,10,EUR,Usage,GPU,2026-10-03,H100-HOUR,0,Nordgrid,de-1\n"
    take(extra)
    row = propose()
    assert row.amount_nanos == 10 * 10**9 and row.event_key == "variance:2026-10:price_variance#2"
    proposals.approve(row.pk, actor=BOSS, now=NOW, reason="second")
    assert reconcile("2026-10", now=NOW).booked == {"price_variance": 307 * 10**9}
    assert trial_balance().balanced


def test_spread_parts_add_up_to_the_nano_whatever_the_shares(fleet):
    chance = random.Random(7)
    AttributionLine.objects.all().delete()
    for row in AttributionInterval.objects.order_by("starts_at")[:48]:
        left = row.cost_nanos
        for tenant in ("a", "b", "platform"):
            part = left if tenant == "platform" else chance.randrange(left + 1)
            left -= part
            AttributionLine.objects.create(
                interval=row, tenant_slug=tenant, class_slug="chat", line="direct", amount_nanos=part
            )
    take(lines_of("5939.999999", "2.550000001"))
    for step in ("price_variance", "quantity_variance"):
        row = propose(step)
        assert sum(line["nanos"] for line in row.lines) == row.amount_nanos
        proposals.approve(row.pk, actor=BOSS, now=NOW, reason="fine")
    assert trial_balance().balanced
    assert reconcile("2026-10", now=NOW).open_nanos == sum(
        step.nanos for step in reconcile("2026-10", now=NOW).bridge.steps if step.name == "rounding"
    )


def test_adjustments_and_credit_notes_need_two_people_and_a_reason(fleet):
    given = {"period": "2026-10", "tenant": "a", "class_": "chat", "actor": FIN, "now": NOW}
    with pytest.raises(ValidationError, match="Say why"):
        proposals.propose_adjustment(amount_nanos=5, reason=" ", **given)
    with pytest.raises(ValidationError, match="over 0"):
        proposals.propose_credit_note(amount_nanos=-5, reason="x", **given)
    with pytest.raises(ValidationError, match="no tenant"):
        proposals.propose_credit_note(amount_nanos=5, reason="x", **{**given, "tenant": "nobody"})
    cost = proposals.propose_adjustment(amount_nanos=-5, reason="outage", **given)
    note = proposals.propose_credit_note(amount_nanos=7, reason="outage", **given)
    for row in (cost, note):
        proposals.approve(row.pk, actor=BOSS, now=NOW, reason="agreed")
    assert balances() == {
        "tenant:a:chat:adjustment": -5, "platform:chat:adjustment": 5, "revenue:chat": 7, "billed:a:chat": -7,
    }  # fmt: skip
    with pytest.raises(ValidationError, match="opposite"):
        proposals.reject(cost.pk, actor=BOSS, now=NOW, reason="no")


def test_the_database_refuses_that_one_person_makes_and_checks(fleet):
    row = proposals.propose_credit_note(
        period="2026-10", tenant="a", class_="chat", amount_nanos=7, actor=FIN, now=NOW, reason="x"
    )
    with pytest.raises(IntegrityError), transaction.atomic():
        Proposal.objects.filter(pk=row.pk).update(decided_by="fin")
    row.refresh_from_db()
    assert row.decided_by == ""


def test_reconciling_again_and_again_leaves_the_book_as_it_was(fleet):
    take(lines_of())
    row = proposals.propose_variance(
        period="2026-10", step="price_variance", spread="platform", actor=FIN, now=NOW, reason="rate went up"
    )
    proposals.approve(row.pk, actor=BOSS, now=NOW, reason="seen")
    before = (trial_balance("2026-10").fingerprint, LedgerEvent.objects.count())
    found = [to_json(reconcile("2026-10", now=NOW)) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert (trial_balance("2026-10").fingerprint, LedgerEvent.objects.count()) == before


def test_days_of_a_sku_add_up_to_it_as_printed(fleet):
    take(lines_of("5939.77", "2.5533"))
    found = reconcile("2026-10", now=NOW)
    cents = {row.name: row.cents for row in step_rows(found)}
    (line,) = sku_lines(found.bridge, cents["price_variance"], cents["quantity_variance"])
    assert len(line.days) == 31
    assert sum(day.price_cents for day in line.days) == cents["price_variance"]
    assert sum(day.quantity_cents for day in line.days) == cents["quantity_variance"]
    assert all(abs(day.price_cents * 10**7 - day.line.variance.price_nanos) < 10**7 for day in line.days)


def test_lines_of_a_sku_are_those_of_the_invoice_of_that_day(fleet):
    take(lines_of(extra="1,1,EUR,Tax,GPU,2026-10-02 00:00:00,H100-HOUR,1,Nordgrid,de-1"))
    report = reconcile("2026-10", now=NOW).bridge
    assert len(lines_of_sku("2026-10", report, "H100-HOUR")) == 31
    assert [line.line for line in lines_of_sku("2026-10", report, "H100-HOUR", "2026-10-02")] == [3]
    assert lines_of_sku("2026-10", report, "H100-HOUR", "2026-11-02") == lines_of_sku("2026-10", report, "x") == []
