"""An agent whose disk takes nothing for a while: it says so, finishes no answer that is not written, and goes on."""

from __future__ import annotations

import asyncio
import resource
from contextlib import contextmanager

import pytest

from controlplane.agent.spool import EpochSpool
from tests.agent import control_planes as cp
from tests.agent.wire_client import WireClient, chat_body, post


@contextmanager
def full_disk():
    """No file may grow, for the whole process: the kernel refuses the writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def ready(port: int) -> tuple[int, str]:
    client = await WireClient.connect(port)
    answer = await client.ask(b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n")
    return answer.status, answer.body.decode()


async def test_what_is_answered_to_the_end_is_on_disk(make_agent):
    agent = await make_agent(speed=2)
    running, later = await WireClient.connect(agent.port), await WireClient.connect(agent.port)
    running.send(post(chat_body(max_tokens=150, ignore_eos=True)))  # two seconds: the disk is full before it ends
    await agent.until(lambda: agent.engine.calls)
    await asyncio.sleep(0.05)
    with full_disk():
        await agent.until(lambda: agent.engine.disk_problem)
        status, why = await ready(agent.port)
        refused = await later.ask(post(chat_body()))
        await asyncio.sleep(0.3)
        assert not running.reader._buffer, "its record is not written yet"
    assert (status, refused.status) == (503, 503)
    assert "cannot write its records" in why and "cannot write its records" in refused.json["error"]["message"]
    assert (await running.answer()).status == 200
    await agent.until(lambda: not agent.engine.disk_problem)
    assert (await ready(agent.port))[0] == 200
    assert (await later.ask(post(chat_body()))).status == 200
    agent.spool.flush()
    again = EpochSpool.reopen(agent.state_dir / "spool", 1)
    assert [entry.row.request_id for entry in again.state.closed] == [row.request_id for row in agent.closed_rows()]
    again.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
async def test_an_agent_outlives_a_full_disk_and_reports_everything_after_it(world, tmp_path):
    async with cp.serving_agent(world, tmp_path / "state") as process:
        client = await WireClient.connect(process.port)
        for _ in range(3):
            assert (await client.ask(post(chat_body(), key=cp.SECRET))).status == 200
        with full_disk():
            await cp.until(lambda: "cannot be written down" in process.control.trouble)
            assert not cp.health(process)["control_plane"]["reachable"]
        await cp.until(lambda: process.control.reachable)
        assert (await client.ask(post(chat_body(), key=cp.SECRET))).status == 200
        await cp.until(lambda: process.store.records_accepted == 4)
    assert len({row[0] for row in await cp.records()}) == len(await cp.records()) == 4
    assert await cp.quarantined() == []
