"""A pass-through to any OpenAI-compatible server (vLLM, SGLang, llama.cpp) over keep-alive connections of our own.

The request carries an explicit output limit, `stream_options.include_usage` and, where asked for, `priority`; nothing
else of it changes, and nothing of the response does. Cancelling closes the upstream connection, which is how these
servers learn that nobody waits any more.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from controlplane.agent.api_body import body_for_upstream
from controlplane.agent.backends.base import Sink
from controlplane.agent.backends.one_shot_usage import one_shot_usage
from controlplane.agent.backends.request import BackendRequest, Failure, TokenUsage
from controlplane.agent.backends.sse import EventStream
from controlplane.agent.backends.upstream_connection import KNOWN_HEADS_MAX, KnownAnswer, UpstreamConnection
from controlplane.agent.backends.usage_reading import (
    Envelope,
    envelope_of,
    estimated_output,
    plain_usage,
    read_usage,
    token_usage,
)
from controlplane.agent.chunks import LINES_BY_READ, READS_KNOWN, SIZE_LINE_MAX, chunk, size_of
from controlplane.agent.errors import UsageError
from controlplane.agent.known_heads import KnownHeads
from controlplane.agent.one_shot_body import one_shot_for_upstream
from controlplane.wire.policy import PolicyDocument

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
END_AFTER_DONE_S: Final = 1.0
"""How long a server may keep a response open behind its `[DONE]`, which the client gets with the end."""
HEADS_KEPT: Final = 64
"""Clients may write a model's name in a tensor path in countless ways (`%61` is `a`): few of them are remembered."""
RETRYABLE_STATUS: Final = frozenset({502, 503})
NOT_THE_CLIENTS: Final = frozenset({401, 403, 407})
"""Statuses by which a server refuses the agent: the client's own key was good, so it is not told so."""
RETRY_AFTER: Final = re.compile(rb"[0-9A-Za-z ,:.]{1,40}")


class OpenAIBackend:
    """All slots share one upstream server; which slot runs what bounds how much it is given."""

    cancels_promptly = True
    batches_itself = False

    def __init__(self, url: str, *, send_priority: bool = False, as_they_are: bool = False) -> None:
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
        self.as_they_are = as_they_are
        """Bodies were made for the server already."""
        self.loop = asyncio.get_running_loop()
        self.idle: deque[UpstreamConnection] = deque()
        self.unreachable: Callable[[], None] = lambda: None
        """Told of every connect that failed."""
        self.heard = 0
        """Reads that brought something."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._heads: dict[tuple[str, bool], bytes] = {}
        """Heads up to the request's id, by path and whether it streams."""
        self.known: KnownHeads[KnownAnswer] = KnownHeads(KNOWN_HEADS_MAX)

    async def open(self) -> None:
        return None

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        while self.idle:
            self.idle.pop().transport.close()

    def reads(self) -> int:
        """Grows while the server sends: then it lives, however late it answers other questions."""
        return self.heard

    def take_policy(self, document: PolicyDocument) -> None:
        """The server is configured by its operator."""

    def set_slots(self, slots: dict[int, int]) -> None:
        """Slots bound what is sent; the server itself has no notion of them."""

    def count_prompt(self, serialised: bytes) -> int | None:
        return None

    def body_of(self, request: BackendRequest) -> bytes:
        """What is sent of a request."""
        if self.as_they_are:
            return request.body
        priority = request.priority if self.send_priority else None
        if request.one_shot:
            return one_shot_for_upstream(request.body, request.path, priority)
        return body_for_upstream(
            request.body,
            request.path,
            max_output_tokens=request.max_output_tokens,
            stream=request.stream,
            usage_wanted=request.wants_usage,
            priority=priority,
        )

    def start(self, request: BackendRequest, sink: Sink) -> UpstreamRun:
        run, idle = UpstreamRun(self, request, sink), self.idle
        while idle:
            # The one used last is the least likely to have been closed by the server.
            connection = idle.pop()
            if not connection.transport.is_closing():
                connection.send(run)
                return run
        self.connect(run)
        return run

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
            self.unreachable()
            if not run.ended:
                run.ended = True
                # Without the address, which is the operator's and not the client's.
                why = os.strerror(error.errno) if error.errno else "timeout"
                run.sink.failed(Failure(f"the inference server cannot be reached: {why}", True))
            return
        if run.ended:
            connection.release()
        else:
            connection.fresh = True
            connection.send(run)

    def message(self, request: BackendRequest, body: bytes) -> bytes:
        """A request as it is sent."""
        head = self._heads.get((request.path, request.stream))
        if head is None:
            if len(self._heads) >= HEADS_KEPT:
                self._heads.clear()
            head = self._heads[request.path, request.stream] = (
                b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\naccept: %b\r\nx-request-id: "
                % (
                    (self.prefix + request.path).encode(),
                    self.host_header,
                    b"text/event-stream" if request.stream else b"application/json",
                )
            )
        return b"%b%b\r\n%bcontent-length: %d\r\n\r\n%b" % (
            head,
            request.request_id.encode(),
            b"traceparent: %b\r\n" % request.traceparent if request.traceparent else b"",
            len(body),
            body,
        )


