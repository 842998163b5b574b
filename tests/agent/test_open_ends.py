"""Clients that send no more and wait, clients that are gone, and more connections than there is room for."""

import asyncio
import re

import httptools
import pytest

from controlplane.agent import open_ends
from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.open_ends import LOOK_PAUSE_S, IdleShedder
from controlplane.core.reasons import Outcome
from tests.agent import upstreams as up
from tests.agent.wire_client import WireClient, chat_body, post

CANCELLED = Outcome.CANCELLED_BY_CLIENT.code
GET = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer fb_live_acme_secret\r\n\r\n"


async def final_answer(client: WireClient):
    """The answer behind any number of interim ones, and how many those were."""
    interim = 0
    while (answer := await client.answer()).status == 100:
        interim += 1
    return answer, interim


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closed_its_sending_half_gets_its_answer(make_agent, stream):
    agent = await make_agent(speed=1.0)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(max_tokens=60, ignore_eos=True, stream=stream)))
    client.writer.write_eof()
    answer, interim = await final_answer(client)
    assert answer.status == 200 and interim >= 1
    assert b"usage" in answer.body or b"[DONE]" in answer.body
    assert await client.closed_by_server(), "nothing can come on it any more"
    assert [row.outcome for row in agent.closed_rows()] == [Outcome.COMPLETED.code]
    agent.assert_nothing_held()


async def test_all_requests_before_the_end_are_answered(make_agent):
    agent = await make_agent()
    client = await WireClient.connect(agent.port)
    client.send(GET * 3)
    client.writer.write_eof()
    assert [(await final_answer(client))[0].status for _ in range(3)] == [200] * 3
    assert await client.closed_by_server()


async def test_a_client_that_closed_both_halves_cancels_within_a_second(make_agent):
    """The end of what it sends looks the same: its host says that nobody is there, to the second look at the latest."""
    agent = await make_agent(speed=0.5)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(max_tokens=200, ignore_eos=True)))
    await agent.until(lambda: any(call.slot for call in agent.engine.calls.values()))
    client.writer.close()
    await agent.until(lambda: not agent.engine.calls, within_s=1.0)
    assert [row.outcome for row in agent.closed_rows()] == [CANCELLED]
    agent.assert_nothing_held()


def silent_for(pause_s: float):
    """A stream whose inference server says nothing for a while between two words."""

    async def script(_, body, writer) -> None:
        up.begin(writer)
        for data in (up.ROLE, up.word("one")):
            up.chunk(writer, data)
        await asyncio.sleep(pause_s)
        for data in (up.word("two"), up.END, up.USAGE, up.DONE):
            up.chunk(writer, data)
        up.end(writer)

    return script


def parsed(raw: bytes) -> bytes:
    """The body of an answer as a strict parser reads it."""
    body: list[bytes] = []

    class Reader:
        whole = False

        def on_body(self, data: bytes) -> None:
            body.append(data)

        def on_message_complete(self) -> None:
            self.whole = True

    reader = Reader()
    httptools.HttpResponseParser(reader).feed_data(raw)
    assert reader.whole
    return b"".join(body)


@pytest.mark.parametrize("early", [True, False], ids=["before the stream", "in the stream"])
async def test_a_stream_goes_on_after_the_client_closed_its_sending_half(make_agent, monkeypatch, early):
    """Whenever it did: what it reads is the body as the server sent it, with probes in front of sizes of chunks."""
    monkeypatch.setattr(open_ends, "PROBE_PAUSES_S", (0.01,))
    async with up.Upstream(silent_for(0.6)) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        client = await WireClient.connect(agent.port)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        client.send(post(chat_body(**options)))
        if early:
            client.writer.write_eof()
        raw = b""
        while b"one" not in raw:
            raw += await client.reader.read(2**16)
        if not early:
            client.writer.write_eof()
        raw += await asyncio.wait_for(client.reader.read(), 60)
    raw = raw[raw.index(b"HTTP/1.1 200") :]
    assert parsed(raw) == b"".join([up.ROLE, up.word("one"), up.word("two"), up.END, up.USAGE, up.DONE])
    sizes = re.findall(rb"\r\n(0+[1-9a-f][0-9a-f]*)\r\ndata", raw)
    assert max(len(size) - len(size.lstrip(b"0")) for size in sizes) == open_ends.ZEROS_MAX
    assert [row.outcome for row in agent.closed_rows()] == [Outcome.COMPLETED.code]
    agent.assert_nothing_held()


