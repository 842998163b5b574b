"""`manage.py attribute --period YYYY-MM`: attributes every hour of a period again; the book gets the difference."""

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.core.money import format_nanos
from controlplane.core.period import format_utc, load_zone, parse_period
from controlplane.ledger.settling import attribute_period, cost_summary
from controlplane.tenants.models import Installation

UNUSABLE = 2


class Command(BaseCommand):
    help = "Attributes the fleet's cost of a period to tenants. Running it again changes nothing that is right."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--period", required=True, help="a month 2026-10, a week 2026-W44 or a day 2026-10-31")
        parser.add_argument(
            "--present-settings",
            action="store_true",
            help="apply the pools' present idle policy instead of the one each hour was completed under",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        installation = Installation.objects.filter(pk=1).first()
        if installation is None:
            raise CommandError("the installation is not set up: run `manage.py demo` first", returncode=UNUSABLE)
        try:
            window = parse_period(load_zone(installation.billing_zone), options["period"])
        except ValueError as error:
            raise CommandError(str(error), returncode=UNUSABLE) from error
        done = attribute_period(options["period"], timezone.now(), present_settings=options["present_settings"])
        summary = cost_summary(window.start, window.end)
        if options["json"]:
            body = {
                "period": options["period"], "zone": installation.billing_zone, "currency": installation.currency,
                "since": format_utc(window.start), "until": format_utc(window.end), **asdict(done), **asdict(summary),
            }  # fmt: skip
            self.stdout.write(json.dumps(body))
            return
        money = f"{format_nanos(summary.fleet)} {installation.currency}"
        self.stdout.write(
            f"{options['period']} ({installation.billing_zone}): {done.intervals} intervals, {done.changed} changed, "
            f"{done.posted} events posted; fleet cost {money}"
        )
        for tenant, nanos in summary.by_tenant.items():
            self.stdout.write(f"  {tenant}: {format_nanos(nanos)}")
        if summary.unpriced_us:
            self.stdout.write("  some slot time has no rate: its cost is unknown until a rate is added")
