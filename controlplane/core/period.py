"""Billing periods and budget windows: wall-clock calendars turned into half-open UTC instants.

A local day begins at the first instant whose wall clock in the zone is at or past midnight of that date. That one rule
covers nights on which clocks change: a midnight that happens twice counts the first time, one that is skipped counts
at the jump, and a date that never happened (Apia, 30 December 2011) is an empty window. Weeks and months are made of
days, so every calendar tiles time without gap or overlap.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from zoneinfo import ZoneInfo

US_PER_SECOND = 1_000_000
US_PER_MINUTE = 60 * US_PER_SECOND
US_PER_QUARTER = 15 * US_PER_MINUTE
US_PER_HOUR = 60 * US_PER_MINUTE
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_MONTH = re.compile(r"(\d{4})-(\d{2})")
_WEEK = re.compile(r"(\d{4})-W(\d{2})")
_DAY = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_YEARS = range(1971, 9000)


class Calendar(StrEnum):
    """How long a window is."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class Window:
    """[start, end) in UTC; `label` names it in its calendar (2026-10, 2026-W44, 2026-10-31) or is empty."""

    start: datetime
    end: datetime
    label: str = ""

    @property
    def start_us(self) -> int:
        return to_us(self.start)

    @property
    def end_us(self) -> int:
        return to_us(self.end)

    @property
    def duration_us(self) -> int:
        return self.end_us - self.start_us

    @property
    def hours(self) -> float:
        """Length in hours; 0.5 steps occur in zones that move by half an hour."""
        return self.duration_us / US_PER_HOUR

    def __contains__(self, at: object) -> bool:
        return isinstance(at, datetime) and self.start <= at < self.end


def to_us(at: datetime) -> int:
    """Microseconds since 1970 of an aware datetime; ValueError for a naive one."""
    if at.tzinfo is None:
        raise ValueError(f"{at.isoformat()} has no time zone: pass an aware datetime")
    return (at - EPOCH) // timedelta(microseconds=1)


def from_us(at_us: int) -> datetime:
    """UTC datetime of microseconds since 1970."""
    return EPOCH + timedelta(microseconds=at_us)


def format_utc(at: datetime) -> str:
    """ISO 8601 in UTC with a Z, seconds always, microseconds only where there are some."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


@lru_cache(maxsize=512)
def load_zone(name: str) -> ZoneInfo:
    """Time zone by its IANA name; ValueError with what to do when there is none of that name."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f"unknown time zone {name!r}: use an IANA name such as Europe/Berlin or UTC") from None


