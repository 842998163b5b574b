"""The publisher: seq and epoch, shallow deltas, four a second, and no harm when Redis is away."""

import threading
import time
from datetime import timedelta

import orjson
import pytest
import redis
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.live import frames, readings, topics
from controlplane.live.frames import CHANNEL_PREFIX, LAST_PREFIX, Publisher, Ticker
from tests import factories
from tests.live import scene as scenes


@pytest.fixture
def heard(frames_redis):
    pubsub = frames_redis.pubsub()
    pubsub.psubscribe(CHANNEL_PREFIX + "*")
    pubsub.get_message(timeout=1)
    yield pubsub
    pubsub.close()


def messages(pubsub):
    found = []
    while (message := pubsub.get_message(timeout=0.2)) is not None:
        if message["type"] == "pmessage":
            found.append(orjson.loads(message["data"]))
    return found


def test_first_a_snapshot_then_deltas_of_what_changed(frames_redis, heard, now):
    publisher = Publisher(frames_redis, epoch=7)
    publisher.publish([("fleet", {"at": "1", "depth": 1, "rows": [1, 2]})], now, clock_s=0.0)
    publisher.publish([("fleet", {"at": "2", "depth": 1, "rows": [1, 3]})], now, clock_s=1.0)
    first, second = messages(heard)
    assert (first["type"], first["epoch"], first["seq"]) == ("snapshot", 7, 1)
    assert (second["type"], second["epoch"], second["seq"]) == ("delta", 7, 2)
    assert second["data"] == {"at": "2", "rows": [1, 3]}
    last = orjson.loads(frames_redis.get(LAST_PREFIX + "fleet"))
    assert (last["type"], last["seq"], last["data"]) == ("snapshot", 2, {"at": "2", "depth": 1, "rows": [1, 3]})


def test_a_part_that_went_away_is_a_snapshot(frames_redis, heard, now):
    publisher = Publisher(frames_redis)
    publisher.publish([("fleet", {"a": 1, "b": 2})], now, clock_s=0.0)
    publisher.publish([("fleet", {"a": 1})], now, clock_s=1.0)
    assert [frame["type"] for frame in messages(heard)] == ["snapshot", "snapshot"]


def test_at_most_four_frames_a_second_and_nothing_is_lost_by_it(frames_redis, heard, now):
    publisher = Publisher(frames_redis)
    for number in range(100):
        publisher.publish([("fleet", {"n": number})], now, clock_s=number / 100)
    found = messages(heard)
    assert len(found) == 4
    assert [frame["seq"] for frame in found] == [1, 2, 3, 4]
    assert found[-1]["data"]["n"] == 75
    publisher.publish([("fleet", {"n": 100})], now, clock_s=1.0)
    assert messages(heard)[-1]["data"]["n"] == 100


def test_redis_away_costs_frames_and_nothing_else(frames_redis, heard, now):
    publisher = Publisher(redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=0.2), epoch=3)
    assert publisher.publish([("fleet", {"n": 1})], now, clock_s=0.0) == 0
    assert publisher.publish([("fleet", {"n": 1})], now, clock_s=0.5) == 0
    publisher._redis = frames_redis
    assert publisher.publish([("fleet", {"n": 2})], now, clock_s=5.0) == 1
    (frame,) = messages(heard)
    assert (frame["type"], frame["epoch"] > 3, frame["seq"], frame["data"]) == ("snapshot", True, 1, {"n": 2})


def test_a_publisher_that_starts_afresh_has_another_epoch(frames_redis, now):
    first, second = Publisher(frames_redis, epoch=1), Publisher(frames_redis)
    assert first.epoch != second.epoch


@pytest.mark.django_db
def test_a_tick_tells_every_topic_and_only_what_changed_the_next_time(scene, frames_redis, heard, moment):
    ticker = Ticker(Publisher(frames_redis))
    ticker.tick(moment)
    topics_told = {frame["topic"] for frame in messages(heard)}
    assert topics_told == {"fleet", "alerts", "pool:chat-70b", "pool:embed-m", "tenant:acme", "tenant:globex"}
    for told_at in ticker.publisher._told.values():
        told_at.at_s -= 1
    ticker.tick(moment + timedelta(milliseconds=1))
    deltas = messages(heard)
    assert {frame["type"] for frame in deltas} == {"delta"}
    assert all("lanes" not in frame["data"] for frame in deltas), "the strip only changes when something happened"


@pytest.mark.django_db
def test_the_number_of_statements_does_not_grow_with_the_pools(scene, moment):
    def count():
        with CaptureQueriesContext(connection) as queries:
            list(topics.all_topics(readings.read(moment)))
        return len(queries)

    count()  # contracts in force are remembered from the first look on
    before = count()
    for number in range(8):
        pool = factories.pool(f"more-{number}", model=f"m{number}")
        scenes.say(factories.agent(pool, f"more-{number}"), moment, None)
    assert count() == before
    assert before < 45


@pytest.mark.django_db
def test_states_are_json_and_survive_the_trip(scene, moment):
    for topic, state in topics.all_topics(readings.read(moment)):
        assert orjson.loads(frames.encode("snapshot", topic, 1, 1, "", state))["data"] == orjson.loads(
            orjson.dumps(state)
        )


def test_a_late_page_never_holds_up_who_asks_and_the_latest_tick_wins(now):
    begun, go, ticked = threading.Event(), threading.Event(), []

    class Slow:
        def tick(self, at):
            ticked.append(at)
            begun.set()
            go.wait(60)
            if len(ticked) == 1:
                raise RuntimeError("the database went away")

        def finish(self, at):
            ticked.append("end")

    teller = frames.Teller(Slow())
    teller.start()
    teller.ask(now)
    assert begun.wait(60)
    for second in range(1, 6):
        teller.ask(now + timedelta(seconds=second))
    assert ticked == [now], "it was asked five times more while the first tick went on"
    go.set()
    until = time.monotonic() + 60
    while len(ticked) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    teller.finish(60)
    assert ticked == [now, now + timedelta(seconds=5), "end"], "a failed tick ends nothing, those between are skipped"
