"""Reports that went for want of space: the control plane hears of each range, and everything else arrives."""

from __future__ import annotations

import asyncio

import pytest
from django.db import connection

from controlplane.embedded.ports import free_port
from tests.agent import control_planes as cp
from tests.agent.wire_client import WireClient, chat_body, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]


@cp.in_database
def gaps() -> list[tuple[int, dict, int]]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT (payload->>'first_seq')::int, (payload->>'last_seq')::int, records FROM usage_quarantine"
            " WHERE reason = 'reports_lost' ORDER BY id"
        )
        return cursor.fetchall()


async def serve(process, requests: int) -> None:
    client = await WireClient.connect(process.port)
    for _ in range(requests):
        assert (await client.ask(post(chat_body(), key=cp.SECRET))).status == 200


async def test_the_control_plane_is_told_of_reports_that_are_lost(world, tmp_path, monkeypatch):
    monkeypatch.setattr("controlplane.agent.spool.SEGMENT_BYTES", 6_000)
    monkeypatch.setattr("controlplane.agent.backoff.MAX_S", 0.2)
    token, port = await cp.in_database(world.token)(), free_port()
    up = cp.control_plane(port)
    url = await up.__aenter__()
    async with cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "0") as process:
        await cp.until(lambda: process.control.epoch_now())
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: process.engine.ready and process.engine.registry.keys)
        await serve(process, 2)
        await cp.until(lambda: process.store.records_accepted == 2)
        await up.__aexit__(None, None, None)
        spool = process.store.current
        for _ in range(8):
            await serve(process, 3)
            process.control._cut(spool)
        process.store.bytes_max = 20_000
        process.store.tidy(process.engine.clock.now_us())
        named, dropped = list(process.store.dropped), process.store.reports_dropped
        assert dropped > 0 and len(named) == 1 and "epoch" in named[0]
        assert cp.health(process)["spool"]["dropped"] == named
        first_kept = spool.state.reports[0].seq
        lost_records = spool.records_lost(first_kept - dropped, first_kept)
        kept = process.store.records_unreported
        async with cp.control_plane(port):
            await cp.until(lambda: process.store.records_accepted == 2 + kept, 60)
            await serve(process, 1)
            await cp.until(lambda: process.store.records_accepted == 3 + kept, 60)
            assert process.store.current is spool, "the epoch goes on"
            await asyncio.sleep(0)
    assert await gaps() == [(first_kept - dropped, first_kept - 1, lost_records)]
    rows = await cp.records()
    assert len(rows) == len({row[0] for row in rows}) == 3 + kept == 2 + 24 + 1 - lost_records


async def test_a_control_plane_that_asks_for_what_is_long_gone_is_told(world, tmp_path):
    """Restored from a backup that is older than the accepted reports which are kept."""
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url, cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "0") as agent:
        await cp.until(lambda: agent.control.epoch_now())
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: agent.engine.ready and agent.engine.registry.keys)
        spool = agent.store.current
        await cp.until(lambda: spool.state.accepted_through >= 3)
        while len(spool.state.accepted) > 1:
            spool.state.accepted.popleft()
        await restored(agent.engine.agent_id)
        await serve(agent, 2)
        await cp.until(lambda: agent.store.records_accepted >= 2, 60)
    found = await gaps()
    assert [gap[0] for gap in found] == [1] and found[0][1] >= 2
    assert len(await cp.records()) == 2


@cp.in_database
def restored(agent_id: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE usage_agentcursor SET last_seq = 0, last_digest = '' WHERE agent_id = %s", [agent_id])
