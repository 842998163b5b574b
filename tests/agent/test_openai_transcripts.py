"""Every form of stream that inference servers send, byte by byte: passed on, counted, and left at any point."""

import asyncio
import time

import pytest

from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.backends.sse import EventStream
from controlplane.core.reasons import Outcome
from controlplane.wire.report import FLAG_ESTIMATED, FLAG_NOT_CHARGED
from tests.agent import transcripts, worlds
from tests.agent import upstreams as up
from tests.agent.transcripts import Transcript
from tests.agent.upstreams import Upstream
from tests.agent.wire_client import WireClient, chat_body, post

CANCELLED = Outcome.CANCELLED_BY_CLIENT.code
each_form = pytest.mark.parametrize("form", transcripts.ALL, ids=lambda form: form.name)


def playing(data: bytes, *, piece: int | None = None, chunked: bool = True, hold: bool = False):
    """Sends the body in pieces; with `hold` it then keeps the response open."""

    async def script(_, __, writer):
        if chunked:
            up.begin(writer)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for at in range(0, len(data), piece or len(data) or 1):
            part = data[at : at + (piece or len(data))]
            up.chunk(writer, part) if chunked else writer.write(part)
            if piece:
                await asyncio.sleep(0)
        if hold:
            await asyncio.sleep(30)
        elif chunked:
            up.end(writer)
        else:
            writer.close()

    return script


def request_of(form: Transcript, *, usage_asked: bool) -> bytes:
    fields = dict(form.body)
    if usage_asked:
        fields["stream_options"] = {"include_usage": True}
    return post(chat_body(**fields), path=form.path)


async def ask(make_agent, server: Upstream, request: bytes):
    agent = await make_agent(backend=OpenAIBackend(server.url))
    client = await WireClient.connect(agent.port)
    answer = await client.ask(request)
    await agent.until(lambda: not agent.engine.calls)
    agent.assert_nothing_held()
    (row,) = agent.closed_rows()
    return answer, row


def assert_read(form: Transcript, row) -> None:
    """The record says what the stream said, and what it did not say is flagged."""
    assert row.outcome == form.outcome.code
    assert bool(row.flags & FLAG_ESTIMATED) == form.estimated
    if form.prompt is not None:
        assert row.prompt_tokens == form.prompt
    else:
        assert row.prompt_tokens > 0
    assert (row.cached_tokens, row.output_tokens) == (form.cached, form.output)
    assert row.charge_prompt_nanos == (row.prompt_tokens - row.cached_tokens) * 1000
    assert row.charge_cached_nanos == row.cached_tokens * 100
    assert row.charge_output_nanos == row.output_tokens * 3000
    assert (row.ttft_us >= 0) == (form.output_events > 0)


@each_form
@pytest.mark.parametrize("piece", [1, 13, None])
async def test_the_bytes_pass_and_the_usage_is_read(make_agent, form, piece):
    async with Upstream(playing(b"".join(form.events), piece=piece)) as server:
        answer, row = await ask(make_agent, server, request_of(form, usage_asked=False))
        assert server.bodies[0]["stream_options"] == {"include_usage": True}
    sent = b"".join(form.visible(usage_asked=False))
    assert answer.body[: len(sent)] == sent
    assert form.added in answer.body[len(sent) :] if form.added else answer.body == sent
    assert_read(form, row)


@each_form
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_usage_that_was_asked_for_is_shown(make_agent, form, chunked):
    """Also where the end of the response is the end of the connection."""
    async with Upstream(playing(b"".join(form.events), chunked=chunked)) as server:
        answer, row = await ask(make_agent, server, request_of(form, usage_asked=True))
    sent = b"".join(form.visible(usage_asked=True))
    assert answer.body[: len(sent)] == sent
    assert form.added in answer.body[len(sent) :] if form.added else answer.body == sent
    assert_read(form, row)


@each_form
async def test_events_that_carry_output_are_told_apart(make_agent, form):
    """A role alone is none; the name of a tool is one, whatever its arguments are."""
    events = EventStream(hide_usage=False)
    for event in form.events:
        events.feed(event)
    assert events.tokens == form.output_events


