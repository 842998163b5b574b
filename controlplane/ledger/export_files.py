"""Files of a month's rows: CSV, typed XLSX, Parquet, and FOCUS as CSV.

Text that a spreadsheet would run is neutralised in CSV and FOCUS, and is a text cell in XLSX and Parquet, where nothing
runs it. Numbers stay numbers in all of them.
"""

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import xlsxwriter

from controlplane.ledger import focus_export
from controlplane.ledger.export_rows import COLUMNS, ExportRow
from controlplane.ledger.focus_export import FocusFacts, focus_rows
from controlplane.web.exports import csv_chunks

FORMATS = ("csv", "xlsx", "parquet", "focus")
CONTENT_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    "parquet": "application/vnd.apache.parquet",
    "focus": "text/csv; charset=utf-8",
}
ROWS_MOST = 1_000_000
"""A spreadsheet has 1,048,576 rows; more than this of one month belongs into Parquet by day."""
_MONEY = {"cost", "charge"}
_HOURS = {"slot_hours"}
_COUNTS = {"rate_version", "requests", "prompt_tokens", "cached_tokens", "output_tokens"}
_WIDTHS = {"tenant_name": 24, "cost": 18, "charge": 18, "line": 26, "day": 12}


class TooManyRows(ValueError):
    """The month has more rows than a file may have; says how many."""


@dataclass(frozen=True, slots=True)
class ExportFile:
    """The bytes of one file and how many rows are in it, the header not counted."""

    name: str
    content: bytes
    rows: int


def file_name(period: str, version: int, format: str) -> str:
    """`costs-2026-10-v1.csv`; an open month has no version."""
    stem = f"costs-{period}" + (f"-v{version}" if version else "-open")
    return f"{stem}-focus.csv" if format == "focus" else f"{stem}.{format}"


def build(
    format: str,
    rows: Iterable[ExportRow],
    facts: FocusFacts,
    period: str,
    progress: Callable[[int], None] | None = None,
) -> ExportFile:
    """One file. Raises ValueError for another format, TooManyRows past ROWS_MOST."""
    if format not in FORMATS:
        raise ValueError(f"{format[:20]!r} is not a format: choose {', '.join(FORMATS)}")
    counted = _Counted(rows, progress)
    if format == "csv":
        content = b"".join(csv_chunks(COLUMNS, (astuple(row) for row in counted)))
    elif format == "focus":
        content = b"".join(csv_chunks(focus_export.COLUMNS, focus_rows(counted, facts)))
    elif format == "xlsx":
        content = _xlsx(counted, facts)
    else:
        content = _parquet(counted)
    return ExportFile(file_name(period, facts.version, format), content, counted.rows)


class _Counted:
    """Rows as they pass; stops a file that grows too large."""

    def __init__(self, rows: Iterable[ExportRow], progress: Callable[[int], None] | None) -> None:
        self._rows, self._progress, self.rows = rows, progress, 0

    def __iter__(self) -> Iterator[ExportRow]:
        for row in self._rows:
            self.rows += 1
            if self.rows > ROWS_MOST:
                raise TooManyRows(f"the month has over {ROWS_MOST:,} rows: export its days with the API instead")
            if self._progress is not None and self.rows % 5_000 == 0:
                self._progress(self.rows)
            yield row


def _xlsx(rows: Iterable[ExportRow], facts: FocusFacts) -> bytes:
    """A sheet whose cells have types. Money beyond the 15 digits that a spreadsheet's number keeps is exact in CSV."""
    stream = io.BytesIO()
    options = {
        "constant_memory": True,
        "strings_to_formulas": False,
        "strings_to_urls": False,
        "strings_to_numbers": False,
    }
    with xlsxwriter.Workbook(stream, {**options, "default_date_format": "yyyy-mm-dd"}) as book:
        # The file says when the month ended, not when it was written: the same rows give the same bytes.
        book.set_properties({"title": f"Costs {facts.window.label}", "created": facts.window.end.replace(tzinfo=None)})
        sheet = book.add_worksheet("Costs")
        money, hours = book.add_format({"num_format": "#,##0.00#######"}), book.add_format({"num_format": "0.000000"})
        count, bold = book.add_format({"num_format": "#,##0"}), book.add_format({"bold": True})
        day = book.add_format({"num_format": "yyyy-mm-dd"})
        for at, name in enumerate(COLUMNS):
            sheet.set_column(at, at, _WIDTHS.get(name, 14))
            sheet.write_string(0, at, name, bold)
        sheet.freeze_panes(1, 0)
        number = 0
        for number, row in enumerate(rows, start=1):
            for at, (name, value) in enumerate(zip(COLUMNS, astuple(row), strict=True)):
                if value is None or value == "":
                    continue
                if isinstance(value, date):
                    sheet.write_datetime(number, at, datetime(value.year, value.month, value.day), day)  # noqa: DTZ001
                elif isinstance(value, (int, Decimal)):
                    kind = money if name in _MONEY else hours if name in _HOURS else count
                    sheet.write_number(number, at, value, kind)
                else:
                    sheet.write_string(number, at, str(value))
        if number:
            sheet.autofilter(0, 0, number, len(COLUMNS) - 1)
    return stream.getvalue()


def _type(name: str) -> str:
    if name in _MONEY:
        return "DECIMAL(38, 9)"
    if name in _HOURS:
        return "DECIMAL(20, 6)"
    if name in _COUNTS:
        return "BIGINT"
    return "DATE" if name == "day" else "VARCHAR"


def _parquet(rows: Iterable[ExportRow]) -> bytes:
    """Typed columns, money as exact decimals; DuckDB reads a CSV in a folder of its own: its fastest way in."""
    with tempfile.TemporaryDirectory(prefix="flexband-export-") as folder:
        source, target = Path(folder, "rows.csv"), Path(folder, "rows.parquet")
        with source.open("wb") as stream:
            for chunk in _plain_csv(COLUMNS, rows):
                stream.write(chunk)
        types = ", ".join(f"'{name}': '{_type(name)}'" for name in COLUMNS)
        with duckdb.connect(":memory:", config={"threads": 1}) as database:
            database.execute(
                f"COPY (SELECT * FROM read_csv('{source}', header=true, delim=',', quote='\"', escape='\"',"  # noqa: S608
                f" nullstr='\\N', columns={{{types}}})) TO '{target}' (FORMAT parquet, COMPRESSION zstd)"
            )
        return target.read_bytes()


def _plain_csv(header: Sequence[str], rows: Iterable[ExportRow]) -> Iterator[bytes]:
    """Text as it is: only DuckDB reads this file, and it runs nothing."""
    yield (",".join(header) + "\n").encode()
    for row in rows:
        yield (",".join(_plain(value) for value in astuple(row)) + "\n").encode()


def _plain(value: Any) -> str:
    if value is None:
        return "\\N"
    if isinstance(value, str):
        return '"' + value.replace('"', '""') + '"'
    return f"{value:f}" if isinstance(value, Decimal) else str(value)
