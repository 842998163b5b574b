"""Embeddings and tensors through a real agent: the official client, records, charges, errors, batches of several."""

import asyncio
import base64
import json
import struct

import openai
import pytest

from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.backends.sim_one_shot import packed, unit_vector
from controlplane.core.reasons import Outcome
from controlplane.wire.policy import Batching
from tests.agent import worlds
from tests.agent.upstreams import Upstream, respond
from tests.agent.wire_client import WireClient

FOUR = ["first text", "second text", "a third one", "and the last"]


def client(agent: worlds.Agent, key: str = worlds.SECRET, **more) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url=agent.url, max_retries=0, timeout=60, **more)


def batching(size: int, wait_ms: int, *, revision: int = 1, **pool) -> object:
    return worlds.document(revision, pool={"batching": Batching(size, wait_ms), **pool})


def row_of(piece) -> list[float]:
    """What the played server answers for an input: enough to tell whose it is."""
    return [float(len(json.dumps(piece))), float(sum(json.dumps(piece).encode()) % 1009)]


def inputs_of(body: dict) -> list:
    given = body["input"]
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def embeddings(given: list, *, tokens: int = 0, order=None) -> bytes:
    rows = [{"object": "embedding", "index": i, "embedding": row_of(piece)} for i, piece in enumerate(given)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json.dumps({"object": "list", "data": rows[::order], "model": "served", "usage": usage}).encode()


async def embed(upstream, body, writer):
    respond(writer, 200, embeddings(inputs_of(body), tokens=sum(len(json.dumps(i)) for i in inputs_of(body))))


def post(body: dict, path: str = "/v1/embeddings", key: str = worlds.SECRET) -> bytes:
    data = json.dumps({"model": worlds.MODEL, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: agent\r\nauthorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def ask(agent, body: dict, **more):
    connection = await WireClient.connect(agent.port, limit=2**22)
    return await connection.ask(post(body, **more))


# The official client, on the simulated backend


async def test_the_official_client_gets_embeddings(make_agent):
    agent = await make_agent()
    async with client(agent) as ai:
        raw = await ai.embeddings.with_raw_response.create(model=worlds.MODEL, input=FOUR)
        answer = raw.parse()
        again = await ai.embeddings.create(model=worlds.MODEL, input=FOUR[2])
    assert [row.index for row in answer.data] == [0, 1, 2, 3]
    assert answer.data[2].embedding == again.data[0].embedding, "seeded: an input's embedding is its own"
    assert answer.data[0].embedding != answer.data[1].embedding
    assert len(again.data[0].embedding) == 64
    assert raw.headers["x-flexband-class"] == "chat"
    row, _ = agent.closed_rows()
    assert (row.request_id, row.outcome, row.status) == (raw.headers["x-request-id"], 1, 200)
    assert (row.prompt_tokens, row.output_tokens) == (answer.usage.prompt_tokens, 0)
    assert row.charge_prompt_nanos == row.prompt_tokens * 1000
    assert row.charge_output_nanos == 0 and row.batch_wait_us == 0
    agent.assert_nothing_held()


@pytest.mark.parametrize("dimensions", [8, 256])
async def test_both_forms_hold_the_same_numbers(make_agent, dimensions):
    agent = await make_agent()
    async with client(agent) as ai:
        base = {"model": worlds.MODEL, "input": "one text", "dimensions": dimensions}
        default = await ai.embeddings.create(**base)
        floats = await ai.embeddings.create(**base, encoding_format="float")
        coded = await ai.embeddings.create(**base, encoding_format="base64")
    assert len(floats.data[0].embedding) == dimensions
    assert default.data[0].embedding == floats.data[0].embedding
    told = base64.b64decode(coded.data[0].embedding)
    assert list(struct.unpack(f"<{dimensions}f", told)) == floats.data[0].embedding


async def test_token_numbers_are_inputs_too(make_agent):
    agent = await make_agent()
    async with client(agent) as ai:
        one = await ai.embeddings.create(model=worlds.MODEL, input=[1, 2, 3])
        two = await ai.embeddings.create(model=worlds.MODEL, input=[[1, 2, 3], [4]])
    assert len(one.data) == 1 and one.usage.prompt_tokens == 3
    assert len(two.data) == 2 and two.usage.total_tokens == 4


def test_the_simulated_vector_is_of_length_one():
    vector = unit_vector(b'"x"', 7, 300)
    assert abs(sum(value * value for value in vector) - 1) < 1e-5
    assert vector == unit_vector(b'"x"', 7, 300) and vector != unit_vector(b'"x"', 8, 300)
    assert base64.b64decode(packed(vector)) == struct.pack("<300f", *vector)


# What is refused


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing required field `input`"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input", "must not be empty"),
        ({"input": [[1], []]}, "input", "must not be empty"),
        ({"input": ["a", 1]}, "input", "must not mix"),
        ({"input": [1, [2]]}, "input", "must not mix"),
        ({"input": [-1]}, "input", "a text, a list of texts, or token numbers"),
        ({"input": [None]}, "input", "a text, a list of texts, or token numbers"),
        ({"input": {"a": 1}}, "input", "a text, a list of texts, or token numbers"),
        ({"input": ["x"] * 2049}, "input", "at most 2048 inputs, got 2049"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "x", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "x", "model": ""}, "model", "1 to 256 characters"),
    ],
)
async def test_bad_requests_are_told_in_openai_form(make_agent, body, param, words):
    agent = await make_agent()
    answer = await ask(agent, body)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert (answer.json["error"]["param"], words in answer.json["error"]["message"]) == (param, True), answer.body
    agent.assert_nothing_held()