async def read_until(client: WireClient, wanted: bytes) -> None:
    """Read the stream until so much of it has come."""
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    got = b""
    async for part in client.chunks():
        got += part
        if len(got) >= len(wanted):
            break
    assert got == wanted


@each_form
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_client_may_leave_after_any_event(make_agent, form, chunked):
    """One record with what was used, upstream told within a second, everything given back."""
    shown = form.visible(usage_asked=True)
    slowest_s = 0.0
    upstream = OpenAIBackend("http://127.0.0.1:9")
    agent = await make_agent(backend=upstream)
    for count in range(1, len(shown) + 1):
        if b"[DONE]" in shown[count - 1] or not shown[count - 1].endswith((b"\n\n", b"\r\n", b"\r\r")):
            # What has no end yet, or ends the stream, is handed out with the end of the response.
            break
        sent = b"".join(shown[:count])
        async with Upstream(playing(sent, chunked=chunked, hold=True)) as server:
            upstream.port = server.port
            client = await WireClient.connect(agent.port)
            client.send(request_of(form, usage_asked=True))
            await read_until(client, sent)
            client.abort()
            gone_s = time.perf_counter()
            await agent.until(lambda server=server: server.gone == 1, within_s=1.0)
            slowest_s = max(slowest_s, time.perf_counter() - gone_s)
            upstream.idle.clear()
        await agent.until(lambda: not agent.engine.calls)
        agent.assert_nothing_held()
        rows = agent.closed_rows()
        assert len(rows) == count == agent.engine.offered
        assert_left(form, rows[-1], shown[:count])
    print(f"{form.name}: upstream was told within {slowest_s * 1000:.1f} ms at the latest")


def assert_left(form: Transcript, row, seen: list[bytes]) -> None:
    """A count that the server told itself is exact; without one the events are counted and flagged."""
    events = EventStream(hide_usage=False)
    for event in seen:
        events.feed(event)
    counted, told = events.tokens, events.usage
    assert row.outcome == CANCELLED and not row.flags & FLAG_NOT_CHARGED
    assert row.prompt_tokens > 0 and row.charge_prompt_nanos + row.charge_cached_nanos > 0
    if told is None:
        assert row.output_tokens == counted and row.flags & FLAG_ESTIMATED
    elif form.n == 1 or events.is_total:
        assert row.output_tokens == told.completion_tokens
        assert bool(row.flags & FLAG_ESTIMATED) == form.estimated
    else:
        assert row.output_tokens == max(counted, told.completion_tokens) and row.flags & FLAG_ESTIMATED
    assert row.charge_output_nanos == row.output_tokens * 3000


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["connecting", "queued", "silent", "head sent"])
async def test_a_client_may_leave_before_anything_came(make_agent, stream, phase):
    async def script(_, __, writer):
        if phase == "head sent":
            up.begin(writer)
        await asyncio.sleep(30)

    doc = worlds.document(pool={"slots": [worlds.slot(1, places=1)]})
    async with Upstream(script) as server:
        agent = await make_agent(doc, backend=OpenAIBackend(server.url))
        hog = await WireClient.connect(agent.port)
        if phase == "queued":
            hog.send(post(chat_body(max_tokens=2)))
            await agent.until(lambda: len(server.bodies) == 1)
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body(stream=stream)))
        if phase == "connecting":
            await agent.until(lambda: bool(agent.engine.calls))
        elif phase == "queued":
            await agent.until(lambda: len(agent.engine.calls) == 2)
        else:
            await agent.until(lambda: len(server.bodies) == 1)
            await asyncio.sleep(0.02)
        client.abort()
        gone_s = time.perf_counter()
        await agent.until(lambda: len(agent.spool.state.closed) == 1, within_s=1.0)
        if phase in ("silent", "head sent"):
            await agent.until(lambda: server.gone == 1, within_s=1.0)
            print(f"{phase}: upstream was told after {(time.perf_counter() - gone_s) * 1000:.1f} ms")
        (row,) = agent.closed_rows()
        assert row.outcome == CANCELLED
        assert (row.slot_id == -1) == (phase == "queued")
        hog.abort()
        await agent.until(lambda: not agent.engine.calls)
        agent.assert_nothing_held()
        assert len(agent.closed_rows()) == agent.engine.offered
