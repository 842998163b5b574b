"""`manage.py attribute_now`: settles cost up to this instant, for a fleet that has been stopped."""

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.core.money import format_nanos
from controlplane.ledger.settling import attribute_now, cost_summary
from controlplane.tenants.models import Installation


class Command(BaseCommand):
    help = "Attributes the fleet's cost up to this instant and prints the sums, in nanos with --json."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        installation = Installation.objects.filter(pk=1).first()
        if installation is None:
            raise CommandError("the installation is not set up: run `manage.py demo` first", returncode=2)
        settled = attribute_now(timezone.now())
        if settled.failed:
            raise CommandError(f"not attributed: {', '.join(settled.failed)}; the log says why. Run it again after.")
        summary = cost_summary()
        if options["json"]:
            self.stdout.write(json.dumps(asdict(summary)))
            return
        for name, nanos in (("fleet", summary.fleet), ("attributed", summary.attributed), *summary.by_tenant.items()):
            self.stdout.write(f"{name}: {format_nanos(nanos)} {installation.currency}")
