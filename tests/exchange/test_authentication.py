"""Who may speak: signatures over method, path, body, epoch and seq; retired and unknown agents are told so."""

from __future__ import annotations

import time
import uuid

from asgiref.sync import sync_to_async
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.exchange.authentication import AgentDirectory
from controlplane.fleet.models import Agent
from tests.exchange.door import call


async def test_another_key_is_refused(agent):
    response = await agent.signed("POST", "/agent/v1/hello", b"{}", key=Ed25519PrivateKey.generate())
    assert (response.status, response.problem.code) == (401, "bad_signature")


async def test_a_signature_is_good_for_its_own_path_only(agent):
    import msgspec

    from controlplane.wire import signing

    body = msgspec.json.encode(agent.build())
    message = signing.request_message(method="POST", path="/agent/v1/hello", body=body, epoch=agent.epoch, stamp=1)
    headers = {
        signing.AGENT_HEADER: agent.uuid,
        signing.EPOCH_HEADER: str(agent.epoch),
        signing.SEQ_HEADER: "1",
        signing.SIGNATURE_HEADER: signing.to_text(signing.sign(agent.key, message)),
    }
    assert (await call(agent.app, "POST", "/agent/v1/report", body, headers)).problem.code == "bad_signature"


async def test_the_signed_seq_is_the_seq_of_the_report(agent):
    response = await agent.send(agent.build(seq=1), seq=2)
    assert response.problem.code == "bad_signature"


async def test_a_time_that_is_far_off_is_refused(agent):
    hour_ago = time.time_ns() // 1000 - 3_600_000_000
    response = await agent.signed("POST", "/agent/v1/hello", b"{}", stamp=hour_ago)
    assert response.problem.code == "bad_signature"
    assert "clock" in response.problem.detail


async def test_headers_are_asked_for_by_name(app, world):
    response = await call(app, "POST", "/agent/v1/hello", b"{}")
    assert response.problem.code == "bad_signature"
    assert "x-flexband-signature" in response.problem.detail


async def test_unknown_agent(agent):
    agent.uuid = str(uuid.uuid4())
    response = await agent.signed("POST", "/agent/v1/hello", b"{}")
    assert (response.status, response.problem.code) == (401, "unknown_agent")


async def test_a_retired_agent_is_refused_once_the_snapshot_is_old(agent):
    await sync_to_async(Agent.objects.filter(pk=agent.id).update)(state="retired")
    agent.app._handlers.directory._loaded_at = float("-inf")
    response = await agent.send(agent.build())
    assert (response.status, response.problem.code) == (410, "retired")


async def test_a_snapshot_is_at_most_two_seconds_old():
    clock, loads = [100.0], []

    async def run(function):
        loads.append(clock[0])
        return {}

    directory = AgentDirectory(run, clock=lambda: clock[0])
    await directory.find("x")
    assert loads == [100.0]
    clock[0] = 101.0
    await directory.find("x")
    assert loads == [100.0, 101.0], "an unknown id asks again"
    directory._agents["y"] = object()
    clock[0] = 102.5
    await directory.find("y")
    assert len(loads) == 2
    clock[0] = 103.5
    await directory.find("y")
    assert len(loads) == 3


async def test_other_paths_go_to_the_fallback(app, world):
    assert (await call(app, "GET", "/pools/")).body == b"fallback"
    assert (await call(app, "GET", "/agent/v1/nothing")).problem.code == "not_found"
    assert (await call(app, "GET", "/agent/v1/report")).status == 405