def wall_clock_instant(zone: ZoneInfo, day: date, at: time = time(0)) -> datetime:
    """First UTC instant at which the zone's wall clock is at or past `day` `at`.

    A wall clock time that happens twice is the first one; one that is skipped is the instant of the jump.
    """
    wall = datetime.combine(day, at)
    before = wall.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if before.astimezone(zone).replace(tzinfo=None) == wall:
        return before
    # In a gap the two folds lie on either side of the jump (PEP 495); find the jump itself, to the second.
    low = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
    high = before
    while high - low > timedelta(seconds=1):
        middle = low + timedelta(seconds=(high - low) // timedelta(seconds=2))
        if middle.astimezone(zone).replace(tzinfo=None) >= wall:
            high = middle
        else:
            low = middle
    return high


@lru_cache(maxsize=4096)
def day_start(zone: ZoneInfo, day: date) -> datetime:
    """UTC instant at which a local date begins."""
    return wall_clock_instant(zone, day)


def day_window(zone: ZoneInfo, day: date) -> Window:
    """The local date as a window; empty when the zone skipped the date."""
    return Window(day_start(zone, day), day_start(zone, day + timedelta(days=1)), day.isoformat())


def week_window(zone: ZoneInfo, day: date) -> Window:
    """The week from Monday that holds a local date."""
    monday = day - timedelta(days=day.weekday())
    year, week, _ = monday.isocalendar()
    end = day_start(zone, monday + timedelta(days=7))
    return Window(day_start(zone, monday), end, f"{year:04d}-W{week:02d}")


def month_window(zone: ZoneInfo, year: int, month: int, *, anchor_day: int = 1) -> Window:
    """The month that begins on `anchor_day` of `month`, or on its last day where the month is shorter."""
    following = (year + 1, 1) if month == 12 else (year, month + 1)
    start = day_start(zone, _anchor(year, month, anchor_day))
    return Window(start, day_start(zone, _anchor(*following, anchor_day)), f"{year:04d}-{month:02d}")


def _anchor(year: int, month: int, anchor_day: int) -> date:
    if not 1 <= month <= 12 or year not in _YEARS:
        raise ValueError(f"{year:04d}-{month:02d} is not a month between {_YEARS[0]} and {_YEARS[-1]}")
    if not 1 <= anchor_day <= 31:
        raise ValueError(f"the anchor day must be 1 to 31, not {anchor_day}")
    following = date(year + month // 12, month % 12 + 1, 1)
    return min(date(year, month, 1) + timedelta(days=anchor_day - 1), following - timedelta(days=1))


def window_at(zone: ZoneInfo, calendar: Calendar, at: datetime, *, anchor_day: int = 1) -> Window:
    """The window of a calendar that holds an instant; depends on the zone and the calendar alone."""
    local = at.astimezone(zone).date()
    if calendar is Calendar.DAY:
        return _settle_day(zone, local, at)
    if calendar is Calendar.WEEK:
        return week_window(zone, _date_of(_settle_day(zone, local, at)))
    local = _date_of(_settle_day(zone, local, at))
    window = month_window(zone, local.year, local.month, anchor_day=anchor_day)
    if at < window.start:
        earlier = date(local.year, local.month, 1) - timedelta(days=1)
        window = month_window(zone, earlier.year, earlier.month, anchor_day=anchor_day)
    return window


def _settle_day(zone: ZoneInfo, day: date, at: datetime) -> Window:
    # A clock set back over midnight shows yesterday's date again inside today's window.
    window = day_window(zone, day)
    while at >= window.end:
        window = day_window(zone, _date_of(window) + timedelta(days=1))
    while at < window.start:
        window = day_window(zone, _date_of(window) - timedelta(days=1))
    return window


def _date_of(window: Window) -> date:
    return date.fromisoformat(window.label)


def next_window(zone: ZoneInfo, calendar: Calendar, window: Window, *, anchor_day: int = 1) -> Window:
    """The window that begins where `window` ends."""
    return window_at(zone, calendar, window.end, anchor_day=anchor_day)


def parse_period(zone: ZoneInfo, text: str, *, anchor_day: int = 1) -> Window:
    """A period by its name: a month 2026-10, a week 2026-W44 or a day 2026-10-31; ValueError otherwise."""
    if match := _MONTH.fullmatch(text):
        return month_window(zone, int(match[1]), int(match[2]), anchor_day=anchor_day)
    try:
        if match := _WEEK.fullmatch(text):
            return week_window(zone, date.fromisocalendar(int(match[1]), int(match[2]), 1))
        if match := _DAY.fullmatch(text):
            return day_window(zone, date(int(match[1]), int(match[2]), int(match[3])))
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not in the calendar") from None
    raise ValueError(f"{text[:40]!r} is not a period: write a month 2026-10, a week 2026-W44 or a day 2026-10-31")


def day_windows(zone: ZoneInfo, start: datetime, end: datetime) -> list[Window]:
    """The local days that [start, end) touches, in order, without the empty ones."""
    windows: list[Window] = []
    at = start
    while at < end:
        window = window_at(zone, Calendar.DAY, at)
        windows.append(window)
        at = window.end
    return windows


def cut_hours(start: datetime, end: datetime, zone: ZoneInfo) -> list[Window]:
    """[start, end) in pieces that end at UTC full hours and where a day of the zone begins; no gap, no overlap."""
    cuts = {window.start for window in day_windows(zone, start, end)}
    hour_us = (to_us(start) // US_PER_HOUR + 1) * US_PER_HOUR
    while hour_us < to_us(end):
        cuts.add(from_us(hour_us))
        hour_us += US_PER_HOUR
    edges = [start, *sorted(cut for cut in cuts if start < cut < end), end]
    return [Window(left, right) for left, right in pairwise(edges) if left < right]


def minute_start_us(at_us: int) -> int:
    """Start of the UTC minute that holds an instant."""
    return at_us - at_us % US_PER_MINUTE


def quarter_start_us(at_us: int) -> int:
    """Start of the UTC quarter of an hour that holds an instant."""
    return at_us - at_us % US_PER_QUARTER


def quarter_starts_us(window: Window) -> Iterator[int]:
    """Starts of the UTC quarters of an hour inside a window whose edges are quarters.

    Raises ValueError when an edge is not on a quarter: such a window cannot be added up from quarters exactly.
    """
    if window.start_us % US_PER_QUARTER or window.end_us % US_PER_QUARTER:
        raise ValueError(f"{format_utc(window.start)} to {format_utc(window.end)} is not made of quarters of an hour")
    return iter(range(window.start_us, window.end_us, US_PER_QUARTER))
