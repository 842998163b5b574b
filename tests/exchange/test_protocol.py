"""Reports over a socket by uvicorn's parser: the short way answers like the long one, and nothing takes it unseen."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import msgspec
import pytest
import pytest_asyncio
import uvicorn
from asgiref.sync import sync_to_async
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from psycopg.types.array import ListDumper

from controlplane.exchange import database, reports
from controlplane.exchange import protocol as door
from controlplane.exchange.asgi import ExchangeApplication
from controlplane.exchange.problems import Reply
from controlplane.fleet.models import Agent
from controlplane.usage.models import RollupDelta, UsageRecord
from controlplane.wire import packed
from controlplane.wire import report as wire
from controlplane.wire.policy import SignedPolicy
from controlplane.wire.problem import Problem
from controlplane.wire.signing import from_text
from tests import factories
from tests.exchange.one_group import held_until, sent_in_turn
from tests.exchange.test_answers import bundle
from tests.usage_rows import usage_row


class Socket:
    """Stands where tests call an application: every call is a request on one connection to a real server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams = None

    async def __call__(self, scope, receive, send) -> None:
        body = (await receive())["body"]
        status, headers, answer = await self.exchange(request(scope["method"], scope["path"], scope["headers"], body))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def connect(self) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)

    async def exchange(self, sent: bytes):
        await self.connect()
        self._streams[1].write(sent)
        return await self.read()

    async def read(self):
        reader = self._streams[0]
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        lines = head.split(b"\r\n")
        headers = [tuple(line.split(b": ", 1)) for line in lines[1:] if line]
        length = int(dict(headers).get(b"content-length", b"0"))
        return int(lines[0].split(b" ")[1]), headers, await reader.readexactly(length)

    async def is_closed(self) -> bool:
        return await asyncio.wait_for(self._streams[0].read(1), 60) == b""


