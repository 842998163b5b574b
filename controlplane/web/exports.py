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
from typing import Any, cast
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db.models import QuerySet
from django.http import StreamingHttpResponse

from controlplane.web.pagination import keyset_page

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
FIRST_CHARS, CHUNK_CHARS = 2 * 1024, 16 * 1024
FIRST_ROWS, BATCH_ROWS = 100, 1_000
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
    """The file in UTF-8 pieces of about 16 KiB, after a first one that comes soon; lines ended by CRLF, header first.

    Raises ValueError when a row's width differs from the header's.
    """
    buffer, wanted = io.StringIO(), FIRST_CHARS
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow([neutral(name) for name in header])
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} cells, the header has {len(header)}")
        writer.writerow([cell(value) for value in row])
        if buffer.tell() >= wanted:
            wanted = CHUNK_CHARS
            yield buffer.getvalue().encode()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode()


def in_batches(rows: QuerySet[Any, Any], order: Sequence[str]) -> Iterator[list[Any]]:
    """A queryset's rows as its pages show them, in lists: what is read beside them is read once a list.

    Each list is a keyset page, the first a short one: a cursor outside a transaction would hold the whole result
    before its first row, and inside one keep a transaction open for as long as somebody downloads. `order` is of
    columns that stay (see `keyset_page`); for what moves while it is read there is `in_present_order`.
    """
    cursor, limit = None, FIRST_ROWS
    while True:
        page = keyset_page(rows, order, cursor=cursor, limit=limit, most=BATCH_ROWS)
        if page.rows:
            yield page.rows
        cursor, limit = page.next_cursor, BATCH_ROWS
        if cursor is None:
            return


def in_present_order(rows: QuerySet[Any, Any], order: Sequence[str], whole: QuerySet[Any, Any]) -> Iterator[list[Any]]:
    """Rows in the order of this instant: their keys are read at once, then `whole` rows by key, in lists.

    For orders that no index has or that change while they are read: each row once, but for those that went meanwhile.
    """
    keys = list(rows.order_by(*order).values_list("pk", flat=True))
    begin, limit = 0, FIRST_ROWS
    while part := keys[begin : begin + limit]:
        found = whole.in_bulk(part)
        yield [found[key] for key in part if key in found]
        begin, limit = begin + limit, BATCH_ROWS


async def pulled(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """For ASGI: each piece is made in a thread when it is wanted, so neither the loop nor memory is held."""

    def following() -> bytes | None:
        return next(pieces, None)

    while (piece := await sync_to_async(following)()) is not None:
        yield piece


class StreamedResponse(StreamingHttpResponse):
    """Pieces that are made as it goes; with a `filename`, without path, it is a download."""

    def __init__(self, filename: str, chunks: Iterator[bytes], content_type: str) -> None:
        super().__init__(chunks, content_type=content_type)
        if filename:
            safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in filename)
            self.headers["Content-Disposition"] = f'attachment; filename="{safe}"'

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in pulled(cast("Iterator[bytes]", self.streaming_content)):
            yield piece


class CsvResponse(StreamedResponse):
    """A table as a download; rows may be a generator that reads as it goes."""

    def __init__(self, filename: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        super().__init__(filename, csv_chunks(header, rows), "text/csv; charset=utf-8; header=present")
