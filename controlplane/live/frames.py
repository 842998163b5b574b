"""Frames: one state per topic and tick, published as a snapshot kept in Redis and a shallow delta on its channel.

`{"type": "snapshot"|"delta", "topic", "epoch", "seq", "at", "data"}`. `seq` grows by one per topic within an epoch; a
publisher that starts afresh has another epoch. `fb:last:<topic>` always holds the snapshot of the newest seq, written
before its delta is told, so whoever misses a delta finds everything there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

import orjson
import redis
from django.conf import settings
from django.db import connection
from django.utils import timezone

from controlplane.alerts.queries import marks
from controlplane.live import alerting, engines, readings, topics
from controlplane.live.recording import Recorder

log = logging.getLogger(__name__)

CHANNEL_PREFIX = "fb:frame:"
LAST_PREFIX = "fb:last:"
MIN_INTERVAL_S = 0.25
SLOW_EVERY_S = 4.0
#: A snapshot that nobody renewed for this long says nothing any more.
LAST_TTL_S = 120
RETRY_AFTER_S = 2.0
TIMEOUT_S = 0.5

State = dict[str, Any]


def encode(kind: str, topic: str, epoch: int, seq: int, at: str, data: State) -> bytes:
    """One frame as it goes over the wire."""
    return orjson.dumps({"type": kind, "topic": topic, "epoch": epoch, "seq": seq, "at": at, "data": data})


@dataclass(slots=True)
class _Told:
    """What was last told of a topic."""

    seq: int
    parts: dict[str, bytes]
    at_s: float


class Publisher:
    """Turns states into frames. Redis may go away at any time: frames are lost then, never the caller."""

    def __init__(self, client: redis.Redis, *, epoch: int | None = None, recorder: Recorder | None = None) -> None:
        self._redis = client
        self._recorder = recorder
        self.epoch = int(time.time() * 1_000) if epoch is None else epoch
        self._told: dict[str, _Told] = {}
        self._down_until_s = 0.0

    def publish(self, states: Iterable[tuple[str, State]], now: datetime, *, clock_s: float | None = None) -> int:
        """Publishes what changed; returns the number of frames. A topic gets at most four a second."""
        clock_s = time.monotonic() if clock_s is None else clock_s
        if clock_s < self._down_until_s and self._recorder is None:
            return 0
        pipe = self._redis.pipeline(transaction=False)
        told: dict[str, _Told] = {}
        for topic, state in states:
            frame = self._frame(topic, state, now, clock_s)
            if frame is None:
                continue
            told[topic], snapshot, delta = frame
            if self._recorder is not None:
                self._recorder.note(topic, snapshot, delta, now)
            pipe.set(LAST_PREFIX + topic, snapshot, ex=LAST_TTL_S)
            pipe.publish(CHANNEL_PREFIX + topic, delta)
        if clock_s < self._down_until_s:
            self._told |= told
            return 0
        try:
            pipe.execute()
        except redis.RedisError as error:
            self._down_until_s = clock_s + RETRY_AFTER_S
            # Some may have been told and some not: another epoch starts everybody from snapshots.
            self._told.clear()
            self.epoch += 1
            log.warning("frames are not told, Redis does not answer: %s", error)
            return 0
        self._told |= told
        return len(told)

    def engines_told(self, topics: list[str]) -> list[list[engines.Point]]:
        """Points of engines in what was last told of topics, by this publisher or one before."""
        return engines.told_before(self._redis, [LAST_PREFIX + topic for topic in topics])

    def _frame(self, topic: str, state: State, now: datetime, clock_s: float) -> tuple[_Told, bytes, bytes] | None:
        before = self._told.get(topic)
        if before is not None and clock_s - before.at_s < MIN_INTERVAL_S:
            return None
        parts = {name: orjson.dumps(value) for name, value in state.items()}
        at = now.isoformat()
        if before is None:
            snapshot = encode("snapshot", topic, self.epoch, 1, at, state)
            return _Told(1, parts, clock_s), snapshot, snapshot
        changed = {name: state[name] for name, part in parts.items() if before.parts.get(name) != part}
        seq = before.seq + 1
        snapshot = encode("snapshot", topic, self.epoch, seq, at, state)
        if before.parts.keys() - parts.keys():
            # A shallow delta cannot take a part away.
            return _Told(seq, parts, clock_s), snapshot, snapshot
        return _Told(seq, parts, clock_s), snapshot, encode("delta", topic, self.epoch, seq, at, changed)


class Ticker:
    """Reads and publishes tick by tick; what changes by the minute is read every few ticks only."""

    def __init__(self, publisher: Publisher, recorder: Recorder | None = None) -> None:
        self.publisher = publisher
        self._recorder = recorder
        self._engines = engines.EngineLines()
        self._slow: readings.SlowParts | None = None
        self._slow_at_s = 0.0

    def tick(self, now: datetime) -> int:
        """One tick of every topic; returns the number of frames."""
        clock_s = time.monotonic()
        looks = self._slow is None or clock_s - self._slow_at_s >= SLOW_EVERY_S
        if looks:
            self._slow, self._slow_at_s = readings.read_slow(now), clock_s
        reading = readings.read(now, self._slow)
        self._look_at_engines(reading)
        if looks:
            alerting.look(reading)
            reading.marks = marks(now)
        frames = self.publisher.publish(topics.all_topics(reading), now)
        if self._recorder is not None:
            self._recorder.flush(now)
        return frames

    def _look_at_engines(self, reading: readings.Reading) -> None:
        new = [pool.slug for pool in reading.pools if not self._engines.knows(pool.slug)]
        for slug, points in zip(new, self.publisher.engines_told([f"pool:{slug}" for slug in new]), strict=True):
            self._engines.resume(slug, points, reading.now)
        for pool in reading.pools:
            reading.engine_points[pool.slug] = self._engines.take(
                pool.slug, reading.words.get(pool.pk, []), reading.now
            )

    def finish(self, now: datetime) -> None:
        """Writes what is recorded and not written yet."""
        if self._recorder is not None:
            self._recorder.flush(now, everything=True)


@cache
def connect() -> redis.Redis:
    """The publisher's connection: it would rather lose a frame than wait for one."""
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)


