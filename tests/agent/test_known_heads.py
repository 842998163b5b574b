"""Heads that are remembered: what they say is what the parser said, and what must be parsed is."""

import asyncio

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.gateway import PIPELINED_MAX
from controlplane.agent.known_heads import HEAD_BYTES_MAX, KnownHeads, cut
from tests.agent import upstreams as up
from tests.agent import worlds
from tests.agent.wire_client import WireClient, chat_body, post

NAMES = ("host", "content-length", "Content-Length", "authorization", "x-content-length", "transfer-encoding")
VALUES = ("a", "3", "03", "+3", "3 ", "", "chunked", "3\r\ncontent-length: 4", "1\t")
LINES = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=4)


class Parsed:
    """What the parser makes of bytes."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.messages = 0
        self.good = True
        self.parser = httptools.HttpRequestParser(self)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.good = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.messages += 1

    @property
    def others(self) -> list[tuple[bytes, bytes]]:
        return [header for header in self.headers if header[0] != b"content-length"]


@given(LINES, LINES, st.binary(max_size=12), st.integers(0, 12))
@example([("content-length", "3")], [], b"abc", 3)
def test_equal_heads_mean_the_same(before, after, body, size):
    """Where a message is cut and parses, any other body with that head is what the parser makes of it."""

    def message(length: int, content: bytes) -> bytes:
        lines = [*before, ("content-length", str(length)), *after]
        return b"POST /x HTTP/1.1\r\n%b\r\n%b" % (b"".join(f"{k}: {v}\r\n".encode() for k, v in lines), content)

    first, second = message(len(body), body), message(size, b"z" * size)
    known, again = cut(first), cut(second)
    if known is None or again is None or known.head != again.head:
        return
    one, other = Parsed(first), Parsed(second)
    if not one.good:
        return
    assert one.messages == other.messages == 1 and other.good
    assert one.others == other.others
    assert (one.body, other.body) == (first[known.body_at :], second[again.body_at :]) == (body, b"z" * size)


@pytest.mark.parametrize(
    "data",
    [
        b"POST /x HTTP/1.1\r\ncontent-length: 3\r\n\r\nab",
        b"POST /x HTTP/1.1\r\ncontent-length: 3\r\n\r\nabcd",
        b"POST /x HTTP/1.1\r\ncontent-length: 3\r\n",
        b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /x HTTP/1.1\r\ncontent-length: 0x3\r\n\r\nabc",
        b"POST /x HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n",
        b"POST /x HTTP/1.1\r\nx: %b\r\ncontent-length: 0\r\n\r\n" % (b"a" * HEAD_BYTES_MAX),
    ],
)
def test_what_is_not_one_whole_short_message_is_not_cut(data):
    assert cut(data) is None


def test_memory_is_bounded_and_what_never_comes_again_is_let_pass():
    heads: KnownHeads[int] = KnownHeads(4)
    for number in range(50):
        heads.put(b"%d" % number, number)
        assert len(heads) <= 4
    assert heads.get(b"49") is None, "nothing came twice: remembering is given up for a while"
    for number in range(100):
        heads.put(b"again", number)
    assert heads.get(b"again") is not None


def test_an_owner_with_many_heads_loses_its_own_only():
    heads: KnownHeads[str] = KnownHeads(100, 4)
    heads.put(b"quiet", "one", 1)
    for number in range(40):
        heads.put(b"%d" % number, "other", 2)
        assert len(heads) <= 5
        assert heads.get(b"quiet") == "one"
    assert len(heads) == 2, "none of the loud one's came twice: they are let pass for a while"
    for number in range(4):
        heads.put(b"useful%d" % number, "third", 3)
        for _ in range(5):
            assert heads.get(b"useful%d" % number) == "third"
    heads.put(b"useful4", "third", 3)
    assert heads.get(b"useful4") == "third", "what was of use goes on to be remembered"
    assert heads.get(b"useful0") is None


def test_a_full_table_begins_anew_for_all():
    heads: KnownHeads[int] = KnownHeads(6, 4)
    for owner in range(50):
        for number in range(3):
            heads.put(b"%d %d" % (owner, number), number, owner)
            assert heads.get(b"%d %d" % (owner, number)) == number
            assert len(heads) <= 6


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_the_bounds_hold_whatever_comes(puts):
    heads: KnownHeads[tuple[int, int]] = KnownHeads(10, 3)
    for owner, number in puts:
        heads.put(b"%d-%d" % (owner, number), (owner, number), owner)
        held = [found for o in range(4) for n in range(10) if (found := heads.get(b"%d-%d" % (o, n))) is not None]
        assert len(held) == len(heads) <= 10
        assert all(sum(of == o for of, _ in held) <= 3 for o in range(4))


async def test_heads_whose_key_nobody_looked_at_are_not_remembered(make_agent):
    """Requests that wait behind another one: they could push out the heads of everybody else."""
    agent = await make_agent(speed=0.5)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(max_tokens=200, ignore_eos=True)))
    await agent.until(lambda: agent.engine.calls)
    (connection,) = agent.front.connections
    for number in range(PIPELINED_MAX - 1):
        client.send(post(chat_body(), key="fb_live_nobody", headers=f"x-number: {number}\r\n"))
        await agent.until(lambda waiting=number + 1: len(connection._queue) == waiting)
    assert len(agent.front.known) == 1, "the first one's, whose key is good"
    client.writer.transport.abort()
    await agent.until(lambda: not agent.front.connections)
    agent.assert_nothing_held()


async def test_a_key_that_sends_ever_new_heads_leaves_those_of_others(make_agent):
    agent = await make_agent()
    agent.front.known = KnownHeads(64, 8)
    friend = await WireClient.connect(agent.port)
    assert (await friend.ask(post(chat_body()))).status == 200
    loud = await WireClient.connect(agent.port)
    for number in range(20):
        answer = await loud.ask(post(chat_body(), key="fb_live_delta_secret", headers=f"x-number: {number}\r\n"))
        assert answer.status == 200
    assert 1 <= len(agent.front.known) <= 9
    known = [kept.meaning.bearer for kept in agent.front.known._heads.values()]
    assert b"fb_live_acme_secret" in known


async def test_a_client_with_the_same_head_is_served_each_time(make_agent):
    agent = await make_agent()
    client = await WireClient.connect(agent.port)
    for tokens in (1, 5, 12, 3):
        answer = await client.ask(post(chat_body(max_tokens=tokens, ignore_eos=True)))
        assert answer.json["usage"]["completion_tokens"] == tokens
    assert len(agent.front.known) == 1
    # Two in one read are no single message; after them the known one is again.
    client.send(post(chat_body(max_tokens=2, ignore_eos=True)) + post(chat_body(max_tokens=4, ignore_eos=True)))
    assert [(await client.answer()).json["usage"]["completion_tokens"] for _ in range(2)] == [2, 4]
    assert (await client.ask(post(chat_body()))).status == 200
    agent.assert_nothing_held()


async def test_a_known_head_in_the_middle_of_another_message_is_its_body(make_agent):
    agent = await make_agent()
    client = await WireClient.connect(agent.port)
    inner = post(chat_body())
    assert (await client.ask(inner)).status == 200
    assert len(agent.front.known) == 1
    client.send(b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(inner))
    await asyncio.sleep(0.05)
    client.send(inner)
    assert (await client.answer()).status == 404
    agent.assert_nothing_held()


async def test_each_key_is_looked_up_each_time(make_agent):
    """A head that is remembered lets nobody in: its key may be revoked meanwhile."""
    agent = await make_agent()
    client = await WireClient.connect(agent.port)
    assert (await client.ask(post(chat_body()))).status == 200
    agent.live.apply(worlds.delta(worlds.live_key(5, state="revoked"), since=2), worlds.trust())
    agent.engine.apply_live(agent.live)
    assert (await client.ask(post(chat_body()))).status == 401


async def test_ids_are_read_of_every_head_and_refused_ones_are_not_remembered(make_agent):
    agent = await make_agent()
    client = await WireClient.connect(agent.port)
    for name in ("one", "two"):
        answer = await client.ask(post(chat_body(), headers=f"x-request-id: {name}\r\n"))
        assert answer.headers["x-client-request-id"] == name
    assert (await client.ask(post(chat_body(), key="fb_live_nobody"))).status == 401
    assert len(agent.front.known) == 0


async def test_the_last_answer_of_a_known_client_closes(make_agent):
    agent = await make_agent()
    client = await WireClient.connect(agent.port)
    assert (await client.ask(post(chat_body()))).status == 200
    agent.front.closing = True
    assert (await client.ask(post(chat_body()))).headers["connection"] == "close"
    assert await client.closed_by_server()


async def test_answers_of_a_server_with_the_same_head(make_agent):
    """Whole answers are read without the parser from the second on; anything else is parsed."""

    async def answer(upstream, body, writer):
        up.respond(writer, 500 if body.get("seed") == 5 else 200, up.WHOLE)

    async with up.Upstream(answer) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        client = await WireClient.connect(agent.port)
        for _ in range(3):
            told = await client.ask(post(chat_body()))
            assert told.status == 200 and told.body == up.WHOLE
        assert len(agent.engine.backend.inner.known) == 1
        assert (await client.ask(post(chat_body(seed=5)))).status == 502
        assert (await client.ask(post(chat_body()))).status == 200
        assert server.connections == 1
        served = [row for row in agent.closed_rows() if row.status == 200]
        assert [(row.prompt_tokens, row.output_tokens, row.flags) for row in served] == [(21, 3, 0)] * 4
        agent.assert_nothing_held()
