"""Answers that are not what was hoped for: statuses, odd framing, silence, and readers that do not keep up."""

import asyncio
import resource
import socket
import time

import pytest

from controlplane.agent.backends import openai as backend
from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.backends.request import BackendRequest
from controlplane.core.reasons import Outcome
from controlplane.wire.report import FLAG_CAPPED, FLAG_ESTIMATED, Lease
from tests.agent import upstreams as up
from tests.agent import worlds
from tests.agent.upstreams import Upstream
from tests.agent.wire_client import WireClient, chat_body, post

FAILED = Outcome.UPSTREAM_ERROR.code
WORDS = b'{"error":{"message":"come back later","type":"rate_limit_error","code":"busy","param":null}}'


def answering(status: int, body: bytes, *headers: bytes):
    async def script(_, __, writer):
        up.respond(writer, status, body, *headers)

    return script


def saying(data: bytes, *, close: bool = False):
    """Exactly these bytes as the response."""

    async def script(_, __, writer):
        writer.write(data)
        if close:
            writer.close()

    return script


async def ask(make_agent, server: Upstream, doc=None, **fields):
    agent = await make_agent(doc, backend=OpenAIBackend(server.url))
    client = await WireClient.connect(agent.port)
    answer = await client.ask(post(chat_body(**fields)))
    await agent.until(lambda: not agent.engine.calls)
    agent.assert_nothing_held()
    (row,) = agent.closed_rows()
    return answer, row


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 404, 408, 413, 422, 429, 444])
async def test_the_clients_mistakes_pass_as_they_are(make_agent, status, stream):
    """With when to come again, and also where the number is nobody's."""
    async with Upstream(answering(status, WORDS, b"retry-after: 7")) as server:
        answer, row = await ask(make_agent, server, stream=stream)
    assert (answer.status, answer.body) == (status, WORDS)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["retry-after"] == "7"
    assert (row.outcome, row.status, row.output_tokens, row.charge_prompt_nanos) == (FAILED, status, 0, 0)


@pytest.mark.parametrize("status", [401, 403, 407])
async def test_a_server_that_refuses_the_agent_does_not_blame_the_client(make_agent, status):
    async with Upstream(answering(status, WORDS)) as server:
        answer, row = await ask(make_agent, server)
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_error")
    assert "of this agent" in answer.json["error"]["message"]
    assert row.status == 502


@pytest.mark.parametrize("status", [302, 500, 503, 529])
async def test_failures_of_the_server_are_its_own_with_when_to_come_again(make_agent, status):
    """Named a time, the agent does not ask again before it."""
    async with Upstream(answering(status, WORDS, b"retry-after: 30")) as server:
        answer, row = await ask(make_agent, server)
        assert len(server.bodies) == 1
    assert (answer.status, answer.json["error"]["code"], row.attempt) == (502, "upstream_error", 1)
    assert answer.headers["retry-after"] == "30"


@pytest.mark.parametrize("value", [b"Sun, 29 Nov 2026 20:00:00 GMT", b"<script>", b"1" * 60, b""])
async def test_only_a_time_passes_as_retry_after(make_agent, value):
    async with Upstream(answering(429, WORDS, b"retry-after: " + value)) as server:
        answer, _ = await ask(make_agent, server)
    assert answer.headers.get("retry-after", "").encode() == (value if value.startswith(b"Sun") else b"")


@pytest.mark.parametrize(("code", "status"), [("400", 400), ('"context_length"', 502), ("500", 502), ("null", 502)])
async def test_an_error_in_an_answer_of_200_is_one(make_agent, code, status):
    body = b'{"error":{"message":"too long","code":%b}}' % code.encode()
    async with Upstream(answering(200, body)) as server:
        answer, row = await ask(make_agent, server)
    assert answer.status == row.status == status
    assert (answer.body == body) == (status == 400)
    assert (row.outcome, row.charge_output_nanos) == (FAILED, 0)


