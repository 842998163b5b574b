"""`reconciliations/`: every month with its residuals, and the same figures as the month's own address tells."""

from datetime import UTC, datetime

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.ledger import proposals
from controlplane.ledger.models import InvoiceLine, Period
from controlplane.ledger.reconciliation_api import ReconciliationRowSerializer, reconciliations_json
from tests import factories
from tests.ledger.fleet_rows import make_fleet
from tests.ledger.test_bridge import BOSS, FIN, NOW, OCTOBER, lines_of, month, sku, take

API = "/api/v1/reconciliations/"


@pytest.fixture
def people(db):
    factories.installation()
    return factories.people()


@pytest.fixture
def fleet(people):
    made = make_fleet("i1", tenants="a b", since=OCTOBER)
    month(made.pool)
    sku(made.pool)
    return made


@pytest.fixture
def today(monkeypatch):
    """The list ends with the running month: November 2026 here."""
    monkeypatch.setattr("django.utils.timezone.now", lambda: datetime(2026, 11, 20, tzinfo=UTC))


def rows_of(answer):
    assert answer.status_code == 200, answer.content
    return {row["period"]: row for row in answer.json()["results"]}


def test_a_month_has_the_figures_of_its_own_address(fleet, people, today):
    Period.objects.create(name="2026-10", state="closed", version=1)
    invoice = take(lines_of(extra="19.5,0,EUR,Tax,GPU,2026-10-05 00:00:00,NULL,,Nordgrid,de-1"))
    found = rows_of(people["finance"].get(API))["2026-10"]
    alone = people["finance"].get(f"{API}2026-10/").json()
    bridge = alone["bridge"]
    assert (found["state"], found["currency"], found["invoices"]) == ("closed", alone["currency"], [invoice.pk])
    for name in ("book", "invoice", "difference", "residual", "open", "tolerance", "within_tolerance", "unpriced_us"):
        assert found[name] == bridge[name], name
    assert found["steps"] == bridge["steps"]
    assert (found["book"], found["difference"], found["sums_to_zero"]) == ("14880.00", "286.50", True)
    described = ReconciliationRowSerializer(data=found)
    assert described.is_valid(), described.errors


def test_what_was_booked_is_no_longer_open(fleet, people, today):
    """297.00 of price up and 30.00 of quantity down."""
    take(lines_of())
    for step, booked, left in (("price_variance", "297.00", "-30.00"), ("quantity_variance", "267.00", "0.00")):
        proposal = proposals.propose_variance(
            period="2026-10", step=step, spread="platform", actor=FIN, now=NOW, reason="lease"
        )
        proposals.approve(proposal.pk, actor=BOSS, now=NOW, reason="seen")
        found = rows_of(people["finance"].get(API))["2026-10"]
        assert (found["booked"], found["open"]) == (booked, left)
    parts = {step["step"]: step["booked"] for step in found["steps"]}
    assert (parts["price_variance"], parts["quantity_variance"]) == ("297.00", "-30.00")


def test_a_month_without_an_invoice_is_unknown_and_not_reconciled(fleet, people, today):
    found = rows_of(people["viewer"].get(API))["2026-10"]
    unknown = ("invoice", "difference", "residual", "sums_to_zero", "open", "tolerance", "within_tolerance")
    assert {found[name] for name in unknown} == {None} and found["book"] == "14880.00"


def test_what_no_step_names_does_not_sum_to_zero(fleet, people, today, monkeypatch):
    take(lines_of())
    monkeypatch.setattr("controlplane.ledger.bridging._steps", lambda *given: ())
    found = rows_of(people["finance"].get(API))["2026-10"]
    assert (found["residual"], found["sums_to_zero"], found["within_tolerance"]) == ("267.00", False, False)


def test_lines_of_one_month_are_in_no_other(fleet, people, today):
    take(lines_of())
    november = InvoiceLine.objects.first().invoice
    november.pk, november.period, november.file_sha256 = None, "2026-11", "f" * 64
    november.save()
    found = rows_of(people["finance"].get(API))
    assert found["2026-10"]["invoice"] == "15147.00"
    assert (found["2026-11"]["invoice"], found["2026-11"]["book"]) == ("0.00", "0.00")


def test_states_pages_and_values_that_cannot_be_used(people, today):
    Period.objects.create(name="2025-03", state="closed", version=2)
    client = people["finance"]
    newest_first = [f"2026-{n:02d}" for n in range(11, 0, -1)] + [f"2025-{n:02d}" for n in range(12, 2, -1)]
    assert list(rows_of(client.get(f"{API}?limit=24"))) == newest_first
    walked, address = [], f"{API}?limit=5"
    while address:
        answer = client.get(address)
        walked += rows_of(answer)
        address = answer.json()["next"]
    assert walked == newest_first
    assert len(rows_of(client.get(API))) == 12 and len(rows_of(client.get(f"{API}?limit=500"))) == 21
    assert list(rows_of(client.get(f"{API}?state=closed"))) == ["2025-03"]
    assert list(rows_of(client.get(f"{API}?state=running"))) == ["2026-11"]
    assert len(rows_of(client.get(f"{API}?state=open&limit=24"))) == 19
    wrong = client.get(f"{API}?state=done")
    assert wrong.status_code == 400 and list(wrong.json()["errors"]) == ["state"]
    assert client.get(f"{API}?cursor=nonsense").status_code == 404


def test_members_of_tenants_do_not_see_it(people):
    statuses = {name: client.get(API).status_code for name, client in people.items()}
    assert {name for name, status in statuses.items() if status == 200} == {"admin", "finance", "oncall", "viewer"}
    assert statuses["tenant"] == statuses["stranger"] == 403


def test_a_page_takes_the_same_statements_for_one_month_as_for_many(fleet, people, today):
    take(lines_of())
    Period.objects.create(name="2025-03", state="closed", version=1)
    counts = []
    for limit in (2, 20):
        with CaptureQueriesContext(connection) as taken:
            assert len(rows_of(people["finance"].get(f"{API}?limit={limit}"))) == limit
        counts.append(len(taken))
    assert counts[0] == counts[1] <= 20


def test_no_month_is_no_row(people):
    assert reconciliations_json([]) == []
