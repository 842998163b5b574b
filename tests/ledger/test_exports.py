"""Files of a month: sums to the nano, types, text that no spreadsheet runs, FOCUS that a validator takes, jobs."""

import csv
import io
import locale
import re
import tempfile
import zipfile
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import duckdb
import openpyxl
import pytest
from django.db.models import ProtectedError
from xlsxwriter.utility import xl_col_to_name

from controlplane.audit.actors import Actor
from controlplane.core.period import load_zone, month_window
from controlplane.fleet.models import SlotTenure
from controlplane.ledger import export_files
from controlplane.ledger.attribution import attribute
from controlplane.ledger.export_files import FORMATS, TooManyRows, build
from controlplane.ledger.export_rows import COLUMNS, ExportRow, export_rows
from controlplane.ledger.exports import ask_export, export_file, is_long, run_export, waiting_exports
from controlplane.ledger.focus_export import FocusFacts
from controlplane.ledger.models import ExportJob
from controlplane.ledger.periods import close_period, settle_closed
from controlplane.tenants.key_actions import create_key, revoke_key
from controlplane.tenants.models import Tenant
from tests.ledger.fleet_rows import HOUR, ONE_HOUR, worked_example
from tests.ledger.focus_validator import problems
from tests.ledger.test_pages import roll_up

FIN = Actor(id=None, name="fin", role="finance")
NOW = datetime(2026, 12, 2, 9, 0, tzinfo=UTC)
MONTH = "2026-11"
WINDOW = month_window(load_zone("UTC"), 2026, 11)
FACTS = FocusFacts("Test organisation", WINDOW, "UTC", 1)
NASTY = ['=HYPERLINK("http://x";"y")', "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", 'Zoë, GmbH "north"\nline two']


@pytest.fixture
def fleet(db):
    made = worked_example()
    SlotTenure.objects.update(ended_at=HOUR + ONE_HOUR)
    attribute(made.pool, HOUR, HOUR + ONE_HOUR, HOUR + 2 * ONE_HOUR)
    roll_up(made, "a", "chat", nanos=(9_000_000_001, 250_000_000, 3_000_000_000, 0))
    Tenant.objects.filter(slug="a").update(name=NASTY[0], cost_centre="-4711")
    return made


def rows_of(content):
    return list(csv.DictReader(io.StringIO(content.decode(), newline="")))


def test_a_month_reads_the_same_after_its_tenant_is_archived_and_its_keys_are_revoked(fleet):
    """Nothing that spent is deleted: names and history stay in the files of the months in which it did."""
    tenant = Tenant.objects.get(slug="a")
    issued = create_key(tenant_id=tenant.pk, name="app", classes=["chat"], default_class="chat", actor=FIN, now=NOW)
    before = {kind: export_file(MONTH, kind).content for kind in ("csv", "focus")}
    assert any(row["tenant"] == "a" and row["tenant_name"] == "'" + NASTY[0] for row in rows_of(before["csv"]))
    revoke_key(key_id=issued.key.pk, actor=FIN, now=NOW, reason="left")
    Tenant.objects.filter(pk=tenant.pk).update(state="archived")
    assert {kind: export_file(MONTH, kind).content for kind in before} == before
    with pytest.raises(ProtectedError):
        tenant.delete()


def test_csv_adds_up_to_the_nano_and_runs_nothing(fleet):
    made = export_file(MONTH, "csv")
    rows = rows_of(made.content)
    assert made.name == "costs-2026-11-open.csv" and not made.closed and made.rows == len(rows)
    assert sum(Decimal(row["cost"]) for row in rows if row["cost"]) == 20
    assert sum(Decimal(row["charge"]) for row in rows if row["charge"]) == Decimal("12.250000001")
    mine = [row for row in rows if row["tenant"] == "a"]
    assert {row["tenant_name"] for row in mine} == {"'" + NASTY[0]} and {row["cost_centre"] for row in mine} == {
        "'-4711"
    }
    hours = sum(Decimal(row["slot_hours"]) for row in rows if row["kind"] == "attribution")
    assert abs(hours - 8) < Decimal("0.00001")


def row(**values):
    given = dict.fromkeys(COLUMNS, "") | {
        "period": MONTH, "day": date(2026, 11, 20), "kind": "attribution", "tenant": "a", "currency": "EUR",
        "rate_version": None, "slot_hours": None, "requests": None, "prompt_tokens": None, "cached_tokens": None,
        "output_tokens": None, "cost": Decimal("-0.000000001"), "charge": None,
    }  # fmt: skip
    return ExportRow(*[{**given, **values}[name] for name in COLUMNS])


