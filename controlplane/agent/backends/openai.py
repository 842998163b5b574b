"""A pass-through to any OpenAI-compatible server (vLLM, SGLang, llama.cpp) over keep-alive connections of our own.

The request carries an explicit output limit, `stream_options.include_usage` and, where asked for, `priority`; nothing
else of it changes, and nothing of the response does. Cancelling closes the upstream connection, which is how these
servers learn that nobody waits any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from controlplane.agent.api_body import body_for_upstream
from controlplane.agent.backends.base import BackendRequest, Failure, Sink, TokenUsage
from controlplane.agent.backends.sse import EventStream, usage_of
from controlplane.agent.errors import UsageError

IDLE_MAX: Final = 256
CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
RETRYABLE_STATUS: Final = frozenset({502, 503})


class OpenAIBackend:
    """All slots share one upstream server; which slot runs what bounds how much it is given."""

    cancels_promptly = True

    def __init__(self, url: str, *, send_priority: bool = False) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"the upstream must be http://HOST:PORT, not {url!r}")
        self.host = parts.hostname
        self.port = parts.port or 80
        self.prefix = parts.path.rstrip("/")
        if self.prefix.endswith("/v1"):
            self.prefix = self.prefix[:-3]
        self.host_header = parts.netloc.rsplit("@", 1)[-1].encode()
        self.send_priority = send_priority
        self.loop = asyncio.get_running_loop()
        self.idle: deque[UpstreamConnection] = deque()
        self.tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        return None

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        while self.idle:
            self.idle.pop().transport.close()

    def set_slots(self, slots: dict[int, int]) -> None:
        """Slots bound what is sent; the server itself has no notion of them."""

    def count_prompt(self, serialised: bytes) -> int | None:
        return None

    def start(self, request: BackendRequest, sink: Sink) -> UpstreamRun:
        run = UpstreamRun(self, request, sink)
        connection = self._idle_connection()
        if connection is not None:
            connection.send(run)
        else:
            self.connect(run)
        return run

    def _idle_connection(self) -> UpstreamConnection | None:
        """The one used last: it is the least likely to have been closed by the server."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def connect(self, run: UpstreamRun) -> None:
        task = self.loop.create_task(self._connect(run))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _connect(self, run: UpstreamRun) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await self.loop.create_connection(
                    lambda: UpstreamConnection(self), self.host, self.port
                )
        except (OSError, TimeoutError) as error:
            if not run.ended:
                run.ended = True
                run.sink.failed(Failure(f"{self.host}:{self.port} cannot be reached: {error or 'timeout'}", True))
            return
        if run.ended:
            connection.release()
        else:
            connection.fresh = True
            connection.send(run)

    def head_of(self, run: UpstreamRun, size: int) -> bytes:
        request = run.request
        return (
            b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\naccept: %b\r\n"
            b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n"
            % (
                (self.prefix + request.path).encode(),
                self.host_header,
                b"text/event-stream" if request.stream else b"application/json",
                request.request_id.encode(),
                size,
            )
        )