async def test_deep_nesting_and_broken_text_are_refused(make_agent):
    agent = await make_agent()
    for data in (b'{"model":"m","input":' + b"[" * 100_000, b'{"model":"m","input":"\xff"}', b"[]", b"nothing"):
        connection = await WireClient.connect(agent.port)
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {worlds.SECRET}\r\n"
        answer = await connection.ask(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
        assert answer.status == 400 and answer.json["error"]["message"]


async def test_key_class_and_model_are_checked_as_for_all_work(make_agent):
    agent = await make_agent()
    assert (await ask(agent, {"input": "x"}, key="fb_live_nobody")).status == 401
    assert (await ask(agent, {"input": "x", "model": "another"})).status == 403
    answer = await ask(agent, {"input": "word " * 20_000})
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    connection = await WireClient.connect(agent.port)
    answer = await connection.ask(b"GET /v1/embeddings HTTP/1.1\r\nhost: a\r\n\r\n")
    assert answer.status == 405


# An upstream server


async def test_a_request_passes_to_the_upstream_as_it_is(make_agent):
    async with Upstream(embed) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        sent = {"model": worlds.MODEL, "input": FOUR, "encoding_format": "float", "dimensions": 2, "user": "u", "x": 1}
        answer = await ask(agent, sent)
    assert server.bodies == [sent]
    assert answer.body == embeddings(FOUR, tokens=answer.json["usage"]["prompt_tokens"])
    (row,) = agent.closed_rows()
    assert (row.prompt_tokens, row.output_tokens, row.flags) == (answer.json["usage"]["prompt_tokens"], 0, 0)
    agent.assert_nothing_held()


async def test_a_priority_of_the_clients_own_does_not_pass(make_agent):
    async with Upstream(embed) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url, send_priority=True))
        await ask(agent, {"input": "x", "priority": -50})
    assert server.bodies[0]["priority"] == 100


async def test_without_usage_the_count_is_the_agents_and_says_so(make_agent):
    async def silent(_, body, writer):
        respond(writer, 200, b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[1.0]}]}')

    async with Upstream(silent) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        assert (await ask(agent, {"input": "four words of text"})).status == 200
    (row,) = agent.closed_rows()
    assert row.prompt_tokens > 0 and row.output_tokens == 0 and row.flags == 2


# Batches


