"""The process around the engine: orderly end, admin listener."""

import asyncio
import signal
from datetime import UTC, datetime

import pytest

from controlplane.agent.errors import RETIRED_STATUS
from controlplane.core.reasons import Outcome
from controlplane.fleet.actions import retire_agent
from controlplane.fleet.models import Agent
from tests.agent import control_planes as cp
from tests.agent.test_kill import Process
from tests.agent.wire_client import WireClient, chat_body, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes, pytest.mark.slow]


async def test_sigterm_lets_requests_finish_and_cancels_the_rest_within_the_bound(world, tmp_path):
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        process = await Process.start(url, token, tmp_path / "state", "--sim-speed", "1", "--drain-timeout", "2")
        await cp.until(lambda: _epoch(process))
        await cp.in_database(cp.push_policy)()
        await cp.until(process.ready, 60)
        quick, slow, idle = [await WireClient.connect(process.port) for _ in range(3)]
        quick.send(post(chat_body(max_tokens=20, ignore_eos=True), key=cp.SECRET))
        slow.send(post(chat_body(max_tokens=500, ignore_eos=True, stream=True), key=cp.SECRET))
        await cp.until(lambda: _present(process, 2))
        process.child.send_signal(signal.SIGTERM)
        assert await idle.closed_by_server()
        assert (await quick.answer()).status == 200
        cancelled = await slow.answer()
        assert b'"code":"cancelled_by_drain"' in cancelled.body
        async with asyncio.timeout(60):
            assert await process.child.wait() == 0
    outcomes = {row[1]: row for row in await cp.records()}
    assert set(outcomes) == {Outcome.COMPLETED.code, Outcome.CANCELLED_BY_DRAIN.code}
    assert outcomes[Outcome.CANCELLED_BY_DRAIN.code][2] > 0, "what was delivered is paid"
    assert await cp.quarantined() == []


async def test_a_retired_agent_ends_with_a_status_that_no_new_start_follows(world, tmp_path):
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        process = await Process.start(url, token, tmp_path / "state")
        await cp.until(lambda: _epoch(process))
        await cp.in_database(_retire)()
        async with asyncio.timeout(60):
            assert await process.child.wait() == RETIRED_STATUS
        assert b"retired this agent" in await process.drain


def _retire() -> None:
    now = datetime.now(UTC)
    retire_agent(agent_id=Agent.objects.get().pk, actor=cp.ACTOR, now=now, reason="old machine")


async def test_metrics_and_health(world, tmp_path):
    token = await cp.in_database(world.token)()
    agent = ("--sim-speed", "0")
    async with cp.control_plane() as url, cp.running_agent(url, token, tmp_path / "state", *agent) as process:
        await cp.until(lambda: process.control.epoch_now())
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: process.engine.ready)
        tenant, admin = await WireClient.connect(process.port), await WireClient.connect(process.admin_port)
        assert (await tenant.ask(post(chat_body(stream=True), key=cp.SECRET))).status == 200
        await tenant.ask(post(chat_body(), key="fb_unknown_key"))
        metrics = (await admin.ask(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")).body.decode()
        lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        assert lines['flexband_requests_ended_total{outcome="completed"}'] == "1.0"
        assert lines['flexband_requests_unknown_key_total{prefix="fb_unknown_k"}'] == "1.0"
        assert lines["flexband_policy_revision"] == f"{process.engine.revision:.1f}"
        assert float(lines['flexband_recent_time_to_first_token_seconds{class="chat",quantile="0.95"}']) > 0
        health = (await admin.ask(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")).json
        assert health["ready"] and health["requests"]["ended"] == {"completed": 1}
        assert (await tenant.ask(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")).status == 404, "admin listener only"
        assert (await admin.ask(b"POST /metrics HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")).status == 405


async def _epoch(process: Process) -> int:
    return (await process.health())["epoch"]


async def _present(process: Process, count: int) -> bool:
    return (await process.health())["requests"]["present"] == count
