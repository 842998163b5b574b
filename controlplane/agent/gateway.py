"""The HTTP front of the agent: a raw asyncio protocol with an httptools parser.

Keep-alive; pipelined requests are served one after the other; heads and bodies are bounded; a slow reader pauses its
own request and nobody else's; a client that goes away ends its request at once, one that only says that it sends no
more is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Final, Protocol, cast

import httptools

from controlplane.agent.answers import error_body
from controlplane.agent.call import Call
from controlplane.agent.http_exchange import HttpExchange
from controlplane.agent.http_status import STATUS_LINES
from controlplane.agent.known_heads import KnownHeads, cut
from controlplane.agent.open_ends import IdleShedder, Probing

log = logging.getLogger(__name__)

HEAD_BYTES_MAX: Final = 32 * 1024
BODY_BYTES_MAX: Final = 8 * 1024 * 1024
BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
"""Of all connections together, in bodies that have not arrived whole or wait behind another request."""
PIPELINED_MAX: Final = 8
HEAD_TIMEOUT_S: Final = 30.0
BODY_TIMEOUT_S: Final = 60.0
IDLE_TIMEOUT_S: Final = 75.0
SWEEP_S: Final = 5.0
WRITE_HIGH_WATER: Final = 256 * 1024
CONTENT_LENGTH_DIGITS: Final = 19
READ_HEADERS: Final = frozenset(
    {
        b"authorization", b"x-flexband-class", b"x-request-id", b"x-client-request-id", b"x-flexband-job",
        b"traceparent", b"accept", b"expect", b"content-length", b"connection", b"proxy-connection",
    }
)  # fmt: skip
"""All others pass by unread."""
METHODS: Final = {b"POST": "POST", b"GET": "GET"}
ONE_REQUESTS: Final = frozenset({b"x-request-id", b"x-client-request-id", b"traceparent", b"expect"})
"""Heads with these do not come again, or need the parser."""
KNOWN_HEADS_MAX: Final = 4_096
KNOWN_HEADS_OF_A_KEY_MAX: Final = 512
CLIENT_ID_CHARS: Final = 128
JOB_CHARS: Final = 45


class Application(Protocol):
    """What answers requests."""

    def handle(self, exchange: HttpExchange) -> None:
        """Answer now or later, through the exchange."""

    def client_gone(self, call: Call) -> None:
        """The connection of a request that is not answered yet is lost."""


class KnownRequest:
    """What a request's head says, for the next request with the same one."""

    __slots__ = ("accept", "asked_class", "bearer", "job", "method", "path")

    def __init__(self, exchange: HttpExchange) -> None:
        self.method = exchange.method
        self.path = exchange.path
        self.bearer = exchange.bearer
        self.asked_class = exchange.asked_class
        self.job = exchange.job
        self.accept = exchange.accept


