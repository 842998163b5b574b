"""Numbers as people read them: tabular, grouped, true minus, a dash for none, 0 only for zero.

Pure functions on integers (nanos, microseconds, counts) and ratios; `templatetags/flexband.py` wraps them.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation

DASH = "—"
MINUS = "−"
NBSP = "\u00a0"
NANOS_PER_UNIT = 1_000_000_000
US_PER_MS = 1_000
US_PER_S = 1_000_000
# Enough digits for the largest float; a decimal beyond that is no figure of ours.
DIGITS_MAX = 400
_WIDE = Context(prec=DIGITS_MAX)

Number = int | float | Decimal


def _finite(value: Number | str | None) -> Decimal | None:
    """The value as a decimal; None for none, text that is no number, infinities and NaN."""
    if value is None or value == "" or isinstance(value, bool):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        number = Decimal(str(value)) if isinstance(value, float | str) else Decimal(value)
    except (InvalidOperation, TypeError, ValueError):
        return None
    return number if number.is_finite() and abs(number.adjusted()) < DIGITS_MAX - 20 else None


def fixed(value: Number | str | None, decimals: int = 0, *, signed: bool = False) -> str:
    """Grouped, `decimals` places, half up. What is not zero but rounds to it shows as `<0.01`, never as 0."""
    number = _finite(value)
    if number is None:
        return DASH
    step = Decimal(1).scaleb(-decimals)
    rounded = abs(number).quantize(step, rounding=ROUND_HALF_UP, context=_WIDE)
    sign = MINUS if number < 0 else ("+" if signed and number > 0 else "")
    if rounded == 0 and number != 0:
        return f"{sign}<{step:f}"
    return f"{sign}{rounded:,.{decimals}f}"


def money(nanos: int | None, currency: str = "", *, signed: bool = False) -> str:
    """Nanos of a currency unit with two decimals, the currency behind when given."""
    number = _finite(nanos)
    if number is None:
        return DASH
    text = fixed(number / NANOS_PER_UNIT, 2, signed=signed)
    return f"{text}{NBSP}{currency}" if currency else text


def money_exact(nanos: int | None, currency: str = "") -> str:
    """Nanos to the last one, at least two decimals: 1500000 -> 0.0015."""
    if nanos is None:
        return DASH
    whole, rest = divmod(abs(int(nanos)), NANOS_PER_UNIT)
    fraction = f"{rest:09d}".rstrip("0").ljust(2, "0")
    text = f"{MINUS if nanos < 0 else ''}{whole:,}.{fraction}"
    return f"{text}{NBSP}{currency}" if currency else text


def milliseconds(us: Number | None, decimals: int = 0) -> str:
    """Microseconds as a number of milliseconds, without the unit (it belongs in the column's header)."""
    number = _finite(us)
    return DASH if number is None else fixed(number / US_PER_MS, decimals)


def percent(ratio: Number | None, decimals: int = 2) -> str:
    """A ratio as per cent without the sign: 0.9896 -> 98.96."""
    number = _finite(ratio)
    return DASH if number is None else fixed(number * 100, decimals)


def duration(us: Number | None) -> str:
    """Microseconds as the two largest units: `10 min 57 s`, `3 d 4 h`, `0.41 s`, `12 ms`. Cuts off, never rounds up."""
    number = _finite(us)
    if number is None:
        return DASH
    sign = MINUS if number < 0 else ""
    total_us = int(abs(number))
    if total_us < US_PER_S:
        if total_us < 10 * US_PER_MS:
            return f"{sign}{fixed(Decimal(total_us) / US_PER_MS, 1 if total_us >= 100 or total_us == 0 else 2)}{NBSP}ms"
        return f"{sign}{total_us // US_PER_MS}{NBSP}ms"
    seconds = total_us // US_PER_S
    if seconds < 10:
        return f"{sign}{Decimal(total_us // 10_000) / 100:.2f}{NBSP}s"
    if seconds < 60:
        return f"{sign}{seconds}{NBSP}s"
    for unit, size, lower, lower_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            whole, rest = divmod(seconds, size)
            tail = f" {rest // lower_size}{NBSP}{lower}" if rest // lower_size else ""
            return f"{sign}{whole}{NBSP}{unit}{tail}"
    raise AssertionError("unreachable: 60 seconds are a minute")
