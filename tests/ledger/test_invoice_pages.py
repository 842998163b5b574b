"""Invoices in the browser: a file is looked through as it is read, taken whole or refused by line, and withdrawn."""

import gzip
import io
import zipfile
from datetime import timedelta
from decimal import Decimal

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.ledger import invoice_uploads
from controlplane.ledger.models import Invoice, InvoiceLine, InvoiceMapping, InvoiceUpload, Period
from controlplane.ledger.tasks import sweep_exports
from tests import factories
from tests.ledger.test_invoices import FOCUS

PAGE = "/finance/invoices/"
OWN_CSV = """\ufeffBuchungstag;Betrag;Waehrung;Art;Dienst
01.10.2026;1.234,50;EUR;Hosting;GPU
02.10.2026;-0,000000000000000001;EUR;Gutschrift;GPU
03.10.2026;19,5;EUR;USt;Steuer
""".replace("\n", "\r\n")
OWN = {
    "format": "mapped", "period": "2026-10", "column_billed": "Betrag", "column_starts": "Buchungstag",
    "column_currency": "Waehrung", "column_category": "Art", "column_service": "Dienst",
    "categories": "Hosting=usage\nGutschrift=credit\nUSt=tax", "save_as": "nordgrid",
}  # fmt: skip


@pytest.fixture
def fin(installation):
    return factories.person("finance", name="fin")


def text_of(response, status=200):
    assert response.status_code == status, response.content[:2000]
    return response.content.decode()


def send(client, content, name="october.csv", period="2026-10"):
    data = content if isinstance(content, bytes) else content.encode()
    return client.post(PAGE, {"file": SimpleUploadedFile(name, data), "period": period})


def upload(client, content, **more):
    response = send(client, content, **more)
    assert response.status_code == 302, response.content.decode()
    return response.url


def test_a_focus_file_is_shown_as_it_is_read_and_taken_whole(fin):
    address = upload(fin, FOCUS)
    text = text_of(fin.get(address))
    assert not Invoice.objects.exists()
    assert "12.123456789012345678" in text and "10.528457589012345678" in text and "Import 5 lines" in text
    done = fin.post(address, {"import": "1", "period": "2026-10", "format": "auto"})
    assert done.status_code == 302
    invoice = Invoice.objects.get()
    assert (invoice.lines_count, invoice.imported_by, invoice.file_name) == (5, "fin", "october.csv")
    assert not InvoiceUpload.objects.exists() and fin.get(address).status_code == 404
    assert "10.528457589012345678" in text_of(fin.get(done.url))
    assert "october.csv" in text_of(fin.get(PAGE))


def test_columns_are_chosen_saved_as_a_mapping_and_read_next_months_file(fin):
    address = upload(fin, OWN_CSV)
    text = text_of(fin.get(address))
    assert "No known format fits this header" in text and "Not readable yet" in text and "Import 3" not in text
    text = text_of(fin.post(address, {**OWN, "column_billed": "", "preview": "1"}), 400)
    assert "Choose the column of the billed amount" in text
    text = text_of(fin.post(address, {**OWN, "preview": "1"}))
    assert "1,234.5" in text and "−0.000000000000000001" in text and "credit" in text and "2026-10-02" in text
    assert not InvoiceMapping.objects.exists()
    text = text_of(fin.post(address, {**OWN, "save_as": "", "import": "1"}), 400)
    assert "Name the mapping" in text and not Invoice.objects.exists()
    assert fin.post(address, {**OWN, "import": "1"}).status_code == 302
    invoice = Invoice.objects.get()
    assert invoice.mapping.name == "nordgrid" and invoice.format == "mapped"
    assert sorted(InvoiceLine.objects.values_list("category", "billed")) == [
        ("credit", Decimal("-0.000000000000000001")), ("tax", Decimal("19.5")), ("usage", Decimal("1234.5")),
    ]  # fmt: skip
    again = upload(fin, OWN_CSV.replace("10.2026", "11.2026"), period="2026-11")
    text = text_of(fin.post(again, {"format": "saved:nordgrid", "period": "2026-11", "preview": "1"}))
    assert "Import 3 lines" in text
    assert fin.post(again, {"format": "saved:nordgrid", "period": "2026-11", "import": "1"}).status_code == 302
    assert Invoice.objects.filter(period="2026-11", mapping__name="nordgrid").count() == 1
    assert AuditEntry.objects.filter(action="invoice_mapping.create", object_id="nordgrid").count() == 1


def test_a_saved_mapping_is_changed_under_its_name_and_audited(fin):
    address = upload(fin, OWN_CSV)
    fin.post(address, {**OWN, "import": "1"})
    address = upload(fin, OWN_CSV.replace("19,5", "20,5"))
    fin.post(address, {**OWN, "provider_name": "Nordgrid", "import": "1"})
    row = InvoiceMapping.objects.get()
    assert (row.version, row.provider_name) == (2, "Nordgrid")
    assert AuditEntry.objects.get(action="invoice_mapping.change").after == {"provider_name": "Nordgrid"}


def test_lines_that_cannot_be_read_are_named_and_nothing_is_taken(fin):
    bad = f"{FOCUS}abc,1,EUR,Usage,GPU,2026-10-02,G1,12\n1,2,3\n"
    address = upload(fin, bad)
    text = text_of(fin.get(address))
    assert "Lines that cannot be read" in text and ">7</th>" in text and ">8</th>" in text
    assert "&#x27;abc&#x27; is not a number" in text and "has 3 cells where the header has 8" in text
    assert 'name="import"' not in text
    text = text_of(fin.post(address, {"import": "1", "period": "2026-10", "format": "auto"}), 400)
    assert "2 lines cannot be read" in text
    assert not Invoice.objects.exists() and InvoiceUpload.objects.count() == 1


