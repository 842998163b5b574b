"""Keep-alive HTTP/1.1 requests made beforehand, sent one after the other on each of many connections.

The client shares the machine with what it measures, so it does as little as it can: one callback for each answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvloop

_GOOD = (b"HTTP/1.1 200", b"HTTP/1.1 204")
_LENGTH = b"content-length: "


@dataclass
class Load:
    """What one round gave."""

    seconds: float
    latencies_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def percentile_ms(self, q: float) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def request_bytes(method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Connection(asyncio.Protocol):
    """Sends its requests in order, each when the one before was answered; the first failure ends it."""

    def __init__(self, requests: Sequence[bytes], load: Load) -> None:
        self._requests = iter(requests)
        self._load = load
        self._received = b""
        self._wanted = 0
        self._began = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._end()
            return
        self._began = time.perf_counter()
        self._transport.write(self.as_sent(request))

    def as_sent(self, request: bytes) -> bytes:
        """The request with what the answers so far change about it."""
        return request

    def note(self, answer: bytes) -> None:
        """Looks at a good answer, head and body."""

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        if not self._wanted:
            head = received.find(b"\r\n\r\n")
            if head < 0:
                return
            at = received.lower().find(_LENGTH, 0, head)
            length = int(received[at + len(_LENGTH) : received.index(b"\r\n", at)]) if at >= 0 else 0
            self._wanted = head + 4 + length
        if len(received) < self._wanted:
            return
        self._load.latencies_ms.append((time.perf_counter() - self._began) * 1000)
        self._received, self._wanted = b"", 0
        if received.startswith(_GOOD):
            self.note(received)
            self.send()
        else:
            head, _, body = received.partition(b"\r\n\r\n")
            self._load.failures.append((head.split(b"\r\n")[0] + b" " + body[:300]).decode("utf-8", "replace"))
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._load.failures.append(f"the connection ended: {exc}")
            self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        self._transport.close()


async def _run(port: int, per_connection: Sequence[Sequence[bytes]], timeout_s: float, kind: type[Connection]) -> Load:
    load, loop = Load(0.0), asyncio.get_running_loop()
    connections = []
    for requests in per_connection:
        _, connection = await loop.create_connection(lambda given=requests: kind(given, load), "127.0.0.1", port)
        connections.append(connection)
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    for connection in connections:
        connection.send()
    await asyncio.wait_for(asyncio.gather(*(connection.done for connection in connections)), timeout_s)
    load.seconds = time.perf_counter() - began
    return load


def run_load(
    port: int,
    per_connection: Sequence[Sequence[bytes]],
    *,
    timeout_s: float = 600.0,
    kind: type[Connection] = Connection,
) -> Load:
    """Sends every connection's requests in order, all connections at once; the time runs from the first to the last."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(port, per_connection, timeout_s, kind))
