"""A client that speaks bytes, for what no well-behaved client does."""

from __future__ import annotations

import asyncio
import json

from tests.agent import worlds


def chat_body(**fields) -> bytes:
    base = {"model": worlds.MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8}
    return json.dumps({**base, **fields}).encode()


def post(body: bytes, *, key: str = worlds.SECRET, path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: agent\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self):
        return json.loads(self.body)


class WireClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, limit: int = 2**16) -> WireClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=limit))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, within_s: float = 30.0) -> Answer:
        async with asyncio.timeout(within_s):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            status = int(head[0].split(" ")[1])
            headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in head[1:] if line)}
            if status == 100:
                return Answer(status, headers, b"")
            if headers.get("transfer-encoding") == "chunked":
                return Answer(status, headers, b"".join([part async for part in self.chunks()]))
            if "content-length" in headers:
                return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
            return Answer(status, headers, await self.reader.read())

    async def chunks(self):
        while size := int(await self.reader.readline(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def ask(self, data: bytes) -> Answer:
        self.send(data)
        return await self.answer()

    async def closed_by_server(self, within_s: float = 15.0) -> bool:
        async with asyncio.timeout(within_s):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True

    def abort(self) -> None:
        self.writer.transport.abort()
