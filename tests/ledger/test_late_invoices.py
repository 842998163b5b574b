"""An invoice that comes after its month was closed: the closing stays, a later month books what it left."""

import io
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from controlplane.audit.actors import Actor
from controlplane.ledger import proposals
from controlplane.ledger.closing_checks import checklist
from controlplane.ledger.invoices import import_invoice, withdraw_invoice
from controlplane.ledger.late_invoices import lands_in
from controlplane.ledger.models import Invoice, LedgerEvent, Period, PeriodExport
from controlplane.ledger.periods import close_period, reopen_period
from controlplane.ledger.posting import balances, hold_posting
from controlplane.ledger.reconciliation import reconcile, to_json
from tests import factories
from tests.ledger.fleet_rows import make_fleet
from tests.ledger.test_bridge import HEADER, OCTOBER, lines_of, month, sku
from tests.ledger.test_invoice_api import post
from tests.ledger.test_invoice_pages import text_of, upload

FIN = Actor(id=None, name="fin", role="finance")
BOSS = Actor(id=None, name="boss", role="finance")
CLOSED_AT = datetime(2026, 11, 3, tzinfo=UTC)
CAME_AT = datetime(2026, 11, 9, tzinfo=UTC)
DECEMBER = datetime(2026, 12, 2, tzinfo=UTC)
OWN = HEADER + "\n3,3,EUR,Usage,GPU,2026-11-10 10:00:00,other,1,own,here\n"


def take(text, period="2026-10", now=CAME_AT):
    done = import_invoice(io.BytesIO(text.encode()), file_name="ng.csv", period=period, actor=FIN, now=now)
    return done.invoice


@pytest.fixture
def closed(db):
    """October: 14,880.00 of cost, closed without an invoice."""
    made = make_fleet("i1", tenants="a b", since=OCTOBER)
    month(made.pool)
    sku(made.pool)
    close_period("2026-10", actor=FIN, now=CLOSED_AT, reason="the provider is late")
    return made


def late_check(period="2026-11", now=DECEMBER):
    return next(check for check in checklist(period, now=now).checks if check.name == "late_invoices")


def book(step, spread="attribution"):
    row = proposals.propose_variance(
        period="2026-10", step=step, spread=spread, actor=FIN, now=CAME_AT, reason="late invoice"
    )
    return proposals.approve(row.pk, actor=BOSS, now=CAME_AT + timedelta(hours=1), reason="seen")


def test_an_invoice_of_an_open_month_is_not_late(closed):
    invoice = take(OWN, "2026-11")
    assert (invoice.missed_by, invoice.late_in, lands_in(invoice)) == (None, "", "")
    assert late_check().word == "0" and reconcile("2026-11", now=DECEMBER).late == ()


def test_a_late_invoice_opens_its_variance_in_the_next_open_month(closed):
    kept = dict(PeriodExport.objects.values_list("file_name", "sha256"))
    invoice = take(lines_of())
    assert (invoice.missed_by, invoice.late_in, lands_in(invoice)) == (1, "2026-11", "2026-11")
    take(OWN, "2026-11")
    found = reconcile("2026-11", now=DECEMBER)
    (late,) = found.late
    assert (late.period, late.invoice_nanos, late.booked_nanos) == ("2026-10", 15_147 * 10**9, 0)
    assert late.left_nanos == 267 * 10**9 and late.tolerance_nanos == 75_735_000_000 and not late.settled
    check = late_check()
    assert (check.state, check.word) == ("risk", "1 month") and "2026-10: 267.00 EUR" in check.text
    with pytest.raises(ValidationError, match="late invoices"):
        close_period("2026-11", actor=FIN, now=DECEMBER)
    assert to_json(found)["late"][0]["open"] == "267.00"
    # nothing of November's own bridge has October's invoice in it
    assert found.bridge.invoice_nanos == 3 * 10**9 and found.bridge.closes
    assert dict(PeriodExport.objects.values_list("file_name", "sha256")) == kept


def test_page_command_and_rest_say_where_it_lands_and_how_to_have_it_in_its_own_month(closed, tmp_path, capsys):
    fin = factories.person("finance", name="fin")
    address = upload(fin, lines_of())
    text = text_of(fin.get(address))
    assert "<b>2026-10 is closed.</b>" in text and "checklist of 2026-11" in text
    assert '<a href="/finance/periods/2026-10/">reopen the month</a>' in text
    path = tmp_path / "ng.csv"
    path.write_text(lines_of())
    call_command("import_invoice", str(path), "--period", "2026-10")
    said = capsys.readouterr().out
    assert "2026-10 is closed and stays as it is: book the variance in 2026-11, or reopen 2026-10" in said
    rest = post(fin, lines_of())
    assert (rest.status_code, rest.json()["repeated"], rest.json()["late_in"]) == (200, True, "2026-11")
    path.write_text(OWN)
    call_command("import_invoice", str(path), "--period", "2026-11")
    assert "is closed" not in capsys.readouterr().out


