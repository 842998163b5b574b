"""`manage.py audit verify`: walks the hash chain of the audit log."""

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.audit.queries import verify_chain


class Command(BaseCommand):
    help = "Checks the audit log: verify walks the chain of hashes from the first entry to the last."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("what", choices=["verify"], help="verify: every entry's hash and link")
        parser.add_argument("--json", action="store_true", help="one JSON object instead of a sentence")

    def handle(self, *args: Any, **options: Any) -> None:
        check = verify_chain()
        if options["json"]:
            self.stdout.write(
                json.dumps({"entries": check.entries, "broken_at": check.broken_at, "holds": check.broken_at is None})
            )
        if check.broken_at is not None:
            raise CommandError(
                f"the chain breaks at entry {check.broken_at}, after {check.entries} good ones: the log was changed "
                "outside the product; compare it with a backup",
                returncode=1,
            )
        if not options["json"]:
            self.stdout.write(f"The chain holds: {check.entries} entries.")
