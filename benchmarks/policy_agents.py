"""Agents of one process, each with its own broker and HTTP connection: heard, pulled, verified, acknowledged."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.http_load import request_bytes
from controlplane.wire import signing
from controlplane.wire.enrolment import Hello, Helloed
from controlplane.wire.policy import Nudge, PolicyDocument, SignedNudge, SignedPolicy, document_message, nudge_message
from controlplane.wire.report import Answer, Report

JITTER_S = 0.2
_answers = msgspec.json.Decoder(Answer)


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiting: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionError(f"the server closed the connection: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        lower = head.lower()
        at = lower.index(b"content-length:") + 15
        whole = end + 4 + int(lower[at:].split(b"\r\n", 1)[0])
        if len(self._buffer) >= whole and self._waiting is not None:
            body = bytes(self._buffer[end + 4 : whole])
            self._buffer.clear()
            if head.split(b" ", 2)[1] not in (b"200", b"204"):
                self._waiting.set_exception(RuntimeError((head + body)[:400].decode("utf-8", "replace")))
            else:
                self._waiting.set_result(body)

    async def ask(self, request: bytes) -> bytes:
        assert self._transport is not None
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiting


class RedisConnection(asyncio.Protocol):
    """One raw connection to the broker that hands every whole reply's last bulk string to `heard`."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self._heard = heard
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def send(self, *words: str) -> None:
        assert self._transport is not None
        parts = [f"*{len(words)}\r\n".encode()]
        parts += [b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in words]
        self._transport.write(b"".join(parts))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (found := _reply(self._buffer)) is not None:
            size, last = found
            self._buffer = self._buffer[size:]
            if last is not None:
                self._heard(last)


def _reply(buffer: bytes) -> tuple[int, bytes | None] | None:
    """(bytes used, last bulk string) of the first whole reply; simple replies have none."""
    line, gap, _ = buffer.partition(b"\r\n")
    if not gap:
        return None
    if not line.startswith(b"*"):
        return len(line) + 2, None
    at, last = len(line) + 2, None
    for _ in range(int(line[1:])):
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return None
        kind, value = buffer[at : at + 1], buffer[at + 1 : end]
        at = end + 2
        if kind == b"$":
            if len(buffer) < at + int(value) + 2:
                return None
            last = buffer[at : at + int(value)]
            at += int(value) + 2
    return at, last


@dataclass
class Times:
    """Seconds since the push, one entry per agent."""

    heard: list[float] = field(default_factory=list)
    pulled: list[float] = field(default_factory=list)
    acked: list[float] = field(default_factory=list)


@dataclass
class Shared:
    """What all agents of the process share: keys they trust, and bundles and nudges that one of them verified."""

    installation: str
    pool: str
    signing_keys: dict[str, str]
    bundles: dict[str, PolicyDocument] = field(default_factory=dict)
    nudges: dict[bytes, Nudge] = field(default_factory=dict)
    raw: list[tuple[bytes, str]] = field(default_factory=list)
    """(bundle as pulled, digest), each once."""

    @property
    def bundle_bytes(self) -> int:
        return len(self.raw[-1][0])

    def nudge(self, body: bytes) -> Nudge:
        found = self.nudges.get(body)
        if found is None:
            envelope = msgspec.json.decode(body, type=SignedNudge)
            raw = signing.from_text(envelope.body)
            message = nudge_message(installation=self.installation, digest=signing.digest_hex(raw))
            self._check(f"nudge:{envelope.kid}", envelope.signature, message)
            found = self.nudges[body] = msgspec.json.decode(raw, type=Nudge)
        return found

    def document(self, bundle: bytes, digest: str) -> PolicyDocument:
        found = self.bundles.get(digest)
        if found is None:
            envelope = msgspec.json.decode(bundle, type=SignedPolicy)
            raw = signing.from_text(envelope.body)
            found = msgspec.json.decode(raw, type=PolicyDocument)
            message = document_message(found, signing.digest_hex(raw))
            self._check(f"policy:{envelope.kid}", envelope.signature, message)
            if signing.digest_hex(raw) != digest or found.pool.slug != self.pool:
                raise RuntimeError("the bundle is not the one that was announced")
            self.bundles[digest] = found
            self.raw.append((bundle, digest))
        return found

    def _check(self, kid: str, signature: str, message: bytes) -> None:
        if not signing.verify(signing.from_text(self.signing_keys[kid]), signing.from_text(signature), message):
            raise RuntimeError(f"the signature of {kid} does not hold")


