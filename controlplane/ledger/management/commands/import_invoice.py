"""`manage.py import_invoice FILE --period YYYY-MM`: takes a provider's invoice, every line or none."""

import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.audit.actors import command_actor
from controlplane.ledger.invoice_columns import FORMATS, UnknownColumns
from controlplane.ledger.invoice_reading import FileRefused
from controlplane.ledger.invoices import (
    ExchangeRate,
    Imported,
    LinesRefused,
    NoExchangeRate,
    decimal_text,
    import_invoice,
    imported_json,
    refused_json,
    totals,
)
from controlplane.ledger.late_invoices import lands_in
from controlplane.tenants.models import Installation

UNUSABLE = 2
SHOWN = 20


def _exchange(text: str) -> ExchangeRate:
    rate, _, day = text.partition("@")
    try:
        return ExchangeRate.of_text(rate, day)
    except ValueError:
        raise ValueError(f"{text!r} is not a rate: write it like 0.9214@2026-10-31") from None


class Command(BaseCommand):
    help = "Imports a provider's invoice (FOCUS, an Azure or AWS export, or a mapped CSV). The same file counts once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path)
        parser.add_argument("--period", required=True, help="the month it is for, such as 2026-10")
        parser.add_argument("--format", default="auto", choices=["auto", *FORMATS], help="default: by the header")
        parser.add_argument("--mapping", default="", help="name of a saved mapping, for another CSV")
        parser.add_argument("--currency", default="", help="for a file that names none, such as EUR")
        parser.add_argument(
            "--rate", default="", help="book currency for one of the file's, and its day: 0.92@2026-10-31"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        if not Installation.objects.filter(pk=1).exists():
            raise CommandError("the installation is not set up: run `manage.py demo` first", returncode=UNUSABLE)
        try:
            exchange = _exchange(options["rate"]) if options["rate"] else None
            with options["file"].open("rb") as stream:
                done = import_invoice(
                    stream, file_name=options["file"].name, period=options["period"], actor=command_actor(),
                    now=timezone.now(), format=options["format"], mapping=options["mapping"],
                    currency=options["currency"], exchange=exchange,
                )  # fmt: skip
        except LinesRefused as error:
            self._refused(error, options)
        except OSError as error:
            raise CommandError(f"{options['file']}: {error.strerror}", returncode=UNUSABLE) from error
        except NoExchangeRate as error:
            raise CommandError(f"{error} Use --rate, such as --rate 0.9214@2026-10-31.", returncode=1) from error
        except (FileRefused, UnknownColumns) as error:
            raise CommandError(str(error), returncode=1) from error
        except ValueError as error:
            raise CommandError(str(error), returncode=UNUSABLE) from error
        else:
            self._taken(done, options)

    def _taken(self, done: Imported, options: dict[str, Any]) -> None:
        invoice, sums = done.invoice, totals(done.invoice)
        if options["json"]:
            self.stdout.write(json.dumps(imported_json(done)))
            return
        again = " (this file was imported before)" if done.repeated else ""
        self.stdout.write(
            f"invoice {invoice.pk}: {invoice.lines_count:,} lines, {decimal_text(sums.billed)} {invoice.currency} "
            f"billed, {invoice.outside_period:,} outside {invoice.period}{again}"
        )
        if month := lands_in(invoice):
            self.stdout.write(
                f"  {invoice.period} is closed and stays as it is: book the variance in {month}, or reopen "
                f"{invoice.period} with a reason and close it again with this invoice"
            )
        for name, value in sums.by_category.items():
            self.stdout.write(f"  {name}: {decimal_text(value)}")

    def _refused(self, error: LinesRefused, options: dict[str, Any]) -> None:
        if options["json"]:
            self.stdout.write(json.dumps(refused_json(error)))
        else:
            for row in error.refused[:SHOWN]:
                self.stderr.write(f"line {row.line}: {row.reason}")
        raise CommandError(f"{error}. Correct these lines or map their columns.", returncode=1)
