"""Pages of the month's end: they render in every state, refuse with the input kept, and two people book a residual."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.ledger.exports import run_export
from controlplane.ledger.models import ExportJob, LedgerEvent, Period, PlannedExchangeRate, PoolSku, Proposal
from tests import factories
from tests.ledger.fleet_rows import make_fleet
from tests.ledger.test_bridge import OCTOBER, lines_of, month, sku, take
from tests.ledger.test_pages import roll_up

BRIDGE = "/finance/reconciliation/?period=2026-10"


@pytest.fixture
def fleet(db):
    made = make_fleet("i1", tenants="a b", since=OCTOBER)
    month(made.pool)
    return made


@pytest.fixture
def fin(fleet):
    return factories.person("finance", name="fin")


def text_of(response, status=200):
    assert response.status_code == status, response.content[:800]
    return response.content.decode()


def test_the_bridge_without_an_invoice_says_so_and_shows_no_amount(fin):
    text = text_of(fin.get(BRIDGE))
    assert "No invoice of October 2026 is imported" in text and "No invoice line can match it" in text
    assert "Bridge closes" not in text
    assert "Book a residual" not in text


def test_the_bridge_names_every_step_and_opens_its_lines(fin, fleet):
    sku(fleet.pool)
    take(lines_of(extra="19.5,0,EUR,Tax,VAT,2026-10-05 00:00:00,NULL,,Nordgrid,de-1"))
    response = fin.get(f"{BRIDGE}&step=tax&sku=H100-HOUR")
    text = text_of(response)
    rows = {row.name: row.cents for row in response.context["rows"]}
    assert rows == {"price_variance": 29_700, "quantity_variance": -3_000, "tax": 1_950}
    assert response.context["rows"][-1].running_cents == 15_147_00 + 1_950
    assert "Bridge closes" in text and "+297.00" in text and "−30.00" in text
    assert text.count('class="level-1"') == 31 and "VAT" in text


def test_a_pool_is_named_on_the_page_and_matches_from_then_on(fin, fleet):
    take(lines_of())
    given = {"sku": "H100-HOUR", "provider": "", "period": "2026-10", "units_per_slot_hour": "1", "reason": "as billed"}
    text = text_of(fin.post(f"/finance/skus/{fleet.pool.slug}/", {**given, "units_per_slot_hour": "-1"}), 400)
    assert "Enter a number over 0" in text and not PoolSku.objects.exists()
    assert fin.post(f"/finance/skus/{fleet.pool.slug}/", given).status_code == 302
    assert "+297.00" in text_of(fin.get(BRIDGE))


def test_two_people_book_a_residual_on_the_pages(fin, fleet):
    sku(fleet.pool)
    take(lines_of())
    given = {"step": "price_variance", "spread": "attribution", "reason": ""}
    text = text_of(fin.post("/finance/reconciliation/2026-10/propose/", given), 400)
    assert "Say why" in text and "There is a problem" in text
    fin.post("/finance/reconciliation/2026-10/propose/", {**given, "reason": "rate went up"})
    row = Proposal.objects.get()
    fin.post(f"/finance/proposals/{row.pk}/", {"approve": "1", "reason": "mine"})
    assert not LedgerEvent.objects.exists()
    text = text_of(fin.get("/finance/proposals/"))
    assert "Take back" in text and "Approve and post" not in text
    boss = factories.person("admin", name="boss")
    assert "Approve and post" in text_of(boss.get("/finance/proposals/"))
    boss.post(f"/finance/proposals/{row.pk}/", {"approve": "1", "reason": "seen"})
    assert LedgerEvent.objects.get().key == "variance:2026-10:price_variance#1"
    assert "Posted" in text_of(fin.get(BRIDGE))


def test_a_running_month_offers_no_button_to_close_it(fin):
    this = f"{timezone.now():%Y-%m}"
    text = text_of(fin.get(f"/finance/periods/{this}/"))
    assert "it can be closed from then on" in text and "Close period" not in text
    text = text_of(fin.post(f"/finance/periods/{this}/", {"reason": "early"}), 400)
    assert "has not ended" in text and not Period.objects.filter(state="closed").exists()
    assert "Close period October 2026" in text_of(fin.get("/finance/periods/2026-10/"))


def test_a_month_before_the_installation_offers_no_button_to_close_it(fin):
    text = text_of(fin.get("/finance/periods/1999-05/"))
    assert "there is nothing to close" in text and "Close period" not in text
    text = text_of(fin.post("/finance/periods/1999-05/", {"reason": "tidy"}), 400)
    assert "There was nothing of this installation yet in 1999-05" in text and not Period.objects.exists()


def test_a_period_is_closed_and_reopened_on_its_page(fin):
    text = text_of(fin.get("/finance/periods/2026-10/"))
    assert "closing needs a reason" in text and "Never" not in text and "was never closed" in text
    text = text_of(fin.post("/finance/periods/2026-10/", {"reason": ""}), 400)
    assert "Say why it is closed with open checks" in text and not Period.objects.filter(state="closed").exists()
    assert fin.post("/finance/periods/2026-10/", {"reason": "no invoice comes"}).status_code == 302
    text = text_of(fin.get("/finance/periods/2026-10/"))
    assert "Reopen October 2026" in text and "no invoice comes" in text
    assert "1" in text_of(fin.get("/finance/periods/"))
    files = [
        fin.get(f"/finance/periods/2026-10/export/{format}/?version=1")
        for format in ("csv", "xlsx", "focus", "parquet")
    ]
    assert [one.status_code for one in files] == [200] * 4
    assert "costs-2026-10-v1.csv" in files[0]["Content-Disposition"]
    assert fin.get("/finance/periods/2026-10/export/csv/?version=9").status_code == 404
    assert fin.get("/finance/periods/2026-10/export/pdf/").status_code == 404
    fin.post("/finance/periods/2026-10/", {"reopen": "1", "reason": "a correction"})
    assert Period.objects.get().state == "open" and "a correction" in text_of(fin.get("/finance/periods/2026-10/"))


def test_requests_without_a_rate_card_are_listed_by_tenant_class_and_model_with_their_statement(fin, fleet):
    address = "/finance/periods/2026-10/"
    assert "#unpriced" not in text_of(fin.get(address))
    at = OCTOBER + timedelta(days=9)
    for hour, (tenant, requests) in enumerate((("a", 4), ("b", 1_700), ("a", 5))):
        roll_up(fleet, tenant, "chat", at=at + timedelta(hours=hour), requests=requests, nanos=(0, 0, 0, 0))
    text = text_of(fin.get(address))
    assert "1,709 requests" in text and 'href="#unpriced"' in text and 'id="unpriced"' in text
    rows = re.findall(
        r"""<a href="(/finance/statements/\w/)\?period=2026-10">(\w)</a></th><td>(\w+)</td><td>([\w-]+)</td>"""
        r"""<td class="num">([\d,]+)</td>""",
        text,
    )
    assert rows == [
        ("/finance/statements/b/", "b", "chat", "llama-70b", "1,700"),
        ("/finance/statements/a/", "a", "chat", "llama-70b", "9"),
    ]
    assert "without a rate card in force" in text_of(fin.get("/finance/statements/b/?period=2026-10"))
    (check,) = [
        check for check in fin.get("/api/v1/periods/2026-10/").json()["checks"] if check["name"] == "unpriced_requests"
    ]
    assert [(use["tenant"], use["workload_class"], use["requests"]) for use in check["unpriced"]] == [
        ("b", "chat", 1_700),
        ("a", "chat", 9),
    ]


def test_only_finance_and_admins_close_and_book(fleet):
    viewer = factories.person("viewer")
    assert "Close period October" not in text_of(viewer.get("/finance/periods/2026-10/"))
    assert viewer.post("/finance/periods/2026-10/", {"reason": "x"}).status_code == 403
    assert viewer.post("/finance/proposals/", {}).status_code == 403
    assert viewer.get("/finance/periods/2026-10/export/csv/").status_code == 200


def test_credit_notes_are_proposed_with_the_input_kept(fin):
    given = {
        "kind": "credit_note",
        "period": "2026-10",
        "tenant": "a",
        "class": "chat",
        "amount": "1,5",
        "reason": "outage",
    }
    text = text_of(fin.post("/finance/proposals/", given), 400)
    assert "is not a decimal number" in text and 'value="1,5"' in text
    assert fin.post("/finance/proposals/", {**given, "amount": "1.5"}).status_code == 302
    assert Proposal.objects.get().amount_nanos == 1_500_000_000


def test_a_long_export_has_an_address_with_its_progress(fin):
    response = fin.post("/finance/exports/", {"period": "2026-10", "format": "csv"})
    job = ExportJob.objects.get()
    assert response.url == f"/finance/exports/{job.pk}/"
    assert "waits for a worker" in text_of(fin.get(response.url)) and "hx-get" in text_of(fin.get(response.url))
    run_export(job.pk, now=timezone.now())
    text = text_of(fin.get(response.url))
    assert "Download costs-2026-10-open.csv" in text and "hx-get" not in text
    assert fin.get(f"{response.url}?download=1").content.startswith(b"period,day,kind")
    assert "not a month" in text_of(fin.post("/finance/exports/", {"period": "2026-W44", "format": "csv"}), 400)


@pytest.mark.parametrize(
    "address", ["/finance/periods/x/", "/finance/periods/2026-10-01/", "/finance/reconciliation/?period=x"]
)
def test_what_is_no_month_is_not_found(fin, address):
    assert fin.get(address).status_code == 404


def test_rest_closes_reopens_and_keeps_files_the_same(fin, fleet):
    send = {"content_type": "application/json"}
    sku(fleet.pool)
    take(lines_of())
    found = fin.get("/api/v1/reconciliations/2026-10/").json()
    assert found["bridge"]["difference"] == "267.00" and found["bridge"]["residual"] == "0.00"
    assert fin.post("/api/v1/periods/2026-10/close/", {}, **send).status_code == 400
    close = fin.post("/api/v1/periods/2026-10/close/", {"reason": "agreed"}, **send, headers={"Idempotency-Key": "k"})
    body = close.json()
    assert (body["state"], body["version"], len(body["versions"][0]["exports"])) == ("closed", 1, 4)
    assert {check["name"]: check["word"] for check in body["checks"]}["unposted"] == "Sums disagree"
    again = fin.post("/api/v1/periods/2026-10/close/", {"reason": "agreed"}, **send, headers={"Idempotency-Key": "k"})
    assert again.headers["Idempotency-Replayed"] == "true" and again.json() == body
    file = fin.get("/api/v1/periods/2026-10/exports/csv/").content
    assert fin.post("/api/v1/periods/2026-10/reopen/", {"reason": ""}, **send).status_code == 400
    assert fin.post("/api/v1/periods/2026-10/reopen/", {"reason": "wrong"}, **send).json()["state"] == "open"
    assert fin.get("/api/v1/periods/2026-10/exports/csv/?version=1").content == file
    listed = {row["period"]: row for row in fin.get("/api/v1/periods/").json()}
    assert listed["2026-10"] == {"period": "2026-10", "state": "open", "version": 1}
    assert fin.get("/api/v1/periods/October/").status_code == 404


def test_rest_proposes_and_another_person_approves(fin, fleet):
    send = {"content_type": "application/json"}
    sku(fleet.pool)
    take(lines_of())
    given = {"kind": "variance", "period": "2026-10", "step": "price_variance", "spread": "platform", "reason": "rate"}
    made = fin.post("/api/v1/proposals/", given, **send)
    assert made.status_code == 201 and made.json()["amount"] == "297.00"
    address = f"/api/v1/proposals/{made.json()['id']}/approve/"
    assert fin.post(address, {"reason": "mine"}, **send).status_code == 400
    boss = factories.person("admin", name="boss")
    assert boss.post(address, {"reason": "seen"}, **send).json()["event"] == "variance:2026-10:price_variance#1"
    note = {"kind": "credit_note", "period": "2026-10", "tenant": "a", "workload_class": "chat", "reason": "x"}
    assert "amount" in str(fin.post("/api/v1/proposals/", {**note, "amount": "1e"}, **send).json())
    number = fin.post("/api/v1/proposals/", {**note, "amount": "2.5"}, **send).json()["id"]
    assert boss.post(f"/api/v1/proposals/{number}/reject/", {"reason": "no"}, **send).json()["state"] == "rejected"
    assert [row["state"] for row in fin.get("/api/v1/proposals/?period=2026-10").json()["results"]] == [
        "rejected",
        "posted",
    ]


def test_planned_exchange_rates_are_added_on_the_page(fin):
    given = {"currency": "usd", "rate": "0.9", "effective_from": "2026-01-01", "reason": "plan", "period": "2026-10"}
    wrong = (("currency", "DOLLAR"), ("rate", "0"), ("rate", "1e400"), ("effective_from", "soon"), ("reason", ""))
    for name, value in wrong:
        text = text_of(fin.post("/finance/planned-rates/", {**given, name: value}), 400)
        assert "There is a problem" in text
    assert fin.post("/finance/planned-rates/", given).status_code == 302
    assert "already" in text_of(fin.post("/finance/planned-rates/", given), 400)
    row = PlannedExchangeRate.objects.get()
    assert (row.currency, f"{row.rate:.2f}", row.created_by) == ("USD", "0.90", "fin")
    assert ">0.9<" in text_of(fin.get(BRIDGE))
