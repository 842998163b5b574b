"""The agent in front of a server that speaks Triton's protocol, over real sockets."""

import asyncio
import base64
import contextlib
import json
import struct
from types import SimpleNamespace

import openai
import pytest

from controlplane.agent.backends.triton import TritonBackend, TritonOptions
from controlplane.core.reasons import Outcome
from controlplane.wire.policy import Batching
from controlplane.wire.report import FLAG_ESTIMATED, FLAG_NOT_CHARGED, FLAG_TOKENLESS
from tests.agent import worlds
from tests.agent.test_one_shot import ask
from tests.agent.test_tensors import TENSOR, infer
from tests.agent.triton_server import TritonServer, vector
from tests.agent.wire_client import WireClient, chat_body
from tests.agent.wire_client import post as post_chat

CLASSES = [worlds.class_policy(priority=10), worlds.class_policy("bulk", kind="batch", priority=100)]
TEXTS = ["first", "second text", "größer"]


def text_tensor(*texts: str, **more) -> dict:
    return {"inputs": [{"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES", "data": list(texts), **more}]}


@pytest.fixture
def make(make_agent):
    async def made(server: TritonServer, **options):
        doc = worlds.document(classes=CLASSES, pool=options.pop("pool", {}))
        return await make_agent(backend=TritonBackend(server.url, TritonOptions(**options)), doc=doc)

    return made


async def test_the_official_client_gets_embeddings_from_tensors(make):
    async with TritonServer(worlds.MODEL) as server:
        agent = await make(server)
        async with openai.AsyncOpenAI(api_key=worlds.SECRET, base_url=agent.url, max_retries=0) as ai:
            answer = await ai.embeddings.create(model=worlds.MODEL, input=TEXTS)
            one = await ai.embeddings.create(model=worlds.MODEL, input=TEXTS[1], encoding_format="float")
            coded = await ai.embeddings.create(model=worlds.MODEL, input=TEXTS[1], encoding_format="base64")
    assert [row.embedding for row in answer.data] == [vector(text) for text in TEXTS]
    assert one.data[0].embedding == vector(TEXTS[1])
    assert list(struct.unpack("<2f", base64.b64decode(coded.data[0].embedding))) == vector(TEXTS[1])
    path, sent = server.requests[0]
    assert path == f"/v2/models/{worlds.MODEL}/infer"
    row = agent.closed_rows()[0]
    assert sent == {
        "id": row.request_id,
        "inputs": [{"name": "TEXT", "shape": [3, 1], "datatype": "BYTES", "data": TEXTS}],
        "outputs": [{"name": "EMBEDDING"}],
        "parameters": {"priority": 1},
    }
    assert (row.outcome, row.output_tokens) == (Outcome.COMPLETED.code, 0)
    assert row.prompt_tokens == answer.usage.prompt_tokens > 0
    assert row.flags == FLAG_ESTIMATED, "Triton counts no tokens: the count is the agent's"
    agent.assert_nothing_held()


async def test_priority_level_1_goes_to_the_class_that_is_served_first(make):
    async with TritonServer(worlds.MODEL) as server:
        agent = await make(server)
        await ask(agent, {"input": "interactive"})
        await ask(agent, {"input": "batch"}, key=worlds.BATCH_SECRET)
        await infer(agent, {**text_tensor("own"), "parameters": {"priority": 1, "timeout": 9}}, key=worlds.BATCH_SECRET)
        agent.apply(worlds.document(2, classes=[CLASSES[0], worlds.class_policy("bulk", kind="batch", priority=10)]))
        await ask(agent, {"input": "equal now"}, key=worlds.BATCH_SECRET)
    sent = [body["parameters"] for _, body in server.requests]
    assert sent == [{"priority": 1}, {"priority": 2}, {"priority": 2, "timeout": 9}, {"priority": 1}]


async def test_tensors_pass_and_are_measured_by_gpu_time(make):
    async with TritonServer(worlds.MODEL) as server:
        agent = await make(server)
        answer = await infer(agent, text_tensor("a text"))
    (output,) = answer.json["outputs"]
    assert (answer.status, output["data"]) == (200, vector("a text"))
    (row,) = agent.closed_rows()
    assert (row.prompt_tokens, row.output_tokens, row.flags) == (0, 0, FLAG_TOKENLESS)
    assert row.gpu_us > 0
    agent.assert_nothing_held()


async def test_other_names_of_tensors(make):
    async with TritonServer(worlds.MODEL) as server:
        output = {"name": "pooled", "datatype": "FP16", "shape": [1, 3], "data": [[1.0, 2.0, 3.0]]}
        server.answer = 200, {"outputs": [{"name": "other", "data": [1]}, output]}
        agent = await make(server, text_input="sentences", embedding_output="pooled")
        answer = await ask(agent, {"input": "x"})
    assert answer.json["data"][0]["embedding"] == [1.0, 2.0, 3.0]
    assert server.requests[0][1]["inputs"][0]["name"] == "sentences"
    assert server.requests[0][1]["outputs"] == [{"name": "pooled"}]


async def test_triton_batches_by_itself_so_nothing_waits_here(make):
    async with TritonServer(worlds.MODEL) as server:
        agent = await make(server, pool={"batching": Batching(8, 10_000)})
        answer = await ask(agent, {"input": "at once"})
    assert answer.status == 200
    assert agent.closed_rows()[0].batch_wait_us == 0