async def test_an_answer_that_is_not_streamed_though_it_was_asked_for(make_agent):
    async with Upstream(answering(200, up.WHOLE)) as server:
        answer, row = await ask(make_agent, server, stream=True)
    assert (answer.status, row.outcome) == (502, FAILED)
    assert "did not stream" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("usage", "output", "estimated"),
    [
        (b'{"prompt_tokens":21,"completion_tokens":0}', 0, False),
        (b'{"prompt_tokens":21}', 2, True),
        (b"{}", 2, True),
        (b"null", 2, True),
        (b'{"prompt_tokens":21,"completion_tokens":-4}', 2, True),
        (b'{"prompt_tokens":21,"completion_tokens":1e30}', 2, True),
        (b'{"prompt_tokens":"21","completion_tokens":"3"}', 2, True),
        (b'{"prompt_tokens":21,"completion_tokens":3,"prompt_tokens_details":null}', 3, False),
    ],
)
async def test_a_zero_that_was_counted_stays_and_what_was_not_counted_is_flagged(make_agent, usage, output, estimated):
    body = b'{"choices":[{"message":{"content":"nine char"}}],"usage":%b}' % usage
    async with Upstream(answering(200, body)) as server:
        answer, row = await ask(make_agent, server)
    assert answer.body == body
    assert (row.output_tokens, bool(row.flags & FLAG_ESTIMATED)) == (output, estimated)
    assert row.prompt_tokens > 0


async def test_an_estimate_never_exceeds_what_was_allowed(make_agent):
    body = b'{"choices":[{"message":{"content":"%b"}}]}' % (b"x" * 4000)
    async with Upstream(answering(200, body)) as server:
        _, row = await ask(make_agent, server, max_tokens=8)
    assert row.output_tokens == 8


async def test_an_answer_that_ends_with_its_connection(make_agent):
    head = b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n"
    async with Upstream(saying(head + up.WHOLE, close=True)) as server:
        answer, row = await ask(make_agent, server)
    assert (answer.body, row.output_tokens) == (up.WHOLE, 3)


async def test_an_answer_shorter_than_it_said(make_agent):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n"
    async with Upstream(saying(head + up.WHOLE, close=True)) as server:
        answer, row = await ask(make_agent, server)
    assert (answer.status, row.outcome) == (502, FAILED)


async def test_interim_answers_are_none(make_agent):
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(up.WHOLE)
    async with Upstream(saying(interim + final + up.WHOLE)) as server:
        answer, row = await ask(make_agent, server)
    assert (answer.status, answer.body, row.output_tokens) == (200, up.WHOLE, 3)


@pytest.mark.parametrize("late", [True, False])
async def test_what_stands_behind_an_answer_is_not_the_next_ones(make_agent, late):
    """Bytes that nobody asked for end the connection, whether they come with the answer or after it."""
    stray = b'HTTP/1.1 200 OK\r\ncontent-length: 24\r\n\r\n{"choices":["not yours"]}'

    said = asyncio.Event()

    async def script(server, __, writer):
        up.respond(writer, 200, up.WHOLE)
        if len(server.bodies) == 1:
            if late:
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.write(stray)
            said.set()

    async with Upstream(script) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        client = await WireClient.connect(agent.port)
        for _ in range(3):
            assert (await client.ask(post(chat_body()))).body == up.WHOLE
            await asyncio.wait_for(said.wait(), 60)
            for _ in range(10):  # turns of the loop, in which the agent reads it
                await asyncio.sleep(0.005)
        assert server.connections == 2, "one more for the one that talked out of turn"
        agent.assert_nothing_held()


