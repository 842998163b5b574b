"""`manage.py audit verify`: walks the hash chain of the audit log."""

import json
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.audit.queries import verify_chain


class Command(BaseCommand):
    help = "Checks the audit log: verify walks the chain of hashes from the first entry to the last."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("what", choices=["verify"], help="verify: every entry's hash and link")
        parser.add_argument("--anchor", default="", help="the hash of an entry, as noted earlier: is it still there?")
        parser.add_argument("--json", action="store_true", help="one JSON object instead of a sentence")

    def handle(self, *args: Any, **options: Any) -> None:
        anchor = options["anchor"].strip().lower()
        check = verify_chain(anchor)
        if options["json"]:
            holds = check.broken_at is None and check.anchor_found is not False
            self.stdout.write(json.dumps({**asdict(check), "holds": holds}))
        if check.broken_at is not None:
            raise CommandError(
                f"the chain breaks at entry {check.broken_at}, after {check.entries} good ones: the log was changed "
                "outside the product; compare it with a backup",
                returncode=1,
            )
        if check.anchor_found is False:
            raise CommandError(
                f"no entry has the hash {anchor}: entries that were there when it was noted are gone; compare the log "
                "with a backup",
                returncode=1,
            )
        if not options["json"]:
            self.stdout.write(f"The chain holds: {check.entries} entries.")
            if check.entries:
                self.stdout.write(f"Note this where nobody here can change it: --anchor {check.last_hash}")
