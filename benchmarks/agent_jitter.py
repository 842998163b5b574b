"""How long each piece of many paced streams stays in the server between its upstream and its client.

    python -m benchmarks.agent_jitter '{"port": 9000, "streams": 2000, "seconds": 10, ...}'

The upstream writes into each event when it handed it to the kernel; the kernel of the client's side says when the event
arrived there (SO_TIMESTAMPNS). The difference is the stay in the server, however late this process reads. Some streams
are watched in that way, all are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import sys
import time

import msgspec
import uvloop

from benchmarks.agent_client import Load, percentile_ms, requests_of
from benchmarks.agent_servers import cpu_of

SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("@qq")
STAMP = re.compile(rb'"@(\d{19})"')
RAMP_PER_S = 1_000
DRAIN_S = 3.0


class Streams(msgspec.Struct):
    """So many streams at once, a part of them watched, for `seconds` after all have begun."""

    port: int
    streams: int = 2_000
    watched: int = 200
    seconds: float = 10.0
    keys: int = 1_000
    pids: list[int] = []
    """Processes of the server: what they took of their core in those seconds is told."""


class Reader(asyncio.Protocol):
    """Reads a stream and counts."""

    events = 0
    begun = 0
    broken = 0

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.first = True

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if self.first:
            self.first = False
            Reader.begun += 1
            if not data.startswith(b"HTTP/1.1 200"):
                Reader.broken += 1
        Reader.events += data.count(b"data: ")


class Watched:
    """Reads a stream and when the kernel had its pieces."""

    stays_s: list[float] = []
    counting = False
    events = 0
    begun = 0

    def __init__(self, port: int, request: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.socket.setblocking(False)
        self.socket.send(request)
        self.loop = loop
        self.first = True
        loop.add_reader(self.socket.fileno(), self.read)

    def read(self) -> None:
        try:
            data, ancillary, _, _ = self.socket.recvmsg(65_536, 64)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        if self.first:
            self.first = False
            Watched.begun += 1
        Watched.events += data.count(b"data: ")
        stamp = STAMP.search(data)
        if not Watched.counting or stamp is None:
            return
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                seconds, nanos = TIMESPEC.unpack(value)
                Watched.stays_s.append((seconds * 1_000_000_000 + nanos - int(stamp[1])) / 1e9)

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            self.loop.remove_reader(self.socket.fileno())
        self.socket.close()


async def main(streams: Streams) -> None:
    loop = asyncio.get_running_loop()
    requests = requests_of(Load(port=streams.port, connections=1, stream=True, keys=streams.keys))
    every = max(1, streams.streams // max(1, streams.watched))
    watched: list[Watched] = []
    began_s = loop.time()
    for number in range(streams.streams):
        request = requests[number % len(requests)]
        if number % every == 0:
            watched.append(Watched(streams.port, request, loop))
        else:
            await loop.create_connection(lambda request=request: Reader(request), "127.0.0.1", streams.port)
        behind_s = began_s + number / RAMP_PER_S - loop.time()
        if behind_s > 0:
            await asyncio.sleep(behind_s)
    await asyncio.sleep(1.0)
    cpu, events, at_s = cpu_of(streams.pids), Reader.events + Watched.events, time.perf_counter()
    Watched.counting = True
    await asyncio.sleep(streams.seconds)
    seconds = time.perf_counter() - at_s
    took = cpu_of(streams.pids).since(cpu)
    Watched.counting = False
    told = {
        "streams": streams.streams,
        "begun": Reader.begun + Watched.begun,
        "broken": Reader.broken,
        "chunks_per_s": (Reader.events + Watched.events - events) / seconds,
        "samples": len(Watched.stays_s),
        "stay_p50_ms": percentile_ms(Watched.stays_s, 0.5),
        "stay_p99_ms": percentile_ms(Watched.stays_s, 0.99),
        "stay_max_ms": percentile_ms(Watched.stays_s, 1.0),
        "busy": took.all_s / seconds,
        "in_kernel": took.kernel_s / max(1e-9, took.all_s),
        "client_cpu_s": time.process_time(),
    }
    for one in watched:
        one.close()
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    uvloop.run(main(msgspec.json.decode(sys.argv[1].encode(), type=Streams)))
