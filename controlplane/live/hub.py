"""Frames from Redis to the sockets of this process: one subscription, encoded once, the latest state for each viewer.

Per topic the hub holds the merged state and its seq. A viewer holds no queue: per topic at most one thing is pending,
the next delta while it keeps up, and a snapshot of the then newest state once it has missed one. So a slow reader
delays nobody, costs no memory, and ends with what is true.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import orjson
import redis.asyncio as redis

from controlplane.live.frames import CHANNEL_PREFIX, LAST_PREFIX, encode
from controlplane.live.live_frame import LiveFrame

log = logging.getLogger(__name__)

RECONNECT_S = (0.2, 0.5, 1.0, 2.0)
POLL_S = 0.1
CLOSE_AGAIN_S = 0.5

Send = Callable[[LiveFrame], Awaitable[None]]
Write = Callable[[LiveFrame], bool]


@dataclass(slots=True)
class Topic:
    """The newest state of a topic and who looks at it. `seq` 0: nothing heard yet."""

    name: str
    epoch: int = 0
    seq: int = 0
    at: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    viewers: set[Viewer] = field(default_factory=set)
    encoded: LiveFrame | None = None

    @property
    def known(self) -> bool:
        return self.seq > 0

    def snapshot(self) -> LiveFrame:
        """The newest state as one frame, encoded once per seq whoever asks."""
        if self.encoded is None:
            self.encoded = LiveFrame(encode("snapshot", self.name, self.epoch, self.seq, self.at, self.data))
        return self.encoded


def _cannot_write(_: LiveFrame) -> bool:
    return False


class Viewer:
    """One socket. A frame is written at once where `write` can; else it is pending, `wake` is set, and `pump` sends
    what is pending, one frame at a time.
    """

    def __init__(self, send: Send, write: Write = _cannot_write) -> None:
        self._send, self._write = send, write
        self._pending: dict[str, LiveFrame | None] = {}
        self._sending = False
        self._wake = asyncio.Event()
        self.topics: dict[str, Topic] = {}

    def offer(self, topic: Topic, delta: LiveFrame | None) -> None:
        """A newer frame of a topic; with one still pending only the newest state will do."""
        if not self._pending and not self._sending and self._write(topic.snapshot() if delta is None else delta):
            return
        self._pending[topic.name] = None if topic.name in self._pending else delta
        self._wake.set()

    def forget(self, topic: str) -> None:
        self._pending.pop(topic, None)

    @property
    def pending(self) -> int:
        return len(self._pending)

    async def pump(self) -> None:
        """Sends what is pending until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                name = next(iter(self._pending))
                delta = self._pending.pop(name)
                topic = self.topics.get(name)
                if topic is None or not topic.known:
                    continue
                self._sending = True
                await self._send(topic.snapshot() if delta is None else delta)
                self._sending = False