async def test_requests_of_several_clients_run_as_one_and_each_gets_its_own(make_agent):
    async with Upstream(embed) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(4, 5_000))
        async with client(agent) as acme, client(agent, worlds.SECRET) as other:
            answers = await asyncio.gather(
                acme.embeddings.create(model=worlds.MODEL, input=FOUR[0], encoding_format="float", user="a"),
                other.embeddings.create(model=worlds.MODEL, input=FOUR[1:3], encoding_format="float", user="b"),
                acme.embeddings.create(model=worlds.MODEL, input=[FOUR[3]], encoding_format="float"),
            )
    (body,) = server.bodies
    assert sorted(body["input"]) == sorted(FOUR) and "user" not in body
    for answer, own in zip(answers, ([FOUR[0]], FOUR[1:3], [FOUR[3]]), strict=True):
        assert [row.embedding for row in answer.data] == [row_of(piece) for piece in own]
        assert [row.index for row in answer.data] == list(range(len(own)))
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
    whole = sum(len(json.dumps(piece)) for piece in FOUR)
    assert sum(answer.usage.prompt_tokens for answer in answers) == whole
    rows = agent.closed_rows()
    assert sum(row.prompt_tokens for row in rows) == whole
    assert all(row.flags == 2 for row in rows), "a share of a server's count is an estimate"
    learnt = agent.engine.registry.estimate_of(1, 1)
    assert learnt.bias != 1.0, "its GPU time is not"
    assert learnt.expected_output is None, "there is no output to learn from"
    assert all(row.outcome == Outcome.COMPLETED.code for row in rows)
    agent.assert_nothing_held()


async def test_shares_of_token_numbers_are_exact(make_agent):
    async def count(_, body, writer):
        respond(writer, 200, embeddings(body["input"], tokens=sum(map(len, body["input"]))))

    async with Upstream(count) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(3, 5_000))
        answers = await asyncio.gather(*(ask(agent, {"input": given}) for given in ([1, 2, 3], [[4], [5, 6]])))
    assert len(server.bodies) == 1
    assert [answer.json["usage"]["prompt_tokens"] for answer in answers] == [3, 3]
    assert [row.flags for row in agent.closed_rows()] == [0, 0]


async def test_rows_that_come_in_another_order_find_their_inputs(make_agent):
    async def backwards(_, body, writer):
        respond(writer, 200, embeddings(body["input"], tokens=8, order=-1))

    async with Upstream(backwards) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(2, 5_000))
        answers = await asyncio.gather(*(ask(agent, {"input": text}) for text in FOUR[:2]))
    for answer, text in zip(answers, FOUR, strict=False):
        assert answer.json["data"][0]["embedding"] == row_of(text)


async def test_a_batch_closes_when_its_oldest_has_waited_and_the_wait_is_a_stage_of_its_own(make_agent):
    async with Upstream(embed) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(16, 120))
        answer = await ask(agent, {"input": "alone"})
    assert answer.status == 200 and answer.json["data"][0]["embedding"] == row_of("alone")
    (row,) = agent.closed_rows()
    print(f"asked to wait 120 ms, waited {row.batch_wait_us / 1000:.1f} ms")
    assert row.batch_wait_us > 110_000
    assert row.gpu_us <= row.ended_us - row.arrived_us - row.batch_wait_us, "waiting for others uses no GPU"
    stages = row.admission_us + row.queue_us + row.batch_wait_us + row.preprocess_us
    assert stages + row.prefill_us + row.decode_us + row.return_us == row.ended_us - row.arrived_us


async def test_what_differs_does_not_mix(make_agent):
    async with Upstream(embed) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(8, 60))
        bodies = (
            {"input": "a"}, {"input": "b", "dimensions": 3}, {"input": "c", "encoding_format": "float"},
            {"input": [7]}, {"input": "long " * 400},
        )  # fmt: skip
        answers = await asyncio.gather(*(ask(agent, body) for body in bodies))
    assert [answer.status for answer in answers] == [200] * 5
    assert len(server.bodies) == 5


