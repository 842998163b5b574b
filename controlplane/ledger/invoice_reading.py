"""Reads a provider's invoice file: every line lands somewhere, or the file is refused with the numbers of its lines."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from itertools import islice
from typing import BinaryIO, TextIO

from controlplane.core.reconcile import InvoiceCategory
from controlplane.ledger.invoice_cells import (
    CellError,
    DayOrder,
    DecimalMark,
    Notation,
    cell,
    instant,
    number,
    observe,
)
from controlplane.ledger.invoice_columns import (
    AMOUNTS,
    DAYS,
    FORMATS,
    ColumnMap,
    comparable,
    detect,
    positions,
)

FILE_BYTES_MOST = 1 << 30
CELL_CHARS_MOST = 131_072
COLUMNS_MOST = 1_000
LINES_MOST = 5_000_000
REFUSED_MOST = 1_000
TEXT_MOST = 200
DELIMITERS = ",;\t|"


class FileRefused(ValueError):
    """The file as a whole cannot be taken; says why and what to do."""


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A line that cannot be read. `line` counts the file's lines from 1, the header included."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class InvoiceRow:
    """One line of an invoice. `billed` and `effective` are exact amounts in `currency`; None is what was not given.

    `starts` is a date as the provider writes it, or an instant in UTC.
    """

    line: int
    billed: Decimal
    effective: Decimal | None
    currency: str
    category: InvoiceCategory
    provider: str
    account: str
    sku: str
    region: str
    service: str
    description: str
    starts: datetime | date
    quantity: Decimal | None
    unit: str
    line_id: str


@dataclass(slots=True)
class Reading:
    """What a first pass found out about a file: format, columns, notation, what cannot be read."""

    format: str
    columns: ColumnMap
    header: list[str]
    places: dict[str, tuple[int, ...]]
    delimiter: str
    mark: DecimalMark
    order: DayOrder | None
    refused: list[RefusedLine] = field(default_factory=list)
    refused_more: int = 0

    def refuse(self, line: int, reason: str) -> None:
        """Notes a refused line; past REFUSED_MOST only their number."""
        if len(self.refused) < REFUSED_MOST:
            self.refused.append(RefusedLine(line, reason))
        else:
            self.refused_more += 1


def open_text(stream: BinaryIO) -> io.TextIOWrapper:
    """The file as text: UTF-8 with or without a mark, or UTF-16 with one.

    Raises FileRefused for files that are too large, empty, or no text.
    """
    stream.seek(0, io.SEEK_END)
    size = stream.tell()
    if not size:
        raise FileRefused("The file is empty.")
    if size > FILE_BYTES_MOST:
        raise FileRefused(f"The file has {size:,} bytes, the most is {FILE_BYTES_MOST:,}. Split it by day or account.")
    stream.seek(0)
    start = stream.read(4)
    stream.seek(0)
    if start[:2] == b"\x1f\x8b" or start[:2] == b"PK" or start[:4] == b"PAR1":
        raise FileRefused("The file is compressed or Parquet. Unpack it to CSV first.")
    encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return io.TextIOWrapper(stream, encoding=encoding, newline="")


def sample(text: TextIO, lines: int) -> tuple[list[str], list[list[str]]]:
    """The header and the first lines as they stand there, for choosing columns. Raises FileRefused for no CSV."""
    rows = [row for _, row in islice(_rows(text, _delimiter(text)), lines + 1)]
    return (rows[0], rows[1:]) if rows else ([], [])


def survey(text: TextIO, *, format: str = "auto", mapping: ColumnMap | None = None) -> Reading:
    """First pass: which format it is and how it writes numbers and dates.

    Raises FileRefused when the format is unknown or its notation stays open, UnknownColumns for missing columns.
    """
    rows = _rows(text, delimiter := _delimiter(text))
    header = next(rows, (0, []))[1]
    if not any(name.strip() for name in header) or len(header) > COLUMNS_MOST:
        raise FileRefused(f"The first line has to be a header of 1 to {COLUMNS_MOST} columns.")
    name, columns = _format_of(format, mapping, header)
    places = positions(columns, header)
    notation = Notation(mark=columns.mark, order=columns.order)
    for _, row in rows:
        observe(
            notation,
            (cell(row[at]) for fact in AMOUNTS for at in places.get(fact, ())[:1] if at < len(row)),
            (cell(row[at]) for fact in DAYS for at in places.get(fact, ())[:1] if at < len(row)),
        )
    if notation.conflict:
        raise FileRefused(f"The file writes numbers or dates in two ways: {notation.conflict}.")
    if notation.mark is None and notation.ambiguous_number:
        raise FileRefused(
            f"{notation.ambiguous_number!r} may be a thousand or a fraction, and no other number of the file tells. "
            "Save a mapping that names the decimal mark."
        )
    if notation.order is None and notation.ambiguous_date:
        raise FileRefused(
            f"{notation.ambiguous_date!r} may be two days, and no other date of the file tells. "
            "Save a mapping that says whether days or months come first."
        )
    return Reading(name, columns, header, places, delimiter, notation.mark or DecimalMark.POINT, notation.order)


def read_rows(text: TextIO, reading: Reading) -> Iterator[InvoiceRow]:
    """Second pass: the lines, in the file's order; what cannot be read is noted in `reading`."""
    rows = _rows(text, reading.delimiter)
    next(rows, None)
    for line, row in rows:
        if len(row) != len(reading.header):
            reading.refuse(line, f"has {len(row)} cells where the header has {len(reading.header)}")
            continue
        try:
            yield _row(line, row, reading)
        except CellError as error:
            reading.refuse(line, str(error))


