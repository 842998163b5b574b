"""Filters of the finance pages."""

from datetime import datetime

from django import template

from controlplane.core.period import Calendar, load_zone, window_at
from controlplane.ledger.pages import cents_text, row_id
from controlplane.web.numerals import fixed

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
