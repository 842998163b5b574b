import json
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.period import (
    US_PER_QUARTER,
    Calendar,
    Window,
    cut_hours,
    day_start,
    day_window,
    day_windows,
    format_utc,
    from_us,
    load_zone,
    minute_start_us,
    month_window,
    next_window,
    parse_period,
    quarter_start_us,
    quarter_starts_us,
    to_us,
    wall_clock_instant,
    window_at,
)

DATA = Path(__file__).parent / "data"
ZONES: list[str] = json.loads((DATA / "zones.json").read_text())
INSTANTS = st.datetimes(datetime(1990, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC))


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


@pytest.mark.parametrize("row", json.loads((DATA / "periods.json").read_text()), ids=lambda row: row["zone"])
def test_named_periods_have_the_hours_of_their_zone(row: dict[str, Any]) -> None:
    window = parse_period(load_zone(row["zone"]), row["period"])
    assert (format_utc(window.start), format_utc(window.end)) == (row["start"], row["end"])
    assert window.hours == row["hours"]
    assert window.label == row["period"]


@pytest.mark.parametrize("text", ["2026-13", "2026-00", "2026", "2026-W54", "2026-02-30", "oct 2026", "0001-01", ""])
def test_an_unusable_period_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"period|calendar|month"):
        parse_period(load_zone("UTC"), text)


def test_an_unknown_zone_names_what_to_use() -> None:
    for name in ("Mars/Olympus", "", "../etc/passwd"):
        with pytest.raises(ValueError, match="IANA"):
            load_zone(name)


def test_a_tokyo_month_begins_at_its_own_midnight() -> None:
    tokyo = load_zone("Asia/Tokyo")
    assert window_at(tokyo, Calendar.MONTH, utc("2026-07-31T14:59:59.999Z")).label == "2026-07"
    assert window_at(tokyo, Calendar.MONTH, utc("2026-07-31T15:00:00Z")).label == "2026-08"


def test_an_anchor_past_the_end_of_a_month_is_its_last_day() -> None:
    zone = load_zone("Europe/Berlin")
    starts = [month_window(zone, 2027, month, anchor_day=31).start for month in range(1, 13)]
    assert [start.astimezone(zone).day for start in starts] == [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    assert month_window(zone, 2028, 2, anchor_day=31).start.astimezone(zone).day == 29
    windows = [month_window(zone, 2027, month, anchor_day=31) for month in range(1, 13)]
    assert all(left.end == right.start for left, right in pairwise(windows))
    assert windows[-1].end == month_window(zone, 2028, 1, anchor_day=31).start
    with pytest.raises(ValueError, match="anchor day"):
        month_window(zone, 2027, 1, anchor_day=32)


def test_a_daily_wall_clock_moves_with_the_clocks() -> None:
    zone = load_zone("America/New_York")
    assert wall_clock_instant(zone, date(2025, 3, 8), time(16, 4)) == utc("2025-03-08T21:04:00Z")
    assert wall_clock_instant(zone, date(2025, 3, 9), time(16, 4)) == utc("2025-03-09T20:04:00Z")
    assert wall_clock_instant(zone, date(2025, 3, 9), time(2, 30)) == utc("2025-03-09T07:00:00Z")  # skipped: the jump
    assert wall_clock_instant(zone, date(2025, 11, 2), time(1, 30)) == utc("2025-11-02T05:30:00Z")  # twice: the first


def test_a_date_that_never_happened_is_empty_and_leaves_no_gap() -> None:
    apia = load_zone("Pacific/Apia")
    assert day_window(apia, date(2011, 12, 30)).hours == 0
    assert day_window(apia, date(2011, 12, 29)).end == day_window(apia, date(2011, 12, 31)).start
    assert window_at(apia, Calendar.DAY, utc("2011-12-30T10:00:00Z")).label == "2011-12-31"
    labels = [window.label for window in day_windows(apia, utc("2011-12-29T12:00:00Z"), utc("2012-01-01T12:00:00Z"))]
    assert labels == ["2011-12-29", "2011-12-31", "2012-01-01", "2012-01-02"]


def test_a_midnight_that_is_skipped_or_repeated_starts_the_day_once() -> None:
    assert day_start(load_zone("Asia/Beirut"), date(2026, 3, 29)) == utc("2026-03-28T22:00:00Z")
    assert day_window(load_zone("Asia/Beirut"), date(2026, 3, 29)).hours == 23
    assert day_start(load_zone("America/Havana"), date(2026, 11, 1)) == utc("2026-11-01T04:00:00Z")
    assert day_window(load_zone("America/Havana"), date(2026, 11, 1)).hours == 25
    # clocks went back from 00:01 to 23:01: the day had begun a minute earlier
    st_johns = load_zone("America/St_Johns")
    assert day_window(st_johns, date(2010, 11, 7)).hours == 25
    assert window_at(st_johns, Calendar.DAY, utc("2010-11-07T03:00:00Z")).label == "2010-11-07"
    # Scoresbysund jumped from 23:30-like hours over midnight: the day begins at the jump
    nuuk = load_zone("America/Nuuk")
    assert day_start(nuuk, date(2024, 3, 31)) == utc("2024-03-31T01:00:00Z")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(ZONES), st.sampled_from(Calendar), INSTANTS, st.integers(1, 31))
