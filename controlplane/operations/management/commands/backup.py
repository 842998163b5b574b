"""`manage.py backup FILE`: the installation in one file, while it runs."""

import json
import time
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from controlplane.operations.backing_up import make_backup
from controlplane.operations.backup_file import BackupError
from controlplane.operations.database_programs import ProgramsMissing


class Command(BaseCommand):
    help = "Saves the database, the signing keys and the files that rows point to in one file. Keep it like a key."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path, help="where to write it, such as /backups/flexband-2026-11-30.zip")
        parser.add_argument("--force", action="store_true", help="replace the file where it exists")
        parser.add_argument("--json", action="store_true", help="print one JSON document at the end")

    def handle(self, **options: Any) -> None:
        started = time.monotonic()
        try:
            saved = make_backup(
                options["file"].absolute(), force=options["force"], now=timezone.now(), say=self.stderr.write
            )
        except (BackupError, ProgramsMissing) as error:
            raise CommandError(str(error)) from error
        seconds = time.monotonic() - started
        for sentence in saved.left_out:
            self.stderr.write(f"NOT in it: {sentence}")
        if options["json"]:
            self.stdout.write(json.dumps({**asdict(saved), "seconds": round(seconds, 3)}))
        else:
            self.stdout.write(
                f"{saved.path}: {saved.size_bytes:,} bytes, {saved.parts:,} parts, generation {saved.generation}, "
                f"{seconds:.1f} s"
            )
