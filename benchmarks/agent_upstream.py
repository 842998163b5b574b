"""An inference server that costs next to nothing, so that what is measured is what stands in front of it.

    python -m benchmarks.agent_upstream PORT [--tokens 32] [--token-ms 0] [--answer-ms 0] [--stamp]

Streams have one event per token. With `--stamp` each carries the instant at which it was handed to the kernel, in Unix
nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import uvloop

USAGE = b'"usage":{"prompt_tokens":160,"completion_tokens":%d,"total_tokens":%d}'
HEAD = b'"id":"chatcmpl-1","created":1790000000,"model":"llama-70b"'
WHOLE_BODY = (
    b"{%b"
    b',"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"%b"},'
    b'"finish_reason":"stop"}],%b}'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
HEALTH = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
NOTHING = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
END = b"\r\n\r\n"


def event(rest: bytes) -> bytes:
    data = b'data: {%b,"object":"chat.completion.chunk",%b}\n\n' % (HEAD, rest)
    return b"%x\r\n%b\r\n" % (len(data), data)


def delta(content: bytes) -> bytes:
    return event(b'"choices":[{"index":0,"delta":%b,"finish_reason":null}]' % content)


class Plan:
    """What every answer is."""

    def __init__(self, tokens: int, token_s: float, answer_s: float, stamp: bool) -> None:
        self.tokens = tokens
        self.token_s = token_s
        self.answer_s = answer_s
        self.stamp = stamp
        usage = USAGE % (tokens, 160 + tokens)
        body = WHOLE_BODY % (HEAD, b"hello " * tokens, usage)
        self.whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
            len(body),
            body,
        )
        self.word = delta(b'{"content":"hello "}')
        # Of equal length whatever the instant is, so that only its digits are replaced.
        self.stamped = delta(b'{"content":"@%019d"}' % 0)
        self.stamp_at = self.stamped.index(b"@") + 1
        stop = event(b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]')
        done = b"data: [DONE]\n\n"
        self.last = stop + event(b'"choices":[],%b' % usage) + b"%x\r\n%b\r\n" % (len(done), done) + b"0\r\n\r\n"


class Pacer:
    """Calls each stream once per period, at a place of its own in it: one timer for all of them."""

    STEP_S = 0.001

    def __init__(self, period_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.places: list[set[Connection]] = [set() for _ in range(max(1, round(period_s / self.STEP_S)))]
        self.step_s = period_s / len(self.places)
        self.at = 0
        self.next_s = loop.time()
        self._step()

    def _step(self) -> None:
        now_s = self.loop.time()
        while self.next_s <= now_s:
            for connection in list(self.places[self.at]):
                connection.token()
            self.at = (self.at + 1) % len(self.places)
            self.next_s += self.step_s
        # Not at an instant: timers of a millisecond would fire before it, again and again.
        self.loop.call_later(self.STEP_S, self._step)

    def join(self, connection: Connection) -> set[Connection]:
        place = random.choice(self.places)
        place.add(connection)
        return place


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, plan: Plan, loop: asyncio.AbstractEventLoop, pacer: Pacer | None) -> None:
        self.plan = plan
        self.loop = loop
        self.pacer = pacer
        self.place: set[Connection] | None = None
        self.buffer = b""
        self.sent = 0

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer = data = self.buffer + data if self.buffer else data
        head = data.find(END)
        if head < 0:
            return
        if data.startswith(b"GET "):
            self.buffer = b""
            self.transport.write(HEALTH if data.startswith(b"GET /health ") else NOTHING)
            return
        at = data.lower().find(b"content-length:", 0, head)
        size = int(data[at + 15 : data.index(b"\r", at)])
        if len(data) < head + 4 + size:
            return
        self.buffer = data[head + 4 + size :]
        plan = self.plan
        if b'"stream":true' in data:
            self.transport.write(STREAM_HEAD)
            self.sent = 0
            if self.pacer is not None:
                self.place = self.pacer.join(self)
            # The first token comes at once.
            self.token()
        elif plan.answer_s:
            self.loop.call_later(plan.answer_s, self._answer)
        else:
            self.transport.write(plan.whole)

    def _answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self.plan.whole)

    def connection_lost(self, exc) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.place is not None:
            self.place.discard(self)
            self.place = None

    def token(self) -> None:
        """The next event of the stream."""
        if self.transport.is_closing():
            return
        plan = self.plan
        if self.sent == plan.tokens:
            self._leave()
            self.transport.write(plan.last)
            return
        self.sent += 1
        if plan.stamp:
            word = bytearray(plan.stamped)
            word[plan.stamp_at : plan.stamp_at + 19] = b"%019d" % time.time_ns()
            self.transport.write(word)
        else:
            self.transport.write(plan.word)
        if self.pacer is None:
            self.loop.call_soon(self.token)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--token-ms", type=float, default=0.0)
    parser.add_argument("--answer-ms", type=float, default=0.0)
    parser.add_argument("--stamp", action="store_true")
    given = parser.parse_args()
    plan = Plan(given.tokens, given.token_ms / 1000, given.answer_ms / 1000, given.stamp)
    loop = asyncio.get_running_loop()
    pacer = Pacer(plan.token_s, loop) if plan.token_s else None
    await loop.create_server(lambda: Connection(plan, loop, pacer), "127.0.0.1", given.port, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