class Connection(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_between", "_body", "_body_size", "_expects", "_front", "_head_size", "_held_bytes", "_last",
        "_names_connection", "_overrun", "_parser", "_queue", "_reading_paused", "_sent_all", "_unique", "_url",
        "current", "reading", "since_s", "transport", "write_paused",
    )  # fmt: skip

    transport: asyncio.Transport

    def __init__(self, front: HttpFront) -> None:
        self._front = front
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._queue: deque[HttpExchange] = deque()
        self._url = b""
        self._head_size = 0
        self._body: list[bytes] = []
        self._body_size = 0
        self._held_bytes = 0
        self._expects = False
        self._names_connection = False
        self._overrun = False
        self._reading_paused = False
        self._sent_all = False
        self._between = True
        """The parser has begun no message: what comes next is the start of one."""
        self._unique = False
        """The head of the message has what only it has."""
        self._last: HttpExchange | None = None
        self.write_paused = False
        """The client does not read: what is written stays in memory until it does."""
        self.reading: HttpExchange | None = None
        self.current: HttpExchange | None = None
        self.since_s = 0.0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self.since_s = self._front.loop.time()
        if not self._front.enter(self):
            self._refuse(503, "This server has too many connections. Retry shortly.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.connections.discard(self)
        self._front.held_bytes -= self._held_bytes
        # These and the connection hold each other: what is left of a body must not wait for the cycle collector.
        self._parser = self.reading = self._last = None
        self._body = []
        waiting = [self.current, *self._queue]
        self.current = None
        self._queue.clear()
        for exchange in waiting:
            if exchange is not None:
                exchange.connection = None
                call = exchange.call
                if call is not None:
                    self._front.application.client_gone(call)

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if self._overrun or parser is None:
            return
        whole = cut(data) if self._between else None
        if whole is not None:
            known = self._front.known.get(whole.head)
            if known is not None:
                self._take(known, data[whole.body_at :])
                return
        if self.reading is None and not self._url:
            self.since_s = self._front.loop.time()
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "This server does not switch protocols. Send plain HTTP/1.1, without upgrade.")
        except httptools.HttpParserCallbackError as error:
            if not self._overrun:
                raise error.__context__ or error from None
        except httptools.HttpParserError:
            self._refuse(400, "The request is not valid HTTP.")
        last, self._last = self._last, None
        if whole is not None and last is not None and not self._overrun:
            self._remember(whole.head, last)
        if self.reading is not None or self._held_bytes or self._queue:
            self._hold()

    def _remember(self, head: bytes, exchange: HttpExchange) -> None:
        """Keep what a head says for the next request with it. One that has a call has a key that is good."""
        call = exchange.call
        if call is not None and not exchange.done and not self._unique:
            self._front.known.put(head, KnownRequest(exchange), call.key.live.id)

    def _take(self, known: KnownRequest, body: bytes) -> None:
        """A whole request whose head is known."""
        exchange = HttpExchange(self, known.method, known.path)
        exchange.bearer = known.bearer
        exchange.asked_class = known.asked_class
        exchange.job = known.job
        exchange.accept = known.accept
        exchange.body = body
        exchange.keep_alive = not self._front.closing
        if self.current is None and not self._queue and not self.write_paused:
            self._begin(exchange)
        else:
            self._queue.append(exchange)
            self._steer_reading()
            self._hold()

    def eof_received(self) -> bool:
        """The client sends no more: it is gone, or waits for its answers. Says whether to keep the connection.

        What an HTTP/1.0 client asked for is ended: it knows neither interim answers nor chunks.
        """
        last = self._queue[-1] if self._queue else self.current
        if last is None or not last.chunked or self._overrun or self._front.closing:
            return False
        last.keep_alive = False
        if not self._sent_all:
            self._sent_all = True
            Probing(self.transport, lambda: self.current)
        return True

    def idle(self) -> bool:
        """Whether nothing is on its way here, in or out."""
        free = self.current is None and self.reading is None and not self._url and not self._queue
        return free and not self.transport.is_closing()

    def shut(self) -> None:
        """Close it now."""
        if self.write_paused:
            # To close it would wait for a client that does not read.
            self.transport.abort()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._steer("pause")
        self._steer_reading()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._steer("resume")
        if self.current is None and self._queue and not self.transport.is_closing():
            self._follow()
        self._steer_reading()

    def stream_begun(self) -> None:
        """A stream whose client stopped reading before it began: nobody else would tell its producer."""
        if self.write_paused:
            self._steer("pause")

    def _steer_reading(self) -> None:
        """Read no more requests than may wait, and none from a client that leaves its answers unread.

        While a request runs and none waits, reading goes on: that is how a client that goes away is noticed.
        """
        if self._sent_all:
            return
        unread = self.write_paused and (self.current is None or bool(self._queue))
        pause = unread or len(self._queue) >= PIPELINED_MAX
        if pause != self._reading_paused and not self.transport.is_closing():
            self._reading_paused = pause
            if pause:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _hold(self) -> None:
        """Count what waits here against what all connections may hold: nobody's key was looked at for it yet."""
        held = sum(len(exchange.body) for exchange in self._queue)
        if self.reading is not None:
            held += self._body_size
        self._front.held_bytes += held - self._held_bytes
        self._held_bytes = held
        if self._front.held_bytes > BODIES_BYTES_MAX and held:
            self._refuse(503, "This server holds too many bodies that are on their way. Retry shortly.")

    def _steer(self, action: str) -> None:
        call = self.current.call if self.current is not None else None
        attempt = call.attempt if call is not None else None
        if attempt is not None and attempt.run is not None:
            if action == "pause":
                attempt.run.pause()
            else:
                attempt.run.resume()

    # httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._head_size = self._body_size = 0
        self._body = []
        self._between = self._expects = self._names_connection = self._unique = False

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url
        self._head_size += len(url)
        if self._head_size > HEAD_BYTES_MAX:
            self._count_head(0)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value) + 4
        if self._head_size > HEAD_BYTES_MAX:
            self._count_head(0)
        if self._overrun:
            return
        exchange = self.reading
        if exchange is None:
            exchange = self.reading = HttpExchange(self, "", "")
        name = name.lower()
        if name not in READ_HEADERS:
            return
        if name in ONE_REQUESTS:
            self._unique = True
        if name == b"authorization":
            scheme, _, secret = value.partition(b" ")
            if scheme.lower() == b"bearer":
                exchange.bearer = secret.strip()
        elif name == b"x-flexband-class":
            exchange.asked_class = value.decode("latin-1").strip()
        elif name == b"x-request-id" or name == b"x-client-request-id":
            exchange.client_request_id = value.decode("latin-1").strip()[:CLIENT_ID_CHARS]
        elif name == b"x-flexband-job":
            exchange.job = value.decode("latin-1").strip()[:JOB_CHARS]
        elif name == b"traceparent":
            exchange.traceparent = value
        elif name == b"accept":
            exchange.accept = value
        elif name == b"expect":
            self._expects = value.lower() == b"100-continue"
        elif name == b"connection" or name == b"proxy-connection":
            self._names_connection = True
        elif name == b"content-length" and value.isdigit():
            if len(value) > CONTENT_LENGTH_DIGITS:
                self._refuse(400, "The content-length header is not a length.")
            elif int(value) > BODY_BYTES_MAX:
                self._refuse(413, f"The body is larger than {BODY_BYTES_MAX} bytes.")

    def on_headers_complete(self) -> None:
        if self._expects and not self._overrun:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._body_size > BODY_BYTES_MAX:
            self._refuse(413, f"The body is larger than {BODY_BYTES_MAX} bytes.")
        elif not self._overrun:
            self._body.append(body)

    def on_message_complete(self) -> None:
        parser = self._parser
        if self._overrun or parser is None:
            return
        exchange = self.reading or HttpExchange(self, "", "")
        self.reading = None
        method = parser.get_method()
        known = METHODS.get(method)
        if (self._names_connection or known is None) and parser.should_upgrade():
            # The parser leaves the body out and stops behind this: that is answered, and once.
            return
        exchange.method = known or method.decode("latin-1")
        exchange.path = (self._url.split(b"?", 1)[0] if b"?" in self._url else self._url).decode("latin-1")
        exchange.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        keeps = parser.should_keep_alive()
        # HTTP/1.0 stays open only where a header asks for it, so that the version has to be looked at for few.
        exchange.chunked = (keeps and not self._names_connection) or parser.get_http_version() != "1.0"
        # A stream to an HTTP/1.0 client ends with its connection.
        exchange.keep_alive = keeps and not self._front.closing and exchange.chunked
        self._url, self._body = b"", []
        self._between = True
        if known is not None and exchange.keep_alive:
            self._last = exchange
        if self.current is None and not self._queue and not self.write_paused:
            self._begin(exchange)
        else:
            self._queue.append(exchange)
            self._steer_reading()

    # the order of answers

    def _begin(self, exchange: HttpExchange) -> None:
        self.current = exchange
        try:
            self._front.application.handle(exchange)
        except Exception:
            log.exception("%s %s failed", exchange.method, exchange.path)
            exchange.keep_alive = False
            exchange.respond(500, error_body("This server made a mistake.", "server_error", "internal"))

    def answered(self, exchange: HttpExchange) -> None:
        """The answer of the current request is whole: the next one may begin once the client reads."""
        exchange.connection = None
        exchange.call = None
        self.current = None
        self.since_s = self._front.loop.time()
        if not exchange.keep_alive:
            self.transport.close()
            return
        if self._queue or self.write_paused or self._reading_paused:
            if self._queue and not self.write_paused:
                self._follow()
            self._steer_reading()

    def _follow(self) -> None:
        """Begin the next request, not from within the answer before it: a long pipeline is no deep stack."""
        following = self.current = self._queue.popleft()
        self._hold()
        self._front.loop.call_soon(self._resume, following)

    def _resume(self, exchange: HttpExchange) -> None:
        if exchange.connection is None or self.current is not exchange:
            return
        if self.write_paused:
            self.current = None
            self._queue.appendleft(exchange)
            self._steer_reading()
        else:
            self._begin(exchange)

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > HEAD_BYTES_MAX:
            self._refuse(431, f"The request's head is larger than {HEAD_BYTES_MAX} bytes.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is wrong with the connection itself and close it; what runs on it is cancelled by that."""
        if self._overrun:
            return
        self._overrun = True
        self._body = []
        if not self.transport.is_closing():
            if self.current is None:
                body = error_body(message, "invalid_request_error", None)
                self.transport.write(
                    b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                    % (STATUS_LINES[status], len(body), body)
                )
            self.transport.close()

    def too_slow(self, now_s: float) -> bool:
        """Whether the client takes too long to send its request, or has been idle for too long."""
        if self.current is not None:
            return False
        if self.reading is not None or self._url:
            return now_s - self.since_s > (BODY_TIMEOUT_S if self._body_size else HEAD_TIMEOUT_S)
        return now_s - self.since_s > IDLE_TIMEOUT_S


class HttpFront:
    """A listener and its connections."""

    def __init__(self, application: Application, *, connections_max: int = 8192) -> None:
        self.application = application
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.closing = False
        self.held_bytes = 0
        self.known: KnownHeads[KnownRequest] = KnownHeads(KNOWN_HEADS_MAX, KNOWN_HEADS_OF_A_KEY_MAX)
        self._connections_max = connections_max
        self._shedder = IdleShedder(self.connections)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def listen(self, host: str, port: int) -> int:
        """Bind and serve; returns the port (its number when 0 was asked for). Raises OSError."""
        self._server = await self.loop.create_server(lambda: Connection(self), host, port, backlog=1024)
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        # uvloop has a list where asyncio has a tuple, which compiled code would take amiss.
        server: Any = self._server
        return int(server.sockets[0].getsockname()[1])

    def enter(self, connection: Connection) -> bool:
        """Whether there is room for one more; in a full table the one that has been idle longest makes room."""
        self.connections.add(connection)
        return len(self.connections) <= self._connections_max or self._shedder.shed(connection, self.loop.time())

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        now_s = self.loop.time()
        for connection in list(self.connections):
            if connection.too_slow(now_s):
                connection.shut()

    def stop_accepting(self) -> None:
        """No new connections; idle ones are closed, running ones after their answer."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            if connection.current is None:
                connection.transport.close()
            else:
                connection.current.keep_alive = False

    async def close(self, within_s: float = 1.0) -> None:
        """Let answers drain, then close every connection."""
        self.stop_accepting()
        if self._sweeper is not None:
            self._sweeper.cancel()
        until = self.loop.time() + within_s
        while self.connections and self.loop.time() < until:
            await asyncio.sleep(0.02)
        for connection in list(self.connections):
            connection.transport.abort()