def request(method: str, path: str, headers, body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: test", *(name + b": " + value for name, value in headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@asynccontextmanager
async def served(exchange: ExchangeApplication):
    class HttpProtocol(door.ReportProtocol):
        pass

    HttpProtocol.exchange = exchange
    config = uvicorn.Config(exchange, http=HttpProtocol, log_config=None, access_log=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield Socket(bound.getsockname()[1])
    finally:
        server.should_exit = True
        server.force_exit = True
        await task


@pytest_asyncio.fixture
async def over_socket(app, agent, monkeypatch):
    """The agent of the tests behind a socket; `ways` notes which way each report took."""
    ways: list[str] = []
    taken = ExchangeApplication._taken

    def note(self, arrived, done, reply: Reply | None) -> None:
        ways.append("long" if reply is None else "short")
        taken(self, arrived, done, reply)

    monkeypatch.setattr(ExchangeApplication, "_taken", note)
    async with served(app) as connection:
        agent.app = connection
        agent.ways = ways
        # the snapshot of agents is there from the first report on
        await app.handlers.directory.find(agent.uuid, epoch=agent.epoch)
        yield agent
    await asyncio.to_thread(app.handlers.close)


def rows(world, n=3):
    return [usage_row(world, prices=world.prices) for _ in range(n)]


async def test_shares_that_an_agent_goes_by_are_left_out_on_the_short_way_too(over_socket):
    told = await over_socket.report()
    response = await over_socket.send(over_socket.build(), headers={wire.SHARES_HEADER: told.shares_mark})
    answer = response.read(wire.Answer)
    assert told.shares and (answer.shares, answer.shares_mark) == ([], told.shares_mark)
    assert over_socket.ways == ["short", "short"]


async def stored() -> tuple[int, int]:
    def read():
        return UsageRecord.objects.count(), sum(RollupDelta.objects.values_list("requests", flat=True))

    return await sync_to_async(read)()


@pytest.mark.parametrize("form", ["json", "packed"])
async def test_a_report_takes_the_short_way_once(over_socket, world, form):
    agent = over_socket
    report = agent.build(records=rows(world))
    body = packed.pack(report) if form == "packed" else msgspec.json.encode(report)
    first, again = [(await agent.send(body, seq=1)).read(wire.Answer) for _ in range(2)]
    assert (first.accepted_through, first.repeat, again.accepted_through, again.repeat) == (1, False, 1, True)
    assert agent.ways == ["short", "short"]
    assert await stored() == (3, 3)


async def test_both_ways_answer_alike(over_socket, world, app):
    """The same bytes over a socket and through the application: status, code and answer are the same."""
    agent = over_socket
    good = msgspec.json.encode(agent.build(seq=1, records=rows(world)))
    await agent.send(good, seq=1)
    other = msgspec.json.encode(agent.build(seq=1, records=rows(world, 1)))
    stranger = Ed25519PrivateKey.generate()
    cases = [
        {"body": good, "seq": 1},
        {"body": other, "seq": 1},
        {"body": msgspec.json.encode(agent.build(seq=9)), "seq": 9},
        {"body": msgspec.json.encode(agent.build(seq=3)), "seq": 2},
        {"body": msgspec.json.encode(agent.build(seq=2, epoch=7)), "seq": 2, "epoch": 7},
        {"body": b"{", "seq": 2},
        {"body": b"\xfbFB\x09 not of this release", "seq": 2},
        {"body": msgspec.json.encode({"layout": 9, "epoch": 1, "seq": 2}), "seq": 2},
        {"body": good, "seq": 1, "key": stranger},
        {"body": good, "seq": 1, "headers": {"x-flexband-seq": "-1"}},
        {"body": good, "seq": 1, "headers": {"x-flexband-agent": "00000000-0000-0000-0000-000000000000"}},
        {"body": gzip.compress(good), "seq": 1, "headers": {"content-encoding": "gzip"}},
        {"body": good, "seq": 1, "headers": {"x-flexband-time": "5"}},
    ]
    for case in cases:
        answers = [await agent.signed("POST", "/agent/v1/report", app=way, **case) for way in (None, app)]
        assert answers[0].status == answers[1].status, case
        kind = wire.Answer if answers[0].status == 200 else Problem
        read = [answer.read(kind) for answer in answers]
        if kind is wire.Answer:
            read = [msgspec.structs.replace(answer, server_time_us=0) for answer in read]
        assert read[0] == read[1], case
        names = [{name: value for name, value in a.headers.items() if name not in ("date", "server")} for a in answers]
        assert {**names[0], "content-length": ""} == {**names[1], "content-length": ""}
    assert await stored() == (3, 3)


@pytest.fixture
def pulled(monkeypatch):
    """Which way each pull took."""
    ways: list[str] = []
    at_hand = ExchangeApplication.policy_at_hand

    def note(self, path, headers) -> Reply | None:
        reply = at_hand(self, path, headers)
        ways.append("long" if reply is None else "short")
        return reply

    monkeypatch.setattr(ExchangeApplication, "policy_at_hand", note)
    return ways


async def test_a_pull_takes_the_short_way_once_its_bundle_is_at_hand_and_answers_alike(over_socket, world, app, pulled):
    own = await sync_to_async(bundle)(world.pool, b'{"own":1}')
    foreign = await sync_to_async(lambda: bundle(factories.pool("other"), b'{"other":1}'))()
    agent, path = over_socket, f"/agent/v1/policy/{own}"
    first, again = [await agent.signed("GET", path) for _ in range(2)]
    assert pulled == ["long", "short"] and first.status == again.status == 200
    assert from_text(again.read(SignedPolicy).body) == b'{"own":1}'
    long_ago, stranger = time.time_ns() // 1000 - 6 * 60_000_000, Ed25519PrivateKey.generate()
    for case in (
        {},
        {"headers": {"if-none-match": first.headers["etag"]}},
        {"stamp": long_ago},
        {"key": stranger},
        {"epoch": agent.epoch + 1},
        {"seq": 5},
        {"headers": {"x-flexband-signature": ""}},
    ):
        short, whole = await agent.signed("GET", path, **case), await agent.signed("GET", path, app=app, **case)
        assert (short.status, short.body) == (whole.status, whole.body), case
        assert whole.headers.items() <= short.headers.items(), case
    for digest in (foreign, "0" * 64, own[:-1]):
        assert (await agent.signed("GET", f"/agent/v1/policy/{digest}")).status == 404
    assert pulled.count("short") == 5, "what is unknown or late takes the long way to its refusal"


async def test_a_retired_agent_pulls_nothing_once_the_snapshot_knows(over_socket, world, app):
    own = await sync_to_async(bundle)(world.pool, b'{"own":1}')
    path = f"/agent/v1/policy/{own}"
    assert [(await over_socket.signed("GET", path)).status for _ in range(2)] == [200, 200]
    await sync_to_async(Agent.objects.filter(pk=over_socket.id).update)(state="retired")
    app.handlers.directory.forget()
    answer = await over_socket.signed("GET", path)
    assert (answer.status, answer.problem.code) == (410, "retired")


async def test_an_agent_that_the_snapshot_lacks_takes_the_long_way(over_socket, world, app):
    agent = over_socket
    app.handlers.directory._agents.clear()
    assert (await agent.report(records=rows(world))).accepted_through == 1
    assert agent.ways == ["long"]
    await sync_to_async(Agent.objects.filter(pk=agent.id).update)(state="retired")
    app.handlers.directory.forget()
    assert (await agent.send(agent.build())).problem.code == "retired"
    assert await stored() == (3, 3)


async def test_reports_of_one_agent_at_once_are_taken_once_and_in_order(over_socket, world, app, monkeypatch):
    agent = over_socket
    report = agent.build(records=rows(world))
    ways = [Socket(agent.app._port) for _ in range(6)]
    answers = await asyncio.gather(*(agent.send(report, app=way) for way in ways))
    assert sorted(answer.read(wire.Answer).repeat for answer in answers) == [False, True, True, True, True, True]
    agent.seq += 1
    # in one group: the second follows the first
    groups = app.handlers._report_groups
    held_until(monkeypatch, groups, 2)
    built = [agent.build(seq=seq, records=rows(world)) for seq in (2, 3)]
    sending = await sent_in_turn(groups, [partial(agent.send, one, app=way) for one, way in zip(built, ways)])
    assert [(await one).read(wire.Answer).accepted_through for one in sending] == [2, 3]
    assert await stored() == (9, 9)


async def test_requests_behind_a_report_on_one_connection_are_answered_in_order(over_socket, world):
    agent = over_socket
    sent: list[bytes] = []

    async def keep(scope, receive, send):
        sent.append(request(scope["method"], scope["path"], scope["headers"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    for seq in (1, 2):
        await agent.send(agent.build(seq=seq, records=rows(world)), app=keep)
    sent.insert(1, b"GET /agent/v1/report HTTP/1.1\r\nhost: test\r\n\r\n")
    connection = agent.app
    found = [await connection.exchange(b"".join(sent)), await connection.read(), await connection.read()]
    assert [status for status, _, _ in found] == [200, 405, 200]
    through = [msgspec.json.decode(found[at][2], type=wire.Answer).accepted_through for at in (0, 2)]
    assert through == [1, 2]


async def test_a_body_in_pieces_is_one_report_and_one_that_stalls_is_refused(over_socket, world, monkeypatch):
    agent = over_socket
    sent: list[bytes] = []

    async def keep(scope, receive, send):
        sent.append(request(scope["method"], scope["path"], scope["headers"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    await agent.send(agent.build(records=rows(world, 40)), app=keep)
    connection = agent.app
    await connection.connect()
    reading = asyncio.ensure_future(connection.exchange(sent[0][:2_000]))
    for at in range(2_000, len(sent[0]), 3_000):
        await asyncio.sleep(0.005)
        connection._streams[1].write(sent[0][at : at + 3_000])
    assert (await reading)[0] == 200
    monkeypatch.setattr(door, "READ_TIMEOUT_S", 0.05)
    status, headers, _ = await connection.exchange(sent[0][:-1])
    assert (status, dict(headers)[b"connection"]) == (408, b"close")
    assert await connection.is_closed()
    assert await stored() == (40, 40)


async def test_a_group_that_cannot_be_handled_is_answered_and_the_next_one_taken(over_socket, world, app):
    agent = over_socket
    groups = app.handlers._report_groups
    work = groups._work

    def broken(group, now):
        groups._work = work
        raise RuntimeError("a fault of ours")

    groups._work = broken
    assert (await agent.send(agent.build(records=rows(world)))).status == 500
    assert (await agent.report(records=rows(world))).accepted_through == 1
    assert await stored() == (3, 3)


@pytest.mark.parametrize("step", ["incoming_of", "compose"])
async def test_a_report_that_meets_a_fault_takes_no_other_of_its_group_with_it(
    over_socket, world, app, monkeypatch, step
):
    agent = over_socket
    real = getattr(reports, step)

    def broken(one, two, *more):
        body = two if step == "incoming_of" else one.report.refused_reason.encode()
        if b"breaks it" in body:
            raise RuntimeError("a fault of ours")
        return real(one, two, *more)

    monkeypatch.setattr(reports, step, broken)
    groups = app.handlers._report_groups
    held_until(monkeypatch, groups, 2)
    bad = agent.build(seq=9 if step == "incoming_of" else 1, refused_revision=1, refused_reason="breaks it")
    good = agent.build(seq=1 if step == "incoming_of" else 2, records=rows(world))
    sending = await sent_in_turn(groups, [partial(agent.send, one, app=Socket(agent.app._port)) for one in (bad, good)])
    assert [(await one).status for one in sending] == [500, 200]
    assert await stored() == (3, 3)


async def test_what_one_answer_stumbles_over_keeps_no_other_of_its_group_from_its_own(
    over_socket, world, app, monkeypatch
):
    agent, groups = over_socket, app.handlers._report_groups
    taker = groups._work.args[0].__self__
    real, looks = taker._look, []

    def look(agents, now):
        looks.append(len(agents))
        if len(agents) > 1:
            raise RuntimeError("a fault of ours")
        return real(agents, now)

    monkeypatch.setattr(taker, "_look", look)
    held_until(monkeypatch, groups, 2)
    built = [agent.build(seq=seq, records=rows(world)) for seq in (1, 2)]
    sending = await sent_in_turn(groups, [partial(agent.send, one, app=Socket(agent.app._port)) for one in built])
    assert [(await one).status for one in sending] == [200, 200]
    assert looks == [2, 1, 1]


async def test_a_report_that_cannot_be_stored_is_kept_by_its_agent(over_socket, world, app, monkeypatch):
    agent = over_socket
    monkeypatch.setattr(database, "_conninfo", lambda: "host=127.0.0.1 port=1 connect_timeout=1")
    monkeypatch.setattr(database, "WAIT_S", 0.2)
    monkeypatch.setattr(app.handlers.directory, "refresh", lambda: None)
    refused = await agent.send(agent.build(records=rows(world)))
    assert (refused.status, refused.problem.code, refused.headers["retry-after"]) == (503, "busy", "1")
    monkeypatch.undo()
    assert (await agent.report(records=rows(world))).accepted_through == 1
    assert await stored() == (3, 3)


@pytest.mark.parametrize(
    "numbers", [[], [0], [1, -1], [2**31, -(2**63)], [None, 3], [True, False], [[1, 2], [3, 4]], [7] * 1_000]
)
def test_lists_of_integers_arrive_as_they_are(world, numbers):
    kind = "bool[]" if numbers and isinstance(numbers[0], bool) else "bigint[]"
    with database.connection() as held:
        assert held.execute(f"SELECT %s::{kind}", (numbers,)).fetchone()[0] == numbers
        # without a cast the database is told the same type as by psycopg itself
        told = held.execute("SELECT pg_typeof(%s)", (numbers or [1],)).fetchone()[0]
        held.adapters.register_dumper(list, ListDumper)
        assert held.execute("SELECT pg_typeof(%s)", (numbers or [1],)).fetchone()[0] == told
