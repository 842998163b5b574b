"""Numbers and dates as providers write them in CSV files: one notation for a whole file, found out, never guessed.

A value that can be read in two ways is settled by the other values of its file, or by the mapping; where nothing
settles it the file is refused. All numbers are exact decimals.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum

NULLS = frozenset({"", "null", "none", "n/a", "na", "nan", "-"})
WHOLE_DIGITS_MOST = 30
DECIMALS_MOST = 30
CENTURY = 2000

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
_POINT_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?")
_COMMA_GROUPED = re.compile(r"[+-]?\d{1,3}(?:\.\d{3})+(?:,\d*)?(?:[eE][+-]?\d{1,3})?")
_COMMA_NUMBER = re.compile(r"[+-]?(?:\d+(?:,\d*)?|,\d+)(?:[eE][+-]?\d{1,3})?")
_SLASHED = re.compile(r"(\d{1,2})([/.])(\d{1,2})\2(\d{4}|\d{2})(?:[ T].*)?")


class DecimalMark(StrEnum):
    """What stands before the fraction."""

    POINT = "point"
    COMMA = "comma"


class DayOrder(StrEnum):
    """Which comes first where a date is written with slashes or points."""

    MONTH_FIRST = "month_first"
    DAY_FIRST = "day_first"


class CellError(ValueError):
    """A cell that cannot be read; says what stands there and what is wanted."""


def cell(text: str | None) -> str:
    """The text of a cell; empty for the many ways of saying that there is none."""
    stripped = (text or "").strip()
    return "" if stripped.lower() in NULLS else stripped


@dataclass(slots=True)
class Notation:
    """What the values of a file have shown so far. `conflict` names two values that exclude each other."""

    mark: DecimalMark | None = None
    order: DayOrder | None = None
    ambiguous_number: str = ""
    ambiguous_date: str = ""
    conflict: str = ""
    _mark_from: str = ""
    _order_from: str = ""

    def see_number(self, text: str) -> None:
        """Learns from a number how the file writes numbers."""
        mark = mark_shown(text)
        if mark is None:
            if "," in text:
                self.ambiguous_number = self.ambiguous_number or text
        elif self.mark is None:
            self.mark, self._mark_from = mark, text
        elif self.mark is not mark and self._mark_from:
            self.conflict = self.conflict or f"{self._mark_from!r} and {text!r} use different decimal marks"

    def see_date(self, text: str) -> None:
        """Learns from a date whether days or months come first."""
        match = _SLASHED.fullmatch(text)
        if match is None:
            return
        first, separator, second = int(match[1]), match[2], int(match[3])
        order: DayOrder | None = None
        if first > 12 or separator == ".":
            order = DayOrder.DAY_FIRST
        elif second > 12:
            order = DayOrder.MONTH_FIRST
        if order is None:
            if first != second:
                self.ambiguous_date = self.ambiguous_date or text
        elif self.order is None:
            self.order, self._order_from = order, text
        elif self.order is not order and self._order_from:
            self.conflict = self.conflict or f"{self._order_from!r} and {text!r} use different orders of day and month"


def mark_shown(text: str) -> DecimalMark | None:
    """The decimal mark that a number gives away; None where it could be either or has none."""
    point, comma = text.rfind("."), text.rfind(",")
    lead = text.lstrip("+-")[:2]
    if lead in ("0.", "0,") and (point < 0 or comma < 0):
        # Nobody groups thousands behind a zero.
        return DecimalMark.POINT if lead == "0." else DecimalMark.COMMA
    if point >= 0 and comma >= 0:
        return DecimalMark.POINT if point > comma else DecimalMark.COMMA
    if point >= 0:
        # 1.234 alone is taken for a fraction: no provider groups by points without a fraction somewhere.
        return DecimalMark.POINT if text.count(".") == 1 and not _COMMA_GROUPED.fullmatch(text) else None
    if comma < 0 or _POINT_GROUPED.fullmatch(text):
        return None
    return DecimalMark.COMMA


def number(text: str, mark: DecimalMark) -> Decimal:
    """Exact value of a number in a file's notation, scientific notation and thousands separators included.

    Raises CellError for anything else.
    """
    plain = text.replace(" ", "").replace("\u00a0", "").replace("\u202f", "").replace("\u2212", "-")
    if mark is DecimalMark.COMMA:
        if _COMMA_GROUPED.fullmatch(plain):
            plain = plain.replace(".", "")
        if not _COMMA_NUMBER.fullmatch(plain):
            raise CellError(f"{text[:60]!r} is not a number. Write it like 1.234,56")
        plain = plain.replace(",", ".")
    elif _POINT_GROUPED.fullmatch(plain):
        plain = plain.replace(",", "")
    if not _NUMBER.fullmatch(plain):
        raise CellError(f"{text[:60]!r} is not a number. Write it like 1234.56")
    value = Decimal(plain)
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)
    if value.adjusted() >= WHOLE_DIGITS_MOST or exponent < -DECIMALS_MOST:
        raise CellError(
            f"{text[:60]!r} has more than {WHOLE_DIGITS_MOST} digits before or {DECIMALS_MOST} behind the decimal mark"
        )
    return value


def instant(text: str, order: DayOrder | None) -> datetime | date:
    """A date, or an instant in UTC where a time stands there; without a zone a time is UTC.

    Raises CellError for anything that is neither ISO 8601 nor a date with slashes or points.
    """
    match = _SLASHED.fullmatch(text)
    if match is not None:
        return _slashed(text, match, order)
    try:
        if len(text) == len("2026-10-31"):
            return date.fromisoformat(text)
        found = datetime.fromisoformat(text.replace(" UTC", "+00:00"))
    except ValueError:
        raise CellError(f"{text[:60]!r} is not a date. Write it like 2026-10-31 or 2026-10-31T22:00:00Z") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def _slashed(text: str, match: re.Match[str], order: DayOrder | None) -> date:
    first, second, year = int(match[1]), int(match[3]), int(match[4])
    if order is None and first != second:
        raise CellError(f"{text!r} may be two days. Say in the mapping whether days or months come first")
    month, day = (second, first) if order is DayOrder.DAY_FIRST else (first, second)
    try:
        return date(year if year > 99 else CENTURY + year, month, day)
    except ValueError:
        raise CellError(f"{text!r} is not a day of the calendar") from None


def observe(notation: Notation, numbers: Iterable[str], dates: Iterable[str]) -> None:
    """Lets a line's cells say how their file writes numbers and dates."""
    for text in numbers:
        if text:
            notation.see_number(text)
    for text in dates:
        if text:
            notation.see_date(text)
