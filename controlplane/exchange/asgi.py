"""The agents' door beside Django: routes `/agent/v1/*` itself, bounds every body and wait, knows no middleware."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psycopg
from django.conf import settings
from django.db import OperationalError

from controlplane.core.period import from_us, to_us
from controlplane.exchange.authentication import Caller, Headers, authenticate
from controlplane.exchange.body_room import BodyRoom, Held
from controlplane.exchange.handlers import Handlers
from controlplane.exchange.problems import Refusal, Reply, fault, problem_reply
from controlplane.exchange.reports import PATH, Arrived

log = logging.getLogger(__name__)

PREFIX = "/agent/v1/"
POLICY_PREFIX = PREFIX + "policy/"
SMALL_BODY_BYTES = 64 * 1024
READ_TIMEOUT_S = 30.0
WORK_TIMEOUT_S = 30.0

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
# Frameworks type what passes through `receive` and `send` each in their own way.
Application = Callable[[Scope, Any, Any], Awaitable[None]]


class ExchangeApplication:
    """An ASGI application for agents; every other path goes to `fallback`."""

    def __init__(self, fallback: Application, handlers: Handlers | None = None) -> None:
        self._fallback = fallback
        self._handlers = handlers
        self._tasks: set[asyncio.Task[Reply]] = set()
        self.room = BodyRoom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._fallback(scope, receive, send)
            return
        reply = await self._handle(scope, receive)
        headers = [
            *reply.headers,
            (b"content-length", str(len(reply.body)).encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    def take_report(self, arrived: Arrived, done: Callable[[Reply], None]) -> None:
        """A whole report on its short way; `done` is called with the reply, on the event loop."""
        self.handlers.offer(arrived, partial(self._taken, arrived, done))

    def policy_at_hand(self, path: str, headers: Headers) -> Reply | None:
        """The answer to a pull of a policy on its short way; None where it has to take the long one."""
        try:
            return self.handlers.policy_at_hand(path, path.removeprefix(POLICY_PREFIX), headers)
        except Refusal as refusal:
            return problem_reply(refusal.problem)
        except Exception as error:
            log.error("GET %s failed on its short way", path, exc_info=error)
            return None

    def _taken(self, arrived: Arrived, done: Callable[[Reply], None], reply: Reply | None) -> None:
        if reply is not None:
            done(reply)
            return
        task = asyncio.get_running_loop().create_task(self._guarded("POST", PATH, self._long_way(arrived)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: None if task.cancelled() else done(task.result()))

    async def _long_way(self, arrived: Arrived) -> Reply:
        return await self._signed("report", PATH, arrived.headers, arrived.body, from_us(arrived.received_us))

    @property
    def handlers(self) -> Handlers:
        """Made when the first request comes: threads and connections belong to the process that serves."""
        if self._handlers is None:
            self._handlers = Handlers()
        return self._handlers

    async def _handle(self, scope: Scope, receive: Receive) -> Reply:
        return await self._guarded(scope["method"], scope["path"], self._route(scope, receive))

    async def _guarded(self, method: str, path: str, answering: Coroutine[Any, Any, Reply]) -> Reply:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S + WORK_TIMEOUT_S):
                return await answering
        except Refusal as refusal:
            return problem_reply(refusal.problem)
        except (psycopg.OperationalError, OperationalError, TimeoutError) as error:
            log.warning("%s %s: not done in time or without the database: %s", method, path, error)
            return problem_reply(Refusal("busy", "The control plane cannot do this now. Try again.").problem)
        except Exception as error:
            log.error("%s %s failed", method, path, exc_info=error)
            return problem_reply(fault().problem)

    async def _route(self, scope: Scope, receive: Receive) -> Reply:
        method, path = scope["method"], scope["path"]
        headers: Headers = dict(scope["headers"])
        name = path[len(PREFIX) :]
        if method == "GET" and path.startswith(POLICY_PREFIX):
            caller = await self._caller(method, path, headers, b"")
            digest = path.removeprefix(POLICY_PREFIX)
            return await self.handlers.policy(caller, digest, headers.get(b"if-none-match", b""))
        if name not in ("enrol", "hello", "report", "lease", "key"):
            raise Refusal("not_found", "Agents use enrol, hello, report, lease, key and policy/<digest>.")
        if method != "POST":
            raise Refusal("not_found", f"Use POST for {path}.", status=405)
        limit = _limit(name)
        with self.room.hold() as held:
            sent = await _read_body(receive, headers, limit, held)
            received = datetime.now(UTC)
            if name == "enrol":
                return await self.handlers.enrol(_unpacked(sent, headers, limit))
            return await self._signed(name, path, headers, sent, received)

    async def _signed(self, name: str, path: str, headers: Headers, sent: bytes, received: datetime) -> Reply:
        handlers = self.handlers
        digest = hashlib.sha256(sent).digest()
        caller = await self._caller("POST", path, headers, sent, digest)
        body = _unpacked(sent, headers, _limit(name))
        if name == "report":
            if body is not sent:
                digest = hashlib.sha256(body).digest()
            return await handlers.report(caller, body, headers, digest, received)
        handler = {"hello": handlers.hello, "lease": handlers.lease, "key": handlers.key}[name]
        return await handler(caller, body)

    async def _caller(
        self, method: str, path: str, headers: Headers, body: bytes, digest: bytes | None = None
    ) -> Caller:
        return await authenticate(
            self.handlers.directory,
            method=method,
            path=path,
            headers=headers,
            body=body,
            digest=digest,
            now_us=to_us(datetime.now(UTC)),
        )


def _limit(name: str) -> int:
    """The most bytes of a body."""
    return int(settings.REPORT_BODY_LIMIT_BYTES) if name == "report" else SMALL_BODY_BYTES


async def _read_body(receive: Receive, headers: Headers, limit: int, held: Held) -> bytes:
    """The body as sent.

    Raises Refusal: too_large as soon as it is known, busy where there is no room, unreadable when it stalls or breaks
    off.
    """
    declared = headers.get(b"content-length", b"0")
    if not declared.isdigit() or int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal("unreadable", "The connection ended inside the body.")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    held.whole(size)
                    return b"".join(parts)
                held.arriving(size)
    except TimeoutError:
        raise Refusal("unreadable", f"The body did not arrive within {READ_TIMEOUT_S:.0f} s.", status=408) from None


def _unpacked(body: bytes, headers: Headers, limit: int) -> bytes:
    """The body without its gzip coding. Raises Refusal: too_large when it unpacks to more than `limit`, unreadable."""
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding in (b"identity", b""):
        return body
    if coding != b"gzip":
        raise Refusal("unreadable", "Send the body plain or with content-encoding gzip.", status=415)
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise Refusal("unreadable", f"The body is not gzip: {error}") from None
    if len(plain) > limit:
        raise _too_large(limit)
    if not unpacker.eof:
        raise Refusal("unreadable", "The gzip body breaks off.")
    return plain


def _too_large(limit: int) -> Refusal:
    return Refusal("too_large", f"The body may have at most {limit:,} bytes, unpacked. Send fewer records at once.")