class Hub:
    """One per process and event loop. It subscribes what somebody looks at and nothing else."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._topics: dict[str, Topic] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: redis.Redis | None = None
        self.connected = False

    @property
    def topics(self) -> dict[str, Topic]:
        return self._topics

    def join(self, viewer: Viewer, name: str) -> None:
        """Adds a viewer to a topic; it gets a snapshot at once when the topic is known, else when it is heard.

        Joining again is how a client that saw a gap asks for the snapshot.
        """
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = Topic(name)
            self._changed.set()
        topic.viewers.add(viewer)
        viewer.topics[name] = topic
        viewer.forget(name)
        if topic.known:
            viewer.offer(topic, None)
        self._start()

    def leave(self, viewer: Viewer) -> None:
        """Takes a viewer out of all its topics; a topic without viewers is no longer heard."""
        for topic in viewer.topics.values():
            topic.viewers.discard(viewer)
            if not topic.viewers and self._topics.get(topic.name) is topic:
                del self._topics[topic.name]
                self._changed.set()
        viewer.topics.clear()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="live-hub")

    async def close(self) -> None:
        """Ends the subscription."""
        task, self._task = self._task, None
        while task is not None and not task.done():
            # A read of Redis whose own time limit ends at this moment swallows the cancellation: ask again.
            task.cancel()
            await asyncio.wait([task], timeout=CLOSE_AGAIN_S)

    # ---- Redis ----

    async def _run(self) -> None:
        tries = 0
        while not _is_cancelled():
            try:
                await self._listen()
                tries = 0
            except asyncio.CancelledError:
                raise
            except (redis.RedisError, OSError, ValueError) as error:
                if self.connected:
                    log.warning("live frames stopped, Redis does not answer: %s", error)
                    tries = 0
            self.connected = False
            wait = RECONNECT_S[min(tries, len(RECONNECT_S) - 1)]
            tries += 1
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311 - spreads reconnects, guards nothing

    async def _listen(self) -> None:
        """One connection's life. After every (re)connection each topic is read afresh, so that nothing is missed."""
        client = redis.Redis.from_url(
            self._url, socket_timeout=5, socket_connect_timeout=2, health_check_interval=15, max_connections=4
        )
        async with client, client.pubsub(ignore_subscribe_messages=False) as pubsub:
            self._client = client
            subscribed: set[str] = set()
            self._changed.set()
            while not _is_cancelled():
                if self._changed.is_set():
                    self._changed.clear()
                    await self._follow(pubsub, subscribed)
                if not subscribed:
                    await self._changed.wait()
                    continue
                message = await self._next(pubsub)
                if message is not None:
                    await self._take(message)

    async def _next(self, pubsub: Any) -> dict[str, Any] | None:
        return await pubsub.get_message(timeout=POLL_S if not self._changed.is_set() else 0.0)

    async def _follow(self, pubsub: Any, subscribed: set[str]) -> None:
        wanted = set(self._topics)
        gone, new = subscribed - wanted, wanted - subscribed
        if new:
            await pubsub.subscribe(*(CHANNEL_PREFIX + name for name in sorted(new)))
        if gone:
            await pubsub.unsubscribe(*(CHANNEL_PREFIX + name for name in sorted(gone)))
        subscribed |= new
        subscribed -= gone

    async def _take(self, message: dict[str, Any]) -> None:
        name = message["channel"].decode().removeprefix(CHANNEL_PREFIX)
        topic = self._topics.get(name)
        if topic is None:
            return
        if message["type"] == "subscribe":
            # Only now no frame can slip between the snapshot and the first delta.
            self.connected = True
            await self._refresh(topic)
        elif message["type"] == "message":
            await self.take_frame(topic, message["data"])

    async def take_frame(self, topic: Topic, raw: bytes) -> None:
        """One frame from the channel: the next delta is merged and passed on as it is, a doubled one is dropped, and
        after a gap the snapshot in Redis is read."""
        frame = orjson.loads(raw)
        same = frame["epoch"] == topic.epoch
        if same and frame["seq"] <= topic.seq:
            return
        if frame["type"] == "snapshot":
            self._hold(topic, frame, frame["data"])
            self._offer(topic, None)
        elif topic.known and same and frame["seq"] == topic.seq + 1:
            self._hold(topic, frame, {**topic.data, **frame["data"]})
            self._offer(topic, LiveFrame(raw))
        else:
            await self._refresh(topic)

    async def _refresh(self, topic: Topic) -> None:
        assert self._client is not None, "frames come from a connection"
        raw = await self._client.get(LAST_PREFIX + topic.name)
        if raw is None:
            return
        frame = orjson.loads(raw)
        if topic.known and frame["epoch"] == topic.epoch and frame["seq"] <= topic.seq:
            return
        self._hold(topic, frame, frame["data"])
        self._offer(topic, None)

    @staticmethod
    def _hold(topic: Topic, frame: dict[str, Any], data: dict[str, Any]) -> None:
        topic.epoch, topic.seq, topic.at = frame["epoch"], frame["seq"], frame["at"]
        topic.data, topic.encoded = data, None

    @staticmethod
    def _offer(topic: Topic, delta: LiveFrame | None) -> None:
        for viewer in topic.viewers:
            viewer.offer(topic, delta)


def _is_cancelled() -> bool:
    """Whether this task was told to end. Reading from Redis may take a cancellation for a timeout of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def hub_of_process(url: str) -> Hub:
    """The hub of the running event loop: one per web process."""
    loop = asyncio.get_running_loop()
    hub = _hubs.get(loop)
    if hub is None:
        hub = _hubs[loop] = Hub(url)
    return hub
