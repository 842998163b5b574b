"""Limits of an installation as agents get them: the tested rate by revision, and shares that sum to the limit."""

from __future__ import annotations

import asyncio
import contextlib

import openai
import pytest

from controlplane.wire.report import Answer
from tests.agent import control_planes as cp

pytestmark = pytest.mark.django_db(transaction=True)


def class_rate(process) -> float | None:
    """Requests per second that this agent admits for chat."""
    bucket = process.engine.registry.classes["chat"].view.rate_bucket
    return None if bucket is None else bucket.rate_micro_per_s / 1e6


def save_rates(world, entries) -> None:
    world.pool.safe_rate = {"entries": entries}
    world.pool.save(update_fields=["safe_rate"])


async def answers(process, count: int) -> None:
    """Wait until that many more reports were answered."""
    for _ in range(count):
        before = process.control.last_answer_us
        process.control.report_now()
        await cp.until(lambda before=before: process.control.last_answer_us > before)


def unchanged(*, mark: str) -> Answer:
    """An answer without news."""
    return Answer(0, False, 0, "", 1_000, 0, 0, shares_mark=mark)


async def test_a_saved_table_of_safe_rates_is_in_force_when_it_was_pushed(world, tmp_path):
    await cp.in_database(save_rates)(world, {"6": 30.0})
    async with cp.serving_agent(world, tmp_path / "state") as process:
        await cp.until(lambda: class_rate(process) == 30.0)
        await cp.in_database(save_rates)(world, {"6": 6.0})
        await asyncio.sleep(1.1)
        await answers(process, 2)
        assert class_rate(process) == 30.0, "saved, not pushed"
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: class_rate(process) == 6.0)


async def test_an_agent_keeps_shares_that_it_is_not_told_again_and_asks_for_all_when_it_missed_some(world, tmp_path):
    await cp.in_database(save_rates)(world, {"6": 30.0})
    async with cp.serving_agent(world, tmp_path / "state") as process:
        client, registry = process.control.client, process.engine.registry
        await cp.until(lambda: class_rate(process) == 30.0 and bool(client.shares_mark))
        # nothing tells of what is in force already: what is forgotten here stays forgotten
        registry.shares.clear()
        await answers(process, 2)
        assert registry.shares == {}
        client.shares_mark = "0123456789abcdef"
        await answers(process, 2)
        assert {share.requests_per_s for share in registry.shares.values()} >= {30.0}
        told = client.shares_mark
        # another answer came between: the one that leaves shares out is not about those in force here
        process.control._apply(unchanged(mark="fedcba9876543210"), sent_boot_us=0, sent_us=0)
        assert client.shares_mark == ""
        await answers(process, 2)
        assert client.shares_mark == told


async def test_over_the_tested_rate_a_request_is_told_when_there_is_a_token(world, tmp_path):
    """Class safe rate first: the refusal names it although the key's own limit would hold too."""
    world.key.requests_per_s = 50
    world.key.live_number += 1
    await cp.in_database(world.key.save)()
    await cp.in_database(save_rates)(world, {"6": 2.0})
    async with cp.serving_agent(world, tmp_path / "state") as process:
        await cp.until(lambda: class_rate(process) == 2.0)
        refused = []
        async with openai.AsyncOpenAI(
            api_key=cp.SECRET, base_url=f"http://127.0.0.1:{process.port}/v1", max_retries=0, timeout=60
        ) as ai:
            for _ in range(8):
                try:
                    await ai.chat.completions.create(
                        model="llama-70b", messages=[{"role": "user", "content": "hello"}], max_tokens=2
                    )
                except openai.RateLimitError as error:
                    refused.append(error)
        assert refused
        assert {error.code for error in refused} == {"rate_limit_exceeded"}
        assert {error.response.headers["retry-after"] for error in refused} == {"1"}
        samples = [one for one in process.engine.desk.log.take_samples() if one.decision == "reject"]
        for sample in samples:
            held = {check.name: check.held for check in sample.checks}
            assert (held["class_rate"], held["key_request_rate"]) == (False, True)
            assert next(check for check in sample.checks if not check.held).name == "class_rate"


async def test_two_agents_together_never_hold_more_places_than_the_limit(world, tmp_path):
    """Load moves from one agent to the other: the shares follow it and sum to the tenant's limit at every look."""
    limit = 10
    world.tenant.max_concurrency = limit
    await cp.in_database(world.tenant.save)()
    tokens = [await cp.in_database(world.token)() for _ in range(2)]

    async with cp.control_plane() as url:
        paths = [tmp_path / "one", tmp_path / "two"]
        async with (
            cp.running_agent(url, tokens[0], paths[0], "--sim-speed", "0", "--slots", "6") as one,
            cp.running_agent(url, tokens[1], paths[1], "--sim-speed", "0", "--name", "gpu-2", "--slots", "2") as two,
        ):
            for process in (one, two):
                await cp.until(lambda process=process: process.control.epoch_now())
            await cp.in_database(cp.push_policy)()
            for process in (one, two):
                await cp.until(lambda process=process: process.engine.registry.document is not None)

            def held() -> tuple[int, int]:
                return tuple(
                    process.engine.registry.tenants[world.tenant.pk].view.concurrency.limit for process in (one, two)
                )

            # who comes second holds nothing until the first said that it gave its part back
            await cp.until(lambda: min(held()) >= 1 and sum(held()) <= limit)
            seen: list[tuple[int, int]] = []

            def look() -> tuple[int, int]:
                pair = held()
                if not seen or seen[-1] != pair:
                    seen.append(pair)
                return pair

            async def load(process, until) -> None:
                loop = asyncio.get_running_loop()
                end = loop.time() + 90
                async with openai.AsyncOpenAI(
                    api_key=cp.SECRET, base_url=f"http://127.0.0.1:{process.port}/v1", max_retries=0, timeout=60
                ) as ai:
                    while not until(look()):
                        assert loop.time() < end, seen
                        for _ in range(5):
                            with contextlib.suppress(openai.APIStatusError):
                                await ai.chat.completions.create(
                                    model="llama-70b", messages=[{"role": "user", "content": "hello"}], max_tokens=1
                                )
                        await asyncio.sleep(0.05)

            await load(one, lambda pair: pair[0] >= 8)
            await load(two, lambda pair: pair[1] >= 4)
            assert all(min(pair) >= 1 for pair in seen), seen
            assert max(map(sum, seen)) <= limit, seen
