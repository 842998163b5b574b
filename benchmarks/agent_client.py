"""Clients of a server under test: keep-alive connections that ask again as soon as they are answered, or at a rate.

    python -m benchmarks.agent_client '{"port": 9000, "connections": 32, "seconds": 4, ...}'

Prints one JSON document with what they saw. Requests are made beforehand, one per API key, and taken in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter

import msgspec
import uvloop

from benchmarks.agent_control import secret_of

END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
PROMPT = "hello world " * 40
GRACE_S = 30.0


class Load(msgspec.Struct):
    """One round of load. `requests` instead of `seconds` bounds it by number; a `rate_per_s` makes it an open loop."""

    port: int
    connections: int
    seconds: float = 0.0
    requests: int = 0
    rate_per_s: float = 0.0
    stream: bool = False
    keys: int = 1_000
    bearer: str = ""
    """One key for all, instead of one per tenant."""
    marks: list[int] = []
    """Numbers of answers at which to look at `rss_of`."""
    rss_of: int = 0
    spread_s: float = 0.0
    """Connections begin evenly over that time. Paced answers that began as one would ask again as one, for ever."""


def requests_of(load: Load) -> list[bytes]:
    body: dict[str, object] = {
        "model": "llama-70b",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 64,
    }
    if load.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    encoded = json.dumps(body, separators=(",", ":")).encode()
    secrets = [load.bearer] if load.bearer else [secret_of(number) for number in range(1, load.keys + 1)]
    return [
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer %b\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (secret.encode(), len(encoded), encoded)
        for secret in secrets
    ]


def rss_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def percentile_ms(values: list[float], q: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] * 1e3 if ordered else None


class Clients:
    """Everything that the connections share."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.requests = itertools.cycle(requests_of(load))
        self.loop = asyncio.get_running_loop()
        self.done = self.loop.create_future()
        self.began_s = time.perf_counter()
        self.warm_s = self.began_s + min(0.5, load.seconds / 5)
        self.end_s = self.began_s + load.seconds if load.seconds else float("inf")
        self.live: set[Connection] = set()
        self.idle: list[Connection] = []
        self.offering = load.rate_per_s > 0
        """An open loop goes on: whoever is answered waits for the next instant."""
        self.ttft_s: list[float] = []
        self.total_s: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.answers = self.sent = self.chunks = self.unsent = 0
        self.rss: list[tuple[int, int]] = []
        self.marks = sorted(load.marks)

    def may_send(self, now_s: float) -> bool:
        return now_s < self.end_s and not (self.load.requests and self.sent >= self.load.requests)

    def answered(self, connection: Connection, now_s: float) -> None:
        self.answers += 1
        self.statuses[connection.status] += 1
        if now_s >= self.warm_s and connection.status == "200" and len(self.total_s) < 2_000_000:
            self.ttft_s.append(connection.first_s - connection.began_s)
            self.total_s.append(now_s - connection.began_s)
        if self.marks and self.answers >= self.marks[0]:
            self.rss.append((self.marks.pop(0), rss_kib(self.load.rss_of)))
        if self.offering:
            self.idle.append(connection)
        elif not self.load.rate_per_s and self.may_send(now_s):
            connection.send()
        else:
            connection.transport.close()
            self.gone(connection)

    def gone(self, connection: Connection) -> None:
        self.live.discard(connection)
        if connection in self.idle and self.offering:
            self.idle.remove(connection)
        if not self.live and not self.done.done():
            self.done.set_result(None)

    async def connect(self) -> Connection:
        _, connection = await self.loop.create_connection(lambda: Connection(self), "127.0.0.1", self.load.port)
        self.live.add(connection)
        return connection

    async def offer(self) -> None:
        """An open loop: a request at each instant of the rate, on any connection that is free."""
        at_s, gap_s = self.loop.time(), 1 / self.load.rate_per_s
        until_s = at_s + self.load.seconds
        while at_s < until_s and self.live:
            at_s += gap_s
            left_s = at_s - self.loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            if self.idle:
                self.idle.pop().send()
            else:
                self.unsent += 1
        self.offering = False
        for connection in self.idle:
            connection.transport.close()
            self.gone(connection)

    async def run(self) -> dict[str, object]:
        connections = [await self.connect() for _ in range(self.load.connections)]
        offering: asyncio.Task[None] | None = None
        if self.load.rate_per_s:
            self.idle = connections
            offering = asyncio.ensure_future(self.offer())
        else:
            for number, connection in enumerate(connections):
                if self.load.spread_s:
                    self.loop.call_later(self.load.spread_s * number / len(connections), connection.send)
                else:
                    connection.send()
        try:
            await asyncio.wait_for(self.done, (self.load.seconds or 3_600) + GRACE_S)
        except TimeoutError:
            self.statuses["unanswered"] += len(self.live)
        if offering is not None:
            await offering
        return self.told()

    def told(self) -> dict[str, object]:
        ended_s = time.perf_counter()
        counted_s = min(ended_s, self.end_s) - self.began_s
        return {
            "answers": self.answers,
            "sent": self.sent,
            "unsent": self.unsent,
            "per_s": self.answers / max(1e-9, ended_s - self.began_s),
            "seconds": counted_s,
            "chunks": self.chunks,
            "chunks_per_s": self.chunks / max(1e-9, ended_s - self.began_s),
            "statuses": dict(self.statuses),
            "ttft_p50_ms": percentile_ms(self.ttft_s, 0.5),
            "ttft_p99_ms": percentile_ms(self.ttft_s, 0.99),
            "p50_ms": percentile_ms(self.total_s, 0.5),
            "p99_ms": percentile_ms(self.total_s, 0.99),
            "rss_kib": self.rss,
            "client_cpu_s": time.process_time(),
        }


class Connection(asyncio.Protocol):
    """One request at a time."""

    __slots__ = ("began_s", "buffer", "clients", "first_s", "left", "status", "transport")

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.buffer = b""
        self.left = 0
        self.status = ""
        self.began_s = self.first_s = 0.0

    def connection_made(self, transport) -> None:
        self.transport = transport

    def connection_lost(self, exc) -> None:
        if self in self.clients.live:
            self.clients.statuses["lost"] += 1
            self.clients.gone(self)

    def send(self) -> None:
        self.status, self.left, self.first_s, self.buffer = "", 0, 0.0, b""
        self.clients.sent += 1
        self.began_s = time.perf_counter()
        self.transport.write(next(self.clients.requests))

    def data_received(self, data: bytes) -> None:
        if not self.status:
            data = self.buffer + data
            head = data.find(END)
            if head < 0:
                self.buffer = data
                return
            self.status = data[9:12].decode()
            at = data.lower().find(b"content-length:", 0, head)
            self.left = -1 if at < 0 else int(data[at + 15 : data.index(b"\r", at)])
            data = data[head + 4 :]
        if self.left >= 0:
            self.left -= len(data)
            if self.left > 0:
                return
            self.first_s = now_s = time.perf_counter()
            self.clients.answered(self, now_s)
            return
        events = data.count(b"data: ")
        if events:
            self.clients.chunks += events
            if not self.first_s:
                self.first_s = time.perf_counter()
        if data.endswith(LAST_CHUNK):
            self.clients.answered(self, time.perf_counter())


async def main(load: Load) -> None:
    sys.stdout.write(json.dumps(await Clients(load).run()) + "\n")


if __name__ == "__main__":
    uvloop.run(main(msgspec.json.decode(sys.argv[1].encode(), type=Load)))
