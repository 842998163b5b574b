"""Keep-alive HTTP/1.1 requests made beforehand, sent one after the other on each of many connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


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


async def _connection(port: int, requests: Sequence[bytes], start: asyncio.Event, load: Load, timeout_s: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    await start.wait()
    try:
        for request in requests:
            began = time.perf_counter()
            writer.write(request)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout_s)
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ),
                0,
            )
            body = await reader.readexactly(length)
            load.latencies_ms.append((time.perf_counter() - began) * 1000)
            if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 204")):
                load.failures.append((head.split(b"\r\n")[0] + b" " + body[:300]).decode("utf-8", "replace"))
                return
    finally:
        writer.close()


async def _run(port: int, per_connection: Sequence[Sequence[bytes]], timeout_s: float) -> Load:
    load, start = Load(0.0), asyncio.Event()
    tasks = [asyncio.ensure_future(_connection(port, requests, start, load, timeout_s)) for requests in per_connection]
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    start.set()
    await asyncio.gather(*tasks)
    load.seconds = time.perf_counter() - began
    return load


def run_load(port: int, per_connection: Sequence[Sequence[bytes]], *, timeout_s: float = 60.0) -> Load:
    """Sends every connection's requests in order, all connections at once; the time runs from the first to the last."""
    return asyncio.run(_run(port, per_connection, timeout_s))