def test_a_list_of_invoices_says_of_each_where_it_lands_by_one_question(closed, django_assert_max_num_queries):
    def listed():
        return {row["id"]: row["late_in"] for row in fin.get("/api/v1/invoices/").json()["results"]}

    fin = factories.person("finance", name="fin")
    late, own = take(lines_of()), take(OWN, "2026-11")
    with CaptureQueriesContext(connection) as two:
        assert listed() == {late.pk: "2026-11", own.pk: None}
    more = [take(lines_of(f"{5_000 + number}")).pk for number in range(4)]
    with django_assert_max_num_queries(len(two)):
        assert listed() == dict.fromkeys([late.pk, *more], "2026-11") | {own.pk: None}
    assert fin.get(f"/api/v1/invoices/{late.pk}/").json()["late_in"] == "2026-11"


def test_what_is_booked_of_it_is_posted_in_the_open_month_and_settles_it(closed):
    take(lines_of())
    october = balances("2026-10")
    event = book("price_variance").event
    assert event.period == "2026-11" and event.reason == "late invoice"
    assert balances("2026-10") == october, "nothing is posted to a closed month"
    assert balances("2026-11")["tenant:a:chat:price_variance"] == 297 * 10**9 * 3 // 4
    (late,) = reconcile("2026-11", now=DECEMBER).late
    assert late.booked_nanos == 297 * 10**9 and late.left_nanos == -30 * 10**9 and late.settled
    assert late_check().state == "ok" and "2026-10" in late_check().text
    assert reconcile("2026-12", now=DECEMBER).late == (), "settled: no later month is asked"


def test_what_a_month_left_unbooked_is_asked_of_the_next(closed):
    take(lines_of())
    close_period("2026-11", actor=FIN, now=DECEMBER, reason="booked next month")
    (late,) = reconcile("2026-12", now=DECEMBER).late
    assert late.period == "2026-10" and not late.settled
    assert late_check("2026-12").state == "risk"
    assert book("price_variance").event.period == "2026-12"


def test_a_month_that_is_closed_anew_has_the_invoice(closed):
    invoice = take(lines_of())
    reopen_period("2026-10", actor=BOSS, now=CAME_AT, reason="the invoice is here")
    assert reconcile("2026-11", now=DECEMBER).late == () and lands_in(invoice) == ""
    close_period("2026-10", actor=FIN, now=CAME_AT, reason="quantity is small")
    assert reconcile("2026-11", now=DECEMBER).late == () and lands_in(invoice) == ""
    with pytest.raises(ValidationError, match="closed on this invoice"):
        withdraw_invoice(invoice.pk, actor=FIN, now=CAME_AT, reason="wrong file")


def test_a_late_invoice_is_withdrawn_until_something_is_booked_on_it(closed):
    first = take(lines_of("5000"))
    assert withdraw_invoice(first.pk, actor=FIN, now=CAME_AT, reason="wrong file").state == "withdrawn"
    assert reconcile("2026-11", now=DECEMBER).late == ()
    second = take(lines_of())
    book("price_variance")
    with pytest.raises(ValidationError, match="were booked on this invoice"):
        withdraw_invoice(second.pk, actor=FIN, now=DECEMBER, reason="wrong file")


@pytest.mark.django_db(transaction=True)
def test_an_import_beside_a_closing_is_in_it_or_late():
    factories.installation()
    held, release, taken = threading.Event(), threading.Event(), []

    def close():
        try:
            with transaction.atomic():
                hold_posting()
                held.set()
                release.wait(60)
                Period.objects.create(name="2026-10", state="closed", version=1)
        finally:
            connection.close()

    def import_one():
        try:
            taken.append(take(lines_of()).pk)
        finally:
            connection.close()

    threads = [threading.Thread(target=close), threading.Thread(target=import_one)]
    threads[0].start()
    assert held.wait(60)
    threads[1].start()
    time.sleep(0.5)
    assert not taken, "it waits for the closing that did not see it"
    release.set()
    for thread in threads:
        thread.join(60)
    assert Invoice.objects.get(pk=taken[0]).missed_by == 1


class TestPages:
    def test_the_bridge_of_the_later_month_lists_it_and_its_own_bridge_says_where_it_is_booked(self, closed):
        invoice = take(lines_of())
        fin = factories.person("finance", name="fin")
        page = fin.get("/finance/reconciliation/?period=2026-11").content.decode()
        assert 'id="late"' in page and "267.00" in page and "Open" in page
        own = fin.get("/finance/reconciliation/?period=2026-10").content.decode()
        assert "was closed without 1 of these invoices" in own and "posted in 2026-11" in own
        one = fin.get(f"/finance/invoices/{invoice.pk}/").content.decode()
        assert "Came after 2026-10 was closed" in one and "Withdraw invoice" in one
        assert "after its month was closed" in fin.get("/finance/invoices/").content.decode()
        assert "#late" in fin.get("/finance/periods/2026-11/").content.decode()

    def test_whoever_hands_a_file_over_is_told_before_it_is_taken(self, closed):
        fin = factories.person("finance", name="fin")
        file = io.BytesIO(lines_of().encode())
        file.name = "ng.csv"
        looked = fin.post("/finance/invoices/", {"file": file, "period": "2026-10"}, follow=True)
        page = looked.content.decode()
        assert "2026-10 is closed." in page and "taken as a late invoice" in page and "2026-11" in page
        done = fin.post(looked.redirect_chain[-1][0], {"period": "2026-10", "import": "1"}, follow=True)
        assert "book the variance in 2026-11" in done.content.decode()
        assert not LedgerEvent.objects.filter(kind="variance").exists()
