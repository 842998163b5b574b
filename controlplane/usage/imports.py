"""Usage from elsewhere: public traces, own files, events of other gateways. Each counts once, none is charged."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice
from pathlib import Path

from django.db import connection, transaction

from controlplane.core.period import EPOCH, format_utc
from controlplane.lab.traces import FROM_OWN_START, BadLine, TraceRequest, open_rows

CHUNK_ROWS = 5_000
REFUSED_MOST = 1_000
HOURS_MOST = 24 * 400
SECONDS_MOST = 5_000_000
DIGEST_BYTES = 16
FILE_DIGEST_CHARS = 40
TIME_MOST = datetime.max.replace(tzinfo=EPOCH.tzinfo) - timedelta(days=366)

_ROWS = """
unnest(%s::text[], %s::text[], %s::timestamptz[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bytea[])
    WITH ORDINALITY AS r (external_id, tenant_slug, at, model, prompt, cached, output, digest, position)
"""
_STORE = f"""
INSERT INTO usage_importedusage (source, tenant_slug, external_id, at, model, prompt_tokens, cached_tokens,
                                 output_tokens, digest, imported_at)
SELECT %s, tenant_slug, external_id, at, model, prompt, cached, output, digest, %s
FROM {_ROWS} ORDER BY tenant_slug, external_id, position
ON CONFLICT (source, tenant_slug, external_id) DO NOTHING
RETURNING tenant_slug, external_id, digest
"""  # noqa: S608 - names are constants
_SAME = f"""
SELECT u.digest = r.digest FROM {_ROWS}
JOIN usage_importedusage u ON u.source = %s AND u.tenant_slug = r.tenant_slug AND u.external_id = r.external_id
ORDER BY r.position
"""  # noqa: S608 - names are constants


class Result(StrEnum):
    """What became of one row."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class ImportRow:
    """A row to keep. `external_id` is unique for its source and tenant; `line` is where the file has it."""

    external_id: str
    request: TraceRequest
    line: int = 0


@dataclass(slots=True)
class FileSummary:
    """What an import of a file found, stored or not. Instants are ISO 8601 in UTC, hours begin on the hour UTC.

    `rows` counts usable and refused lines; `refused` holds the first REFUSED_MOST, `refused_count` all of them.
    """

    format: str
    source: str
    rows: int = 0
    stored: int = 0
    duplicates: int = 0
    refused_count: int = 0
    refused: list[BadLine] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    output: int = 0
    first: datetime | None = None
    last: datetime | None = None
    hours: dict[datetime, list[int]] = field(default_factory=dict)
    _seconds: Counter[int] = field(default_factory=Counter)

    @property
    def peak_per_second(self) -> int:
        """Most requests in one second of the clock."""
        return max(self._seconds.values(), default=0)

    def refuse(self, line: int, reason: str) -> None:
        """Counts a line that cannot be used."""
        self.rows += 1
        self.refused_count += 1
        if len(self.refused) < REFUSED_MOST:
            self.refused.append(BadLine(line, reason))

    def take(self, request: TraceRequest) -> None:
        """Counts a usable line."""
        at = EPOCH + timedelta(microseconds=request.at_us)
        self.rows += 1
        self.prompt += request.prompt_tokens
        self.cached += request.cached_tokens
        self.output += request.output_tokens
        self.first = at if self.first is None else min(self.first, at)
        self.last = at if self.last is None else max(self.last, at)
        if len(self._seconds) < SECONDS_MOST:
            self._seconds[request.at_us // 1_000_000] += 1
        hour = at.replace(minute=0, second=0, microsecond=0)
        if hour in self.hours or len(self.hours) < HOURS_MOST:
            row = self.hours.setdefault(hour, [0, 0, 0])
            row[0] += 1
            row[1] += request.prompt_tokens
            row[2] += request.output_tokens

    def as_json(self) -> dict[str, object]:
        """The summary under the names that scripts depend on."""
        return {
            "format": self.format, "source": self.source, "rows": self.rows, "stored": self.stored,
            "duplicates": self.duplicates, "refused_count": self.refused_count,
            "refused": [{"line": bad.line, "reason": bad.reason} for bad in self.refused],
            "tokens": {"prompt": self.prompt, "cached": self.cached, "output": self.output},
            "first": format_utc(self.first) if self.first else None,
            "last": format_utc(self.last) if self.last else None, "peak_per_second": self.peak_per_second,
            "by_hour": [
                {"hour": format_utc(hour), "requests": row[0], "prompt": row[1], "output": row[2]}
                for hour, row in sorted(self.hours.items())
            ],
        }  # fmt: skip


def import_file(
    path: Path,
    *,
    source: str,
    now: datetime,
    format: str = "auto",
    start: datetime = EPOCH,
    progress: Callable[[int], None] = lambda rows: None,
) -> FileSummary:
    """Keeps the usable lines of a file under a named source; a second run of the same file adds nothing.

    `start` is where a trace without dates begins. Each chunk is stored by itself, so a run that was stopped is
    completed by the next. Raises TraceError for an unknown format, OSError when the file cannot be read.
    """
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()[:FILE_DIGEST_CHARS]
    with path.open(encoding="utf-8-sig", newline="") as file:
        name, rows = open_rows(file, format)
        summary = FileSummary(name, source)
        offset_us = (start - EPOCH) // timedelta(microseconds=1) if name in FROM_OWN_START else 0
        usable = _usable(rows, summary, digest, offset_us)
        while chunk := list(islice(usable, CHUNK_ROWS)):
            results = store(chunk, source=source, now=now)
            for row, result in zip(chunk, results, strict=True):
                if result is Result.CONFLICT:
                    summary.refuse(row.line, f"{row.external_id!r} is known with other content; the first is kept")
                    continue
                summary.take(row.request)
                if result is Result.STORED:
                    summary.stored += 1
                else:
                    summary.duplicates += 1
            progress(summary.rows)
    summary.refused.sort(key=lambda bad: bad.line)
    return summary


def store(rows: Sequence[ImportRow], *, source: str, now: datetime) -> list[Result]:
    """Keeps what is new, in one transaction, and says what became of each row, in their order."""
    columns = [list(column) for column in zip(*map(_values, rows), strict=True)]
    if not columns:
        return []
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_STORE, [source, now, *columns])
        fresh = Counter((tenant, name, bytes(digest)) for tenant, name, digest in cursor.fetchall())
        cursor.execute(_SAME, [*columns, source])
        same = [bool(equal) for (equal,) in cursor.fetchall()]
    return [_result(row, equal, fresh) for row, equal in zip(rows, same, strict=True)]


def _result(row: ImportRow, equal: bool, fresh: Counter[tuple[str, str, bytes]]) -> Result:
    """Of rows with one identity in one batch the first is stored."""
    if not equal:
        return Result.CONFLICT
    key = (row.request.tenant, row.external_id, _digest(row.request))
    if fresh[key]:
        fresh[key] -= 1
        return Result.STORED
    return Result.DUPLICATE


def _values(row: ImportRow) -> tuple[object, ...]:
    request = row.request
    at = EPOCH + timedelta(microseconds=request.at_us)
    return (
        row.external_id, request.tenant, at, request.model, request.prompt_tokens, request.cached_tokens,
        request.output_tokens, _digest(request),
    )  # fmt: skip


def _digest(request: TraceRequest) -> bytes:
    text = "\x1f".join(
        str(part)
        for part in (request.at_us, request.model, request.prompt_tokens, request.cached_tokens, request.output_tokens)
    )
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def _usable(
    rows: Iterable[tuple[int, TraceRequest | str]], summary: FileSummary, digest: str, offset_us: int
) -> Iterator[ImportRow]:
    latest_us = (TIME_MOST - EPOCH) // timedelta(microseconds=1)
    for line, request in rows:
        if isinstance(request, str):
            summary.refuse(line, request)
        elif not 0 <= request.at_us + offset_us < latest_us:
            summary.refuse(line, "its time is before 1970 or too far ahead")
        else:
            moved = _moved(request, offset_us) if offset_us else request
            yield ImportRow(request.id or f"{digest}:{line}", moved, line)


def _moved(request: TraceRequest, offset_us: int) -> TraceRequest:
    return TraceRequest(
        request.at_us + offset_us, request.prompt_tokens, request.output_tokens, request.cached_tokens, request.model,
        request.tenant, request.id,
    )  # fmt: skip