# What goes wrong


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": [1, 2]}, "input", "takes texts, not token numbers"),
        ({"input": [[1], [2]]}, "input", "takes texts, not token numbers"),
        ({"input": "x", "dimensions": 7}, "dimensions", "have 2 dimensions, not 7"),
    ],
)
async def test_what_the_model_does_not_offer_is_the_clients_to_change(make, body, param, words):
    async with TritonServer(worlds.MODEL) as server:
        agent = await make(server)
        answer = await ask(agent, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert words in answer.json["error"]["message"]
    agent.assert_nothing_held()


async def test_text_is_not_generated(make):
    async with TritonServer(worlds.MODEL) as server:
        agent = await make(server)
        connection = await WireClient.connect(agent.port)
        answer = await connection.ask(post_chat(chat_body()))
    assert answer.status == 400 and "text is not generated here" in answer.json["error"]["message"]
    assert not server.requests
    agent.assert_nothing_held()


async def test_tritons_own_words_reach_the_client_in_its_form(make):
    async with TritonServer(worlds.MODEL) as server:
        agent = await make(server, text_input="WRONG")
        answer = await ask(agent, {"input": "x"})
        tensors = await infer(agent, TENSOR)
    assert answer.status == 400
    assert answer.json["error"]["message"] == f"unexpected inference input 'WRONG' for model '{worlds.MODEL}'"
    assert tensors.status == 400 and "unexpected inference input 'IMAGE'" in tensors.json["error"]
    agent.assert_nothing_held()


async def test_a_model_that_is_not_loaded_is_not_the_clients_fault(make):
    async with TritonServer(worlds.MODEL) as server:
        server.loaded = False
        agent = await make(server)
        embedded, tensors = await ask(agent, {"input": "x"}), await infer(agent, text_tensor("x"))
        assert (embedded.status, tensors.status) == (502, 502)
        for words in (embedded.json["error"]["message"], tensors.json["error"]):
            assert "does not have the model loaded" in words
    agent.assert_nothing_held()


async def test_a_full_queue_is_tried_again_and_then_told(make):
    async with TritonServer(worlds.MODEL) as server:
        server.answer = 503, {"error": "Exceeds maximum queue size"}
        agent = await make(server)
        answer = await ask(agent, {"input": "x"})
    assert answer.status == 502 and len(server.requests) > 1
    agent.assert_nothing_held()


def embedding(**changes) -> dict:
    tensor = {"name": "EMBEDDING", "datatype": "FP32", "shape": [2, 2], "data": [1.0, 2.0, 3.0, 4.0]}
    return {"outputs": [{**tensor, **changes}]}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (embedding(shape=[1, 4]), "had 2 inputs and came back with 1 outputs"),
        (embedding(shape=[3, 2]), "had 2 inputs and came back with 3 outputs"),
        (embedding(shape=[]), "came back with 0 outputs"),
        (embedding(shape=[2, 0], data=[]), "has shape [2, 0] and 0 values"),
        (embedding(shape=[2, 3]), "has shape [2, 3] and 4 values"),
        (embedding(datatype="BYTES"), "holds BYTES, not floats"),
        (embedding(name="OTHER"), "has no tensor EMBEDDING with data (it has: OTHER)"),
        (embedding(data=["a"]), "cannot be read"),
        (embedding(data=[1e400, 1, 1, 1]), "cannot be read"),
        ({"outputs": []}, "it has: none"),
        ({}, "cannot be read"),
        ([], "cannot be read"),
    ],
)
async def test_answers_without_usable_embeddings_fail_with_what_is_wrong(make, answer, words):
    async with TritonServer(worlds.MODEL) as server:
        server.answer = 200, json.loads(json.dumps(answer).replace("Infinity", "1e400"))
        agent = await make(server)
        told = await ask(agent, {"input": ["a", "b"]})
    assert told.status == 502
    assert words in told.json["error"]["message"], told.body
    agent.assert_nothing_held()


@contextlib.asynccontextmanager
async def raw_server(answer):
    """Whatever `answer` writes, on a real socket."""
    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield SimpleNamespace(url=f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    listener.close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
NASTY = {
    "no JSON": [HEAD + b"content-length: 7\r\n\r\n{broken"[:-1]],
    "no text": [HEAD + b"content-length: 4\r\n\r\n\xff\xfe\x00\x00"],
    "another content type": [b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>"],
    "a head without end": [HEAD, *[b"x-more: " + b"a" * 60_000 + b"\r\n"] * 40],
    "a length that is none": [HEAD + b"content-length: many\r\n\r\n{}"],
    "two lengths": [HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}"],
    "less than its length": [HEAD + b"content-length: 100\r\n\r\n{}"],
    "not HTTP": [b"SSH-2.0-OpenSSH_9.6\r\n"],
    "nothing": [b""],
    "nested too deeply": [HEAD + b"content-length: 200000\r\n\r\n" + b"[" * 200_000],
    "a redirect": [b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"],
}


@pytest.mark.parametrize("parts", NASTY.values(), ids=NASTY)
async def test_a_server_that_talks_nonsense_fails_the_request_and_nothing_else(make, parts):
    """Each is the server's fault: the client is told so, nothing is held or charged, and the next answer counts."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
        writer.close()

    async with raw_server(answer) as server:
        agent = await make(server)
        told = await ask(agent, {"input": ["a", "b"]})
    assert told.status == 502, told.body
    assert told.json["error"]["message"]
    [row] = agent.closed_rows()
    assert row.flags & FLAG_NOT_CHARGED and not row.charge_gpu_nanos and not row.charge_prompt_nanos
    agent.assert_nothing_held()


async def test_a_server_whose_answer_drips_ends_at_the_stage_timeout(make):
    """Every byte comes in time for a reader's patience, the answer never."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(HEAD + b"content-length: 1000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)

    async with raw_server(drip) as server:
        agent = await make(server)
        agent.engine.registry.classes["chat"].stage_timeout_us = 400_000
        told = await ask(agent, {"input": ["a", "b"]})
    assert (told.status, told.json["error"]["code"]) == (504, "stage_timeout"), told.body
    agent.assert_nothing_held()
