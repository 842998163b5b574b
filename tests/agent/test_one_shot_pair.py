"""One-shot work with a control plane: batching acts when it is pushed, and what was waited and used is on record."""

import asyncio

import openai
import pytest
from django.db import connection

from controlplane.fleet.models import Pool
from tests.agent import control_planes as cp
from tests.agent.triton_server import TritonServer, vector

pytestmark = pytest.mark.django_db(transaction=True)

TEXTS = ("one", "two", "three", "four")


async def embed(process, *texts: str) -> list:
    """One client per text, all at once."""
    async with openai.AsyncOpenAI(
        api_key=cp.SECRET, base_url=f"http://127.0.0.1:{process.port}/v1", max_retries=0, timeout=60
    ) as ai:
        return await asyncio.gather(
            *(ai.embeddings.create(model="llama-70b", input=text, encoding_format="float") for text in texts)
        )


@cp.in_database
def one_shot_records() -> list[tuple[int, int, int, int]]:
    """Prompt and output tokens, batch wait and GPU time by record, the earliest first."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT prompt_tokens, output_tokens, batch_wait_us, gpu_us FROM usage_record ORDER BY arrived_at"
        )
        return cursor.fetchall()


@cp.in_database
def batch_of(size: int, wait_ms: int) -> int:
    Pool.objects.update(max_batch_size=size, max_batch_wait_ms=wait_ms)
    return cp.push_policy()


async def records_are(count: int) -> bool:
    return len(await one_shot_records()) == count


async def test_batching_acts_with_the_revision_that_carries_it(world, tmp_path):
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        async with cp.running_agent(url, token, tmp_path / "state") as process:
            await cp.until(lambda: process.control.epoch_now())
            await cp.in_database(cp.push_policy)()
            await cp.until(lambda: process.engine.ready and process.engine.registry.keys)
            await embed(process, "alone")
            number = await batch_of(4, 2_000)
            await cp.until(lambda: process.engine.revision == number)
            answers = await embed(process, *TEXTS)
            assert all(len(answer.data) == 1 for answer in answers)
            await cp.until(lambda: records_are(5))
        alone, *together = await one_shot_records()
        assert alone[2] == 0
        assert all(wait_us < 2_000_000 for _, _, wait_us, _ in together), "it was full before its time"
        assert max(wait_us for _, _, wait_us, _ in together) > 0
        assert all(prompt > 0 and output == 0 for prompt, output, _, _ in together)
        gpu_us = sum(row[3] for row in together)
        print(f"four embeddings in one batch: {gpu_us / 1000:.1f} ms of GPU, alone {alone[3] / 1000:.1f} ms each")
        assert gpu_us >= 4_000, "4 ms and 0.5 ms for each of four; timers end up to 2 ms early"
        assert await cp.quarantined() == []


async def test_an_agent_in_front_of_triton(world, tmp_path):
    token = await cp.in_database(world.token)()
    async with TritonServer("llama-70b") as triton, cp.control_plane() as url:
        server = ("--backend", "triton", "--upstream", triton.url, "--triton-metrics", triton.url + "/metrics")
        triton.loaded = False
        async with cp.running_agent(url, token, tmp_path / "state", *server) as process:
            await cp.until(lambda: process.control.epoch_now())
            await cp.in_database(cp.push_policy)()
            await cp.until(lambda: process.engine.revision)
            await cp.until(lambda: "has not loaded the model llama-70b" in process.engine.readiness.why)
            assert not process.engine.ready
            triton.loaded = True
            await cp.until(lambda: process.engine.ready and process.engine.registry.keys)
            answers = await embed(process, *TEXTS)
            assert [answer.data[0].embedding for answer in answers] == [vector(text) for text in TEXTS]
            await cp.until(lambda: records_are(4))
        assert await cp.quarantined() == []
