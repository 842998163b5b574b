"""`manage.py export_costs --period YYYY-MM --format csv|xlsx|parquet|focus`: a month's costs and charges as a file."""

import hashlib
import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.ledger.export_files import FORMATS, TooManyRows
from controlplane.ledger.exports import export_file
from controlplane.tenants.models import Installation

UNUSABLE = 2


class Command(BaseCommand):
    help = "Exports a month's costs and charges: of a closed month the very bytes that were kept when it was closed."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--period", required=True, help="a month of the billing zone, such as 2026-10")
        parser.add_argument("--format", required=True, choices=FORMATS)
        parser.add_argument("--output", type=Path, default=None, help="file to write; default: its own name, here")
        parser.add_argument("--closing", type=int, default=0, help="which closing; default: last")
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        if not Installation.objects.filter(pk=1).exists():
            raise CommandError("the installation is not set up: run `manage.py demo` first", returncode=UNUSABLE)
        try:
            made = export_file(options["period"], options["format"], version=options["closing"])
        except TooManyRows as error:
            raise CommandError(str(error), returncode=1) from error
        except ValueError as error:
            raise CommandError(str(error), returncode=UNUSABLE) from error
        path = options["output"] or Path(made.name)
        try:
            path.write_bytes(made.content)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}", returncode=UNUSABLE) from error
        digest = hashlib.sha256(made.content).hexdigest()
        if options["json"]:
            body = {
                "file": str(path), "rows": made.rows, "bytes": len(made.content), "sha256": digest,
                "closed": made.closed,
            }  # fmt: skip
            self.stdout.write(json.dumps(body))
        else:
            kept = "as kept at its closing" if made.closed else "of an open month"
            self.stdout.write(f"{path}: {made.rows:,} rows, {len(made.content):,} bytes, {kept}, sha256 {digest}")