class UpstreamRun:
    """One attempt on the upstream server."""

    __slots__ = (
        "backend",
        "connection",
        "ended",
        "events",
        "output_tokens",
        "parts",
        "request",
        "resent",
        "sink",
        "size",
        "status",
    )

    def __init__(self, backend: OpenAIBackend, request: BackendRequest, sink: Sink) -> None:
        self.backend = backend
        self.request = request
        self.sink = sink
        self.connection: UpstreamConnection | None = None
        self.ended = False
        self.resent = False
        self.status = 0
        self.size = 0
        self.parts: list[bytes] = []
        self.output_tokens = 0
        self.events = EventStream(hide_usage=not request.wants_usage)

    def body(self) -> bytes:
        request = self.request
        return body_for_upstream(
            request.body,
            request.path,
            max_output_tokens=request.max_output_tokens,
            stream=request.stream,
            usage_wanted=request.wants_usage,
            priority=request.priority if self.backend.send_priority else None,
        )

    def cancel(self) -> None:
        self.ended = True
        if self.connection is not None:
            self.connection.transport.abort()

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.transport.resume_reading()

    @property
    def streams(self) -> bool:
        return self.request.stream and self.status == 200

    def took(self, data: bytes) -> None:
        """Bytes of the response's body."""
        if self.ended:
            return
        if not self.streams:
            self.size += len(data)
            if self.size > ANSWER_BYTES_MAX:
                self.broke(f"the answer is larger than {ANSWER_BYTES_MAX} bytes")
            else:
                self.parts.append(data)
            return
        try:
            passed = self.events.feed(data)
        except ValueError as error:
            self.broke(str(error))
            return
        if passed.data:
            self.output_tokens += passed.tokens
            self.sink.chunk(passed.data, passed.tokens)

    def complete(self, content_type: bytes) -> None:
        """The response is whole."""
        if self.ended:
            return
        self.ended = True
        if self.streams:
            self.sink.finished(self._stream_usage(), self.events.finish())
            return
        body = b"".join(self.parts)
        if self.status == 200:
            self.sink.finished(self._usage(body), body)
        else:
            detail = f"the inference server answered {self.status}"
            retryable = self.status in RETRYABLE_STATUS
            self.sink.failed(Failure(detail, retryable, self.status if self.status < 500 else 502, body, content_type))

    def _stream_usage(self) -> TokenUsage:
        usage = self.events.usage
        if usage is None:
            return TokenUsage(self.request.prompt_tokens, 0, self.output_tokens, estimated=True)
        return TokenUsage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def _usage(self, body: bytes) -> TokenUsage:
        usage = usage_of(body)
        if usage is None:
            return TokenUsage(self.request.prompt_tokens, 0, max(1, len(body) // 4), estimated=True)
        return TokenUsage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def broke(self, detail: str, *, retryable: bool = False) -> None:
        """The response cannot be used."""
        if not self.ended:
            self.ended = True
            if self.connection is not None:
                self.connection.transport.abort()
            self.sink.failed(Failure(detail, retryable))

    def lost(self, *, fresh: bool) -> None:
        """The connection ended before the response was whole."""
        if self.ended:
            return
        if not self.status and not fresh and not self.resent:
            # A kept connection that the server had closed meanwhile: the request was not looked at.
            self.resent = True
            self.connection = None
            self.backend.connect(self)
            return
        self.broke("the inference server closed the connection", retryable=not self.status)


class UpstreamConnection(asyncio.Protocol):
    """One keep-alive connection; it carries one request at a time."""

    transport: asyncio.Transport

    def __init__(self, backend: OpenAIBackend) -> None:
        self._backend = backend
        self._parser = httptools.HttpResponseParser(self)
        self._content_type = b"application/json"
        self._run: UpstreamRun | None = None
        self.fresh = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def send(self, run: UpstreamRun) -> None:
        self._run = run
        run.connection = self
        self._parser = httptools.HttpResponseParser(self)
        body = run.body()
        self.transport.write(self._backend.head_of(run, len(body)) + body)
        self._backend.loop.call_soon(run.sink.prefill_began)

    def release(self) -> None:
        """Back among the idle ones."""
        self._run = None
        self.fresh = False
        if self.transport.is_closing() or len(self._backend.idle) >= IDLE_MAX:
            self.transport.close()
        else:
            self._backend.idle.append(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            run, self._run = self._run, None
            self.transport.abort()
            if run is not None:
                run.broke(f"the inference server's answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        run, self._run = self._run, None
        if self in self._backend.idle:
            self._backend.idle.remove(self)
        if run is not None:
            run.lost(fresh=self.fresh)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._content_type = value

    def on_headers_complete(self) -> None:
        if self._run is not None:
            self._run.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._run is not None:
            self._run.took(body)

    def on_message_complete(self) -> None:
        run = self._run
        if run is None:
            return
        keep = self._parser.should_keep_alive()
        self._run = None
        run.connection = None
        if keep:
            self.release()
        else:
            self.transport.close()
        run.complete(self._content_type)
