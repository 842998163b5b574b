"""Provider invoices: every line lands or the file is refused, the same file counts once, sums are exact."""

import io
import json
from datetime import date, timedelta
from decimal import Decimal

import pytest
from django.core.management import CommandError, call_command

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.ledger.invoice_columns import UnknownColumns
from controlplane.ledger.invoice_reading import FileRefused
from controlplane.ledger.invoices import ExchangeRate, LinesRefused, import_invoice, totals, withdraw_invoice
from controlplane.ledger.models import Invoice, InvoiceLine, InvoiceMapping
from tests.threads import at_once

FIN = Actor(id=None, name="fin", role="finance")
FOCUS_HEADER = "BilledCost,EffectiveCost,BillingCurrency,ChargeCategory,ServiceName,ChargePeriodStart,SkuId,Id"
FOCUS = f"""{FOCUS_HEADER}
0.00000080000,0,EUR,Usage,Queue,2026-10-18 22:00:00,Q1,7
12.123456789012345678,10.5,EUR,Usage,"GPU, large",2026-10-31 23:30:00,G1,7
-3.5,-3.5,EUR,Credit,GPU,2026-10-02 00:00:00,NULL,8
1.9,NULL,EUR,Tax,NULL,2026-10-02 00:00:00,NULL,9
5E-3,0,EUR,Adjustment,GPU,2026-10-02 00:00:00,NULL,10
"""


def take(text, now, **more):
    data = text if isinstance(text, bytes) else text.encode()
    given = {"file_name": "october.csv", "period": "2026-10", "actor": FIN, "now": now, **more}
    return import_invoice(io.BytesIO(data), **given)


def test_every_line_lands_with_its_exact_amount(installation, now):
    done = take(FOCUS, now)
    sums = totals(done.invoice)
    assert done.invoice.lines_count == InvoiceLine.objects.count() == 5
    assert sums.billed == Decimal("10.528457589012345678")
    assert sums.effective == Decimal("7")
    assert sums.by_category == {
        "credit": Decimal("-3.5"), "other": Decimal("0.005"), "tax": Decimal("1.9"),
        "usage": Decimal("12.123457589012345678"),
    }  # fmt: skip
    assert sum(sums.by_service.values()) == sums.billed
    assert AuditEntry.objects.filter(action="invoice.import").count() == 1


def test_a_line_belongs_to_the_day_of_the_billing_zone(installation, now):
    # 23:30 UTC of 31 October is 1 November in Berlin
    installation.billing_zone = "Europe/Berlin"
    installation.save(update_fields=["billing_zone"])
    done = take(FOCUS, now)
    assert done.invoice.outside_period == 1
    assert InvoiceLine.objects.get(line=3).day == date(2026, 11, 1)


def test_the_same_file_counts_once_for_a_period(installation, now):
    first = take(FOCUS, now)
    again = take(FOCUS, now + timedelta(hours=1), file_name="copy.csv")
    assert again.repeated and again.invoice.pk == first.invoice.pk
    assert Invoice.objects.count() == 1
    withdraw_invoice(first.invoice.pk, actor=FIN, now=now, reason="wrong account")
    assert not take(FOCUS, now).repeated
    assert Invoice.objects.filter(state="current").count() == 1


@pytest.mark.django_db(transaction=True)
def test_one_of_many_who_import_the_same_file_at_once(installation, now):
    done = at_once([lambda: take(FOCUS, now)] * 4)
    assert len(done) == 4 and len({one.invoice.pk for one in done}) == 1
    assert Invoice.objects.count() == 1 and InvoiceLine.objects.count() == 5


def test_a_file_with_lines_that_cannot_be_read_leaves_nothing(installation, now):
    no_day, no_number = "1.5,1,EUR,Usage,GPU,not a day,G1,11", "abc,1,EUR,Usage,GPU,2026-10-02,G1,12"
    bad = f"{FOCUS}{no_day}\n{no_number}\n1,2,3\n,1,EUR,Usage,,2026-10-02,,\n"
    with pytest.raises(LinesRefused) as refused:
        take(bad, now)
    assert [row.line for row in refused.value.refused] == [7, 8, 9, 10]
    assert "has no amount" in refused.value.refused[3].reason
    assert not Invoice.objects.exists() and not InvoiceLine.objects.exists()


def test_a_number_with_a_line_break_in_quotes_keeps_its_line_number(installation, now):
    text = f'{FOCUS_HEADER}\r\n1,1,EUR,Usage,"two\r\nlines",2026-10-02,A,1\r\n2,1,EUR,Usage,x,no day,A,2\r\n'
    with pytest.raises(LinesRefused) as refused:
        take(text, now)
    assert [row.line for row in refused.value.refused] == [4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        (FOCUS_HEADER + "\n", "no lines"),
        (b"\x1f\x8b\x08\x00rest", "compressed"),
        (FOCUS.encode("utf-16"), ""),
        (FOCUS.replace("Queue", "M\u00fcnchen").encode("latin-1"), "UTF-8"),
        (FOCUS + '1,1,EUR,Usage,"open,2026-10-02,A,1\n', "quotes"),
        (FOCUS.replace("5E-3,0,EUR", "5E-3,0,USD"), "several currencies: EUR, USD"),
        (FOCUS.replace("EUR", "USD"), "Give the rate"),
        (FOCUS.replace("EUR", ""), "names no currency"),
        ("a,b\n1,2\n", "No known format"),
    ],
)
def test_files_that_are_taken_or_refused_as_a_whole(installation, now, text, words):
    if not words:
        assert take(text, now).invoice.lines_count == 5
        return
    with pytest.raises(FileRefused, match=words):
        take(text, now)
    assert not Invoice.objects.exists()


