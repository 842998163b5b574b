"""Clients that go away at every point of a request: one record each, everything given back, within a second."""

import asyncio

import pytest

from controlplane.core.reasons import Outcome
from controlplane.wire.report import FLAG_NOT_CHARGED
from tests.agent import worlds
from tests.agent.wire_client import WireClient, chat_body, post

CANCELLED = Outcome.CANCELLED_BY_CLIENT.code


async def read_words(client: WireClient, words: int) -> None:
    """Read the head of a stream and chunks until so many words have come."""
    await client.reader.readuntil(b"\r\n\r\n")
    seen = 0
    async for chunk in client.chunks():
        seen += chunk.count(b'"content":"') - chunk.count(b'"content":""')
        if seen >= words:
            return


async def settled(agent: worlds.Agent):
    """The one record; it is there within a second."""
    await agent.until(lambda: not agent.engine.calls and len(agent.spool.state.closed) == 1, within_s=1.0)
    await asyncio.sleep(0.15)
    agent.assert_nothing_held()
    assert sum(agent.engine.outcomes.values()) == 1
    (row,) = agent.closed_rows()
    return row


@pytest.mark.parametrize("words", [1, 10, 19])
async def test_gone_in_the_middle_of_a_stream(make_agent, words):
    """At the first, a middle and the last chunk but one: prompt and what was produced are paid."""
    agent = await make_agent(speed=0.5)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(stream=True, max_tokens=20, ignore_eos=True)))
    await read_words(client, words)
    client.abort()
    row = await settled(agent)
    assert row.outcome == CANCELLED
    assert words <= row.output_tokens < 20
    assert row.charge_output_nanos == row.output_tokens * 3000
    assert row.charge_prompt_nanos == row.prompt_tokens * 1000 > 0
    assert row.ttft_us > 0
    assert row.gpu_us > 0


async def test_gone_before_the_first_chunk(make_agent):
    agent = await make_agent(speed=0.5)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(stream=True)))
    await agent.until(lambda: any(call.prefill_us for call in agent.engine.calls.values()))
    client.abort()
    row = await settled(agent)
    assert (row.outcome, row.output_tokens, row.ttft_us) == (CANCELLED, 0, -1)
    assert row.charge_prompt_nanos > 0, "prefill had begun"


async def test_gone_while_a_whole_answer_is_made(make_agent):
    agent = await make_agent(speed=1.0)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(max_tokens=100, ignore_eos=True)))
    await agent.until(lambda: any(call.slot for call in agent.engine.calls.values()))
    client.abort()
    assert (await settled(agent)).outcome == CANCELLED


async def test_gone_while_queued(make_agent):
    """Nothing ran, nothing is paid; the others are not disturbed."""
    doc = worlds.document(pool={"slots": [worlds.slot(1, places=1)]})
    agent = await make_agent(doc, speed=1.0)
    running, waiting = await WireClient.connect(agent.port), await WireClient.connect(agent.port)
    running.send(post(chat_body(stream=True, max_tokens=30, ignore_eos=True)))
    await agent.until(lambda: any(call.slot for call in agent.engine.calls.values()))
    waiting.send(post(chat_body(stream=True)))
    await agent.until(lambda: len(agent.engine.calls) == 2)
    waiting.abort()
    await agent.until(lambda: len(agent.spool.state.closed) == 1, within_s=1.0)
    (row,) = agent.closed_rows()
    assert (row.outcome, row.slot_id, row.gpu_us) == (CANCELLED, -1, 0)
    assert row.flags & FLAG_NOT_CHARGED
    assert (await running.answer()).body.endswith(b"[DONE]\n\n")
    await agent.until(lambda: not agent.engine.calls)
    agent.assert_nothing_held()


async def test_gone_with_requests_in_the_pipeline(make_agent):
    agent = await make_agent(speed=1.0)
    client = await WireClient.connect(agent.port)
    client.send(post(chat_body(max_tokens=50, ignore_eos=True)) * 3)
    await agent.until(lambda: bool(agent.engine.calls))
    client.abort()
    row = await settled(agent)
    assert row.outcome == CANCELLED


async def test_gone_at_the_last_byte(make_agent):
    """The answer is complete or cancelled, never both and never neither."""
    agent = await make_agent()
    for _ in range(30):
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body(stream=True, max_tokens=2, ignore_eos=True)))
        client.abort()
    await agent.until(lambda: not agent.engine.calls)
    await asyncio.sleep(0.1)
    agent.assert_nothing_held()
    rows = agent.closed_rows()
    assert len({row.request_id for row in rows}) == len(rows) == agent.engine.offered
    assert {row.outcome for row in rows} <= {1, CANCELLED}


async def test_the_slot_is_free_at_once_for_the_next(make_agent):
    doc = worlds.document(pool={"slots": [worlds.slot(1, places=1)]})
    agent = await make_agent(doc, speed=1.0)
    hog, next_one = await WireClient.connect(agent.port), await WireClient.connect(agent.port)
    hog.send(post(chat_body(stream=True, max_tokens=400, ignore_eos=True)))
    await read_words(hog, 1)
    next_one.send(post(chat_body(max_tokens=1)))
    await agent.until(lambda: len(agent.engine.calls) == 2)
    hog.abort()
    assert (await next_one.answer(within_s=6)).status == 200
