"""One request of a client's connection and the answer to it, whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from controlplane.agent.chunks import chunk, unchunked
from controlplane.agent.http_status import STATUS_LINES

if TYPE_CHECKING:
    from controlplane.agent.call import Call
    from controlplane.agent.gateway import Connection


class HttpExchange:
    """One request and its answer (`call.Exchange`)."""

    __slots__ = (
        "accept", "asked_class", "bearer", "body", "call", "chunked", "client_request_id", "connection", "done",
        "error_form", "job", "keep_alive", "method", "path", "streaming", "traceparent", "zeros",
    )  # fmt: skip

    def __init__(self, connection: Connection, method: str, path: str) -> None:
        self.connection: Connection | None = connection
        self.method = method
        self.path = path
        self.body = b""
        self.bearer = b""
        self.asked_class = ""
        self.job = ""
        self.client_request_id = ""
        self.traceparent = self.accept = b""
        self.keep_alive = True
        self.chunked = True
        self.streaming = False
        self.zeros = 0
        self.done = False
        self.call: Call | None = None
        self.error_form: Callable[[bytes], bytes] | None = None
        """Makes an error's body over for clients of a protocol that has a form of its own."""

    def respond(
        self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json"
    ) -> None:
        connection = self.connection
        if connection is None or self.done:
            return
        self.done = True
        if status >= 400 and self.error_form is not None:
            body = self.error_form(body)
        connection.transport.write(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b"
            % (
                STATUS_LINES[status],
                content_type,
                len(body),
                headers,
                b"" if self.keep_alive else b"connection: close\r\n",
                b"" if self.method == "HEAD" else body,
            )
        )
        connection.answered(self)

    def begin_stream(self, headers: bytes, data: bytes) -> None:
        connection = self.connection
        if connection is None or self.done or self.streaming:
            return
        self.streaming = True
        connection.transport.write(
            b"%bcontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
            b"%b%b%b\r\n%b"
            % (
                STATUS_LINES[200],
                b"transfer-encoding: chunked\r\n" if self.chunked else b"",
                headers,
                b"" if self.keep_alive else b"connection: close\r\n",
                chunk(data) if self.chunked else data,
            )
        )
        connection.stream_begun()

    def write(self, data: bytes) -> None:
        if data and self.connection is not None and not self.done:
            self.zeros = 0
            self.connection.transport.write(chunk(data) if self.chunked else data)

    def write_chunks(self, chunks: bytes) -> None:
        if self.connection is not None and not self.done:
            self.zeros = 0
            self.connection.transport.write(chunks if self.chunked else unchunked(chunks))

    def end_stream(self, data: bytes, *, close: bool = False) -> None:
        connection = self.connection
        if connection is None or self.done:
            return
        self.done = True
        last = chunk(data) + b"0\r\n\r\n" if self.chunked else data
        if last:
            connection.transport.write(last)
        if close:
            self.keep_alive = False
        connection.answered(self)
