"""`manage.py close_period YYYY-MM`: closes a month; with open checks it needs a reason."""

import json
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.audit.actors import command_actor
from controlplane.core.money import format_nanos
from controlplane.ledger.periods import close_period, verify_exports
from controlplane.tenants.models import Installation

UNUSABLE = 2


class Command(BaseCommand):
    help = "Closes a month of the billing zone and keeps its exports and statements. Closing it again changes nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("period", help="a month that has ended, such as 2026-10")
        parser.add_argument("--reason", default="", help="why it is closed although checks are open")
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        if not Installation.objects.filter(pk=1).exists():
            raise CommandError("the installation is not set up: run `manage.py demo` first", returncode=UNUSABLE)
        try:
            done = close_period(options["period"], actor=command_actor(), now=timezone.now(), reason=options["reason"])
        except ValidationError as error:
            code = UNUSABLE if "period" in getattr(error, "error_dict", {}) else 1
            raise CommandError(" ".join(error.messages), returncode=code) from error
        version = done.version
        exports = {row.file_name: row for row in version.exports.order_by("format")}
        kept = verify_exports(options["period"])
        if options["json"]:
            body = {
                "period": options["period"], "version": version.version, "repeated": done.repeated,
                "closed_at": version.closed_at.isoformat(), "closed_by": version.closed_by, "reason": version.reason,
                "cost": format_nanos(version.cost_nanos), "charges": format_nanos(version.charge_nanos),
                "fingerprint": version.fingerprint, "statements": version.statements.count(),
                "checks": version.checklist,
                "exports": {
                    name: {"rows": row.rows, "sha256": row.sha256, "intact": kept[name]}
                    for name, row in exports.items()
                },
            }  # fmt: skip
            self.stdout.write(json.dumps(body))
            return
        again = " (it was closed before)" if done.repeated else ""
        self.stdout.write(
            f"{options['period']} is closed, version {version.version}{again}: cost {format_nanos(version.cost_nanos)},"
            f" charges {format_nanos(version.charge_nanos)}, {version.statements.count():,} statements"
        )
        for name, row in exports.items():
            self.stdout.write(f"  {name}: {row.rows:,} rows, sha256 {row.sha256}")
