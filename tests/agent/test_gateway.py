"""HTTP as bytes: keep-alive, pipelining, limits, clients that misbehave."""

import asyncio
import gc
import json

import pytest

from controlplane.agent import gateway
from controlplane.agent.api_body import TEXT_PATH, BadBody, read_body
from controlplane.agent.gateway import Connection
from tests.agent import worlds
from tests.agent.wire_client import WireClient, chat_body, post


async def connect(agent) -> WireClient:
    return await WireClient.connect(agent.port)


async def test_keep_alive_serves_one_after_the_other(make_agent):
    agent = await make_agent()
    client = await connect(agent)
    for _ in range(3):
        answer = await client.ask(post(chat_body()))
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] >= 1
    assert len(agent.front.connections) == 1
    agent.assert_nothing_held()


async def test_pipelined_requests_are_answered_in_order(make_agent):
    agent = await make_agent(speed=200.0)
    client = await connect(agent)
    sizes = [9, 1, 5, 2, 7, 3, 8, 1, 2, 4, 6, 1]
    client.send(b"".join(post(chat_body(max_tokens=n, ignore_eos=True, stream=n % 2 == 0)) for n in sizes))
    for size in sizes:
        answer = await client.answer()
        if size % 2:
            assert answer.json["usage"]["completion_tokens"] == size
        else:
            assert answer.body.count(b'"content":"') - answer.body.count(b'"content":""') == size
            assert answer.body.endswith(b"data: [DONE]\n\n")
    await agent.until(lambda: not agent.engine.calls)
    agent.assert_nothing_held()


async def test_a_request_in_single_bytes(make_agent):
    agent = await make_agent()
    client = await connect(agent)
    for byte in post(chat_body()):
        client.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await client.answer()).status == 200


async def test_head_and_body_are_bounded(make_agent, monkeypatch):
    agent = await make_agent()
    client = await connect(agent)
    big = await client.ask(post(chat_body(), headers=f"x-big: {'a' * gateway.HEAD_BYTES_MAX}\r\n"))
    assert big.status == 431
    assert await client.closed_by_server()
    client = await connect(agent)
    declared = post(b"", headers="").replace(b"content-length: 0", b"content-length: 99999999999")
    assert (await client.ask(declared)).status == 413
    assert await client.closed_by_server()
    monkeypatch.setattr(gateway, "BODY_BYTES_MAX", 1000)
    client = await connect(agent)
    head = post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    assert (await client.ask(head + b"7d0\r\n" + b"x" * 2000 + b"\r\n")).status == 413
    agent.assert_nothing_held()


UPGRADE = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        post(chat_body(), headers=UPGRADE),
        f"GET /healthz HTTP/1.1\r\nhost: a\r\n{UPGRADE}\r\n".encode(),
        b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
    ids=["post", "get", "connect"],
)
async def test_who_asks_for_another_protocol_gets_one_answer(make_agent, sent):
    agent = await make_agent()
    client = await connect(agent)
    client.send(sent)
    answer = await client.answer()
    assert answer.status == 400 and "without upgrade" in answer.json["error"]["message"]
    assert await client.closed_by_server()
    assert not agent.engine.calls and not agent.closed_rows()


async def test_bodies_on_their_way_are_bounded_over_all_connections(make_agent, monkeypatch):
    """No key is known before a body is whole, so that anybody could have them held."""
    monkeypatch.setattr("controlplane.agent.gateway.BODIES_BYTES_MAX", 1_000_000)
    agent = await make_agent()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 800000\r\n\r\n"
    first, second, third = [await WireClient.connect(agent.port) for _ in range(3)]
    first.send(head + b"x" * 700_000)
    await agent.until(lambda: agent.front.held_bytes == 700_000)
    second.send(head + b"x" * 700_000)
    refused = await second.answer()
    assert refused.status == 503 and "Retry" in refused.json["error"]["message"]
    assert await second.closed_by_server()
    assert (await third.ask(post(chat_body()))).status == 200, "what comes whole is served meanwhile"
    first.send(b"x" * 100_000)
    assert (await first.answer()).status == 401, "who was there first is read to the end"
    assert agent.front.held_bytes == 0
    first.send(post(chat_body(max_tokens=400, ignore_eos=True)) + post(chat_body()) * 3)
    assert [(await first.answer()).status for _ in range(4)] == [200] * 4
    assert agent.front.held_bytes == 0
    first.send(head + b"x" * 700_000)
    await agent.until(lambda: agent.front.held_bytes == 700_000)
    first.abort()
    await agent.until(lambda: agent.front.held_bytes == 0)


