"""`manage.py import_usage FILE`: usage or a public trace, kept under a named source; the same file counts once."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.core.period import EPOCH
from controlplane.lab.traces import READERS, TraceError
from controlplane.usage.imports import FileSummary, import_file

UNUSABLE = 2
SHOWN = 20
SOURCE_CHARS_MOST = 120


def _instant(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


class Command(BaseCommand):
    help = "Imports usage or a public trace. It is kept under its source, and neither charged nor attributed."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path)
        parser.add_argument("--format", default="auto", choices=["auto", *READERS], help="default: by the first line")
        parser.add_argument("--source", default="", help="name to keep it under; default: the file's name")
        parser.add_argument(
            "--start", type=_instant, default=EPOCH, help="when a trace without dates begins (ISO 8601); default 1970"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        path: Path = options["file"]
        source = options["source"] or path.name
        if len(source) > SOURCE_CHARS_MOST or not source.isprintable():
            raise CommandError(
                f"name the source with --source, in at most {SOURCE_CHARS_MOST} printable characters",
                returncode=UNUSABLE,
            )
        try:
            summary = import_file(
                path, source=source, now=timezone.now(), format=options["format"], start=options["start"],
                progress=_bar(path, quiet=options["json"]),
            )  # fmt: skip
        except TraceError as error:
            raise CommandError(f"{path}: {error}", returncode=UNUSABLE) from error
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}", returncode=UNUSABLE) from error
        except UnicodeDecodeError as error:
            raise CommandError(f"{path}: not UTF-8 text from byte {error.start} on", returncode=UNUSABLE) from error
        self.stdout.write(json.dumps(summary.as_json()) if options["json"] else _text(summary))


def _bar(path: Path, *, quiet: bool) -> Any:
    """Says on a terminal how many lines are done."""
    if quiet or not sys.stderr.isatty():
        return lambda rows: None

    def show(rows: int) -> None:
        sys.stderr.write(f"\r{path.name}: {rows:,} lines")
        sys.stderr.flush()

    return show


def _text(summary: FileSummary) -> str:
    lines = [
        f"{summary.source} ({summary.format}): {summary.rows:,} lines, {summary.stored:,} stored, "
        f"{summary.duplicates:,} known already, {summary.refused_count:,} refused",
        f"  {summary.prompt:,} prompt tokens ({summary.cached:,} cached), {summary.output:,} output tokens, "
        f"at most {summary.peak_per_second:,} requests in a second",
    ]
    lines += [f"  line {bad.line}: {bad.reason}" for bad in summary.refused[:SHOWN]]
    return "\n".join(lines)