def test_another_currency_needs_a_dated_rate_that_is_kept_beside_the_amounts(installation, now):
    text = FOCUS.replace("EUR", "USD")
    done = take(text, now, exchange=ExchangeRate(Decimal("0.9214"), date(2026, 10, 31)))
    assert done.invoice.currency == "USD" and done.invoice.exchange_rate == Decimal("0.9214")
    assert totals(done.invoice).billed == Decimal("10.528457589012345678")


AZURE = """\ufeffSubscriptionId,Date,MeterCategory,MeterId,MeterRegion,Quantity,UnitOfMeasure,Cost,Currency,ChargeType
s-1,10/02/2026,Virtual Machines,m-1,westeurope,1,1 Hour,3.25,EUR,Usage
s-1,10/03/2026,Virtual Machines,m-1,westeurope,-1,1 Hour,-0.25,EUR,Refund
s-1,10/04/2026,Reservations,m-2,westeurope,1,1 Hour,2E-2,EUR,UnusedReservation
"""


def test_an_azure_export_with_its_mark_slashed_dates_and_line_ends(installation, now):
    done = take(AZURE.replace("\n", "\r\n").removesuffix("\r\n"), now)
    assert done.invoice.format == "azure" and done.invoice.outside_period == 0
    assert totals(done.invoice).by_category == {
        "commitment": Decimal("0.02"), "refund": Decimal("-0.25"), "usage": Decimal("3.25"),
    }  # fmt: skip
    assert InvoiceLine.objects.get(line=2).day == date(2026, 10, 2)


def test_localised_headers_are_known_by_the_name_in_brackets(installation, now):
    header = (
        "Abo (SubscriptionGuid),UsageDateTime (UsageDateTime),Kategorie (MeterCategory),Kosten (PreTaxCost),Currency\n"
    )
    assert totals(take(header + "s,2026-10-02,Netz,0.075,EUR\n", now).invoice).billed == Decimal("0.075")


def mapping(now, **values):
    given = {
        "name": "rack", "provider_name": "Rack",
        "columns": {"billed": ["Betrag"], "starts": ["Tag"], "service": ["Posten"], "category": ["Art"]},
        "categories": {"steuer": "tax"}, "fixed_currency": "EUR", "created_at": now,
        "created_by": "fin", **values,
    }  # fmt: skip
    return InvoiceMapping.objects.create(**given)


def test_a_saved_mapping_reads_decimal_commas_semicolons_and_own_categories(installation, now):
    mapping(now)
    text = "Tag;Posten;Art;Betrag\n02.10.2026;GPU;;1.234,56\n03.10.2026;;Steuer;0,44\n"
    done = take(text, now, mapping="rack")
    assert totals(done.invoice).by_category == {"tax": Decimal("0.44"), "usage": Decimal("1234.56")}
    assert InvoiceLine.objects.filter(provider="Rack").count() == 2


def test_what_the_file_leaves_open_is_asked_for_and_the_mapping_settles_it(installation, now):
    row = mapping(now)
    text = "Tag;Posten;Art;Betrag\n02/10/2026;GPU;;1,234\n"
    with pytest.raises(FileRefused, match="thousand or a fraction"):
        take(text, now, mapping="rack")
    row.decimal_mark, row.day_order = "comma", "day_first"
    row.save(update_fields=["decimal_mark", "day_order"])
    assert totals(take(text, now, mapping="rack").invoice).billed == Decimal("1.234")
    assert InvoiceLine.objects.get().day == date(2026, 10, 2)


def test_missing_columns_and_mappings_are_named(installation, now):
    mapping(now)
    with pytest.raises(UnknownColumns, match="Betrag"):
        take("a;b\n1;2\n", now, mapping="rack")
    with pytest.raises(ValueError, match="rack"):
        take(FOCUS, now, mapping="other")


def test_line_ids_that_stand_twice_are_said_and_both_kept(installation, now):
    text = "BilledCost,BillingCurrency,ChargePeriodStart,InvoiceDetailId\n1,EUR,2026-10-02,a\n1,EUR,2026-10-02,a\n"
    done = take(text, now)
    assert done.repeated_ids == ("a",) and totals(done.invoice).billed == 2


def test_the_command_prints_exact_strings_and_refuses_with_line_numbers(installation, tmp_path, capsys):
    path = tmp_path / "october.csv"
    path.write_text(FOCUS)
    call_command("import_invoice", str(path), "--period", "2026-10", "--json")
    body = json.loads(capsys.readouterr().out)
    assert body["totals"] == {"billed": "10.528457589012345678", "effective": "7"}
    assert body["lines"] == 5 and body["currency"] == "EUR" and body["refused"] == []
    path.write_text(FOCUS + "x,1,EUR,Usage,GPU,2026-10-02,G1,1\n")
    with pytest.raises(CommandError) as error:
        call_command("import_invoice", str(path), "--period", "2026-10", "--json")
    assert error.value.returncode == 1
    assert json.loads(capsys.readouterr().out)["refused"][0]["line"] == 7
    for arguments in (["--period", "October"], ["--period", "2026-10", "--rate", "0@2026-10-31"]):
        with pytest.raises(CommandError) as error:
            call_command("import_invoice", str(path), *arguments)
        assert error.value.returncode == 2
    path.write_text(FOCUS.replace("EUR", "USD"))
    with pytest.raises(CommandError, match=r"Give the rate and its day.*--rate 0\.9214@2026-10-31"):
        call_command("import_invoice", str(path), "--period", "2026-10")