@pytest.mark.parametrize("early", [True, False], ids=["before the stream", "in the stream"])
async def test_who_leaves_while_the_server_is_silent_cancels_within_a_second(make_agent, early):
    """Nothing but probes is written then: the stream has begun, and its next chunk is far away."""
    async with up.Upstream(silent_for(30)) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body(stream=True)))
        if early:
            client.writer.write_eof()
        await asyncio.wait_for(client.reader.readuntil(b"one"), 60)
        await asyncio.sleep(0.5 if early else 0.05)
        assert agent.engine.calls, "it is still there"
        client.writer.close()
        await agent.until(lambda: not agent.engine.calls, within_s=1.0)
        await agent.until(lambda: server.gone == 1, within_s=1.0)
    assert [row.outcome for row in agent.closed_rows()] == [CANCELLED]
    agent.assert_nothing_held()


async def test_an_old_client_gets_no_interim_answer_and_counts_as_gone(make_agent):
    agent = await make_agent(speed=0.5)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(max_tokens=200, ignore_eos=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
    await agent.until(lambda: agent.engine.calls)
    client.writer.write_eof()
    assert await client.closed_by_server()
    assert [row.outcome for row in agent.closed_rows()] == [CANCELLED]


async def test_half_a_request_and_its_end_close_the_connection(make_agent):
    agent = await make_agent()
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body())[:-5])
    client.writer.write_eof()
    assert await client.closed_by_server()
    agent.assert_nothing_held()


async def test_a_full_table_sheds_the_connection_that_was_idle_longest(make_agent):
    agent = await make_agent(speed=0.5)
    agent.front._connections_max = 3
    idle = await WireClient.connect(agent.port)
    assert (await idle.ask(GET)).status == 200
    await asyncio.sleep(0.01)  # the loop's clock tells milliseconds; of two in one, either may go
    later = await WireClient.connect(agent.port)
    assert (await later.ask(GET)).status == 200
    busy = await WireClient.connect(agent.port)
    busy.send(post(chat_body(max_tokens=200, ignore_eos=True)))
    await agent.until(lambda: agent.engine.calls)
    newcomer = await WireClient.connect(agent.port)
    assert (await newcomer.ask(GET)).status == 200
    assert await idle.closed_by_server()
    assert (await later.ask(GET)).status == 200
    assert agent.engine.calls, "who is being answered stays"


async def test_with_nobody_idle_a_full_table_refuses(make_agent):
    agent = await make_agent(speed=0.5)
    agent.front._connections_max = 1
    busy = await WireClient.connect(agent.port)
    busy.send(post(chat_body(max_tokens=200, ignore_eos=True)))
    await agent.until(lambda: agent.engine.calls)
    newcomer = await WireClient.connect(agent.port)
    refused = await newcomer.answer()
    assert refused.status == 503 and "too many connections" in refused.json["error"]["message"]
    assert agent.engine.calls


class One:
    def __init__(self, since_s: float, *, busy: bool = False) -> None:
        self.since_s = since_s
        self.busy = busy
        self.closed = False

    def idle(self) -> bool:
        return not self.busy and not self.closed

    def shut(self) -> None:
        self.closed = True


def test_one_look_serves_many_and_what_became_busy_is_left():
    table = {One(float(at)) for at in range(100)}
    oldest = sorted(table, key=lambda one: one.since_s)
    shedder, newest = IdleShedder(table), One(200.0)
    assert shedder.shed(newest, 0.0) and oldest[0].closed
    oldest[1].busy = True
    assert shedder.shed(newest, 0.0) and oldest[2].closed and not oldest[1].closed
    for _ in range(61):
        assert shedder.shed(newest, 0.0)
    assert not shedder.shed(newest, LOOK_PAUSE_S / 2), "the next look waits"
    assert shedder.shed(newest, LOOK_PAUSE_S) and oldest[64].closed


def test_the_newest_is_never_shed_for_itself():
    newest = One(0.0)
    assert not IdleShedder({newest}).shed(newest, 0.0)
    assert not newest.closed