@pytest.mark.parametrize("text", NASTY)
def test_text_that_a_spreadsheet_would_run_is_inert_in_every_format_and_can_be_read_back(text):
    rows = [row(tenant_name=text, tenant="t")]
    plain = rows_of(build("csv", rows, FACTS, MONTH).content)[0]
    assert plain["tenant_name"].lstrip("'") == text and not plain["tenant_name"].startswith(
        ("=", "+", "-", "@", "\t", "\r")
    )
    assert plain["cost"] == "-0.000000001"
    focus = rows_of(build("focus", rows, FACTS, MONTH).content)[0]
    assert focus["BillingAccountName"] == plain["tenant_name"] and focus["BilledCost"] == "-0.000000001"
    sheet = openpyxl.load_workbook(io.BytesIO(build("xlsx", rows, FACTS, MONTH).content)).active
    cell = sheet.cell(2, COLUMNS.index("tenant_name") + 1)
    assert cell.data_type == "s" and cell.value.replace("_x000D_", "\r") == text
    assert parquet(build("parquet", rows, FACTS, MONTH).content, "SELECT tenant_name FROM f") == [(text,)]


def parquet(content, statement):
    with tempfile.NamedTemporaryFile(suffix=".parquet") as stream:
        stream.write(content)
        stream.flush()
        return duckdb.sql(statement.replace("FROM f", f"FROM '{stream.name}'")).fetchall()


def test_a_spreadsheet_has_typed_cells(fleet):
    sheet = openpyxl.load_workbook(io.BytesIO(export_file(MONTH, "xlsx").content)).active
    header = [cell.value for cell in sheet[1]]
    assert header == list(COLUMNS) and sheet.freeze_panes == "A2"
    total = Decimal(0)
    for line in sheet.iter_rows(min_row=2):
        cells = dict(zip(header, line, strict=True))
        if cells["kind"].value == "attribution":
            assert cells["cost"].data_type == "n" and cells["day"].is_date
            assert cells["day"].value == datetime(2026, 11, 20)
            total += Decimal(str(cells["cost"].value))
        assert cells["tenant"].data_type == "s"
    assert abs(total - 20) < Decimal("0.000001")


def test_numbers_dates_and_accents_of_a_spreadsheet_are_the_same_in_every_country():
    """As the file says them: a number is no text that a German or French reader would take for a date or a thousand."""
    amounts = [Decimal("9.10"), Decimal("22.5"), Decimal("1234567.89")]
    rows = [row(cost=amount, charge=-amount, tenant="zoe", tenant_name="Zoë") for amount in amounts]
    content = build("xlsx", rows, FACTS, MONTH).content
    with zipfile.ZipFile(io.BytesIO(content)) as parts:
        sheet = parts.read("xl/worksheets/sheet1.xml").decode()
    cost = COLUMNS.index("cost")
    for at, amount in enumerate(amounts, start=2):
        cell = re.search(rf'<c r="{xl_col_to_name(cost)}{at}"([^>]*)><v>([^<]*)</v>', sheet)
        assert cell and Decimal(cell[2]) == amount and " t=" not in cell[1], "a plain number, whatever the country"
    book = openpyxl.load_workbook(io.BytesIO(content)).active
    assert {book.cell(at, COLUMNS.index("tenant_name") + 1).value for at in (2, 3, 4)} == {"Zoë"}
    assert {book.cell(at, COLUMNS.index("day") + 1).value for at in (2, 3, 4)} == {datetime(2026, 11, 20)}
    plain = build("csv", rows, FACTS, MONTH).content
    assert not plain.startswith(b"\xef\xbb\xbf") and "Zoë" in plain.decode() and b",9.10," in plain


def test_parquet_keeps_exact_decimals_and_unknown_apart_from_zero(fleet):
    content = export_file(MONTH, "parquet").content
    assert parquet(content, "SELECT sum(cost), sum(charge), count(*) FILTER (WHERE cost IS NULL) FROM f") == [
        (Decimal("20.000000000"), Decimal("12.250000001"), 1)
    ]
    types = {name: kind for name, kind, *_ in parquet(content, "DESCRIBE SELECT * FROM f")}
    assert types["cost"] == "DECIMAL(38,9)" and types["day"] == "DATE" and types["requests"] == "BIGINT"


def test_focus_passes_its_validator_and_adds_up(fleet):
    close_period(MONTH, actor=FIN, now=NOW, reason="fine")
    made = export_file(MONTH, "focus")
    assert problems(made.content) == []
    rows = rows_of(made.content)
    assert sum(Decimal(row["BilledCost"]) for row in rows) == 20
    assert {row["InvoiceId"] for row in rows} == {"2026-11-v1"} and {row["ChargeClass"] for row in rows} == {""}
    assert {row["BillingAccountType"] for row in rows} == {"Tenant"}
    assert {(row["ChargePeriodStart"], row["ChargePeriodEnd"]) for row in rows} == {
        ("2026-11-20T00:00:00Z", "2026-11-21T00:00:00Z")
    }