def _delimiter(text: TextIO) -> str:
    try:
        first = text.readline(CELL_CHARS_MOST)
    except UnicodeDecodeError as error:
        raise FileRefused(f"The file is not UTF-8 text (byte {error.start:,}). Save it as UTF-8.") from None
    return max(DELIMITERS, key=first.count)


def _rows(text: TextIO, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Lines with their number in the file; empty ones are none."""
    text.seek(0)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    number_of = 0
    try:
        for row in reader:
            number_of += 1
            if number_of > LINES_MOST:
                raise FileRefused(f"The file has more than {LINES_MOST:,} lines. Split it by day or account.")
            if row and any(row):
                yield reader.line_num, row
    except csv.Error as error:
        raise FileRefused(f"Line {reader.line_num} is not CSV: {error}. Check its quotes.") from None
    except UnicodeDecodeError as error:
        raise FileRefused(f"The file is not UTF-8 text (near line {reader.line_num}). Save it as UTF-8.") from error


def _format_of(format: str, mapping: ColumnMap | None, header: Sequence[str]) -> tuple[str, ColumnMap]:
    if mapping is not None:
        return "mapped", mapping
    name = detect(header) if format == "auto" else format
    if name not in FORMATS:
        raise FileRefused(
            f"No known format fits this header ({', '.join(header)[:300]}). Known are {', '.join(FORMATS)}; "
            "for another, save a mapping and name it."
        )
    return name, FORMATS[name]


def _row(line: int, row: Sequence[str], reading: Reading) -> InvoiceRow:
    places = reading.places

    def text(fact: str) -> str:
        for at in places.get(fact, ()):
            found = cell(row[at])
            if "\x00" in found:
                raise CellError("holds a null byte, which is no text")
            if found:
                return found
        return ""

    def amount(fact: str) -> Decimal | None:
        found = text(fact)
        return number(found, reading.mark) if found else None

    billed = amount("billed")
    if billed is None:
        raise CellError("has no amount")
    starts = text("starts")
    if not starts:
        raise CellError("has no date")
    columns = reading.columns
    currency = (text("currency") or columns.fixed_currency).upper()
    if currency and not (len(currency) == 3 and currency.isalpha()):
        raise CellError(f"{currency[:20]!r} is not a currency. Write its three letters, such as EUR")
    return InvoiceRow(
        line, billed, amount("effective"), currency, _category(text("category"), text("service"), columns),
        (text("provider") if not columns.provider_name else columns.provider_name)[:TEXT_MOST],
        text("account")[:TEXT_MOST], text("sku")[:TEXT_MOST], text("region")[:TEXT_MOST], text("service")[:TEXT_MOST],
        text("description")[:TEXT_MOST], instant(starts, reading.order), amount("quantity"), text("unit")[:TEXT_MOST],
        text("line_id")[:TEXT_MOST],
    )  # fmt: skip


def _category(text: str, service: str, columns: ColumnMap) -> InvoiceCategory:
    found = columns.categories.get(comparable(text), InvoiceCategory.OTHER)
    if found is InvoiceCategory.USAGE and "support" in service.lower().split():
        return InvoiceCategory.SUPPORT
    return found