@dataclass
class SimulatedAgent:
    """Speaks the agents' protocol on its own connection."""

    id: int
    uuid: str
    key: Ed25519PrivateKey
    shared: Shared
    http: HttpConnection | None = None
    broker: RedisConnection | None = None
    epoch: int = 0
    seq: int = 0
    revision: int = 0

    def _request(self, method: str, path: str, body: bytes = b"", *, seq: int | None = None) -> bytes:
        stamp = seq if seq is not None else time.time_ns() // 1000
        message = signing.request_message(method=method, path=path, body=body, epoch=self.epoch, stamp=stamp)
        headers = {
            signing.AGENT_HEADER: self.uuid,
            signing.EPOCH_HEADER: str(self.epoch),
            signing.SEQ_HEADER if seq is not None else signing.TIME_HEADER: str(stamp),
            signing.SIGNATURE_HEADER: signing.to_text(signing.sign(self.key, message)),
        }
        return request_bytes(method, path, body, headers)

    async def hello(self) -> Helloed:
        assert self.http is not None
        body = msgspec.json.encode(Hello("benchmark", "boot"))
        helloed = msgspec.json.decode(await self.http.ask(self._request("POST", "/agent/v1/hello", body)), type=Helloed)
        self.epoch, self.seq = helloed.epoch, 0
        return helloed

    async def pull(self, digest: str) -> PolicyDocument:
        assert self.http is not None
        return self.shared.document(await self.http.ask(self._request("GET", f"/agent/v1/policy/{digest}")), digest)

    async def report(self) -> Answer:
        assert self.http is not None
        self.seq += 1
        body = msgspec.json.encode(
            Report(1, self.epoch, self.seq, time.time_ns() // 1000, revision=self.revision, live_number=0)
        )
        answer = _answers.decode(await self.http.ask(self._request("POST", "/agent/v1/report", body, seq=self.seq)))
        if answer.accepted_through != self.seq:
            raise RuntimeError("the report was not accepted")
        return answer


def kombu_body(message: bytes) -> bytes:
    """The body in kombu's envelope on a Redis-compatible broker."""
    envelope = json.loads(message)
    body = envelope["body"]
    return base64.b64decode(body) if envelope["properties"].get("body_encoding") == "base64" else body.encode()


async def connect(agents: list[SimulatedAgent], http_port: int) -> None:
    loop = asyncio.get_running_loop()
    for agent in agents:
        _, agent.http = await loop.create_connection(HttpConnection, "127.0.0.1", http_port)


async def subscribe(agent: SimulatedAgent, redis_url: str, heard: Callable[[bytes], None], *words: str) -> None:
    parts = urlsplit(redis_url)
    loop = asyncio.get_running_loop()
    _, agent.broker = await loop.create_connection(
        lambda: RedisConnection(heard), parts.hostname or "127.0.0.1", parts.port or 6379
    )
    if parts.password:
        agent.broker.send("AUTH", *([parts.username] if parts.username else []), parts.password)
    if parts.path.strip("/"):
        agent.broker.send("SELECT", parts.path.strip("/"))
    agent.broker.send(*words)


async def gathered(
    agents: list[SimulatedAgent], work: Callable[[SimulatedAgent], Awaitable[object]], most: int
) -> None:
    """Runs `work` for all agents, `most` at a time."""
    gate = asyncio.Semaphore(most)

    async def one(agent: SimulatedAgent) -> None:
        async with gate:
            await work(agent)

    await asyncio.gather(*(one(agent) for agent in agents))


def jitter(random_source: random.Random) -> float:
    return random_source.random() * JITTER_S
