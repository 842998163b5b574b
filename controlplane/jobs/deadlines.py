"""Deadlines as people write them: an instant with its offset, or a wall clock with its zone."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_WALL_CLOCK: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d) ([A-Za-z_]+(?:/[A-Za-z0-9_+-]+)*)")
HOW: Final = (
    "Write an instant with its offset (2026-12-01T06:00:00+01:00) or a time and its zone (06:00 Europe/Berlin)."
)


def read_deadline(text: str, now: datetime) -> datetime:
    """The instant meant: of a wall clock, its next occurrence. Raises ValueError that says how to write it.

    A time that a change of clocks leaves out is read with the offset before the change, one that comes twice is the
    first of the two.
    """
    if found := _WALL_CLOCK.fullmatch(text.strip()):
        return _next(time(int(found[1]), int(found[2])), _zone(found[3]), now)
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(HOW) from None
    if at.tzinfo is None:
        raise ValueError(HOW)
    return at


def is_clock(text: str) -> bool:
    """Whether it is a time and a zone, so that it means another instant tomorrow."""
    return _WALL_CLOCK.fullmatch(text.strip()) is not None


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"There is no time zone {name!r}. {HOW}") from None


def _next(clock: time, zone: ZoneInfo, now: datetime) -> datetime:
    today = now.astimezone(zone).date()
    for ahead in range(3):
        at = datetime.combine(today + timedelta(days=ahead), clock, zone)
        if at > now:
            return at.astimezone(now.tzinfo)
    raise AssertionError("one of three days in a row is ahead")
