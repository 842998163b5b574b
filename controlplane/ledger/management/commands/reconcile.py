"""`manage.py reconcile --period YYYY-MM`: estimates, meters and invoices of a month, every residual by its name."""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.core.money import format_nanos
from controlplane.ledger.reconciliation import Reconciliation, reconcile, to_json
from controlplane.tenants.models import Installation

UNUSABLE = 2


class Command(BaseCommand):
    help = "Reconciles a month: estimates with actuals, reports with meters, attributed cost with the invoices."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--period", required=True, help="a month of the billing zone, such as 2026-10")
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        if not Installation.objects.filter(pk=1).exists():
            raise CommandError("the installation is not set up: run `manage.py demo` first", returncode=UNUSABLE)
        try:
            found = reconcile(options["period"], now=timezone.now())
        except ValueError as error:
            raise CommandError(str(error), returncode=UNUSABLE) from error
        if options["json"]:
            self.stdout.write(json.dumps(to_json(found)))
        else:
            self._tell(found)

    def _tell(self, found: Reconciliation) -> None:
        meters, bridge = found.meters, found.bridge
        self.stdout.write(
            f"{found.period} ({found.zone}, {found.currency})\n"
            f"estimates: {found.estimates.records:,} records, {found.estimates.unknown_requests:,} requests without\n"
            f"meters: {meters.agree:,} slot-minutes agree, {meters.differs:,} differ, {meters.unknown:,} unknown, "
            f"{len(meters.gaps):,} gaps in reports"
        )
        self.stdout.write(f"book {format_nanos(bridge.book_nanos)}")
        for step in bridge.steps:
            if step.nanos or step.lines:
                self.stdout.write(f"  {step.title}: {format_nanos(step.nanos)} ({step.lines:,} lines)")
        self.stdout.write(
            f"invoice {format_nanos(bridge.invoice_nanos)}, residual {format_nanos(bridge.unexplained_nanos)}, "
            f"open {format_nanos(found.open_nanos)} of {format_nanos(found.tolerance_nanos)} tolerated"
        )
        if not bridge.invoices:
            self.stdout.write("no invoice of this period is imported: run `manage.py import_invoice`")
