"""Pass-through to an inference server: bytes unchanged, usage read, failures told."""

import asyncio
import json

import pytest

from controlplane.agent.attempt import CHARGED_TOGETHER
from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.backends.sse import EventStream
from controlplane.core.reasons import Outcome
from controlplane.wire.report import FLAG_ESTIMATED
from tests.agent import upstreams as up
from tests.agent import worlds
from tests.agent.upstreams import Upstream, begin, chunk, end, respond, whole
from tests.agent.wire_client import WireClient, chat_body, post

STREAM = up.ROLE + up.word("a") + up.word(" b") + up.word(" c") + up.END


def streaming(data: bytes, *, piece: int = 10_000, usage: bool = True):
    async def script(_, body, writer):
        begin(writer)
        sent = data + (up.USAGE if usage and body["stream_options"]["include_usage"] else b"") + up.DONE
        for at in range(0, len(sent), piece):
            chunk(writer, sent[at : at + piece])
            if piece < 1000:
                await asyncio.sleep(0)
        end(writer)

    return script


async def agent_for(make_agent, server: Upstream, **options):
    return await make_agent(backend=OpenAIBackend(server.url, **options))


async def ask(agent, **fields):
    client = await WireClient.connect(agent.port)
    return await client.ask(post(chat_body(**fields)))


async def test_a_whole_answer_passes_unchanged(make_agent):
    async with Upstream(whole) as server:
        agent = await agent_for(make_agent, server)
        answer = await ask(agent, max_tokens=7, temperature=0.25, user="us€r")
        assert answer.body == up.WHOLE
        (row,) = agent.closed_rows()
        assert (row.prompt_tokens, row.output_tokens, row.flags & FLAG_ESTIMATED) == (21, 3, 0)
        assert server.bodies[0]["max_tokens"] == 7
        assert server.bodies[0]["temperature"] == 0.25
        assert server.bodies[0]["user"] == "us€r"
        assert "stream_options" not in server.bodies[0] and "priority" not in server.bodies[0]
        agent.assert_nothing_held()


async def test_the_limit_is_explicit_and_priority_goes_where_asked(make_agent):
    async with Upstream(whole) as server:
        agent = await agent_for(make_agent, server, send_priority=True)
        client = await WireClient.connect(agent.port)
        await client.ask(post(chat_body(max_tokens=None)))
        await client.ask(post(chat_body(max_tokens=None, max_completion_tokens=9)))
        assert server.bodies[0]["max_tokens"] == 16
        assert server.bodies[1]["max_completion_tokens"] == 9
        assert "max_tokens" not in server.bodies[1]
        assert {body["priority"] for body in server.bodies} == {100}
        assert server.connections == 1, "the upstream connection is kept"


async def test_the_more_urgent_class_has_the_smaller_number_there_too(make_agent):
    """vLLM runs the smallest `priority` first, and so does the scheduler: the number passes as it is."""
    doc = worlds.document(
        classes=[worlds.class_policy(priority=10), worlds.class_policy("bulk", kind="batch", priority=100)]
    )
    async with Upstream(whole) as server:
        agent = await make_agent(doc, backend=OpenAIBackend(server.url, send_priority=True))
        client = await WireClient.connect(agent.port)
        await client.ask(post(chat_body()))
        await client.ask(post(chat_body(), key=worlds.BATCH_SECRET))
        assert [body["priority"] for body in server.bodies] == [10, 100]
        orders = {queue.spec.slug: queue.spec.precedence for queue in agent.engine.scheduler.classes}
        assert orders == {"chat": 10, "bulk": 100}


@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_is_sent_that_nobody_asked_for(make_agent, stream):
    """Not every server takes fields that it does not know."""
    async with Upstream(streaming(STREAM) if stream else whole) as server:
        agent = await agent_for(make_agent, server)
        fields = json.loads(chat_body(stream=stream, max_tokens=None, seed=7))
        del fields["max_tokens"]
        client = await WireClient.connect(agent.port)
        await client.ask(post(json.dumps(fields).encode(), headers="x-flexband-class: chat\r\ncookie: a=b\r\n"))
        added = {"max_tokens": 16} | ({"stream_options": {"include_usage": True}} if stream else {})
        assert server.bodies == [{**fields, **added}]


