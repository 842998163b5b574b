"""`manage.py usage verify`: the rollups are built again from the records and compared."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.usage.retirement import ArchiveChanged
from controlplane.usage.verification import verify

SHOWN = 50


def _instant(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


class Command(BaseCommand):
    help = "Checks usage: verify builds the rollups again from the records and compares. Exit 1 when they differ."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("what", choices=["verify"])
        parser.add_argument("--since", type=_instant, help="records that ended at or after this instant (ISO 8601)")
        parser.add_argument("--until", type=_instant, help="records that ended before this instant (ISO 8601)")
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            result = verify(options["since"], options["until"])
        except ArchiveChanged as error:
            raise CommandError(str(error)) from error
        if options["json"]:
            self.stdout.write(json.dumps(asdict(result), default=str))
        else:
            self.stdout.write(
                f"{result.records:,} records, {result.keys:,} rollup keys, {len(result.differences):,} differences"
            )
            for row in result.differences[:SHOWN]:
                key = " ".join(f"{name}={value}" for name, value in row.key.items())
                self.stdout.write(f"{row.minute:%Y-%m-%d %H:%M} {key} {row.column}: {row.stored} is not {row.rebuilt}")
        if result.differences:
            raise CommandError("The rollups are not what the records add up to.", returncode=1)
