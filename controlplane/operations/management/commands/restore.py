"""`manage.py restore FILE`: the installation of a backup, in a new generation."""

import json
import time
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from controlplane.operations.backup_file import BackupError, BackupReader, opened
from controlplane.operations.database_programs import ProgramsMissing
from controlplane.operations.restoring import plan, restore


class Command(BaseCommand):
    help = "Brings the installation of a backup back. Run it as the owner, with web, worker, beat, controller stopped."
    requires_migrations_checks = False
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path, help="a file that `manage.py backup` wrote")
        parser.add_argument("--plan", action="store_true", help="check the file, say what would be done, do nothing")
        parser.add_argument(
            "--replace", action="store_true", help="replace what the database holds of this installation"
        )
        parser.add_argument(
            "--generation",
            type=int,
            help="begin this generation or a later one: where the same backup was restored before into a database that "
            "is lost, one more than that had",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document at the end")

    def handle(self, **options: Any) -> None:
        try:
            with opened(options["file"]) as reader:
                self._handle(reader, options)
        except (BackupError, ProgramsMissing) as error:
            raise CommandError(str(error)) from error

    def _handle(self, reader: BackupReader, options: dict[str, Any]) -> None:
        started = time.monotonic()
        for name in sorted(reader.manifest.parts):
            reader.check(name)
        self.stderr.write(f"{len(reader.manifest.parts):,} parts are as the manifest says")
        chosen = plan(reader, replace=options["replace"], generation=options["generation"])
        for line in (*chosen.steps, *(f"WARNING: {warning}" for warning in chosen.warnings)):
            self.stderr.write(line)
        if chosen.refusals:
            raise CommandError("; ".join(chosen.refusals))
        if options["plan"]:
            self.stdout.write(json.dumps(asdict(chosen)) if options["json"] else "nothing was changed")
            return
        done = restore(reader, chosen, now=timezone.now(), say=self.stderr.write)
        for warning in done.warnings[len(chosen.warnings) :]:
            self.stderr.write(f"WARNING: {warning}")
        seconds = time.monotonic() - started
        if options["json"]:
            self.stdout.write(json.dumps({**asdict(done), "seconds": round(seconds, 3)}))
        else:
            said = "" if done.revision is None else f", policy in force again as revision {done.revision}"
            self.stdout.write(f"restored, generation {done.generation}{said}, {seconds:.1f} s")