def test_windows_hold_their_instant_and_touch_the_next(name: str, calendar: Calendar, at: datetime, day: int) -> None:
    zone = load_zone(name)
    window = window_at(zone, calendar, at, anchor_day=day)
    assert at in window
    following = next_window(zone, calendar, window, anchor_day=day)
    assert following.start == window.end
    assert window.end not in window
    assert window_at(zone, calendar, window.start, anchor_day=day) == window
    assert window_at(zone, calendar, window.end - timedelta(microseconds=1), anchor_day=day) == window


@pytest.mark.parametrize("name", ZONES)
def test_days_tile_a_month_and_quarters_tile_the_days(name: str) -> None:
    zone = load_zone(name)
    for year, month in ((2011, 12), (2025, 3), (2025, 10), (2026, 4)):
        whole = month_window(zone, year, month)
        days = day_windows(zone, whole.start, whole.end)
        assert (days[0].start, days[-1].end) == (whole.start, whole.end)
        assert all(left.end == right.start for left, right in pairwise(days))
        quarters = [quarter for day in days for quarter in quarter_starts_us(day)]
        assert quarters == list(range(whole.start_us, whole.end_us, US_PER_QUARTER))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ZONES),
    st.lists(
        st.tuples(st.integers(to_us(utc("2025-10-01T00:00Z")), to_us(utc("2025-12-01T00:00Z"))), st.integers(0, 10**9))
    ),
)
def test_days_of_any_zone_add_up_to_the_range_to_the_last_digit(name: str, events: list[tuple[int, int]]) -> None:
    zone = load_zone(name)
    whole = Window(month_window(zone, 2025, 10).start, month_window(zone, 2025, 11).end)
    by_quarter: dict[int, int] = {}
    for at_us, amount in events:
        by_quarter[quarter_start_us(at_us)] = by_quarter.get(quarter_start_us(at_us), 0) + amount
    inside = [(at_us, amount) for at_us, amount in events if whole.start_us <= at_us < whole.end_us]
    days = day_windows(zone, whole.start, whole.end)
    from_quarters = [sum(by_quarter.get(quarter, 0) for quarter in quarter_starts_us(day)) for day in days]
    from_events = [sum(amount for at_us, amount in inside if day.start_us <= at_us < day.end_us) for day in days]
    assert from_quarters == from_events
    assert sum(from_quarters) == sum(amount for _, amount in inside)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ZONES), INSTANTS, st.integers(1, 80 * 3600))
def test_cut_hours_tile_and_never_cross_an_hour_or_a_day(name: str, start: datetime, seconds: int) -> None:
    zone, end = load_zone(name), start + timedelta(seconds=seconds)
    pieces = cut_hours(start, end, zone)
    assert (pieces[0].start, pieces[-1].end) == (start, end)
    assert all(left.end == right.start for left, right in pairwise(pieces))
    for piece in pieces:
        last = piece.end - timedelta(microseconds=1)
        assert piece.start.replace(minute=0, second=0, microsecond=0) == last.replace(minute=0, second=0, microsecond=0)
        assert window_at(zone, Calendar.DAY, piece.start) == window_at(zone, Calendar.DAY, last)


def test_an_hour_is_cut_where_a_half_hour_zone_starts_its_day() -> None:
    pieces = cut_hours(utc("2026-10-31T18:00:00Z"), utc("2026-10-31T20:00:00Z"), load_zone("Asia/Kolkata"))
    edges = ["2026-10-31T18:00:00Z", "2026-10-31T18:30:00Z", "2026-10-31T19:00:00Z"]
    assert [format_utc(piece.start) for piece in pieces] == edges
    assert cut_hours(utc("2026-10-31T18:00:00Z"), utc("2026-10-31T18:00:00Z"), load_zone("UTC")) == []


def test_an_event_belongs_to_the_period_of_its_own_instant() -> None:
    zone = load_zone("Europe/Berlin")
    event = utc("2026-10-31T23:00:30Z")  # half a minute past local midnight
    assert window_at(zone, Calendar.MONTH, event).label == "2026-11"


def test_instants_convert_exactly_and_naive_ones_are_refused() -> None:
    at = utc("2026-11-29T13:50:53.123457Z")
    assert from_us(to_us(at)) == at
    assert from_us(minute_start_us(to_us(at))) == utc("2026-11-29T13:50:00Z")
    assert from_us(quarter_start_us(to_us(at))) == utc("2026-11-29T13:45:00Z")
    with pytest.raises(ValueError, match="no time zone"):
        to_us(datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="quarters"):
        quarter_starts_us(Window(utc("2026-01-01T00:01:00Z"), utc("2026-01-01T01:00:00Z")))
