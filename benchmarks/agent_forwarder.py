"""The agent's gateway and backend without a decision between them: what the decision costs is the rest.

python -m benchmarks.agent_forwarder PORT UPSTREAM
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from controlplane.agent.api_body import read_body
from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.backends.request import BackendRequest, Failure, TokenUsage
from controlplane.agent.call import Call
from controlplane.agent.clock import Clock
from controlplane.agent.gateway import HttpFront
from controlplane.agent.http_exchange import HttpExchange
from controlplane.agent.request_ids import new_request_id


class Forwarded:
    """A request on its way."""

    __slots__ = ("begun", "exchange")

    def __init__(self, exchange: HttpExchange) -> None:
        self.exchange = exchange
        self.begun = False

    def prefill_began(self) -> None: ...

    def chunk(self, data: bytes, tokens: int, *, framed: bool = False) -> None:
        if framed:
            self.exchange.write_chunks(data)
        elif self.begun:
            self.exchange.write(data)
        else:
            self.begun = True
            self.exchange.begin_stream(b"", data)

    def finished(self, usage: TokenUsage, body: bytes) -> None:
        if self.begun:
            self.exchange.end_stream(body)
        else:
            self.exchange.respond(200, body)

    def failed(self, failure: Failure) -> None:
        self.exchange.respond(failure.status, failure.body or failure.detail.encode())


class Forwarder:
    """Reads what the agent reads of a request, and sends it on."""

    def __init__(self, upstream: str) -> None:
        self.backend = OpenAIBackend(upstream)
        self.clock = Clock()

    def handle(self, exchange: HttpExchange) -> None:
        parsed = read_body(exchange.body, exchange.path)
        self.backend.start(
            BackendRequest(
                new_request_id(self.clock.now_us()),
                exchange.path,
                exchange.body,
                parsed.model,
                1,
                bool(parsed.stream),
                parsed.stream_options is not None and bool(parsed.stream_options.include_usage),
                0,
                parsed.max_tokens or 64,
                parsed.n or 1,
                0,
            ),
            Forwarded(exchange),
        )

    def client_gone(self, call: Call) -> None:
        """The load of a benchmark stays to the end."""


async def main(port: int, upstream: str) -> None:
    await HttpFront(Forwarder(upstream)).listen("127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
