"""Tensors over the HTTP v2 protocol, admitted and measured like all work."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from controlplane.agent.backends.openai import HEADS_KEPT, OpenAIBackend
from controlplane.wire.report import FLAG_TOKENLESS
from tests.agent import worlds
from tests.agent.test_one_shot import post
from tests.agent.upstreams import Upstream, respond
from tests.agent.wire_client import WireClient

TENSOR = {"inputs": [{"name": "IMAGE", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}]}
INFER = f"/v2/models/{worlds.MODEL}/infer"


async def infer(agent, body: dict, path: str = INFER, key: str = worlds.SECRET):
    data = json.dumps(body).encode()
    connection = await WireClient.connect(agent.port)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    return await connection.ask(head.encode() + data)


async def test_tensors_pass_through_any_server_and_are_measured_by_gpu_time(make_agent):
    answered = (
        b'{"model_name":"m","model_version":"1","outputs":[{"name":"O","datatype":"FP32","shape":[1],"data":[1.5]}]}'
    )

    async def serve(_, body, writer):
        await asyncio.sleep(0.02)
        respond(writer, 200, answered)

    rates = [worlds.rate(class_slug="chat", gpu_nanos_per_slot_hour=3_600_000_000)]
    async with Upstream(serve) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url), doc=worlds.document(rates=rates))
        answer = await infer(agent, TENSOR)
    assert (answer.status, answer.body, server.bodies) == (200, answered, [TENSOR])
    (row,) = agent.closed_rows()
    assert (row.prompt_tokens, row.output_tokens, row.flags) == (0, 0, FLAG_TOKENLESS)
    assert row.gpu_us > 15_000
    assert row.charge_gpu_nanos == row.gpu_us and row.charge_prompt_nanos == 0
    assert agent.engine.registry.tokenless_time.mean_us == row.gpu_us, "what the next is expected to take"
    agent.assert_nothing_held()


async def test_the_many_spellings_of_a_models_path_are_not_all_remembered(make_agent):
    async def serve(_, body, writer):
        respond(writer, 200, b"{}")

    async with Upstream(serve) as upstream:
        backend = OpenAIBackend(upstream.url)
        agent = await make_agent(backend=backend)
        spelled = itertools.product(*((letter, f"%{ord(letter):02x}", f"%{ord(letter):02X}") for letter in "llama-7"))
        connection = await WireClient.connect(agent.port)
        for letters in itertools.islice(spelled, 3 * HEADS_KEPT):
            path = f"/v2/models/{''.join(letters)}{worlds.MODEL.removeprefix('llama-7')}/infer"
            assert (await connection.ask(post(TENSOR, path))).status == 200
        assert len(upstream.bodies) == 3 * HEADS_KEPT
        assert len(backend._heads) <= HEADS_KEPT


async def test_a_client_that_says_that_its_data_is_not_binary_is_served(make_agent):
    agent = await make_agent()
    output = {"name": "SCORE", "parameters": {"binary_data": False}}
    answer = await infer(agent, {**TENSOR, "outputs": [output], "parameters": {"binary_data_output": False}})
    assert answer.status == 200


async def test_the_simulated_server_scores_tensors(make_agent):
    agent = await make_agent()
    first, again = await infer(agent, TENSOR), await infer(agent, TENSOR)
    (output,) = first.json["outputs"]
    assert output["shape"] == [2, 1] and len(output["data"]) == 2
    assert output == again.json["outputs"][0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "missing required field `inputs`"),
        ({"inputs": []}, "length >= 1"),
        ({"inputs": [{"shape": [1]}]}, "`name`"),
        ({"inputs": [{"name": "A", "shape": [-1]}]}, ">= 0"),
        ({"inputs": [{"name": "A", "parameters": {"shared_memory_region": "x"}}]}, "shared_memory_region is not taken"),
        ({"inputs": [{"name": "A", "parameters": {"binary_data_size": 8}}]}, "binary_data_size is not taken"),
        ({**TENSOR, "outputs": [{"name": "O", "parameters": {"binary_data": True}}]}, "binary_data is not taken"),
        ({**TENSOR, "parameters": {"binary_data_output": True}}, "Binary outputs are not offered"),
    ],
)
async def test_tensors_that_cannot_be_taken(make_agent, body, words):
    agent = await make_agent()
    answer = await infer(agent, body)
    assert answer.status == 400 and words in answer.json["error"], answer.body


async def test_tensors_are_admitted_like_all_work(make_agent):
    agent = await make_agent()
    stranger = await infer(agent, TENSOR, key="nobody")
    assert (stranger.status, "API key is not known" in stranger.json["error"]) == (401, True), "in the protocol's form"
    for model in ("another", "..%2F..%2Frepository"):
        assert (await infer(agent, TENSOR, path=f"/v2/models/{model}/infer")).status == 403
    for path in ("/v2/models//infer", "/v2/models/a/b/infer", "/v2/repository/index"):
        assert (await infer(agent, TENSOR, path=path)).status == 404
    agent.assert_nothing_held()
