"""A tiny OpenAI-compatible server that plays what it is told, byte by byte."""

from __future__ import annotations

import asyncio
import json

ROLE = b'data: {"id":"u1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
END = b'data: {"id":"u1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
COUNTS = b'"prompt_tokens":21,"completion_tokens":3'
USAGE = b'data: {"id":"u1","choices":[],"usage":{' + COUNTS + b',"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
DONE = b"data: [DONE]\n\n"


def word(text: str) -> bytes:
    return b'data: {"id":"u1","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode()


WHOLE = (
    b'{"id":"u1","choices":[{"index":0,"message":{"role":"assistant","content":"a b c"}}],"usage":{' + COUNTS + b"}}"
)


class Upstream:
    """Answers with `script`, a coroutine function (upstream, request body, writer); counts connections and closes."""

    def __init__(self, script) -> None:
        self.script = script
        self.heads: list[str] = []
        self.bodies: list[dict] = []
        self.connections = 0
        self.gone = 0
        self.port = 0

    async def __aenter__(self) -> Upstream:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_) -> None:
        self.server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                if head.startswith("get "):
                    # What an agent asks to know whether it is there, and its figures, of which it has none.
                    respond(writer, 200 if head.startswith("get /health ") else 404, b"{}")
                    continue
                self.heads.append(head)
                size = int(head.split("content-length: ")[1].split("\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(size)))
                serving = asyncio.ensure_future(self.script(self, self.bodies[-1], writer))
                watching = asyncio.ensure_future(reader.read(1))
                await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    self.gone += 1
                    serving.cancel()
                    return
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                serving.result()
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


async def whole(_: Upstream, body: dict, writer) -> None:
    respond(writer, 200, WHOLE)


def respond(writer, status: int, body: bytes, *headers: bytes) -> None:
    lines = b"".join(header + b"\r\n" for header in headers)
    writer.write(
        b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b"
        % (status, len(body), lines, body)
    )


def begin(writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")


def chunk(writer, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def end(writer) -> None:
    writer.write(b"0\r\n\r\n")
