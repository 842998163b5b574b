"""Real sockets of a real server that misbehave: one that never reads among two hundred, and ones that come back."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from datetime import timedelta

import pytest
import redis
from django.conf import settings
from websockets.sync.client import connect as connect_socket

from controlplane.live import consumers, engines, frames, hub, readings, topics
from controlplane.live.frames import Publisher, Ticker
from tests.live import scene as scenes
from tests.live.socket_people import sign_in, sweep
from tests.web_thread import WebThread

SMALL, BIG = "pool:small", "pool:big"
#: What the server's transport may hold of a reader that does not read: its high-water mark, and the frame beyond it.
HIGH_WATER = 64 * 1024
BIG_BYTES = 200_000
FRAMES = 60


@pytest.fixture(scope="module")
def key(django_db_setup, django_db_blocker):
    with django_db_blocker.unblock():
        sweep()
        yield sign_in("crowd", "viewer")
        sweep()


class Door(WebThread):
    """The web process's sockets, and what it holds of each."""

    def __init__(self):
        super().__init__(ws_per_message_deflate=False)

    def transports(self):
        """Of every open socket, by the port that it came from."""
        return {one.client[1]: one.transport for one in list(self.server.server_state.connections)}

    def viewers(self):
        hubs = list(hub._hubs.values())
        return {viewer for own in hubs for topic in list(own.topics.values()) for viewer in set(topic.viewers)}


@pytest.fixture
def door(key, frames_redis):
    one = Door()
    yield one
    one.stop()


@contextlib.contextmanager
def viewer(door, key, *names):
    """A socket that reads."""
    with connect_socket(
        f"ws://localhost:{door.port}/ws/live/", origin=f"http://localhost:{door.port}", compression=None,
        additional_headers={"cookie": f"sessionid={key}"}, max_size=None,
    ) as one:  # fmt: skip
        one.send(json.dumps({"subscribe": list(names)}))
        yield one


def deaf(door, key, *names):
    """A socket that shakes hands, subscribes, and never reads again."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    one.connect(("127.0.0.1", door.port))
    one.sendall(
        f"GET /ws/live/ HTTP/1.1\r\nHost: localhost:{door.port}\r\nOrigin: http://localhost:{door.port}\r\n"
        f"Cookie: sessionid={key}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    while b"\r\n\r\n" not in one.recv(4_096, socket.MSG_PEEK):
        time.sleep(0.01)
    wish = json.dumps({"subscribe": list(names)}).encode()
    one.sendall(bytes((0x81, 0x80 | len(wish), 0, 0, 0, 0)) + wish)
    return one


class Reader(threading.Thread):
    """Reads everything that its sockets are told, and keeps the newest state of each."""

    def __init__(self, sockets):
        super().__init__(daemon=True)
        self.sockets = sockets
        self.newest = [0] * len(sockets)

    def run(self):
        while any(number < FRAMES for number in self.newest):
            for at, one in enumerate(self.sockets):
                with contextlib.suppress(TimeoutError):
                    frame = json.loads(one.recv(timeout=0 if self.newest[at] < FRAMES else 0.001))
                    self.newest[at] = max(self.newest[at], frame["data"].get("n", 0))


def until(condition, seconds=60.0):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.02)


def tell(publisher, now, number):
    states = [(SMALL, {"n": number}), (BIG, {"n": number, "bulk": f"{number} " + "x" * BIG_BYTES})]
    publisher.publish(states, now, clock_s=float(number))


def test_one_of_two_hundred_that_never_reads_delays_nobody_and_costs_bounded_memory(door, key, frames_redis, now):
    publisher = Publisher(frames_redis)
    tell(publisher, now, 0)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(viewer(door, key, SMALL)) for _ in range(199)]
        stuck = stack.enter_context(deaf(door, key, SMALL, BIG))
        port = stuck.getsockname()[1]
        until(lambda: len(door.viewers()) == 200)
        reading = Reader(readers)
        reading.start()
        held, waiting = 0, 0
        for number in range(1, FRAMES + 1):
            tell(publisher, now, number)
            time.sleep(0.02)
            held = max(held, door.transports()[port].get_write_buffer_size())
            waiting = max(waiting, *(one.pending for one in door.viewers()))
        until(lambda: min(reading.newest) == FRAMES)
        assert held <= HIGH_WATER + BIG_BYTES + 1_000, "one frame beyond the mark, and no second one"
        assert waiting <= 2, "one thing for each of its topics, never a backlog"
        told = FRAMES * BIG_BYTES
        came, last = drain(stuck)
        assert came < told * 0.75, "what it did not read was not kept for it"
        assert last == FRAMES, "it ends with what is true"


def drain(one):
    """Bytes that come until nothing more does after the last frame, and the newest number of the big topic."""
    one.settimeout(1.5)
    data, ends = b"", time.monotonic() + 60
    while True:
        with contextlib.suppress(TimeoutError):
            while part := one.recv(1 << 20):
                data += part
        numbers = re.findall(rb'"n":([0-9]+),"bulk"', data)
        if (numbers and int(numbers[-1]) == FRAMES) or time.monotonic() > ends:
            return len(data), int(numbers[-1])


def test_who_does_not_read_for_long_is_let_go(door, key, frames_redis, now, monkeypatch):
    monkeypatch.setattr(consumers, "SEND_DEADLINE_S", 0.5)
    publisher = Publisher(frames_redis)
    tell(publisher, now, 0)
    with deaf(door, key, BIG):
        until(lambda: len(door.viewers()) == 1)
        for number in range(1, 40):
            tell(publisher, now, number)
            time.sleep(0.01)
        until(lambda: not door.viewers())


@pytest.mark.parametrize("away_s", [5, 600])
def test_who_comes_back_is_shown_what_a_fresh_load_shows(door, key, frames_redis, scene, moment, away_s):
    ticker = Ticker(Publisher(redis.Redis.from_url(settings.REDIS_URL)))
    ticker.tick(moment)
    with viewer(door, key, "fleet", "pool:chat-70b") as one:
        before = {frame["topic"]: frame for frame in (json.loads(one.recv(5)) for _ in range(2))}
    later = moment + timedelta(seconds=away_s)
    for step in range(1, 4):
        at = moment + timedelta(seconds=away_s * step / 3)
        for agent in scene.agents[:2]:
            scenes.say(agent, at, scenes.chat_figures(scene, at, depth=30 + step))
        scenes.sample(scene, at, p95_ms=150 + step)
        for told in ticker.publisher._told.values():
            told.at_s -= 10
        ticker._slow = None
        ticker.tick(at)
    with viewer(door, key, "fleet", "pool:chat-70b") as one:
        after = {frame["topic"]: frame for frame in (json.loads(one.recv(5)) for _ in range(2))}
    reading = readings.read(later)
    (points,) = engines.told_before(frames_redis, [frames.LAST_PREFIX + "pool:chat-70b"])
    reading.engine_points["chat-70b"] = points
    fresh = {"fleet": topics.fleet(reading), "pool:chat-70b": topics.pool_state(reading, scene.pool)}
    for topic, state in fresh.items():
        assert after[topic]["type"] == "snapshot" and after[topic]["seq"] == before[topic]["seq"] + 3
        assert after[topic]["data"] == json.loads(frames.orjson.dumps(state)), topic
        assert after[topic]["data"] != before[topic]["data"]
