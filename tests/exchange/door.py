"""An agent of the tests: real keys, real bytes, through the ASGI application without a socket."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.exchange.asgi import ExchangeApplication
from controlplane.wire import signing
from controlplane.wire.enrolment import Enrol, Enrolled, Hello, Helloed
from controlplane.wire.lease import LeaseAnswer, LeaseRequest
from controlplane.wire.problem import Problem
from controlplane.wire.report import Answer, Report


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def read(self, kind):
        return msgspec.json.decode(self.body, type=kind)

    @property
    def problem(self) -> Problem:
        assert self.headers["content-type"] == "application/problem+json", self.body
        return self.read(Problem)


async def call(app, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Response:
    sent: list[dict] = []
    given = {"content-length": str(len(body)), **(headers or {})}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Response(sent[0]["status"], names, b"".join(message.get("body", b"") for message in sent[1:]))


async def nowhere(scope, receive, send):
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"fallback"})


@dataclass
class TestAgent:
    """Talks to one application; `epoch` and `seq` move as the protocol says."""

    __test__ = False

    app: ExchangeApplication
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    uuid: str = ""
    id: int = 0
    epoch: int = 0
    seq: int = 0

    @property
    def public_key(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    async def enrol(self, token: str, name: str = "gpu-1", slots: int = 8) -> Response:
        message = Enrol(token, signing.to_text(self.public_key), name, "0.1.0", slots)
        response = await call(self.app, "POST", "/agent/v1/enrol", msgspec.json.encode(message))
        if response.status == 200:
            enrolled = response.read(Enrolled)
            self.uuid, self.id = enrolled.agent, enrolled.agent_id
        return response

    async def signed(
        self, method, path, body=b"", *, epoch=None, seq=None, headers=None, key=None, stamp=None, app=None
    ) -> Response:
        epoch = self.epoch if epoch is None else epoch
        stamp = stamp if stamp is not None else (seq if seq is not None else time.time_ns() // 1000)
        message = signing.request_message(method=method, path=path, body=body, epoch=epoch, stamp=stamp)
        given = {
            signing.AGENT_HEADER: self.uuid,
            signing.EPOCH_HEADER: str(epoch),
            signing.SEQ_HEADER if seq is not None else signing.TIME_HEADER: str(stamp),
            signing.SIGNATURE_HEADER: signing.to_text(signing.sign(key or self.key, message)),
            **(headers or {}),
        }
        return await call(app or self.app, method, path, body, given)

    async def hello(self, spooled=()) -> Helloed:
        body = msgspec.json.encode(Hello("0.1.0", "boot", list(spooled)))
        response = await self.signed("POST", "/agent/v1/hello", body, epoch=0)
        assert response.status == 200, response.body
        helloed = response.read(Helloed)
        self.epoch, self.seq = helloed.epoch, 0
        return helloed

    def build(self, *, epoch=None, seq=None, **parts) -> Report:
        given = {"layout": 1, "revision": 0, "live_number": 0, "sent_us": time.time_ns() // 1000, **parts}
        return Report(epoch=self.epoch if epoch is None else epoch, seq=self.seq + 1 if seq is None else seq, **given)

    async def send(self, report: Report | bytes, *, epoch=None, seq=None, app=None, headers=None) -> Response:
        body = report if isinstance(report, bytes) else msgspec.json.encode(report)
        seq = seq if seq is not None else (report.seq if isinstance(report, Report) else None)
        return await self.signed("POST", "/agent/v1/report", body, epoch=epoch, seq=seq, app=app, headers=headers)

    async def report(self, **parts) -> Answer:
        response = await self.send(self.build(**parts))
        assert response.status == 200, response.body
        self.seq += 1
        return response.read(Answer)

    async def lease(self, tenant_id: int, need_nanos: int, spends=()) -> LeaseAnswer:
        body = msgspec.json.encode(LeaseRequest(tenant_id, need_nanos, list(spends)))
        response = await self.signed("POST", "/agent/v1/lease", body)
        assert response.status == 200, response.body
        return response.read(LeaseAnswer)


def ended(app: ExchangeApplication) -> None:
    """Ends the threads of an application of the test."""
    if app._handlers is not None:
        app._handlers.close()
