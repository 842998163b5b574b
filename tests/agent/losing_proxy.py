"""A proxy before a control plane that loses answers: what was asked is done there, and the agent never hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import random


class LosingProxy:
    """Passes bytes on; of answers to reports it drops a share with their connection."""

    def __init__(self, port: int, *, seed: int, share: float) -> None:
        self._target = port
        self._rng = random.Random(seed)
        self._share = share
        self.port = 0
        self.lost = 0
        self.passed = 0

    async def __aenter__(self) -> LosingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            behind_reader, behind = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                while True:
                    head, body = await _message(reader)
                    behind.write(head + body)
                    head_back, body_back = await _message(behind_reader)
                    if b"/agent/v1/report" in head.split(b"\r\n", 1)[0]:
                        if self._rng.random() < self._share:
                            self.lost += 1
                            return
                        self.passed += 1
                    writer.write(head_back + body_back)
            finally:
                writer.close()
                behind.close()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """One HTTP message with a length or chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        body = b""
        while True:
            size = await reader.readuntil(b"\r\n")
            part = await reader.readexactly(int(size, 16) + 2)
            body += size + part
            if not int(size, 16):
                return head, body
    if b"content-length: " not in lower:
        return head, b""
    return head, await reader.readexactly(int(lower.split(b"content-length: ")[1].split(b"\r\n")[0]))
