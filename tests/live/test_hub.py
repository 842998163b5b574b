"""The hub against a real Redis: nothing lost, nothing doubled, the slow reader alone is slow, Redis may go and come."""

import asyncio
import contextlib
import random
import time

import orjson
import redis
from django.conf import settings

from controlplane.embedded.ports import free_port
from controlplane.live.frames import Publisher
from controlplane.live.hub import Hub, Viewer

T = "pool:chat-70b"


class Reader:
    """A viewer's far end: applies frames by the protocol's rules and notices anything lost or doubled."""

    def __init__(self, *, pause_s=0.0):
        self.pause_s = pause_s
        self.straight = 0
        self.frames, self.state, self.seq, self.epoch = [], None, 0, None
        self.faults = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, told):
        await self.gate.wait()
        if self.pause_s:
            await asyncio.sleep(self.pause_s)
        self.take(told)

    def write(self, told):
        """As a transport does: at once while there is room, else not at all."""
        if not self.gate.is_set():
            return False
        self.straight += 1
        self.take(told)
        return True

    def take(self, told):
        frame = orjson.loads(told.text)
        self.frames.append(frame)
        if frame["type"] == "snapshot":
            if frame["epoch"] == self.epoch and frame["seq"] < self.seq:
                self.faults.append(("back", self.seq, frame["seq"]))
            self.state = frame["data"]
        elif frame["epoch"] != self.epoch or frame["seq"] != self.seq + 1:
            self.faults.append(("gap", self.seq, frame["seq"]))
        else:
            self.state = {**self.state, **frame["data"]}
        self.epoch, self.seq = frame["epoch"], frame["seq"]


class Desk:
    """A hub, its viewers, and a publisher beside it."""

    def __init__(self, url):
        self.hub = Hub(url)
        self.client = redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1)
        self.publisher = Publisher(self.client)
        self.clock_s = 0.0
        self.tasks = []

    def view(self, *topics, straight=False, **options):
        reader = Reader(**options)
        reader.viewer = Viewer(reader, reader.write) if straight else Viewer(reader)
        self.tasks.append(asyncio.create_task(reader.viewer.pump()))
        for topic in topics:
            self.hub.join(reader.viewer, topic)
        return reader

    async def tell(self, state, now, topic=T):
        self.clock_s += 1
        return await asyncio.to_thread(self.publisher.publish, [(topic, state)], now, clock_s=self.clock_s)

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await self.hub.close()
        self.client.close()


@contextlib.asynccontextmanager
async def desk(url=None):
    one = Desk(url or settings.REDIS_URL)
    try:
        yield one
    finally:
        await one.close()


async def until(condition, seconds=60.0):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come to pass"
        await asyncio.sleep(0.01)


async def test_a_snapshot_on_join_then_deltas(frames_redis, now):
    async with desk() as one:
        await one.tell({"depth": 1, "name": "chat"}, now)
        reader = one.view(T)
        await until(lambda: reader.frames)
        await one.tell({"depth": 2, "name": "chat"}, now)
        await until(lambda: len(reader.frames) == 2)
        assert [frame["type"] for frame in reader.frames] == ["snapshot", "delta"]
        assert reader.frames[1]["data"] == {"depth": 2}
        late = one.view(T)
        await until(lambda: late.frames)
        assert late.state == reader.state == {"depth": 2, "name": "chat"}


async def test_a_topic_that_was_never_told_is_silent_until_it_is(frames_redis, now):
    async with desk() as one:
        reader = one.view(T)
        await until(lambda: one.hub.connected)
        assert reader.frames == []
        await one.tell({"depth": 1}, now)
        await until(lambda: reader.state == {"depth": 1})


async def test_a_thousand_updates_with_snapshots_between_lose_and_double_nothing(frames_redis, now):
    async with desk() as one:
        chance = random.Random(3)
        await one.tell({"n": 0, "part": 0}, now)
        readers = [one.view(T) for _ in range(3)]
        await until(lambda: all(reader.frames for reader in readers))
        for number in range(1, 1_001):
            part = number if chance.random() < 0.3 else readers[0].state["part"]
            await one.tell({"n": number, "part": part}, now)
            if chance.random() < 0.05:
                readers.append(one.view(T))
            if chance.random() < 0.05:
                one.hub.join(chance.choice(readers).viewer, T)
        expected = orjson.loads(one.client.get("fb:last:" + T))
        await until(lambda: all(reader.seq == expected["seq"] for reader in readers))
        assert all(reader.faults == [] for reader in readers)
        assert all(reader.state == expected["data"] for reader in readers)
        assert len(readers) > 20


async def test_a_slow_reader_gets_the_latest_and_delays_nobody(frames_redis, now):
    async with desk() as one:
        await one.tell({"n": 0}, now)
        slow, fast = one.view(T), one.view(T)
        await until(lambda: slow.frames and fast.frames)
        slow.gate.clear()
        for number in range(1, 301):
            await one.tell({"n": number, "bulk": "x" * 2_000}, now)
        await until(lambda: fast.state["n"] == 300)
        assert len(fast.frames) == 301
        assert slow.viewer.pending == 1, "one thing waits, never a backlog"
        slow.gate.set()
        await until(lambda: slow.state["n"] == 300)
        assert len(slow.frames) <= 4
        assert slow.faults == []