class Teller(threading.Thread):
    """Ticks beside the caller's loop, on a connection of its own: pages that are late never make a recall late.

    A tick that is asked for while another runs replaces the one that waits.
    """

    def __init__(self, ticker: Ticker) -> None:
        super().__init__(name="live-teller", daemon=True)
        self._ticker = ticker
        self._asked = threading.Condition()
        self._now: datetime | None = None
        self._ends = False

    def ask(self, now: datetime) -> None:
        """Wants a tick at `now`; returns at once."""
        with self._asked:
            self._now = now
            self._asked.notify()

    def run(self) -> None:
        while True:
            with self._asked:
                while self._now is None and not self._ends:
                    self._asked.wait()
                now, self._now = self._now, None
            try:
                if now is not None:
                    self._ticker.tick(now)
                if self._ends:
                    self._ticker.finish(timezone.now())
                    return
            except Exception:
                log.exception("a tick of frames failed; the next one tries again")
                if self._ends:
                    return
            finally:
                connection.close()

    def finish(self, within_s: float) -> None:
        """Ends the thread after its present tick, with everything written."""
        with self._asked:
            self._ends = True
            self._asked.notify()
        self.join(within_s)


@cache
def _teller() -> Teller:
    recorder = Recorder()
    teller = Teller(Ticker(Publisher(connect(), recorder=recorder), recorder))
    teller.start()
    return teller


def publish_all(now: datetime) -> None:
    """Asks for one tick of all topics from the database to Redis; returns at once and never raises."""
    _teller().ask(now)


def finish_telling(within_s: float = 5.0) -> None:
    """At the end of the process: writes what was recorded. Nothing when nothing was ever told."""
    if _teller.cache_info().currsize:
        _teller().finish(within_s)
