"""CSV as RFC 4180 writes it and a spreadsheet can open it safely, streamed.

A *text* cell that starts like a formula gets an apostrophe in front, so that no spreadsheet runs it.
Numbers are written as numbers, minus included: neutralising them would break every sum.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import islice
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db.models import QuerySet
from django.http import StreamingHttpResponse

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
CHUNK_CHARS = 16 * 1024
BATCH_ROWS = 200
NANOS_EXPONENT = -9


def decimal_of_nanos(nanos: int | None) -> Decimal | None:
    """Nanos as an exact decimal number for a cell: 1_500_000_000 -> 1.5."""
    if nanos is None:
        return None
    return Decimal(nanos).scaleb(NANOS_EXPONENT).normalize() + Decimal(0)


def neutral(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def cell(value: Any) -> str:
    """One value as it stands in the file.

    None is empty; numbers are plain with a dot and no grouping; instants are ISO 8601 in UTC; text is neutralised.
    Raises ValueError for NaN and infinities, which have no place in a report: write None.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"cannot export {value}: write None where there is no number")
        return format(value, "f")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"cannot export {value}: write None where there is no number")
        return format(Decimal(repr(value)), "f")
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"cannot export {value!r}: an instant needs its zone")
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    return neutral(str(value))


def csv_chunks(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """The file in UTF-8 pieces of about 16 KiB, lines ended by CRLF, the header first.

    Raises ValueError when a row's width differs from the header's.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow([neutral(name) for name in header])
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} cells, the header has {len(header)}")
        writer.writerow([cell(value) for value in row])
        if buffer.tell() >= CHUNK_CHARS:
            yield buffer.getvalue().encode()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode()


def in_batches(rows: QuerySet[Any, Any], size: int = BATCH_ROWS) -> Iterator[list[Any]]:
    """A queryset's rows by a server-side cursor, in lists: what is read beside them is read once a list."""
    remaining = rows.iterator(chunk_size=size)
    while batch := list(islice(remaining, size)):
        yield batch


class _Pieces:
    """Chunks for WSGI (iterated) and ASGI (pulled from a thread, so neither the loop nor memory is held)."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = chunks

    async def pull(self) -> AsyncIterator[bytes]:
        def following() -> bytes | None:
            return next(self.chunks, None)

        while (piece := await sync_to_async(following)()) is not None:
            yield piece


class CsvResponse(StreamingHttpResponse):
    """A download. `filename` without path; rows may be a generator over a server-side cursor."""

    def __init__(self, filename: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        self._pieces = _Pieces(csv_chunks(header, rows))
        super().__init__(self._pieces.chunks, content_type="text/csv; charset=utf-8; header=present")
        safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in filename)
        self.headers["Content-Disposition"] = f'attachment; filename="{safe}"'

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces.pull():
            yield piece
