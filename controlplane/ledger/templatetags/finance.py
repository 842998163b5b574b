"""Filters of the finance pages."""

from datetime import datetime
from decimal import Decimal
from fractions import Fraction

from django import template

from controlplane.core.money import NANOS_PER_UNIT
from controlplane.core.period import Calendar, from_us, load_zone, window_at
from controlplane.ledger.bridging import STEP_TITLES
from controlplane.ledger.pages import cents_text, row_id
from controlplane.web.numerals import DASH, MINUS, fixed

register = template.Library()
register.filter("cents", cents_text)
register.filter("row_id", row_id)


@register.filter
def us_s(us: int | None, decimals: int = 0) -> str:
    """Microseconds as seconds, without the unit."""
    return fixed(None if us is None else us / 1_000_000, decimals)


@register.filter
def ppm_percent(ppm: int | None) -> str:
    """Parts per million as per cent, without the sign."""
    return fixed(None if ppm is None else ppm / 10_000, 2)


@register.filter
def local_day(at: datetime, zone: str) -> str:
    """The date of the billing zone that holds an instant."""
    return window_at(load_zone(zone), Calendar.DAY, at).label


@register.filter
def exact_decimal(value: Decimal | Fraction | None) -> str:
    """An exact number as grouped text without needless zeros; fractions to nine decimals."""
    if value is None:
        return DASH
    if isinstance(value, Fraction):
        value = Decimal(round(value * 10**9)).scaleb(-9)
    text = f"{abs(value):,f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{MINUS if value < 0 else ''}{text}"


@register.filter
def money_nine(nanos: int | None) -> str:
    """Nanos with all nine decimals, so that the figures of a column stand under each other."""
    if nanos is None:
        return DASH
    whole, part = divmod(abs(nanos), NANOS_PER_UNIT)
    return f"{MINUS if nanos < 0 else ''}{whole:,}.{part:09d}"


@register.filter
def ratio(value: Fraction | None) -> float | None:
    """An exact ratio as a number to show."""
    return None if value is None else float(value)


@register.filter
def step_title(name: str) -> str:
    """The title of a step of the bridge; empty for none."""
    return STEP_TITLES.get(name, "")


@register.filter
def minute_utc(at_us: int) -> str:
    """Microseconds since 1970 as day and minute in UTC."""
    return f"{from_us(at_us):%Y-%m-%d %H:%M}"


@register.filter
def entry(found: dict[str, str], key: str) -> str:
    """The value of a key, empty without one."""
    return found.get(key, "")