def test_corrections_of_a_closed_month_say_so_in_the_next_one(fleet):
    close_period(MONTH, actor=FIN, now=NOW, reason="fine")
    fleet.use("b2", "b", "bulk", 5_000_000, minute=HOUR)
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, NOW)
    roll_up(fleet, "b", "chat", nanos=(7, 0, 0, 0))
    settle_closed(NOW)
    made = export_file("2026-12", "focus")
    assert problems(made.content) == []
    rows = rows_of(made.content)
    assert rows and {(row["ChargeClass"], row["x_CorrectsPeriod"]) for row in rows} == {("Correction", MONTH)}
    assert sum(Decimal(row["BilledCost"]) for row in rows) == 0
    plain = [row for row in rows_of(export_file("2026-12", "csv").content) if row["charge"]]
    assert [(row["kind"], row["corrects"], row["charge"]) for row in plain] == [("charge", MONTH, "0.000000007")]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ServiceProviderName", "ServiceProvider", "ServiceProviderName is missing"),
        ("2026-11-20T00:00:00Z", "2026-11-20T00:00:00+01:00", "no instant in UTC"),
        ("Usage-Based", "Hourly", "not an allowed value"),
        (",EUR,", ",Eur,", "currency"),
    ],
)
def test_the_validator_finds_what_is_wrong(fleet, old, new, words):
    content = export_file(MONTH, "focus").content.decode()
    assert old in content
    assert any(words in text for text in problems(content.replace(old, new).encode()))


def test_the_same_rows_give_the_same_csv_focus_and_spreadsheet(fleet):
    for format in FORMATS:
        both = [build(format, list(export_rows(MONTH, WINDOW, "UTC", "EUR")), FACTS, MONTH).content for _ in range(2)]
        assert both[0] == both[1], format


def test_a_machine_readable_file_does_not_follow_the_servers_locale(fleet):
    before = locale.setlocale(locale.LC_ALL)
    try:
        for name in ("fr_FR.UTF-8", "de_DE.UTF-8", "C.UTF-8"):
            try:
                locale.setlocale(locale.LC_ALL, name)
            except locale.Error:
                continue
            text = build("csv", [row(cost=Decimal("2002.34"))], FACTS, MONTH).content.decode()
            assert ",2002.34," in text
    finally:
        locale.setlocale(locale.LC_ALL, before)


def test_a_month_that_is_too_long_is_refused_and_not_cut(fleet, monkeypatch):
    monkeypatch.setattr(export_files, "ROWS_MOST", 3)
    with pytest.raises(TooManyRows, match="over 3 rows"):
        export_file(MONTH, "csv")
    job = ask_export(MONTH, "csv", actor=FIN, now=NOW)
    assert run_export(job.pk, now=NOW)
    job.refresh_from_db()
    assert job.state == "failed" and "over 3 rows" in job.problem and job.content is None


def test_an_export_as_a_job_is_made_once(fleet):
    assert not is_long(MONTH)
    job = ask_export(MONTH, "csv", actor=FIN, now=NOW)
    assert waiting_exports(NOW) == [job.pk]
    assert run_export(job.pk, now=NOW) and not run_export(job.pk, now=NOW)
    job.refresh_from_db()
    assert job.state == "done" and bytes(job.content) == export_file(MONTH, "csv").content
    assert job.rows_done == len(rows_of(bytes(job.content)))
    assert waiting_exports(NOW + timedelta(days=8)) == [] and not ExportJob.objects.exists()


def test_a_job_of_a_worker_that_is_gone_is_taken_up_again(fleet):
    job = ask_export(MONTH, "focus", actor=FIN, now=NOW)
    ExportJob.objects.filter(pk=job.pk).update(state="running", started_at=NOW)
    assert not run_export(job.pk, now=NOW + timedelta(minutes=1)) and waiting_exports(NOW) == []
    late = NOW + timedelta(minutes=20)
    assert waiting_exports(late) == [job.pk] and run_export(job.pk, now=late)


@pytest.mark.parametrize(("period", "format"), [("2026-W44", "csv"), ("2026-11", "pdf"), ("x", "csv")])
def test_unusable_asks_are_refused(fleet, period, format):
    with pytest.raises(ValueError):
        export_file(period, format)
    with pytest.raises(ValueError):
        ask_export(period, format, actor=FIN, now=NOW)