async def test_frames_written_at_once_and_frames_that_waited_keep_their_order(frames_redis, now):
    async with desk() as one:
        chance = random.Random(5)
        await one.tell({"n": 0, "part": 0}, now)
        readers = [one.view(T, straight=True) for _ in range(4)] + [one.view(T, straight=True, pause_s=0.002)]
        await until(lambda: all(reader.frames for reader in readers))
        for number in range(1, 501):
            for reader in readers:
                if chance.random() < 0.1:
                    (reader.gate.clear if reader.gate.is_set() else reader.gate.set)()
            await one.tell({"n": number, "part": number // 7}, now)
        for reader in readers:
            reader.gate.set()
        await until(lambda: all(reader.state == {"n": 500, "part": 71} for reader in readers))
        assert all(reader.faults == [] for reader in readers)
        assert all(0 < reader.straight < len(reader.frames) for reader in readers), "both ways were gone"


async def test_a_lost_frame_is_healed_from_the_snapshot_and_a_doubled_one_dropped(frames_redis, now):
    async with desk() as one:
        await one.tell({"n": 1, "keep": "a"}, now)
        reader = one.view(T)
        await until(lambda: reader.frames)
        topic = one.hub.topics[T]
        await one.tell({"n": 2, "keep": "a"}, now)
        await until(lambda: reader.seq == 2)
        doubled = orjson.dumps(
            {"type": "delta", "topic": T, "epoch": topic.epoch, "seq": 2, "at": "", "data": {"n": -1}}
        )
        one.client.publish("fb:frame:" + T, doubled)
        # A frame that nobody heard: seq 3 is only in the snapshot, 4 comes over the channel.
        one.publisher._told[T].seq = 3
        await one.tell({"n": 4, "keep": "b"}, now)
        await until(lambda: reader.seq == 4)
        assert reader.state == {"n": 4, "keep": "b"}
        assert reader.faults == []
        assert all(frame["data"].get("n") != -1 for frame in reader.frames)


async def test_a_publisher_that_starts_afresh_clears_everything_of_the_one_before(frames_redis, now):
    async with desk() as one:
        await one.tell({"n": 1, "old": True}, now)
        reader = one.view(T)
        await until(lambda: reader.frames)
        one.publisher = Publisher(one.client, epoch=one.publisher.epoch + 1)
        await one.tell({"n": 1}, now)
        await until(lambda: reader.state == {"n": 1})
        assert reader.faults == []


async def test_only_what_somebody_looks_at_is_subscribed(frames_redis, now):
    async with desk() as one:
        reader = one.view(T, "fleet")
        await until(
            lambda: set(frames_redis.pubsub_channels("fb:frame:*")) == {b"fb:frame:" + T.encode(), b"fb:frame:fleet"}
        )
        one.hub.leave(reader.viewer)
        await until(lambda: not frames_redis.pubsub_channels("fb:frame:*"))
        assert one.hub.topics == {}


async def test_two_hundred_readers_that_do_not_read_hold_no_memory(frames_redis, now):
    async with desk() as one:
        await one.tell({"n": 0}, now)
        stalled = [one.view(T) for _ in range(200)]
        await until(lambda: all(reader.frames for reader in stalled))
        for reader in stalled:
            reader.gate.clear()
        for number in range(50):
            await one.tell({"n": number + 1, "bulk": "x" * 5_000}, now)
        await until(lambda: one.hub.topics[T].seq == 51)
        assert max(reader.viewer.pending for reader in stalled) == 1
        assert (
            sum(len(value.text) for reader in stalled for value in reader.viewer._pending.values() if value)
            < 200 * 6_000
        )


class Server:
    """A Redis of the test's own that can be killed."""

    def __init__(self, binary, port):
        self.binary, self.port, self.process = binary, port, None
        self.url = f"redis://127.0.0.1:{port}/0"

    async def start(self):
        self.process = await asyncio.create_subprocess_exec(
            self.binary, "--port", str(self.port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1",
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        client = redis.Redis.from_url(self.url)
        for _ in range(3_000):
            with contextlib.suppress(redis.RedisError):
                client.ping()
                break
            await asyncio.sleep(0.02)
        client.close()

    async def kill(self):
        self.process.kill()
        await self.process.wait()


async def test_redis_killed_and_back_serves_everybody_what_a_fresh_load_shows(now, valkey_binary):
    server = Server(valkey_binary, free_port())
    await server.start()
    try:
        async with desk(server.url) as one:
            await one.tell({"n": 1}, now)
            readers = [one.view(T) for _ in range(10)]
            await until(lambda: all(reader.frames for reader in readers))
            await server.kill()
            one.clock_s += 10
            assert await one.tell({"n": 2}, now) == 0
            await server.start()
            one.clock_s += 10
            assert await one.tell({"n": 3, "new": True}, now) == 1
            await until(lambda: all(reader.state.get("n") == 3 for reader in readers))
            one.clock_s += 1
            await one.tell({"n": 4, "new": True}, now)
            await until(lambda: all(reader.state.get("n") == 4 for reader in readers))
            fresh = one.view(T)
            await until(lambda: fresh.frames)
            assert all(reader.state == fresh.state and reader.seq == fresh.seq for reader in readers)
            assert all(reader.faults == [] for reader in readers)
    finally:
        if server.process.returncode is None:
            await server.kill()
