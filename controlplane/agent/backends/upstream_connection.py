"""One keep-alive connection to an inference server, and how its answers are read."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final, cast

import httptools

from controlplane.agent.known_heads import cut

if TYPE_CHECKING:
    from controlplane.agent.backends.openai import OpenAIBackend, UpstreamRun

IDLE_MAX: Final = 256
HEAD_BYTES_MAX: Final = 64 * 1024
KNOWN_HEADS_MAX: Final = 256
MANY_STREAMS: Final = 500
"""So many at once: what the kernel does for each of their events is worth less of it."""
PUT_OFF_EVERY: Final = 16
"""Events of a stream after which the kernel is told again to put its acknowledgements off."""
TCP_QUICKACK: Final = int(getattr(socket, "TCP_QUICKACK", 0))
"""0 where the system has no such option: it is Linux's."""


class KnownAnswer:
    """What the head of a whole answer with status 200 says, for the next answer with the same one."""

    __slots__ = ("content_type",)

    def __init__(self, content_type: bytes) -> None:
        self.content_type = content_type


class UpstreamConnection(asyncio.Protocol):
    """One keep-alive connection; it carries one request at a time."""

    transport: asyncio.Transport

    def __init__(self, backend: OpenAIBackend) -> None:
        self._backend = backend
        self._parser: httptools.HttpResponseParser | None = None
        """Made for an answer whose head is not known."""
        self._run: UpstreamRun | None = None
        self._head_left = 0
        self._until_close = False
        self._whole = self._keep = False
        self._parts: list[bytes] = []
        """What the present read holds of the body: a stream's events of one read pass as one."""
        self._between = False
        """The parser stands between two chunks of a stream: what comes next is the size of one."""
        self._paused = False
        self._repeats = self._heard = 0
        """Events of the stream that passed unparsed since acknowledgements were put off, and what the server had been
        heard saying then."""
        self.fresh = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def send(self, run: UpstreamRun) -> None:
        self._run = run
        run.connection = self
        self._parser = None
        self._repeats, self._heard = 0, self._backend.heard
        self._head_left, self._until_close, self._whole, self._between = HEAD_BYTES_MAX, True, False, False
        self.transport.write(self._backend.message(run.request, run.body()))
        run.sink.prefill_began()

    def release(self) -> None:
        """Back among the idle ones, reading again: a slow client may have paused it with its last bytes."""
        self._run = None
        self.fresh = False
        if self.transport.is_closing() or len(self._backend.idle) >= IDLE_MAX:
            self.transport.close()
        else:
            if self._paused:
                self.resume()
            self._backend.idle.append(self)

    def pause(self) -> None:
        self._paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        run = self._run
        if run is None:
            # Nothing was asked: whatever this is, it must not become the answer to the next request.
            self.transport.abort()
            return
        backend, parser = self._backend, self._parser
        backend.heard += 1
        # The parser need not see whole chunks that it would only hand on.
        seen = run.repeated(data) if self._between else 0
        if seen == len(data):
            self._repeats += 1
            if self._repeats >= PUT_OFF_EVERY:
                self._put_acknowledgements_off()
            return
        whole = cut(data) if parser is None else None
        if whole is not None:
            known = backend.known.get(whole.head)
            if known is not None:
                self._run = run.connection = None
                self.release()
                run.answered(known, data[whole.body_at :])
                return
        if parser is None:
            parser = self._parser = httptools.HttpResponseParser(self)
        broken = ""
        try:
            parser.feed_data(data[seen:] if seen else data)
        except httptools.HttpParserUpgrade:
            broken = "the inference server switched protocols"
        except httptools.HttpParserError as error:
            if self._whole:
                self._keep = False
            else:
                broken = f"the inference server's answer is not HTTP: {error}"
        parts = self._parts
        self._between = False
        if parts:
            self._parts = []
            # Line ends that do not belong to a body end its chunk.
            self._between = run.streams and data.endswith(b"\n\n\r\n") and parts[-1].endswith(b"\n\n")
            run.took(parts[0] if len(parts) == 1 else b"".join(parts), data[:seen])
        elif seen:
            run.took(b"", data[:seen])
        if broken:
            self._broken(broken)
        if self._whole:
            if whole is not None and self._keep and self._run is not None and is_plain(self._run):
                backend.known.put(whole.head, KnownAnswer(self._run.content_type))
            self._finish()
        elif self._head_left:
            self._head_left -= len(data)
            if self._head_left <= 0:
                self._broken(f"the head of the inference server's answer is larger than {HEAD_BYTES_MAX} bytes")

    def _put_acknowledgements_off(self) -> None:
        """One for two events, not one for each, while there are many streams: sending it is a fifth of what they cost.

        Linux sends one whenever an event was read that left nothing behind, unless a connection seems to be one where
        an answer follows that can carry it; and it gives that up once the next event takes longer than 40 ms.
        """
        heard = self._backend.heard
        many = heard - self._heard >= MANY_STREAMS * PUT_OFF_EVERY
        self._heard, self._repeats = heard, 0
        if many and TCP_QUICKACK and not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, TCP_QUICKACK, 0)

    def _finish(self) -> None:
        """The response is whole; only now may the connection carry another one."""
        run, self._run = self._run, None
        if run is not None:
            run.connection = None
        if self._keep:
            self.release()
        else:
            self.transport.close()
        if run is not None:
            run.complete()

    def _broken(self, detail: str) -> None:
        run, self._run = self._run, None
        self.transport.abort()
        if run is not None:
            run.broke(detail)

    def connection_lost(self, exc: Exception | None) -> None:
        run, self._run = self._run, None
        if self in self._backend.idle:
            self._backend.idle.remove(self)
        if run is None:
            return
        run.connection = None
        if exc is None and run.status and self._until_close:
            run.complete()
        else:
            run.lost(fresh=self.fresh)

    # httptools

    def on_message_begin(self) -> None:
        if self._whole:
            # More than was asked for.
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        run = self._run
        if run is None or self._whole or run.status:
            return
        name = name.lower()
        if name == b"content-type":
            run.content_type = value.lower()
        elif name == b"content-length" or name == b"transfer-encoding":
            self._until_close = False
        elif name == b"retry-after":
            run.retry_after = value.strip()

    def on_headers_complete(self) -> None:
        parser = self._parser
        status = 0 if parser is None else parser.get_status_code()
        if self._run is not None and not self._whole and status >= 200:
            run = self._run
            run.status = status
            run.streams = run.request.stream and status == 200 and not run.content_type.startswith(b"application/json")
            self._head_left = 0

    def on_body(self, body: bytes) -> None:
        if self._run is not None and not self._whole:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        parser = self._parser
        if self._run is not None and not self._whole and self._run.status and parser is not None:
            # What is interim (100, 103) is no answer.
            self._whole, self._keep = True, parser.should_keep_alive()


def is_plain(run: UpstreamRun) -> bool:
    """Whether a response is a whole answer as it should be: its head tells nothing else."""
    json = run.content_type.startswith(b"application/json")
    return run.status == 200 and json and not run.request.stream and not run.retry_after
