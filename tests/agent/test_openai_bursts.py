"""More than a server can take, for longer than it should: queues stay bounded, counts come back, prices are exact."""

import asyncio
import json
import random
import resource

import pytest

from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.core.reasons import Outcome
from tests.agent import transcripts, worlds
from tests.agent import upstreams as up
from tests.agent.upstreams import Upstream
from tests.agent.wire_client import WireClient, chat_body, post

PLACES, QUEUE_MAX = 2, 4


def one_slot(**changes):
    classes = [worlds.class_policy(max_queue=QUEUE_MAX, **changes), worlds.class_policy("bulk", kind="batch")]
    return worlds.document(classes=classes, pool={"slots": [worlds.slot(1, places=PLACES)]})


async def test_cached_prompt_tokens_are_priced_once_and_exactly(make_agent):
    """27,147 of which 27,146 cached, 351 out, at 1.4, 0.26 and 4.4 per million: 0.00860376."""
    usage = b'{"prompt_tokens":27147,"completion_tokens":351,"prompt_tokens_details":{"cached_tokens":27146}}'

    async def script(_, __, writer):
        up.respond(writer, 200, b'{"choices":[{"message":{"content":"a"}}],"usage":%b}' % usage)

    prices = {
        "prompt_nanos_per_mtok": 1_400_000_000,
        "cached_nanos_per_mtok": 260_000_000,
        "output_nanos_per_mtok": 4_400_000_000,
    }
    async with Upstream(script) as server:
        doc = worlds.document(rates=[worlds.rate(**prices)])
        agent = await make_agent(doc, backend=OpenAIBackend(server.url))
        client = await WireClient.connect(agent.port)
        await client.ask(post(chat_body(max_tokens=512)))
    (row,) = agent.closed_rows()
    assert (row.charge_prompt_nanos, row.charge_cached_nanos, row.charge_output_nanos) == (1400, 7_057_960, 1_544_400)
    assert row.charge_prompt_nanos + row.charge_cached_nanos + row.charge_output_nanos == 8_603_760


async def test_a_burst_far_over_what_fits_is_refused_beyond_the_queue(make_agent):
    """Ten times what runs and waits: exactly that much is kept, nobody waits longer than allowed, memory stays."""
    gate = asyncio.Event()

    async def script(_, __, writer):
        await gate.wait()
        up.respond(writer, 200, up.WHOLE)

    kept, many = PLACES + QUEUE_MAX, 10 * (PLACES + QUEUE_MAX)
    async with Upstream(script) as server:
        agent = await make_agent(one_slot(), backend=OpenAIBackend(server.url))
        clients = [await WireClient.connect(agent.port) for _ in range(many)]
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for client in clients:
            client.send(post(chat_body()))
        await agent.until(lambda: agent.engine.offered == many)
        (chat, _) = agent.engine.scheduler.classes
        assert (chat.running, chat.queued, len(agent.engine.calls)) == (PLACES, QUEUE_MAX, kept)
        gate.set()
        answers = [await client.answer() for client in clients]
        statuses = [answer.status for answer in answers]
        assert (statuses.count(200), statuses.count(429)) == (kept, many - kept)
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status == 429)
        agent.assert_nothing_held()
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        print(f"{many} at once: {kept} kept, memory grew {grown_kib} KiB")
        assert grown_kib < 32 * 1024
        assert len(agent.closed_rows()) == kept


async def test_what_waits_is_never_forgotten_and_never_waits_past_its_time(make_agent):
    """Nothing else arrives while it waits; it is served when a place is free, or told when its time is over."""
    gate = asyncio.Event()

    async def script(_, __, writer):
        await gate.wait()
        up.respond(writer, 200, up.WHOLE)

    async with Upstream(script) as server:
        agent = await make_agent(one_slot(stage_timeout_s=4, overload="queue"), backend=OpenAIBackend(server.url))
        clients = [await WireClient.connect(agent.port) for _ in range(PLACES + 2)]
        for client in clients[:-1]:
            client.send(post(chat_body()))
        await agent.until(lambda: len(agent.engine.calls) == PLACES + 1)
        await asyncio.sleep(2)
        clients[-1].send(post(chat_body()))
        answers = await asyncio.gather(*(client.answer() for client in clients[:-1]))
        assert [answer.status for answer in answers] == [504] * (PLACES + 1)
        assert len(agent.engine.calls) == 1, "the last has two seconds left, and did not lengthen what the others had"
        gate.set()
        assert (await clients[-1].answer()).status == 200
        agent.assert_nothing_held()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_after_a_storm_of_every_kind_of_end_nothing_is_occupied(make_agent, seed):
    """Silence, failures, odd streams and clients that leave at random: counts agree throughout and end at zero."""
    rng = random.Random(seed)

    async def script(_, body, writer):
        kind = json.loads(body["user"])
        await asyncio.sleep(rng.random() * 0.02)
        if kind["end"] == "silent":
            await asyncio.sleep(30)
        elif kind["end"] == "fail":
            up.respond(writer, rng.choice([429, 500, 503]), b"{}")
        elif kind["end"] == "abort":
            up.begin(writer)
            up.chunk(writer, up.ROLE + up.word("a"))
            await writer.drain()
            writer.transport.abort()
        elif body.get("stream"):
            up.begin(writer)
            for event in rng.choice(transcripts.ALL[:6]).events:
                up.chunk(writer, event)
                await asyncio.sleep(rng.random() * 0.002)
            up.end(writer)
        else:
            up.respond(writer, 200, up.WHOLE)

    async def one(agent: worlds.Agent) -> None:
        end = rng.choice(["well", "well", "well", "silent", "fail", "abort"])
        client = await WireClient.connect(agent.port)
        fields = {"stream": rng.random() < 0.5, "user": json.dumps({"end": end})}
        client.send(post(chat_body(**fields)))
        leaves = end == "silent" or rng.random() < 0.3
        if leaves:
            await asyncio.sleep(rng.random() * 0.05)
            client.abort()
        else:
            await client.answer(within_s=60)

    async with Upstream(script) as server:
        agent = await make_agent(one_slot(), backend=OpenAIBackend(server.url))
        for _ in range(8):
            await asyncio.gather(*(one(agent) for _ in range(12)))
            running = sum(len(slot.running) for slot in agent.engine.scheduler.slots)
            assert running == sum(call.slot is not None for call in agent.engine.calls.values()) <= PLACES
        await agent.until(lambda: not agent.engine.calls)
        agent.assert_nothing_held()
        rows = agent.closed_rows()
        assert len({row.request_id for row in rows}) == len(rows) == sum(agent.engine.outcomes.values())
        refused = sum(row.count for row in agent.engine.desk.log.take_counts())
        assert len(rows) + refused == agent.engine.offered
        assert {Outcome.COMPLETED.code, Outcome.UPSTREAM_ERROR.code} <= {row.outcome for row in rows}
