"""What an import of a file would take, before anything is written: first lines as read, sums, what is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any, BinaryIO

from controlplane.core.period import Window, format_utc
from controlplane.ledger.invoice_columns import ColumnMap
from controlplane.ledger.invoice_reading import (
    FileRefused,
    InvoiceRow,
    Reading,
    open_text,
    read_rows,
    sample,
    survey,
)
from controlplane.ledger.invoices import billing_day, decimal_text, is_inside

LINES_SHOWN = 12
RAW_LINES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Line:
    """A line as it would be taken; `day` is the day of the billing zone."""

    row: InvoiceRow
    day: date
    inside: bool


@dataclass(slots=True)
class Preview:
    """Exact sums in the file's currencies, mostly one. `lines` counts what can be read."""

    reading: Reading
    first: list[Line] = field(default_factory=list)
    lines: int = 0
    outside: int = 0
    billed: Decimal = Decimal(0)
    effective: Decimal | None = None
    by_category: dict[str, Decimal] = field(default_factory=dict)
    currencies: set[str] = field(default_factory=set)

    @property
    def refused_count(self) -> int:
        return len(self.reading.refused) + self.reading.refused_more

    def take(self, line: Line) -> None:
        """Counts one line."""
        row = line.row
        self.lines += 1
        self.outside += not line.inside
        self.billed += row.billed
        if row.effective is not None:
            self.effective = (self.effective or Decimal(0)) + row.effective
        self.by_category[row.category.value] = self.by_category.get(row.category.value, Decimal(0)) + row.billed
        self.currencies.add(row.currency)
        if len(self.first) < LINES_SHOWN:
            self.first.append(line)


def preview(
    stream: BinaryIO, *, window: Window, zone: str, format: str = "auto", columns: ColumnMap | None = None
) -> Preview:
    """Reads the whole file as the import does. Raises FileRefused and UnknownColumns for the file as a whole."""
    text = open_text(stream)
    try:
        found = Preview(survey(text, format=format, mapping=columns))
        for row in read_rows(text, found.reading):
            day = billing_day(row, zone)
            found.take(Line(row, day, is_inside(row, day, window, zone)))
    finally:
        text.detach()
    return found


def raw_lines(stream: BinaryIO) -> tuple[list[str], list[list[str]]]:
    """Header and first lines as they stand in the file; both empty for what is no CSV."""
    try:
        text = open_text(stream)
    except FileRefused:
        return [], []
    try:
        return sample(text, RAW_LINES_SHOWN)
    except FileRefused:
        return [], []
    finally:
        text.detach()


def to_json(found: Preview) -> dict[str, Any]:
    """For REST: amounts as exact text."""
    return {
        "format": found.reading.format, "lines": found.lines, "outside_period": found.outside,
        "currencies": sorted(found.currencies - {""}),
        "decimal_mark": found.reading.mark, "day_order": found.reading.order, "columns": found.reading.header,
        "totals": {
            "billed": decimal_text(found.billed),
            "effective": None if found.effective is None else decimal_text(found.effective),
        },
        "by_category": {name: decimal_text(value) for name, value in sorted(found.by_category.items())},
        "refused": [{"line": row.line, "reason": row.reason} for row in found.reading.refused],
        "refused_more": found.reading.refused_more,
        "first": [_line_json(line) for line in found.first],
    }  # fmt: skip


def _line_json(line: Line) -> dict[str, Any]:
    row = line.row
    texts: Sequence[str] = ("provider", "account", "sku", "region", "service", "description", "unit", "line_id")
    return {
        "line": row.line, "day": line.day.isoformat(), "inside_period": line.inside,
        "starts": format_utc(row.starts) if isinstance(row.starts, datetime) else row.starts.isoformat(),
        "billed": decimal_text(row.billed), "currency": row.currency, "category": row.category.value,
        "effective": None if row.effective is None else decimal_text(row.effective),
        "quantity": None if row.quantity is None else decimal_text(row.quantity),
        **{name: getattr(row, name) for name in texts},
    }  # fmt: skip
