"""Large reports travel packed, small ones plain, and a control plane that wants them plain gets them plain."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.agent.client import PACK_FROM_BYTES, ControlPlane
from controlplane.agent.errors import Refused
from controlplane.wire import packed, signing
from controlplane.wire.problem import Problem
from controlplane.wire.report import Answer
from tests.agent import control_planes as cp
from tests.agent.wire_client import WireClient, chat_body, post
from tests.wire.messages import REPORT as REPORT_WITH_ROWS

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PATH = "/agent/v1/report"


class Server:
    """Keeps what it is sent, byte for byte; takes packed bodies or refuses them."""

    def __init__(self, *, takes_packed: bool, refuses_rows: int = 0) -> None:
        self.takes_packed = takes_packed
        self.refuses_rows = refuses_rows
        """The status that packed records are refused with, 0 to take them."""
        self.seen: list[tuple[str, bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines[1:] if line)}
                body = await reader.readexactly(int(headers["content-length"]))
                status, answer = self.answer(headers, body)
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(answer), answer))
        writer.close()

    def answer(self, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        coding = headers.get("content-encoding", "")
        self.seen.append((coding, body))
        message = signing.request_message(method="POST", path=PATH, body=body, epoch=3, stamp=5)
        public, signature = KEY.public_key().public_bytes_raw(), signing.from_text(headers[signing.SIGNATURE_HEADER])
        if not signing.verify(public, signature, message):
            return 401, msgspec.json.encode(Problem("urn:x", "no", 401, "bad_signature"))
        if coding and not self.takes_packed:
            return 415, msgspec.json.encode(Problem("urn:x", "no", 415, "unreadable", "plain, please"))
        if self.refuses_rows and not coding and packed.is_packed(body):
            return self.refuses_rows, msgspec.json.encode(Problem("urn:x", "no", self.refuses_rows, "unreadable"))
        return 200, msgspec.json.encode(Answer(5, False, 0, "", 1000, time.time_ns() // 1000, 1))


@asynccontextmanager
async def serving(**how):
    server = Server(**how)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = ControlPlane(f"http://127.0.0.1:{port}", KEY, "a", lambda: time.time_ns() // 1000)
    try:
        yield server, client
    finally:
        await client.close()
        listener.close()


async def test_large_reports_are_packed_with_the_same_bytes_each_time():
    large, small = b'{"a":"%b"}' % (b"x" * PACK_FROM_BYTES), b"{}"
    async with serving(takes_packed=True) as (server, client):
        for body in (large, large, small):
            assert (await client.report(body, epoch=3, seq=5)).accepted_through == 5
    assert [coding for coding, _ in server.seen] == ["gzip", "gzip", ""]
    assert server.seen[0] == server.seen[1] and gzip.decompress(server.seen[0][1]) == large
    assert len(server.seen[0][1]) < len(large) / 20
    assert server.seen[2][1] == small


async def test_a_control_plane_that_wants_them_plain_is_asked_once():
    large = b" " * PACK_FROM_BYTES
    async with serving(takes_packed=False) as (server, client):
        for _ in range(3):
            await client.report(large, epoch=3, seq=5)
    assert [coding for coding, _ in server.seen] == ["gzip", "", "", ""]
    assert server.seen[1][1] == large


@pytest.mark.parametrize("status", [400, 415])
@pytest.mark.parametrize("takes_gzip", [False, True])
async def test_packed_records_go_as_json_to_a_control_plane_that_does_not_take_them(status, takes_gzip, monkeypatch):
    """One that was rolled back after its hello: what is in the spool already is written in JSON on its way."""
    monkeypatch.setattr("controlplane.agent.client.PACK_FROM_BYTES", 2**20 if takes_gzip else 1)
    body = packed.pack(REPORT_WITH_ROWS)
    async with serving(takes_packed=takes_gzip, refuses_rows=status) as (server, client):
        for _ in range(2):
            assert (await client.report(body, epoch=3, seq=5)).accepted_through == 5
    plain = [sent for coding, sent in server.seen if not coding]
    assert plain == [body, msgspec.json.encode(REPORT_WITH_ROWS), msgspec.json.encode(REPORT_WITH_ROWS)]


async def test_a_report_that_is_unreadable_in_json_too_is_refused(monkeypatch):
    async with serving(takes_packed=True, refuses_rows=400) as (server, client):
        server.answer = lambda headers, body: (400, msgspec.json.encode(Problem("urn:x", "no", 400, "unreadable")))
        with pytest.raises(Refused):
            await client.report(b"{}", epoch=3, seq=5)


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
async def test_packed_reports_are_counted_like_others(world, tmp_path, monkeypatch):
    monkeypatch.setattr("controlplane.agent.client.PACK_FROM_BYTES", 1)
    async with cp.serving_agent(world, tmp_path / "state") as process:
        client = await WireClient.connect(process.port)
        for _ in range(20):
            assert (await client.ask(post(chat_body(), key=cp.SECRET))).status == 200
        await cp.until(lambda: process.store.records_accepted == 20)
        assert process.client._packs and process.store.current.packs
        reports = [process.store.current.body_of(report) for report in process.store.current.state.accepted]
        assert sum(len(packed.read_report(body).records) for body in reports) == 20
        assert any(packed.is_packed(body) for body in reports)
    assert len(await cp.records()) == 20
    assert await cp.quarantined() == []
