"""Which span a finance page shows: whole local days of the billing zone, as half-open instants."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from urllib.parse import parse_qsl, urlencode
from zoneinfo import ZoneInfo

from controlplane.core.period import Calendar, Window, day_window, day_windows, load_zone, parse_period, window_at

DAYS_MOST = 92
US_PER_HOUR = 3_600_000_000


@dataclass(frozen=True)
class FinanceRange:
    """A period by its name, or days from and to (both included)."""

    window: Window
    zone: str
    query: str
    title: str
    kind: str

    @property
    def hours(self) -> str:
        """Length by the zone's clocks: 745 for an October with a change of clocks."""
        return f"{self.window.duration_us / US_PER_HOUR:,.2f}".rstrip("0").rstrip(".")

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The query as the hidden fields of a form."""
        return parse_qsl(self.query)

    @property
    def days(self) -> list[Window]:
        return day_windows(load_zone(self.zone), self.window.start, self.window.end)


@dataclass(frozen=True)
class Choice:
    """An entry of the period menu."""

    title: str
    query: str
    note: str
    current: bool = False


def read_range(given: Mapping[str, str], zone_name: str, now: datetime) -> FinanceRange:
    """`period` (2026-10, 2026-W44, 2026-10-31) or `from` and `to` dates; without either the present month.

    Raises ValueError with what to write.
    """
    zone = load_zone(zone_name)
    start, end = given.get("from", ""), given.get("to", "")
    if start or end:
        first, last = _date(start or end), _date(end or start)
        if last < first:
            raise ValueError(f"{last.isoformat()} is before {first.isoformat()}: choose an end on or after the start")
        if (last - first).days >= DAYS_MOST:
            raise ValueError(f"choose at most {DAYS_MOST} days; a longer span is what the CSV of several months is for")
        window = Window(day_window(zone, first).start, day_window(zone, last).end)
        title = f"{_day(first)} to {_day(last)}" if last > first else _day(first)
        query = urlencode({"from": first.isoformat(), "to": last.isoformat()})
        return FinanceRange(window, zone_name, query, title, "days")
    name = given.get("period", "") or window_at(zone, Calendar.MONTH, now).label
    return _named(parse_period(zone, name), zone_name)


def _named(window: Window, zone_name: str) -> FinanceRange:
    kind = "week" if "W" in window.label else "day" if window.label.count("-") == 2 else "month"
    return FinanceRange(window, zone_name, urlencode({"period": window.label}), _title(window, kind), kind)


def _title(window: Window, kind: str) -> str:
    if kind == "month":
        return date.fromisoformat(f"{window.label}-01").strftime("%B %Y")
    if kind == "day":
        return _day(date.fromisoformat(window.label))
    return f"Week {window.label[-2:]}, {window.label[:4]}"


def _date(text: str) -> date:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a date: write it like 2026-10-31") from None
    if not 1971 <= day.year < 9000:
        raise ValueError(f"{text[:40]!r} is out of range: choose a year from 1971 on")
    return day


def _day(day: date) -> str:
    return f"{day:%a} {day.day} {day:%b %Y}"


def around(shown: FinanceRange) -> tuple[FinanceRange, FinanceRange]:
    """The range before and the one after, of the same kind and length."""
    zone = load_zone(shown.zone)
    if shown.kind == "days":
        first = date.fromisoformat(shown.days[0].label)
        last = date.fromisoformat(shown.days[-1].label)
        length = (last - first).days + 1
        return _days_moved(zone, shown, first, last, -length), _days_moved(zone, shown, first, last, length)
    calendar = Calendar(shown.kind)
    before = window_at(zone, calendar, shown.window.start - timedelta(microseconds=1))
    return _named(before, shown.zone), _named(window_at(zone, calendar, shown.window.end), shown.zone)


def _days_moved(zone: ZoneInfo, shown: FinanceRange, first: date, last: date, by: int) -> FinanceRange:
    start, end = first + timedelta(days=by), last + timedelta(days=by)
    window = Window(day_window(zone, start).start, day_window(zone, end).end)
    query = urlencode({"from": start.isoformat(), "to": end.isoformat()})
    return FinanceRange(window, shown.zone, query, f"{_day(start)} to {_day(end)}", "days")


def menu(shown: FinanceRange, now: datetime) -> list[Choice]:
    """Today, yesterday, this week and the last six months, with their hours."""
    zone = load_zone(shown.zone)
    today = window_at(zone, Calendar.DAY, now)
    yesterday = window_at(zone, Calendar.DAY, today.start - timedelta(microseconds=1))
    windows = [("Today", today), ("Yesterday", yesterday), ("This week", window_at(zone, Calendar.WEEK, now))]
    month = window_at(zone, Calendar.MONTH, now)
    for _ in range(6):
        windows.append((_title(month, "month"), month))
        month = window_at(zone, Calendar.MONTH, month.start - timedelta(microseconds=1))
    choices = []
    for title, window in windows:
        named = _named(window, shown.zone)
        running = ", running" if now in window else ""
        choices.append(Choice(title, named.query, f"{named.hours} h{running}", named.query == shown.query))
    return choices
