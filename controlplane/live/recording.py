"""The live pages as they were: frames kept as they were told, so that a past second is shown exactly as people saw it.

Every half minute of a topic is one row: its frames as lines, a snapshot first, compressed. For the years after, the
first snapshot of each minute is kept alone. Loans, decisions and alerts have tables of their own and are kept for ever.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
from django.conf import settings
from django.db import connection, transaction

log = logging.getLogger(__name__)

#: Seconds are kept for so many whole days beside today: 48 h at the least.
SECOND_DAYS = 2
SPAN = timedelta(seconds=30)
#: A frame further away than this says nothing about an instant: the controller was away.
REACH = {1: timedelta(seconds=10), 60: timedelta(seconds=90)}
SECOND, MINUTE = 1, 60
RECORDED = ("fleet", "pool:")
#: Spans that wait for a database that is away: an hour of eighty topics. The oldest are let go.
WAITING_MOST = 10_000

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Moment:
    """What a page showed: the state, the instant it was told, and how exact that is (seconds between frames)."""

    state: State
    at: datetime
    grain: int


class _Span:
    """Frames of one topic that wait to be written."""

    def __init__(self, started_at: datetime, snapshot: bytes) -> None:
        self.started_at = self.ended_at = started_at
        self.snapshot = snapshot
        self._packer = zlib.compressobj(3)
        self._packed = [self._packer.compress(snapshot)]
        self._body: bytes | None = None

    def add(self, frame: bytes, at: datetime) -> None:
        self.ended_at = at
        self._packed.append(self._packer.compress(b"\n" + frame))

    def body(self) -> bytes:
        """All of it; the span is over then. The same again, for a write that is tried once more."""
        if self._body is None:
            self._body = b"".join([*self._packed, self._packer.flush()])
            self._packed.clear()
        return self._body


class Recorder:
    """Takes the frames of a publisher; `flush` writes what is complete. One for each process that publishes."""

    def __init__(self) -> None:
        self._open: dict[str, _Span] = {}
        self._done: list[tuple[str, _Span]] = []
        self._minutes: dict[str, datetime] = {}
        self._kept_day: Any = None

    def note(self, topic: str, snapshot: bytes, frame: bytes, at: datetime) -> None:
        """A frame that is told now, and the whole state after it."""
        if not topic.startswith(RECORDED):
            return
        span = self._open.get(topic)
        if span is not None and at - span.started_at < SPAN and at >= span.ended_at:
            span.add(frame, at)
            return
        if span is not None:
            self._done.append((topic, span))
        self._open[topic] = _Span(at, snapshot)

    def flush(self, now: datetime, *, everything: bool = False) -> int:
        """Writes spans that are over (all with `everything`, at the end); returns how many rows."""
        over = [topic for topic, span in self._open.items() if everything or now - span.started_at >= SPAN]
        self._done += [(topic, self._open.pop(topic)) for topic in over]
        if not self._done:
            return 0
        if len(self._done) > WAITING_MOST:
            log.warning("%d recorded spans could not be written and are let go", len(self._done) - WAITING_MOST)
            del self._done[:-WAITING_MOST]
        self._keep(now)
        minutes = dict(self._minutes)
        rows = [row for topic, span in self._done for row in _rows(topic, span, minutes)]
        with (
            transaction.atomic(),
            connection.cursor() as cursor,
            cursor.copy(  # type: ignore[attr-defined]
                "COPY live_recording (grain, topic, started_at, ended_at, body) FROM STDIN"
            ) as copy,
        ):
            for row in rows:
                copy.write_row(row)
        self._done.clear()
        self._minutes = minutes
        return len(rows)

    def _keep(self, now: datetime) -> None:
        """Partitions ahead, and those over their time away; once a day and process."""
        today = now.astimezone(UTC).date()
        if self._kept_day == today:
            return
        keep(now)
        self._kept_day = today


def _rows(
    topic: str, span: _Span, minutes: dict[str, datetime]
) -> Iterator[tuple[int, str, datetime, datetime, bytes]]:
    """A span as rows; `minutes` remembers which minute of each topic has its snapshot."""
    yield SECOND, topic, span.started_at, span.ended_at, span.body()
    minute = span.started_at.replace(second=0, microsecond=0)
    if minutes.get(topic) != minute:
        minutes[topic] = minute
        yield MINUTE, topic, span.started_at, span.started_at, zlib.compress(span.snapshot, 6)


def keep(now: datetime) -> int:
    """Makes the partitions of the days ahead and drops those that are over; returns how many were dropped."""
    with connection.cursor() as cursor:
        today = now.astimezone(UTC).date()
        cursor.execute("SELECT live_keep_recordings(%s, %s, %s)", (today, SECOND_DAYS, settings.HISTORY_DAYS))
        return int(cursor.fetchone()[0])


def moment(topic: str, at: datetime) -> Moment | None:
    """What the page of a topic showed at an instant; None when nobody told anything near it."""
    for grain in (SECOND, MINUTE):
        row = _span_before(topic, at, grain)
        if row is None:
            continue
        state, told = state_at(_frames(row), at)
        if told is not None and at - told <= REACH[grain]:
            return Moment(state, told, grain)
    return None


def frames_between(topic: str, begin: datetime, end: datetime) -> list[State]:
    """Frames whose spans touch [begin, end), in order, each span from its snapshot on; whole minutes where seconds are
    gone. Bound the time: an hour of seconds is some megabytes.
    """
    for grain in (SECOND, MINUTE):
        with connection.cursor() as cursor:
            cursor.execute(
                """
                SELECT body FROM live_recording
                 WHERE grain = %s AND topic = %s AND started_at >= %s AND started_at < %s AND ended_at >= %s
                 ORDER BY started_at
                """,
                (grain, topic, begin - SPAN, end, begin),
            )
            bodies = [bytes(body) for (body,) in cursor.fetchall()]
        if bodies:
            return [frame for body in bodies for frame in _frames(body)]
    return []


def known_span(topic: str) -> tuple[datetime, datetime] | None:
    """Instants at which the first and the last recorded span of a topic begin."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT min(started_at), max(started_at) FROM live_recording WHERE topic = %s", (topic,))
        first, last = cursor.fetchone()
    return None if first is None else (first, last)


def state_at(frames: list[State], at: datetime) -> tuple[State, datetime | None]:
    """The state after all frames up to `at`, and when the last of them was told."""
    state: State = {}
    told = None
    for frame in frames:
        said = datetime.fromisoformat(frame["at"])
        if said > at:
            break
        state = dict(frame["data"]) if frame["type"] == "snapshot" else state | frame["data"]
        told = said
    return state, told


def _span_before(topic: str, at: datetime, grain: int) -> bytes | None:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT body FROM live_recording WHERE grain = %s AND topic = %s AND started_at <= %s AND started_at > %s
             ORDER BY started_at DESC LIMIT 1
            """,
            (grain, topic, at, at - SPAN - REACH[grain]),
        )
        row = cursor.fetchone()
    return None if row is None else bytes(row[0])


def _frames(body: bytes) -> list[State]:
    return [orjson.loads(line) for line in zlib.decompress(body).split(b"\n")]
