"""The viewers of `benchmarks.live`: many sockets in one process that read frames and measure how late they are.

    python -m benchmarks.live_clients FILE

FILE is JSON: `viewers` as [port, topic, session key], `sources` as addresses to connect from. It prints `{"ready": n}`
once every viewer has had its first frame. Then one command a line: `measure` begins anew, `report` prints what came.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from pathlib import Path

import uvloop

CONNECTING_AT_ONCE = 64
#: Each signs in through the database: with others on the machine ten thousand take minutes.
CONNECT_WITHIN_S = 480.0
#: Frames carry the instant of their publishing as 16 digits: microseconds of the monotonic clock and this.
STAMP_BASE = 10**15
STAMP = b'"t_us":'
STAMP_DIGITS = 16
LATE_MS_MOST = 4_000
TEXT, CLOSE, PING, PONG = 0x81, 0x88, 0x89, 0x8A


def masked(opcode: int, payload: bytes) -> bytes:
    """A frame of at most 125 bytes under a mask of zeros."""
    return bytes((opcode, 0x80 | len(payload), 0, 0, 0, 0)) + payload


class Crowd:
    """What all viewers of the process have seen since `measure`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.greeted = 0
        self.lost = 0
        self.ready = asyncio.Event()
        self.measure()

    def measure(self) -> None:
        self.frames = self.octets = 0
        self.late_ms = [0] * (LATE_MS_MOST + 1)
        self.cpu_s = time.process_time()

    def greet(self) -> None:
        self.greeted += 1
        if self.greeted == self.size:
            self.ready.set()

    def take(self, data: bytes, begin: int, end: int) -> None:
        self.frames += 1
        self.octets += end - begin
        at = data.find(STAMP, begin, end)
        if at >= 0:
            at += len(STAMP)
            late_us = time.monotonic_ns() // 1_000 + STAMP_BASE - int(data[at : at + STAMP_DIGITS])
            self.late_ms[min(max(late_us, 0) // 1_000, LATE_MS_MOST)] += 1

    def late(self, share: float) -> int | None:
        """The lateness that this share of the frames kept to, in whole ms rounded up; None without frames."""
        wanted, seen = share * sum(self.late_ms), 0
        for ms, count in enumerate(self.late_ms):
            seen += count
            if count and seen >= wanted:
                return ms + 1
        return None

    def report(self) -> dict[str, float | int | None]:
        return {
            "frames": self.frames,
            "octets": self.octets,
            "p50_ms": self.late(0.50),
            "p99_ms": self.late(0.99),
            "lost": self.lost,
            "cpu_s": time.process_time() - self.cpu_s,
        }


class Viewer(asyncio.Protocol):
    """One socket: shakes hands, subscribes one topic, counts frames, answers pings."""

    def __init__(self, crowd: Crowd, port: int, topic: str, session: str) -> None:
        self._crowd = crowd
        self._hello = (
            f"GET /ws/live/ HTTP/1.1\r\nHost: localhost:{port}\r\nOrigin: http://localhost:{port}\r\n"
            f"Cookie: sessionid={session}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
        self._wish = masked(TEXT, json.dumps({"subscribe": [topic]}).encode())
        self._rest = b""
        self._shaken = self._seen = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._hello)

    def connection_lost(self, error: Exception | None) -> None:
        self._crowd.lost += 1

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at = 0
        if not self._shaken:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._rest = data
                return
            self._shake(data)
            at = end + 4
        size = len(data)
        while size - at >= 2:
            length, begin = data[at + 1], at + 2
            if length == 126:
                length, begin = int.from_bytes(data[at + 2 : at + 4]), at + 4
            elif length == 127:
                length, begin = int.from_bytes(data[at + 2 : at + 10]), at + 10
            if begin + length > size:
                break
            self._frame(data, data[at], begin, begin + length)
            at = begin + length
        self._rest = data[at:]

    def _shake(self, answer: bytes) -> None:
        if not answer.startswith(b"HTTP/1.1 101"):
            raise SystemExit(f"the server refused a viewer: {answer[:80]!r}")
        self._shaken = True
        self._transport.write(self._wish)

    def _frame(self, data: bytes, opcode: int, begin: int, end: int) -> None:
        if opcode == TEXT:
            if not self._seen:
                self._seen = True
                self._crowd.greet()
            self._crowd.take(data, begin, end)
        elif opcode == PING:
            self._transport.write(masked(PONG, data[begin:end]))


async def _connect(crowd: Crowd, viewers: list[list], sources: list[str]) -> None:
    loop, places = asyncio.get_running_loop(), asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def one(number: int, port: int, topic: str, session: str) -> None:
        async with places:
            source = sources[number % len(sources)]
            await loop.create_connection(
                lambda: Viewer(crowd, port, topic, session), "127.0.0.1", port, local_addr=(source, 0)
            )

    async with asyncio.TaskGroup() as tasks:
        for number, (port, topic, session) in enumerate(viewers):
            tasks.create_task(one(number, port, topic, session))


async def serve(given: dict) -> None:
    """Connects everybody, then obeys."""
    crowd = Crowd(len(given["viewers"]))
    async with asyncio.timeout(CONNECT_WITHIN_S):
        await _connect(crowd, given["viewers"], given["sources"])
        await crowd.ready.wait()
    print(json.dumps({"ready": crowd.greeted}), flush=True)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while command := (await commands.readline()).strip():
        if command == b"measure":
            crowd.measure()
        else:
            print(json.dumps(crowd.report()), flush=True)


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(json.loads(Path(sys.argv[1]).read_text())))