@pytest.mark.parametrize("send_priority", [True, False])
async def test_a_priority_of_the_clients_own_does_not_pass(make_agent, send_priority):
    async with Upstream(whole) as server:
        agent = await agent_for(make_agent, server, send_priority=send_priority)
        await ask(agent, priority=-1000)
        assert server.bodies[0].get("priority") == (100 if send_priority else None)


async def test_the_deepest_body_that_is_taken_can_be_sent_on(make_agent):
    """Whatever reading lets through must not fail where it is read again, deeper in the stack."""
    async with Upstream(whole) as server:
        agent = await agent_for(make_agent, server)
        client = await WireClient.connect(agent.port)
        statuses = []
        for depth in range(700, 1000, 20):
            nested = b"[" * depth + b"]" * depth
            statuses.append((await client.ask(post(chat_body(metadata="X").replace(b'"X"', nested)))).status)
        assert set(statuses) == {200, 400}
        agent.assert_nothing_held()


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
async def test_a_stream_passes_unchanged_and_an_injected_usage_is_hidden(make_agent, piece):
    async with Upstream(streaming(STREAM, piece=piece)) as server:
        agent = await agent_for(make_agent, server)
        answer = await ask(agent, stream=True)
        assert answer.body == STREAM + up.DONE
        (row,) = agent.closed_rows()
        assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (21, 16, 3)
        assert row.charge_cached_nanos == 16 * 100
        assert row.ttft_us >= 0
        asked = await ask(agent, stream=True, stream_options={"include_usage": True})
        assert asked.body == STREAM + up.USAGE + up.DONE
        agent.assert_nothing_held()


async def test_a_server_without_usage_is_counted_by_chunks(make_agent):
    async with Upstream(streaming(STREAM, usage=False)) as server:
        agent = await agent_for(make_agent, server)
        await ask(agent, stream=True)
        (row,) = agent.closed_rows()
        assert row.output_tokens == 3
        assert row.flags & FLAG_ESTIMATED


async def test_a_tenant_is_charged_a_stream_while_it_runs_and_exactly_what_it_was_at_its_end(make_agent):
    """A few tokens at a time: whose turn is next hears of them that much later."""
    told, words = asyncio.Event(), 3 * CHARGED_TOGETHER

    async def script(_, __, writer):
        begin(writer)
        for _ in range(words):
            chunk(writer, up.word("a"))
            await told.wait()
            told.clear()
        for event in (up.END, up.USAGE, up.DONE):
            chunk(writer, event)
        end(writer)

    async with Upstream(script) as server:
        agent = await agent_for(make_agent, server)
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body(stream=True, max_tokens=64)))
        await client.reader.readuntil(b"\r\n\r\n")
        await client.reader.readuntil(b"\n\n\r\n")
        (request,) = agent.engine.scheduler.requests.values()
        queue, fair = agent.engine.scheduler.class_queue("chat"), request.fair
        each, others = queue.spec.work.w_output, fair.counter - request.charged_work * fair.multiplier
        begun = request.charged_work - each
        seen = set()
        for count in range(2, words + 1):
            told.set()
            await client.reader.readuntil(b"\n\n\r\n")
            charged = (request.charged_work - begun) // each
            assert 0 <= count - charged < CHARGED_TOGETHER
            seen.add(charged)
        assert seen == {1, 1 + CHARGED_TOGETHER, 1 + 2 * CHARGED_TOGETHER}
        told.set()
        await agent.until(lambda: not agent.engine.calls)
        assert fair.counter == others + queue.work_of(21, 3, 0) * fair.multiplier
        agent.assert_nothing_held()