async def test_a_head_without_end_is_cut(make_agent):
    async def script(_, __, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nx-a: ")
        for _ in range(100):
            writer.write(b"a" * 65536)
            await writer.drain()
            await asyncio.sleep(0)

    async with Upstream(script) as server:
        answer, _ = await ask(make_agent, server)
    assert answer.status == 502
    assert "head of the inference server" in answer.json["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_without_end_is_cut(make_agent, monkeypatch, stream):
    monkeypatch.setattr(backend, "ANSWER_BYTES_MAX", 1 << 20)
    monkeypatch.setattr("controlplane.agent.backends.sse.EVENT_BYTES_MAX", 1 << 20)

    async def script(_, __, writer):
        kind = b"text/event-stream" if stream else b"application/json"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nconnection: close\r\n\r\ndata: " % kind)
        while True:
            writer.write(b"a" * 65536)
            await writer.drain()

    async with Upstream(script) as server:
        answer, row = await ask(make_agent, server, stream=stream)
    assert (answer.status, row.outcome) == (502, FAILED)
    assert "larger than 1048576 bytes" in answer.json["error"]["message"]


async def test_talk_behind_the_end_is_bounded_and_does_not_hold_the_client(make_agent, monkeypatch):
    """A server that keeps the response open behind `[DONE]` is not waited for."""
    monkeypatch.setattr(backend, "END_AFTER_DONE_S", 0.2)

    async def script(_, __, writer):
        up.begin(writer)
        up.chunk(writer, up.ROLE + up.word("a") + up.END + up.DONE)
        await asyncio.sleep(30)

    async with Upstream(script) as server:
        began_s = time.perf_counter()
        answer, row = await ask(make_agent, server, stream=True)
        print(f"the end came after {(time.perf_counter() - began_s) * 1000:.0f} ms")
    assert answer.body == up.ROLE + up.word("a") + up.END + up.DONE
    assert row.outcome == Outcome.COMPLETED.code


@pytest.mark.parametrize("silent", ["before the head", "before the first event", "between events"])
async def test_each_stage_of_a_silent_server_ends_with_the_classs_time(make_agent, silent):
    async def script(_, __, writer):
        if silent != "before the head":
            up.begin(writer)
        if silent == "between events":
            up.chunk(writer, up.ROLE + up.word("a"))
        await asyncio.sleep(30)

    doc = worlds.document(classes=[worlds.class_policy(stage_timeout_s=1), worlds.class_policy("bulk", kind="batch")])
    async with Upstream(script) as server:
        began_s = time.perf_counter()
        answer, row = await ask(make_agent, server, doc, stream=True)
        took_s = time.perf_counter() - began_s
        print(f"{silent}: ended after {took_s:.2f} s, promised 1 s")
        assert 0.9 < took_s < 5.0, "nothing else ends it before 30 s"
        async with asyncio.timeout(30):
            while not server.gone:
                await asyncio.sleep(0.01)
        assert server.gone == 1, "the server was told"
    assert (row.outcome, row.status) == (Outcome.STAGE_TIMEOUT.code, 504)
    if silent == "between events":
        assert answer.body.startswith(up.ROLE + up.word("a")) and b'"code":"stage_timeout"' in answer.body
        assert row.charge_output_nanos == 3000
    else:
        assert (answer.status, row.charge_prompt_nanos) == (504, 0)


async def test_a_slow_first_byte_is_waited_for(make_agent):
    async def script(_, __, writer):
        await asyncio.sleep(0.4)
        up.begin(writer)
        up.chunk(writer, up.ROLE)
        await asyncio.sleep(0.2)
        up.chunk(writer, up.word("a") + up.END + up.DONE)
        up.end(writer)

    async with Upstream(script) as server:
        answer, row = await ask(make_agent, server, stream=True)
    assert answer.body.endswith(up.DONE)
    assert row.ttft_us > 500_000, "the role, sent after 0.4 s, is not the first token, sent 0.2 s later"


async def test_connections_are_used_again_and_no_more_are_made_than_run_at_once(make_agent):
    gate = asyncio.Event()

    async def script(_, body, writer):
        await gate.wait()
        up.respond(writer, 200, up.WHOLE)

    async with Upstream(script) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        clients = [await WireClient.connect(agent.port) for _ in range(4)]
        for _ in range(5):
            gate.clear()
            for client in clients:
                client.send(post(chat_body()))
            await agent.until(lambda: len(server.bodies) % 4 == 0 and len(agent.engine.calls) == 4)
            gate.set()
            assert {(await client.answer()).status for client in clients} == {200}
        assert (server.connections, len(server.bodies)) == (4, 20)


async def test_a_reader_that_stops_stops_the_server_and_memory_stays_bounded(make_agent):
    """Nothing piles up between a fast server and a client that does not read; when it reads, all of it comes."""
    event = up.word("x" * 60_000)
    total = 400
    sent = 0

    async def script(_, __, writer):
        nonlocal sent
        up.begin(writer)
        up.chunk(writer, up.ROLE)
        for _ in range(total):
            up.chunk(writer, event)
            await writer.drain()
            sent += 1
        up.chunk(writer, up.END + up.DONE)
        up.end(writer)

    async with Upstream(script) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        client = await WireClient.connect(agent.port)
        client.writer.transport.pause_reading()
        client.send(post(chat_body(stream=True)))
        await agent.until(lambda: sent > 0)
        held = -1
        while held != sent:
            held = sent
            await asyncio.sleep(0.3)
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        print(f"{sent} of {total} events ({sent * len(event) >> 10} KiB) left the server, memory grew {grown_kib} KiB")
        assert sent * len(event) < 14 << 20, "two socket buffers each way and 256 KiB"
        client.writer.transport.resume_reading()
        answer = await client.answer(within_s=60)
        assert answer.body == up.ROLE + event * total + up.END + up.DONE
        await agent.until(lambda: not agent.engine.calls)
        agent.assert_nothing_held()
        # The connection that was paused is fit for the next request.
        next_one = await WireClient.connect(agent.port)
        next_one.send(post(chat_body(stream=True)))
        assert (await next_one.answer(within_s=60)).body.endswith(up.DONE)
        assert server.connections == 1


class PausingSink:
    """Pauses its run with the first bytes, as a client whose buffer they fill does, and never resumes it."""

    def __init__(self) -> None:
        self.run = None
        self.ended = asyncio.get_running_loop().create_future()

    def prefill_began(self) -> None:
        pass

    def chunk(self, data: bytes, tokens: int, *, framed: bool = False) -> None:
        self.run.pause()

    def finished(self, usage, body: bytes) -> None:
        self.ended.set_result(usage)

    def failed(self, failure) -> None:
        self.ended.set_result(failure)


async def test_a_connection_that_was_paused_with_its_last_bytes_reads_again():
    """The answer ends in the very bytes that fill the client's buffer: nobody resumes that connection later."""

    async def script(_, __, writer):
        up.begin(writer)
        up.chunk(writer, up.ROLE + up.word("b") + up.END + up.USAGE + up.DONE)
        up.end(writer)

    async with Upstream(script) as server:
        upstream = OpenAIBackend(server.url)
        for _ in range(3):
            sink = PausingSink()
            body = chat_body(stream=True)
            request = BackendRequest("r1", "/v1/chat/completions", body, worlds.MODEL, 1, True, False, 7, 8, 1, 100)
            sink.run = upstream.start(request, sink)
            async with asyncio.timeout(30):
                assert (await sink.ended).output_tokens == 3
        assert server.connections == 1
        await upstream.close()


async def test_attempts_of_one_request_are_one_record(make_agent):
    """The first attempt fails, the second answers: one request, one record, charged once."""
    statuses = [502, 200]

    async def script(_, __, writer):
        status = statuses.pop(0)
        up.respond(writer, status, up.WHOLE if status == 200 else b"{}")

    async with Upstream(script) as server:
        answer, row = await ask(make_agent, server)
        assert (answer.status, len(server.bodies), row.attempt) == (200, 2, 2)
    assert row.request_id == answer.headers["x-request-id"]
    assert row.charge_output_nanos == 3 * 3000


async def test_what_a_trailer_says_changes_nothing(make_agent):
    """Headers behind a body come too late to say what it was."""

    async def script(_, __, writer):
        up.begin(writer)
        up.chunk(writer, up.ROLE + up.word("a") + up.END + up.USAGE + up.DONE)
        writer.write(b"0\r\ncontent-type: application/json\r\nretry-after: 5\r\n\r\n")

    async with Upstream(script) as server:
        answer, row = await ask(make_agent, server, stream=True)
    assert answer.body == up.ROLE + up.word("a") + up.END + up.DONE
    assert (row.outcome, row.output_tokens) == (Outcome.COMPLETED.code, 3)


async def test_a_connect_that_is_not_answered_is_given_up(make_agent, monkeypatch):
    """A listener whose backlog is full: the kernel leaves further connects waiting."""
    monkeypatch.setattr(backend, "CONNECT_TIMEOUT_S", 0.3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        agent = await make_agent(backend=OpenAIBackend(f"http://127.0.0.1:{address[1]}"))
        client = await WireClient.connect(agent.port)
        began_s = time.perf_counter()
        answer = await client.ask(post(chat_body()))
        print(f"given up after {time.perf_counter() - began_s:.2f} s, two attempts of 0.3 s")
        assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_error")
        assert "timeout" in answer.json["error"]["message"]
        agent.assert_nothing_held()
        for filler in fillers:
            filler.close()


async def test_a_record_stands_from_admission_on(make_agent):
    """What is written when a request is admitted says `lost`: that is what it is if nothing more is heard of it."""
    gate = asyncio.Event()

    async def script(_, __, writer):
        await gate.wait()
        up.respond(writer, 200, up.WHOLE)

    async with Upstream(script) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body()))
        await agent.until(lambda: len(server.bodies) == 1)
        (opened,) = agent.spool.state.opened.values()
        gate.set()
        answer = await client.answer()
        (row,) = agent.closed_rows()
        assert answer.headers["x-request-id"] == row.request_id
        assert not agent.spool.state.opened
    assert (opened.row.outcome, opened.row.request_id) == (Outcome.LOST.code, row.request_id)


async def test_a_server_that_talks_on_behind_its_end_is_cut(make_agent, monkeypatch):
    monkeypatch.setattr("controlplane.agent.backends.sse.EVENT_BYTES_MAX", 1 << 18)

    async def script(_, __, writer):
        up.begin(writer)
        up.chunk(writer, up.ROLE + up.word("a") + up.END + up.DONE)
        while True:
            up.chunk(writer, up.word("b") * 100)
            await writer.drain()

    async with Upstream(script) as server:
        answer, row = await ask(make_agent, server, stream=True)
    assert answer.body.startswith(up.ROLE + up.word("a") + up.END)
    assert b'"code":"upstream_error"' in answer.body
    assert (row.outcome, row.output_tokens) == (FAILED, 1)


async def test_an_engine_that_counts_beyond_the_limit_costs_the_tenant_its_reservation_at_most(make_agent):
    """Two tokens were allowed and a million counted: the budget's lease is never overspent, the record says so."""
    counted = b'{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":3,"completion_tokens":1000000}}'
    async with Upstream(answering(200, counted)) as server:
        doc = worlds.document(tenants=[worlds.tenant_policy(hard_budget=True)])
        agent = await make_agent(doc, backend=OpenAIBackend(server.url))
        now_us = agent.engine.clock.now_us()
        lease = Lease(5, 1, 10**9, now_us + 60_000_000)
        agent.engine.leases.apply([lease], [], asked_us=now_us, now_us=now_us)
        client = await WireClient.connect(agent.port)
        answer = await client.ask(post(chat_body(max_tokens=2)))
        await agent.until(lambda: not agent.engine.calls)
    assert answer.json["usage"]["completion_tokens"] == 1_000_000
    (row,) = agent.closed_rows()
    (spend,) = agent.engine.leases.spends()
    charged = row.charge_prompt_nanos + row.charge_cached_nanos + row.charge_output_nanos + row.charge_gpu_nanos
    assert row.flags & FLAG_CAPPED and row.output_tokens == 1_000_000
    assert 0 < charged == spend.spent_nanos < 10**9
    agent.assert_nothing_held()