async def test_who_leaves_before_the_batch_closes_is_not_in_it(make_agent):
    async with Upstream(embed) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(8, 400))
        leaver = await WireClient.connect(agent.port)
        leaver.send(post({"input": "left"}))
        await agent.until(lambda: len(agent.engine.calls) == 1)
        staying = asyncio.ensure_future(ask(agent, {"input": "stayed"}))
        await agent.until(lambda: len(agent.engine.calls) == 2)
        leaver.writer.close()
        await agent.until(lambda: len(agent.engine.calls) == 1)
        answer = await staying
    assert [body["input"] for body in server.bodies] == ["stayed"]
    assert answer.json["data"][0]["embedding"] == row_of("stayed")
    left, stayed = agent.closed_rows()
    assert left.outcome == Outcome.CANCELLED_BY_CLIENT.code
    assert (left.prompt_tokens, left.gpu_us, left.charge_prompt_nanos) == (0, 0, 0)
    assert left.batch_wait_us > 0
    assert stayed.batch_wait_us > 380_000, "the deadline follows the oldest that is left"
    agent.assert_nothing_held()


async def test_who_leaves_a_running_batch_does_not_stop_it(make_agent):
    gate = asyncio.Event()

    async def slow(_, body, writer):
        await gate.wait()
        respond(writer, 200, embeddings(body["input"], tokens=10))

    async with Upstream(slow) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(2, 5_000))
        leaver = await WireClient.connect(agent.port)
        leaver.send(post({"input": "left"}))
        staying = asyncio.ensure_future(ask(agent, {"input": "stayed"}))
        await agent.until(lambda: len(server.bodies) == 1)
        leaver.writer.close()
        await agent.until(lambda: len(agent.engine.calls) == 1)
        gate.set()
        answer = await staying
        assert server.gone == 0
    assert answer.json["data"][0]["embedding"] == row_of("stayed")
    agent.assert_nothing_held()


async def test_a_batch_that_all_have_left_is_cancelled_upstream(make_agent):
    async def never(_, body, writer):
        await asyncio.sleep(30)

    async with Upstream(never) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(2, 5_000))
        leavers = [await WireClient.connect(agent.port) for _ in range(2)]
        for number, leaver in enumerate(leavers):
            leaver.send(post({"input": f"text {number}"}))
        await agent.until(lambda: len(server.bodies) == 1)
        for leaver in leavers:
            leaver.writer.close()
        await agent.until(lambda: server.gone == 1)
    agent.assert_nothing_held()


@pytest.mark.parametrize("off", [-1, 1])
async def test_another_number_of_outputs_fails_every_member_and_no_other_batch(make_agent, off):
    async def miscounts(_, body, writer):
        given = body["input"]
        wrong = (given[:-1] if off < 0 else [*given, "x"]) if "bad" in given else given
        respond(writer, 200, embeddings(wrong, tokens=9))

    async with Upstream(miscounts) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(2, 5_000, isolation="shared"))
        bad = [asyncio.ensure_future(ask(agent, {"input": text})) for text in ("bad", "luck")]
        await agent.until(lambda: len(server.bodies) == 1)
        good = [asyncio.ensure_future(ask(agent, {"input": text})) for text in ("all", "well")]
        failed, fine = await asyncio.gather(*bad), await asyncio.gather(*good)
    for answer in failed:
        assert answer.status == 502
        assert f"had 2 inputs and came back with {2 + off} outputs" in answer.json["error"]["message"]
    assert [answer.status for answer in fine] == [200, 200]
    agent.assert_nothing_held()


@pytest.mark.parametrize(
    "data", [b'[{"embedding":[1]},{"embedding":[2]}]', b'[{"index":0},{"index":0}]', b'[{"index":1},{"index":2}]', b"7"]
)
async def test_rows_that_do_not_say_whose_they_are_fail_every_member(make_agent, data):
    async def unclear(_, body, writer):
        respond(writer, 200, b'{"object":"list","data":%b}' % data)

    async with Upstream(unclear) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(2, 5_000))
        answers = await asyncio.gather(*(ask(agent, {"input": text}) for text in ("a", "b")))
    assert [answer.status for answer in answers] == [502, 502]
    assert all("the inference server's" in answer.json["error"]["message"] for answer in answers)
    agent.assert_nothing_held()


