"""REST of invoices: a form is looked through, taken or refused by line; withdrawn; mappings are saved by name."""

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.utils import timezone

from controlplane.ledger.models import Invoice, InvoiceMapping, Period
from tests import factories
from tests.ledger.test_invoice_pages import OWN_CSV
from tests.ledger.test_invoices import FOCUS

ADDRESS = "/api/v1/invoices/"


@pytest.fixture
def fin(installation):
    return factories.person("finance", name="fin")


def post(client, content, headers=None, **more):
    file = SimpleUploadedFile("october.csv", content.encode())
    return client.post(ADDRESS, {"file": file, "period": "2026-10", **more}, headers=headers)


def test_a_file_is_looked_through_then_taken_once_with_exact_sums(fin):
    looked = post(fin, FOCUS, preview="true").json()
    assert not Invoice.objects.exists()
    assert looked["totals"] == {"billed": "10.528457589012345678", "effective": "7"}
    assert [line["line"] for line in looked["first"]] == [2, 3, 4, 5, 6] and looked["refused"] == []
    taken = post(fin, FOCUS)
    assert taken.status_code == 201 and taken.json()["totals"] == looked["totals"]
    again = post(fin, FOCUS)
    assert (again.status_code, again.json()["repeated"], Invoice.objects.count()) == (200, True, 1)
    whole = fin.get(f"{ADDRESS}{taken.json()['invoice']}/").json()
    assert whole["totals"] == looked["totals"] and whole["state"] == "current"
    assert [row["id"] for row in fin.get(f"{ADDRESS}?period=2026-10").json()["results"]] == [whole["id"]]
    assert fin.get(f"{ADDRESS}?period=2026-09").json()["results"] == []


def test_a_file_sent_twice_under_one_key_gets_the_first_answer_and_another_file_is_refused(fin):
    first = post(fin, FOCUS, headers={"Idempotency-Key": "october"})
    again = post(fin, FOCUS, headers={"Idempotency-Key": "october"})
    assert (first.status_code, again.status_code) == (201, 201) and again.json() == first.json()
    assert again.headers["Idempotency-Replayed"] == "true" and Invoice.objects.count() == 1
    other = post(fin, FOCUS.replace("10.5", "11.5"), headers={"Idempotency-Key": "october"})
    assert other.status_code == 422 and "another body" in str(other.json()) and Invoice.objects.count() == 1
    other_month = post(fin, FOCUS, period="2026-09", headers={"Idempotency-Key": "october"})
    assert other_month.status_code == 422 and Invoice.objects.count() == 1


def test_a_file_that_was_refused_may_be_sent_again_corrected_under_its_key(fin):
    bad = f"{FOCUS}abc,1,EUR,Usage,GPU,2026-10-02,G1,12\n"
    for _ in range(2):
        refused = post(fin, bad, headers={"Idempotency-Key": "k"})
        assert refused.status_code == 422 and refused.json()["refused"]
    assert post(fin, FOCUS, headers={"Idempotency-Key": "k"}).status_code == 201


def test_lines_that_cannot_be_read_are_listed_and_nothing_is_taken(fin):
    answer = post(fin, f"{FOCUS}abc,1,EUR,Usage,GPU,2026-10-02,G1,12\n")
    assert answer.status_code == 422
    assert answer.json()["refused"] == [{"line": 7, "reason": "'abc' is not a number. Write it like 1234.56"}]
    assert not Invoice.objects.exists()


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"period": "2026-13"}, "period"),
        ({"mapping": "nobody"}, "mapping"),
        ({"format": "pdf"}, "format"),
        ({"rate": "x"}, "rate"),
        ({"format": "aws"}, "file"),
        ({"file": ""}, "file"),
    ],
)
def test_what_is_wrong_is_said_by_field(fin, more, field):
    answer = post(fin, FOCUS, **more)
    assert answer.status_code == 400 and field in str(answer.json()), answer.json()


def test_a_mapping_is_saved_and_reads_a_file(fin):
    mapping = {
        "name": "nordgrid", "columns": {"billed": ["Betrag"], "starts": ["Buchungstag"], "currency": ["Waehrung"]},
        "decimal_mark": "comma", "day_order": "day_first",
    }  # fmt: skip
    made = fin.post("/api/v1/invoice-mappings/", mapping, content_type="application/json")
    assert made.status_code == 201
    assert fin.post("/api/v1/invoice-mappings/", mapping, content_type="application/json").status_code == 201
    changed = {**mapping, "provider_name": "Nordgrid"}
    assert fin.post("/api/v1/invoice-mappings/", changed, content_type="application/json").status_code == 200
    assert InvoiceMapping.objects.get().version == 2
    bad = fin.post("/api/v1/invoice-mappings/", {**mapping, "columns": {"billed": ["x"]}}, "application/json")
    assert bad.status_code == 400 and "day or start" in str(bad.json())
    taken = post(fin, OWN_CSV, mapping="nordgrid")
    assert taken.status_code == 201 and taken.json()["totals"]["billed"] == "1253.999999999999999999"
    assert [row["name"] for row in fin.get("/api/v1/invoice-mappings/").json()["results"]] == ["nordgrid"]


def test_an_invoice_is_withdrawn_with_a_reason_but_not_in_a_closed_month(fin):
    invoice = post(fin, FOCUS).json()["invoice"]
    withdraw = f"{ADDRESS}{invoice}/withdraw/"
    assert fin.post(withdraw, {}, content_type="application/json").status_code == 400
    Period.objects.create(name="2026-10", state="closed", version=1)
    closed = fin.post(withdraw, {"reason": "wrong"}, content_type="application/json")
    assert closed.status_code == 400 and "Reopen it" in str(closed.json())
    Period.objects.update(state="open")
    for _ in range(2):
        done = fin.post(withdraw, {"reason": "wrong"}, content_type="application/json")
        assert (done.status_code, done.json()["state"]) == (200, "withdrawn")
    assert fin.post(f"{ADDRESS}999/withdraw/", {"reason": "x"}, content_type="application/json").status_code == 404


def test_who_may_only_read_takes_and_withdraws_nothing(fin):
    viewer = factories.person("viewer")
    assert post(viewer, FOCUS).status_code == 403 and viewer.get(ADDRESS).status_code == 200
    assert not Invoice.objects.exists()


def test_mappings_are_walked_by_cursor_to_their_end(fin):
    for name in ("alpha", "beta", "gamma"):
        InvoiceMapping.objects.create(name=name, columns={}, created_at=timezone.now(), created_by="fin")
    first = fin.get("/api/v1/invoice-mappings/?limit=2").json()
    assert [row["name"] for row in first["results"]] == ["alpha", "beta"]
    assert first["previous"] is None
    rest = fin.get(first["next"]).json()
    assert [row["name"] for row in rest["results"]] == ["gamma"]
    assert rest["next"] is None
    last_first = fin.get("/api/v1/invoice-mappings/?ordering=-name").json()["results"]
    assert [row["name"] for row in last_first] == ["gamma", "beta", "alpha"]