async def test_a_connection_that_ends_leaves_nothing_for_the_cycle_collector(make_agent):
    agent = await make_agent()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 800000\r\n\r\n"
    gc.collect()
    gc.disable()
    try:
        for sent in (b"", b"GET", head + b"x" * 400_000, head.replace(b"800000", b"9" * 9), post(chat_body())):
            client = await WireClient.connect(agent.port)
            client.send(sent)
            await asyncio.sleep(0.05)
            client.abort()
            await agent.until(lambda: not agent.front.connections)
        await asyncio.sleep(0.05)
        left = [one for one in gc.get_objects() if type(one) is Connection]  # others' lazy objects would wake up
        assert not left, f"{len(left)} connections"
    finally:
        gc.enable()


@pytest.mark.parametrize("digits", [b"9" * 5_000, b"0" * 5_000])
async def test_a_length_that_is_no_length(make_agent, digits):
    agent = await make_agent()
    client = await connect(agent)
    answer = await client.ask(post(b"").replace(b"content-length: 0", b"content-length: " + digits))
    assert answer.status == 400
    assert await client.closed_by_server()


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"HELLO there\r\n\r\n"])
async def test_what_is_not_http_is_refused(make_agent, garbage):
    agent = await make_agent()
    client = await connect(agent)
    answer = await client.ask(garbage)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert await client.closed_by_server()


async def test_bodies_that_cannot_be_understood(make_agent):
    agent = await make_agent()
    client = await connect(agent)
    for body, param in [
        (b"{", None),
        (b'{"messages":[]}', "model"),
        (chat_body(max_tokens="many"), "max_tokens"),
        (chat_body(max_tokens=0), "max_tokens"),
        (chat_body(messages="hi"), "messages"),
        (chat_body(n=0), "n"),
        (chat_body(n=2, best_of=3), "best_of"),
        (chat_body(messages=[]), "messages"),
        (chat_body(model="m" * 257), "model"),
        (chat_body(messages="NEST").replace(b'"NEST"', b"[" * 100_000 + b"]" * 100_000), None),
        (chat_body(messages="NEST").replace(b'"NEST"', b"[" * 900 + b"]" * 900), None),
        (chat_body(user="BYTE").replace(b"BYTE", b"\xff\xfe"), None),
        (chat_body(BYTE=1).replace(b"BYTE", b"\xff"), None),
    ]:
        answer = await client.ask(post(body))
        assert answer.status == 400
        assert answer.json["error"]["param"] == param
        assert answer.headers["x-should-retry"] == "false"
    assert agent.engine.offered == 0


@pytest.mark.parametrize("prompt", ["", [], None, 7, True, {}, [""], ["a", ""], [[]], ["a", 1], [1.5], [None]])
async def test_prompts_that_cannot_be_served(make_agent, prompt):
    agent = await make_agent()
    client = await connect(agent)
    body = json.dumps({"model": worlds.MODEL, "prompt": prompt}).encode()
    answer = await client.ask(post(body, path="/v1/completions"))
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")
    assert agent.engine.offered == 0


@pytest.mark.parametrize(
    ("prompt", "n", "outputs"),
    [
        ("a", None, 1),
        ("a", 3, 3),
        (["a"] * 100, None, 100),
        (["a"] * 4, 2, 8),
        ([1, 2, 3], 2, 2),
        ([[1, 2], [3]], 2, 4),
    ],
)
def test_every_output_that_the_engine_makes_is_counted(prompt, n, outputs):
    body = json.dumps({"model": "m", "prompt": prompt, "n": n, "best_of": n}).encode()
    assert read_body(body, TEXT_PATH).n == outputs