async def test_one_refused_input_does_not_refuse_the_others(make_agent):
    async def picky(_, body, writer):
        if "too long" in inputs_of(body):
            respond(writer, 400, b'{"error":{"message":"this input is too long","type":"x","code":null,"param":null}}')
        else:
            await embed(_, body, writer)

    async with Upstream(picky) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(2, 5_000))
        bad, good = await asyncio.gather(*(ask(agent, {"input": text}) for text in ("too long", "fine")))
    assert (bad.status, bad.json["error"]["message"]) == (400, "this input is too long")
    assert good.status == 200 and good.json["data"][0]["embedding"] == row_of("fine")
    assert len(server.bodies) == 3
    agent.assert_nothing_held()


async def test_a_server_that_is_away_fails_each_by_its_own_retry_budget(make_agent):
    async def away(_, body, writer):
        respond(writer, 503, b'{"error":{"message":"not now"}}')

    async with Upstream(away) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=batching(2, 30))
        answers = await asyncio.gather(*(ask(agent, {"input": text}) for text in ("a", "b")))
    assert [answer.status for answer in answers] == [502, 502]
    agent.assert_nothing_held()


async def test_batching_is_off_by_default_and_follows_the_revision(make_agent):
    async with Upstream(embed) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        assert not agent.engine.backend.gathers("/v1/embeddings")
        await ask(agent, {"input": "off"})
        agent.apply(worlds.document(2, pool={"batching": Batching(2, 60_000)}))
        waiting = asyncio.ensure_future(ask(agent, {"input": "on"}))
        await agent.until(lambda: len(agent.engine.calls) == 1)
        agent.apply(worlds.document(3))
        assert (await waiting).status == 200, "what waited runs when batching is switched off"
    assert agent.closed_rows()[0].batch_wait_us == 0
    agent.assert_nothing_held()


async def test_a_revision_with_impossible_limits_is_refused(make_agent):
    agent = await make_agent()
    with pytest.raises(AssertionError, match="max_batch_size must be 1 or more, not 0"):
        agent.apply(batching(0, 10, revision=2))


async def test_the_simulated_server_takes_a_fixed_time_and_one_per_input(make_agent):
    agent = await make_agent(doc=batching(8, 50), speed=1.0)
    answers = await asyncio.gather(*(ask(agent, {"input": f"text {number}"}) for number in range(4)))
    assert [answer.status for answer in answers] == [200] * 4
    rows = agent.closed_rows()
    assert sum(row.gpu_us for row in rows) >= 4_000 + 4 * 500, "4 ms and 0.5 ms per input"
    print(f"one batch of 4: {sum(row.gpu_us for row in rows) / 1000:.1f} ms of GPU")
    agent.assert_nothing_held()


async def test_the_simulated_server_does_not_hold_up_its_agent(make_agent):
    agent = await make_agent()
    answer = await ask(agent, {"input": ["x"] * 100, "dimensions": 65_536})
    assert (answer.status, answer.json["error"]["param"]) == (400, "dimensions")
    agent.assert_nothing_held()


async def test_a_lent_slot_counts_the_wait_for_others(make_agent):
    """It takes only what is home within the drain bound (10 s), and a batch may keep it for its whole wait."""
    unsafe = [worlds.class_policy(), worlds.class_policy("bulk", kind="batch", retry_safe=False)]
    agent = await make_agent()
    for revision, wait_ms, fits in ((2, 2_400, True), (3, 2_600, False)):
        agent.apply(worlds.document(revision, classes=unsafe, pool={"batching": Batching(2, wait_ms)}))
        connection = await WireClient.connect(agent.port)
        connection.send(post({"input": "x"}, key=worlds.BATCH_SECRET))
        await agent.until(lambda: len(agent.engine.calls) == 1)
        (call,) = agent.engine.calls.values()
        assert call.fits_drain is fits, "the estimate counts four times: 2.5 s of waiting are the bound"
        connection.writer.close()
        await agent.until(lambda: not agent.engine.calls)
