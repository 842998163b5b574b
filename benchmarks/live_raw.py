"""The limit of `benchmarks.live`: a protocol that writes each frame, encoded once, to every viewer, and nothing else.

python -m benchmarks.live_raw PORT CHANNEL_PREFIX TOPIC...
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import sys
from collections import defaultdict

import redis.asyncio as redis
import uvloop

from benchmarks.live_clients import TEXT

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
viewers: dict[str, list[asyncio.Transport]] = defaultdict(list)


def framed(payload: bytes) -> bytes:
    """A text frame of the server."""
    size = len(payload)
    head = bytes((TEXT, size)) if size < 126 else bytes((TEXT, 126)) + size.to_bytes(2)
    return head + payload


class Door(asyncio.Protocol):
    """Shakes hands, and takes what comes first for a wish for one topic, under a mask of zeros."""

    def __init__(self) -> None:
        self._shaken = False
        self._topic = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._topic:
            viewers[self._topic].remove(self._transport)

    def data_received(self, data: bytes) -> None:
        if not self._shaken:
            key = data.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0]
            accept = base64.b64encode(hashlib.sha1(key + GUID, usedforsecurity=False).digest())
            self._transport.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
            )
            self._shaken = True
        elif not self._topic:
            self._topic = data.partition(b'["')[2].partition(b'"]')[0].decode()
            viewers[self._topic].append(self._transport)
            self._transport.write(framed(b"{}"))


async def serve(port: int, prefix: str, topics: list[str]) -> None:
    """Listens on loopback until it is ended."""
    await asyncio.get_running_loop().create_server(Door, "127.0.0.1", port, backlog=2_048)
    client = redis.Redis.from_url(os.environ["REDIS_URL"])
    async with client.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(*(prefix + topic for topic in topics))
        async for message in pubsub.listen():
            frame = framed(message["data"])
            for transport in viewers[message["channel"].decode().removeprefix(prefix)]:
                transport.write(frame)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
