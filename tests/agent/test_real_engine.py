"""The whole way with nothing simulated: official client, agent, llama.cpp with a small model, and the control plane."""

import asyncio
import contextlib
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from controlplane.agent.agent_slot import BROKEN, READY
from controlplane.core.reasons import Outcome
from controlplane.embedded.ports import free_port
from tests.agent import control_planes as cp
from tests.agent import real_engine, worlds

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not real_engine.installed(), reason=real_engine.MISSING),
]
SCRIPT = Path(real_engine.__file__)
COMPLETED, CANCELLED = Outcome.COMPLETED.code, Outcome.CANCELLED_BY_CLIENT.code


@asynccontextmanager
async def inference_server(port: int):
    """A child that serves; ended with its test."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), str(port), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(60):
            line = await child.stdout.readline()
        assert b"serving" in line, f"it ended with {child.returncode}"
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


@asynccontextmanager
async def installation(world, tmp_path, upstream_port: int):
    """Control plane and agent with a policy in force; yields the agent and a client."""
    token = await cp.in_database(world.token)()
    more = ("--backend", "openai", "--upstream", f"http://127.0.0.1:{upstream_port}")
    async with cp.control_plane() as url, cp.running_agent(url, token, tmp_path / "state", *more) as process:
        await cp.until(lambda: process.control.epoch_now())
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: process.engine.ready, 60)
        client = openai.AsyncOpenAI(
            api_key=cp.SECRET, base_url=f"http://127.0.0.1:{process.port}/v1", max_retries=0, timeout=60
        )
        async with client:
            yield process, client


def asked(text: str, **more):
    messages = [{"role": "user", "content": text}]
    return {"model": worlds.MODEL, "messages": messages, "temperature": 0, "max_tokens": 24, **more}


async def ended(process, count: int):
    """Records of this process, reported or not, once so many are there."""
    await cp.until(lambda: not process.engine.calls)
    async with asyncio.timeout(60):
        while len(found := await cp.records()) < count:
            await asyncio.sleep(0.05)
    return {row[0]: row for row in found}


async def test_usage_is_the_servers_own_whole_and_streamed(world, tmp_path):
    port = free_port()
    async with inference_server(port), installation(world, tmp_path, port) as (process, ai):
        assert [model.id async for model in ai.models.list()] == [worlds.MODEL]
        raw = await ai.chat.completions.with_raw_response.create(**asked("Name a harbour."))
        whole = raw.parse()
        assert whole.choices[0].message.content
        stream = await ai.chat.completions.create(
            **asked("Name a harbour."), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        told = [chunk.usage for chunk in chunks if chunk.usage]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert len(told) == 1 and text == whole.choices[0].message.content
        quiet = await ai.chat.completions.create(**asked("Name a harbour."), stream=True)
        assert not [chunk async for chunk in quiet if chunk.usage], "what the agent asked for stays hidden"
        found = await ended(process, 3)
        assert {row[1] for row in found.values()} == {COMPLETED}
        counts = sorted(row[3] for row in found.values())
        assert counts == sorted([whole.usage.completion_tokens] + [told[0].completion_tokens] * 2)
        assert found[raw.headers["x-request-id"]][3] == whole.usage.completion_tokens
        text_answer = await ai.completions.create(model=worlds.MODEL, prompt="Once upon a time", max_tokens=5)
        assert text_answer.usage.completion_tokens == 5
    assert await cp.quarantined() == []


async def test_four_streams_at_once_and_the_servers_figures(world, tmp_path):
    port = free_port()
    async with inference_server(port), installation(world, tmp_path, port) as (process, ai):
        watch = process.engine.readiness.watch
        await cp.until(lambda: watch.totals.counted["output_tokens"] is not None, 60)
        seen: list[int] = []

        async def one(number: int) -> int:
            stream = await ai.chat.completions.create(
                **asked(f"Tell me about pier {number}.", max_tokens=32),
                stream=True,
                stream_options={"include_usage": True},
            )
            tokens = 0
            async for chunk in stream:
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            return tokens

        async def look() -> None:
            while True:
                await watch.scrape()
                seen.append(watch.reading.running or 0)
                await asyncio.sleep(0.05)

        looking = asyncio.create_task(look())
        began_s = time.perf_counter()
        counts = await asyncio.gather(*(one(number) for number in range(real_engine.PLACES)))
        took_s = time.perf_counter() - began_s
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        print(f"{sum(counts)} tokens in 4 streams in {took_s:.2f} s; the server ran up to {max(seen)} at once")
        assert max(seen) >= 2, "they ran beside each other"
        await watch.scrape()
        assert watch.totals.counted["output_tokens"] >= sum(counts) - real_engine.PLACES
        found = await ended(process, 4)
        assert sorted(row[3] for row in found.values()) == sorted(counts)
        details = cp.health(process)["inference_server"]
        assert (details["engine"], details["state"], details["kv_used"]) == ("llama.cpp", READY, None)


async def test_a_client_that_leaves_frees_the_server(world, tmp_path):
    port = free_port()
    async with inference_server(port), installation(world, tmp_path, port) as (process, ai):
        watch = process.engine.readiness.watch
        stream = await ai.chat.completions.create(
            **asked("Write a long story about tides.", max_tokens=400), stream=True
        )
        words = 0
        async for chunk in stream:
            words += bool(chunk.choices and chunk.choices[0].delta.content)
            if words == 5:
                break
        await stream.close()
        gone_s = time.perf_counter()
        await cp.until(lambda: not process.engine.calls, 1.0)
        record_ms = (time.perf_counter() - gone_s) * 1000

        async def idle() -> bool:
            await watch.scrape()
            return watch.reading.running == 0

        await cp.until(idle, 60)
        print(f"record closed after {record_ms:.1f} ms, server idle after {time.perf_counter() - gone_s:.2f} s")
        ((_, outcome, charge_nanos, tokens),) = (await ended(process, 1)).values()
        assert outcome == CANCELLED
        assert 5 <= tokens < 400 and charge_nanos > 0
    assert await cp.quarantined() == []


async def test_slots_follow_a_server_that_dies_and_comes_back(world, tmp_path):
    port = free_port()
    async with contextlib.AsyncExitStack() as first:
        child = await first.enter_async_context(inference_server(port))
        async with installation(world, tmp_path, port) as (process, ai):
            stream = await ai.chat.completions.create(**asked("Count the gulls.", max_tokens=400), stream=True)
            await anext(aiter(stream))
            child.kill()
            died_s = time.perf_counter()
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass
            await cp.until(lambda: process.engine.readiness.state == BROKEN, 60)
            print(f"slots were taken out {time.perf_counter() - died_s:.2f} s after the server died")
            assert not process.engine.ready
            with pytest.raises(openai.RateLimitError):
                await ai.chat.completions.create(**asked("Anybody?"))
            async with inference_server(port):
                await cp.until(lambda: process.engine.ready, 60)
                answer = await ai.chat.completions.create(**asked("Anybody?"))
                assert answer.usage.completion_tokens > 0
            found = await ended(process, 2)
            assert {row[1] for row in found.values()} == {COMPLETED, Outcome.UPSTREAM_ERROR.code}