def test_a_foreign_currency_asks_for_its_rate(fin):
    address = upload(fin, FOCUS.replace("EUR", "USD"))
    assert "give the rate and its day" in text_of(fin.get(address))
    form = {"import": "1", "period": "2026-10", "format": "auto"}
    assert "Give the rate and its day" in text_of(fin.post(address, form), 400)
    text = text_of(fin.post(address, {**form, "rate": "0,92", "rate_day": "2026-10-31"}), 400)
    assert "is not a rate" in text and 'value="0,92"' in text
    assert fin.post(address, {**form, "rate": "0.92", "rate_day": "2026-10-31"}).status_code == 302
    assert Invoice.objects.get().exchange_rate == Decimal("0.92")


def _zip_bomb():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("invoice.csv", b"0" * (8 << 20))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Choose a file"),
        (gzip.compress(FOCUS.encode()), "compressed"),
        (_zip_bomb(), "compressed"),
        (b"PAR1" + bytes(100), "compressed or Parquet"),
        (b"%PDF-1.7\n\xe2\xe3\xcf\xd3 binary", "not UTF-8 text"),
        (b"<!doctype html>\n<html></html>\n", "no header of a CSV"),
        (b'"open quote,1\n' + b"x" * 200_000, "is not CSV"),
        (b"\n\n\n", "no header of a CSV"),
    ],
)
def test_what_is_no_csv_is_refused_before_it_is_kept(fin, content, words):
    text = text_of(send(fin, content), 400)
    assert words in text and "There is a problem" in text
    assert not InvoiceUpload.objects.exists()


def test_size_lines_and_number_of_files_are_bounded(fin, monkeypatch):
    monkeypatch.setattr(invoice_uploads, "LINES_MOST", 4)
    assert "the most here is 4" in text_of(send(fin, FOCUS), 400)
    monkeypatch.setattr(invoice_uploads, "BYTES_MOST", 100)
    assert "the most here is 100" in text_of(send(fin, FOCUS), 400)
    monkeypatch.undo()
    monkeypatch.setattr(invoice_uploads, "UPLOADS_MOST", 1)
    upload(fin, FOCUS)
    assert "wait to be imported" in text_of(send(fin, FOCUS), 400)
    assert InvoiceUpload.objects.count() == 1


def test_a_file_that_nobody_imports_goes_after_a_day(fin):
    address = upload(fin, FOCUS)
    InvoiceUpload.objects.update(uploaded_at=timezone.now() - timedelta(days=1, minutes=1))
    assert fin.get(address).status_code == 404
    sweep_exports()
    assert not InvoiceUpload.objects.exists()


def test_a_file_is_discarded(fin):
    address = upload(fin, FOCUS)
    assert fin.post(address, {"discard": "1"}).status_code == 302
    assert not InvoiceUpload.objects.exists() and not Invoice.objects.exists()


def test_a_cell_with_a_null_byte_is_a_refused_line(fin):
    address = upload(fin, FOCUS + "1,1,EUR,Usage,G\x00PU,2026-10-02 00:00:00,G1,12\n")
    text = text_of(fin.get(address))
    assert "Lines that cannot be read" in text and ">7</th>" in text
    text_of(fin.post(address, {"import": "1", "period": "2026-10", "format": "auto"}), 400)
    assert not Invoice.objects.exists()


def test_the_page_imports_twice_what_is_one_file_once(fin):
    form = {"import": "1", "period": "2026-10", "format": "auto"}
    for _ in range(2):
        assert fin.post(upload(fin, FOCUS), form).status_code == 302
    assert Invoice.objects.count() == 1


def test_an_invoice_is_withdrawn_with_a_reason_but_not_once_its_month_is_closed(fin):
    fin.post(upload(fin, FOCUS), {"import": "1", "period": "2026-10", "format": "auto"})
    invoice = Invoice.objects.get()
    page = f"{PAGE}{invoice.pk}/"
    assert "Say why" in text_of(fin.post(page, {"reason": " "}), 400)
    Period.objects.create(name="2026-10", state="closed", version=1)
    assert "Reopen the month" in text_of(fin.get(page))
    assert "is closed on this invoice" in text_of(fin.post(page, {"reason": "wrong account"}), 400)
    invoice.refresh_from_db()
    assert invoice.state == "current"
    Period.objects.update(state="open")
    assert fin.post(page, {"reason": "wrong account"}).status_code == 302
    text = text_of(fin.get(page))
    assert "Withdrawn" in text and "Withdraw invoice" not in text
    entry = AuditEntry.objects.get(action="invoice.withdraw")
    assert (entry.reason, entry.actor_name, entry.after) == ("wrong account", "fin", {"state": "withdrawn"})


def test_only_finance_and_admins_hand_over_and_withdraw(fin):
    address = upload(fin, FOCUS)
    fin.post(address, {"import": "1", "period": "2026-10", "format": "auto"})
    page = f"{PAGE}{Invoice.objects.get().pk}/"
    viewer = factories.person("viewer")
    assert "Hand over a file" not in text_of(viewer.get(PAGE)) and "Withdraw invoice" not in text_of(viewer.get(page))
    assert send(viewer, FOCUS).status_code == viewer.post(page, {"reason": "x"}).status_code == 403
    assert viewer.get(upload(fin, FOCUS)).status_code == 403