def test_more_outputs_than_one_request_may_have():
    body = json.dumps({"model": "m", "prompt": ["a"] * 100, "n": 100}).encode()
    with pytest.raises(BadBody, match="send several requests"):
        read_body(body, TEXT_PATH)


async def test_a_list_of_prompts_is_admitted_and_charged_as_many(make_agent):
    agent = await make_agent()
    client = await connect(agent)
    body = json.dumps({"model": worlds.MODEL, "prompt": ["a"] * 10, "max_tokens": 4, "ignore_eos": True}).encode()
    assert (await client.ask(post(body, path="/v1/completions"))).json["usage"]["completion_tokens"] == 40
    assert agent.closed_rows()[0].output_tokens == 40


async def test_paths_and_methods(make_agent):
    agent = await make_agent()
    client = await connect(agent)
    assert (await client.ask(b"GET /v1/chat/completions HTTP/1.1\r\nhost: a\r\n\r\n")).status == 405
    assert (await client.ask(b"GET /nowhere HTTP/1.1\r\nhost: a\r\n\r\n")).status == 404
    assert (await client.ask(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")).body == b"ok\n"
    assert (await client.ask(b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n")).status == 200
    agent.engine.draining = True
    assert (await client.ask(b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n")).status == 503
    answer = await client.ask(post(chat_body()))
    assert (answer.status, answer.json["error"]["code"]) == (503, "unavailable")


async def test_http_1_0_streams_end_with_their_connection(make_agent):
    agent = await make_agent()
    client = await connect(agent)
    answer = await client.ask(post(chat_body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert "transfer-encoding" not in answer.headers
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_expect_100_continue(make_agent):
    agent = await make_agent()
    client = await connect(agent)
    data = post(chat_body(), headers="expect: 100-continue\r\n")
    head, body = data.split(b"\r\n\r\n", 1)
    assert (await client.ask(head + b"\r\n\r\n")).status == 100
    assert (await client.ask(body)).status == 200


async def test_headers_out(make_agent):
    agent = await make_agent()
    client = await connect(agent)
    answer = await client.ask(post(chat_body(), headers="x-request-id: mine-1\x01\r\n".replace("\x01", "")))
    assert answer.headers["x-client-request-id"] == "mine-1"
    assert answer.headers["x-flexband-class"] == "chat"
    assert int(answer.headers["x-flexband-queue-ms"]) >= 0
    assert agent.closed_rows()[0].client_request_id == "mine-1"
    bulk = await client.ask(post(chat_body(), headers="x-flexband-class: bulk\r\n"))
    assert bulk.headers["x-flexband-class"] == "bulk"


async def test_slow_and_idle_clients_are_closed(make_agent):
    agent = await make_agent()
    slow, idle = await connect(agent), await connect(agent)
    slow.send(post(chat_body())[:40])
    await agent.until(lambda: any(c.reading or c._url for c in agent.front.connections))
    now_s = agent.front.loop.time()
    late = {
        "slow": [c for c in agent.front.connections if c.too_slow(now_s + gateway.HEAD_TIMEOUT_S + 1)],
        "idle": [c for c in agent.front.connections if c.too_slow(now_s + gateway.IDLE_TIMEOUT_S + 1)],
    }
    assert len(late["slow"]) == 1
    assert len(late["idle"]) == 2
    idle.abort()


async def test_a_reader_that_stops_pauses_only_its_own_request(make_agent):
    """The agent stops producing for it instead of filling memory; the others go on; then it gets everything."""
    doc = worlds.document(
        classes=[worlds.class_policy(max_output_tokens=40_000), worlds.class_policy("bulk", kind="batch")]
    )
    agent = await make_agent(doc, speed=0.0)
    stopped = await WireClient.connect(agent.port, limit=1024)
    stopped.writer.transport.pause_reading()
    stopped.send(post(chat_body(stream=True, max_tokens=30_000, ignore_eos=True)))
    await agent.until(lambda: any(call.attempt and call.attempt.run.paused for call in agent.engine.calls.values()))
    buffered = max(c.transport.get_write_buffer_size() for c in agent.front.connections)
    assert buffered < 2 * gateway.WRITE_HIGH_WATER
    other = await connect(agent)
    assert (await other.ask(post(chat_body()))).status == 200
    stopped.writer.transport.resume_reading()
    answer = await stopped.answer()
    assert answer.body.count(b'"content":" ') >= 29_000
    assert json.loads(answer.body.split(b"data: ")[-2])["choices"][0]["finish_reason"] == "length"
    await agent.until(lambda: not agent.engine.calls)
    agent.assert_nothing_held()


PIPELINED = post(chat_body(user="u" * 2_000, max_tokens=200, ignore_eos=True))


async def stall(agent, count: int = 12_000):
    """A client that sends many requests and reads no answer; returns it when the agent has stopped serving it."""
    stopped = await WireClient.connect(agent.port, limit=1024)
    stopped.writer.transport.pause_reading()
    for _ in range(count):
        stopped.send(PIPELINED)
    await agent.until(lambda: bool(agent.front.connections))
    (connection,) = agent.front.connections
    await agent.until(lambda: connection.transport.get_write_buffer_size() > 0 and connection.current is None, 30)
    return stopped, connection


async def test_a_client_that_pipelines_and_never_reads_is_not_served_on(make_agent):
    """Few of the requests begin, and memory does not grow with what is sent; when it reads, it gets every answer."""
    agent = await make_agent(keys=[worlds.live_key()])
    stopped, connection = await stall(agent)
    begun = agent.engine.offered
    await asyncio.sleep(0.5)
    assert agent.engine.offered == begun < 6_000
    assert connection.transport.get_write_buffer_size() < 2 * gateway.WRITE_HIGH_WATER
    assert len(connection._queue) * len(PIPELINED) < 1024 * 1024
    assert stopped.writer.transport.get_write_buffer_size() > 0, "the agent stopped reading too"
    stopped.writer.transport.resume_reading()
    for _ in range(begun + 20):
        assert (await stopped.answer(10)).status == 200
    stopped.abort()
    await agent.until(lambda: not agent.front.connections)
    agent.assert_nothing_held()


async def test_a_connection_that_leaves_its_answers_unread_is_ended(make_agent, monkeypatch):
    agent = await make_agent(keys=[worlds.live_key()])
    await stall(agent)
    monkeypatch.setattr(gateway, "IDLE_TIMEOUT_S", -1)
    monkeypatch.setattr(gateway, "HEAD_TIMEOUT_S", -1)
    monkeypatch.setattr(gateway, "BODY_TIMEOUT_S", -1)
    agent.front._sweep()
    await agent.until(lambda: not agent.front.connections)
    agent.assert_nothing_held()


async def test_a_stream_that_begins_while_nobody_reads_is_paused(make_agent):
    agent = await make_agent(speed=1.0)
    client = await connect(agent)
    messages = [{"role": "user", "content": "word " * 2_000}]
    client.send(post(chat_body(messages=messages, stream=True, max_tokens=20, ignore_eos=True)))
    await agent.until(lambda: bool(agent.engine.calls))
    (connection,) = agent.front.connections
    assert connection.current.call.attempt is not None and not connection.current.streaming
    connection.write_paused = True
    await agent.until(lambda: any(call.attempt.run.paused for call in agent.engine.calls.values()))
    connection.resume_writing()
    answer = await client.answer()
    assert answer.body.endswith(b"data: [DONE]\n\n")
    await agent.until(lambda: not agent.engine.calls)
    agent.assert_nothing_held()


async def test_a_class_that_is_not_served_is_not_named_as_the_one_that_served(make_agent):
    """The header tells which class served; what a client wrote into its own must not come back as that."""
    agent = await make_agent()
    client = await connect(agent)
    answer = await client.ask(post(chat_body(), headers="x-flexband-class: nosuch\r\n"))
    assert (answer.status, answer.json["error"]["code"]) == (403, "class_not_allowed")
    assert not {"x-flexband-class", "x-flexband-asked-class"} & set(answer.headers)
    assert "x-request-id" in answer.headers