async def test_mistakes_of_the_client_pass_with_the_servers_own_words(make_agent):
    body = b'{"error":{"message":"no such tool","type":"invalid_request_error","code":null,"param":"tools"}}'

    async def script(_, __, writer):
        respond(writer, 422, body)

    async with Upstream(script) as server:
        agent = await agent_for(make_agent, server)
        answer = await ask(agent)
        assert (answer.status, answer.body) == (422, body)
        (row,) = agent.closed_rows()
        assert (row.outcome, row.status, row.charge_prompt_nanos) == (Outcome.UPSTREAM_ERROR.code, 422, 0)


async def test_a_failure_is_retried_within_the_budget(make_agent):
    """The budget gives one retry in 10 s: the first failure is tried again, the second is returned."""
    statuses = [503, 200, 503]

    async def script(_, __, writer):
        status = statuses.pop(0)
        respond(writer, status, up.WHOLE if status == 200 else b"{}")

    async with Upstream(script) as server:
        agent = await agent_for(make_agent, server)
        assert (await ask(agent)).status == 200
        assert agent.closed_rows()[0].attempt == 2
        answer = await ask(agent)
        assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_error")
        assert statuses == []
        agent.assert_nothing_held()


async def test_a_server_that_is_not_there(make_agent):
    agent = await make_agent(backend=OpenAIBackend("http://127.0.0.1:9"))
    answer = await ask(agent)
    assert answer.status == 502
    assert "cannot be reached" in answer.json["error"]["message"]
    agent.assert_nothing_held()


async def test_a_kept_connection_that_the_server_closed_is_replaced(make_agent):
    async def script(server, __, writer):
        respond(writer, 200, up.WHOLE)
        if len(server.bodies) == 1:
            await writer.drain()
            writer.transport.abort()

    async with Upstream(script) as server:
        agent = await agent_for(make_agent, server)
        for _ in range(3):
            assert (await ask(agent)).status == 200
        assert {row.attempt for row in agent.closed_rows()} == {1}


async def test_a_stream_that_breaks_ends_with_an_error_and_pays_what_came(make_agent):
    async def script(_, __, writer):
        begin(writer)
        chunk(writer, up.ROLE + up.word("a") + up.word("b"))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async with Upstream(script) as server:
        agent = await agent_for(make_agent, server)
        answer = await ask(agent, stream=True)
        assert answer.body.startswith(up.ROLE + up.word("a"))
        assert b'"code":"upstream_error"' in answer.body
        (row,) = agent.closed_rows()
        assert (row.outcome, row.output_tokens) == (Outcome.UPSTREAM_ERROR.code, 2)
        assert row.charge_output_nanos == 2 * 3000
        agent.assert_nothing_held()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_cancels_upstream_within_a_second(make_agent, stream):
    async def script(_, __, writer):
        if stream:
            begin(writer)
            chunk(writer, up.ROLE + up.word("a"))
        await asyncio.sleep(30)

    async with Upstream(script) as server:
        agent = await agent_for(make_agent, server)
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body(stream=stream)))
        await agent.until(lambda: bool(server.bodies))
        await asyncio.sleep(0.05)
        client.abort()
        await agent.until(lambda: server.gone == 1, within_s=1.0)
        assert agent.closed_rows()[0].outcome == Outcome.CANCELLED_BY_CLIENT.code
        agent.assert_nothing_held()


async def test_an_answer_that_is_not_http(make_agent):
    async def script(_, __, writer):
        writer.write(b"HELLO\r\n\r\n")

    async with Upstream(script) as server:
        agent = await agent_for(make_agent, server)
        assert (await ask(agent)).status == 502
        agent.assert_nothing_held()


def test_events_are_cut_anywhere_without_a_difference():
    data = STREAM.replace(b"\n\n", b"\r\n\r\n") + up.word("d") + up.USAGE + up.DONE + b": bye\n\n"
    for cut in range(len(data)):
        events = EventStream(hide_usage=True)
        passed = events.feed(data[:cut]) + events.feed(data[cut:]) + events.finish()
        assert passed == data.replace(up.USAGE, b"")
        assert events.tokens == 4
        assert events.usage is not None and events.usage.completion_tokens == 3