class UpstreamRun:
    """One attempt on the upstream server."""

    __slots__ = (
        "backend",
        "connection",
        "content_type",
        "done_timer",
        "ended",
        "events",
        "parts",
        "request",
        "resent",
        "retry_after",
        "sink",
        "size",
        "status",
        "streams",
        "told",
    )

    def __init__(self, backend: OpenAIBackend, request: BackendRequest, sink: Sink) -> None:
        self.backend = backend
        self.request = request
        self.sink = sink
        self.connection: UpstreamConnection | None = None
        self.ended = False
        self.resent = False
        self.status = 0
        self.streams = False
        """Known with the head of the response: its body is a stream of events."""
        self.content_type = b""
        self.retry_after = b""
        self.done_timer: asyncio.TimerHandle | None = None
        self.size = 0
        self.parts: list[bytes] = []
        self.told = 0
        """Events with output that the sink knows of."""
        self.events: EventStream | None = EventStream(hide_usage=not request.wants_usage) if request.stream else None

    def body(self) -> bytes:
        return self.backend.body_of(self.request)

    def cancel(self) -> None:
        self.ended = True
        if self.done_timer is not None:
            self.done_timer.cancel()
        if self.connection is not None:
            self.connection.transport.abort()

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()

    def usage_so_far(self) -> TokenUsage | None:
        """A total as it stands; a count that goes with each chunk is one choice's where a request has several."""
        events = self.events
        usage = None if events is None else events.usage
        if events is None or usage is None:
            return None
        told = token_usage(usage, prompt_tokens=self.request.prompt_tokens, output_tokens=events.tokens)
        if events.is_total or self.request.n == 1:
            return told
        output = max(told.output_tokens, events.tokens)
        return TokenUsage(told.prompt_tokens, told.cached_tokens, output, estimated=True)

    def repeated(self, data: bytes) -> int:
        """How much of a read that begins with a chunk are whole chunks of one event each like the event before.

        They pass as they are, in their framing; if that is all of the read, they are handed on here.
        """
        events, at, end = self.events, 0, len(data)
        if events is None or self.ended:
            return 0
        line_of_one = LINES_BY_READ[end] if end < READS_KNOWN else b""
        begin = len(line_of_one)
        if begin and data[:begin] == line_of_one and data[-2:] == b"\r\n" and events.repeats(data, begin, end - 2):
            # A read is one chunk nearly always, and then its length alone says how it begins.
            at = end
        while at < end:
            line = data.find(b"\r\n", at, at + SIZE_LINE_MAX)
            size = size_of(data[at:line]) if line > at else 0
            behind = line + 2 + size
            if not size or not data.startswith(b"\r\n", behind) or not events.repeats(data, line + 2, behind):
                return at
            at = behind + 2
        tokens = events.tokens - self.told
        self.told = events.tokens
        self.sink.chunk(data, tokens, framed=True)
        return at

    def took(self, data: bytes, ahead: bytes = b"") -> None:
        """Bytes of the response's body; `ahead` are the chunks before them that were found to repeat."""
        if self.ended:
            return
        events = self.events
        if not self.streams or events is None:
            self.size += len(data)
            if self.size > ANSWER_BYTES_MAX:
                self.broke(f"the answer is larger than {ANSWER_BYTES_MAX} bytes")
            else:
                self.parts.append(data)
            return
        try:
            passed = events.feed(data) if data else b""
        except ValueError as error:
            self.broke(str(error))
            return
        tokens = events.tokens - self.told
        self.told = events.tokens
        if ahead:
            self.sink.chunk(ahead + chunk(passed), tokens, framed=True)
        elif passed:
            self.sink.chunk(passed, tokens)
        if events.done and self.done_timer is None and not self.ended:
            self.done_timer = self.backend.loop.call_later(END_AFTER_DONE_S, self._end_after_done)

    def _end_after_done(self) -> None:
        connection = self.connection
        self.complete()
        if connection is not None:
            connection.transport.abort()

    def complete(self) -> None:
        """The response is whole."""
        if self.done_timer is not None:
            self.done_timer.cancel()
        if self.ended:
            return
        self.ended = True
        if self.streams and self.events is not None:
            self._stream_ended(self.events)
            return
        parts = self.parts
        self._whole(parts[0] if len(parts) == 1 else b"".join(parts))

    def answered(self, known: KnownAnswer, body: bytes) -> None:
        """The response came whole in one read, with a head that is known."""
        if not self.ended:
            self.ended = True
            self.status, self.content_type = 200, known.content_type
            self._whole(body)

    def _whole(self, body: bytes) -> None:
        """A response that is not a stream of events."""
        request = self.request
        if self.status == 200 and not request.stream and not request.one_shot:
            told = plain_usage(body)
            if told is not None:
                self.sink.finished(told, body)
                return
        if self.status != 200:
            self.sink.failed(self._refusal(body))
            return
        envelope = envelope_of(body)
        if envelope is not None and envelope.has_error:
            detail, status = "the inference server answered 200 with an error", envelope.error_status
            self.sink.failed(Failure(detail, False, status, body, self.content_type))
        elif request.stream:
            self.sink.failed(Failure("the inference server did not stream its answer", False))
        else:
            self.sink.finished(self._usage(body, envelope), body)

    def _stream_ended(self, events: EventStream) -> None:
        try:
            rest = events.finish()
        except ValueError as error:
            self.sink.failed(Failure(str(error), False))
            return
        if events.error:
            self.sink.failed(Failure("the inference server told an error in its stream", False, body=rest, told=True))
        elif events.complete:
            usage = self.usage_so_far()
            if usage is None:
                usage = token_usage(None, prompt_tokens=self.request.prompt_tokens, output_tokens=events.tokens)
            self.sink.finished(usage, rest)
        else:
            self.sink.failed(Failure("the inference server ended its stream before it was whole", False))

    def _refusal(self, body: bytes) -> Failure:
        """A status that is not 200: the client's own mistakes pass, with when to come again."""
        status, detail = self.status, f"the inference server answered {self.status}"
        if status in NOT_THE_CLIENTS:
            return Failure(f"{detail}: it does not take requests of this agent", False)
        retry_after = self.retry_after if RETRY_AFTER.fullmatch(self.retry_after) else b""
        # A server that names a time is not asked again before it.
        retryable = status in RETRYABLE_STATUS and not retry_after
        passed = status if 400 <= status < 500 else 502
        return Failure(detail, retryable, passed, body, self.content_type or b"application/json", retry_after)

    def _usage(self, body: bytes, envelope: Envelope | None) -> TokenUsage:
        request = self.request
        if request.one_shot:
            return one_shot_usage(request, body)
        usage = read_usage(envelope.usage) if envelope is not None and envelope.has_usage else None
        counted = 0 if usage is not None and usage.completion_tokens is not None else self._estimated_output(body)
        return token_usage(usage, prompt_tokens=request.prompt_tokens, output_tokens=counted)

    def _estimated_output(self, body: bytes) -> int:
        return estimated_output(body, most=self.request.n * self.request.max_output_tokens)

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
