"""What balancers and operators are told: readiness with its reason, the wait, and nothing that a client wrote."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from controlplane.agent.gateway import HttpFront
from controlplane.agent.readiness import NotReady, expected_wait_us, not_ready
from controlplane.agent.routes import AdminRoutes
from controlplane.agent.spool_store import SpoolStore
from tests.agent import control_planes as cp
from tests.agent import worlds
from tests.agent.collectors import Collector
from tests.agent.test_full_disk import full_disk
from tests.agent.test_kill import Process
from tests.agent.upstreams import Upstream, begin, chunk, respond
from tests.agent.wire_client import WireClient, chat_body, post

PROMPT = "the patient's name is Zebedee"
WRONG_KEY = "fb_test_this-key-is-not-known"
READYZ = b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n"


async def readyz(agent):
    client = await WireClient.connect(agent.port)
    return await client.ask(READYZ)


def drain(engine):
    engine.draining = True


def no_epoch(engine):
    engine.spool = None


def no_policy(engine):
    engine.registry.document = None


def no_keys(engine):
    engine.registry.knows_keys = False


REASONS = {
    NotReady.DRAINING: (drain, "is shutting down"),
    NotReady.NO_EPOCH: (no_epoch, "has not received its policy yet"),
    NotReady.NO_POLICY: (no_policy, "has not received its policy yet"),
    NotReady.NO_KEYS: (no_keys, "has not received the list of API keys yet"),
}


@pytest.mark.parametrize("reason", REASONS)
async def test_each_reason_is_told_by_name_and_as_a_sentence(make_agent, reason):
    agent = await make_agent()
    assert (await readyz(agent)).status == 200
    bring_about, sentence = REASONS[reason]
    bring_about(agent.engine)
    answer = await readyz(agent)
    assert (answer.status, answer.headers["x-flexband-not-ready"]) == (503, reason.value)
    assert sentence in answer.body.decode()
    client = await WireClient.connect(agent.port)
    refused = await client.ask(post(chat_body()))
    assert refused.status == 503 and sentence in refused.json["error"]["message"], "requests are refused likewise"


async def test_an_agent_without_a_slot_is_not_ready(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(1, agent_id=worlds.AGENT_ID + 1)]}))
    answer = await readyz(agent)
    assert (answer.status, answer.headers["x-flexband-not-ready"]) == (503, "no_slot")
    assert "No slot is ready" in answer.body.decode()
    assert expected_wait_us(agent.engine, "chat", agent.engine.clock.now_us()) is None
    assert expected_wait_us(agent.engine, "never-heard-of", 0) is None


async def test_a_disk_that_takes_nothing_is_a_reason_until_it_does(make_agent):
    agent = await make_agent(speed=5)
    client = await WireClient.connect(agent.port)
    with full_disk():
        client.send(post(chat_body()))
        await agent.until(lambda: agent.engine.disk_problem)
        assert (await readyz(agent)).headers["x-flexband-not-ready"] == "disk"
    await agent.until(lambda: not_ready(agent.engine) is None)
    assert (await client.answer()).status == 200


async def test_readyz_tells_the_wait_that_admission_reckons_with(make_agent):
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(1, places=1)]}), speed=1)
    idle = await readyz(agent)
    assert (idle.headers["x-flexband-class"], idle.headers["x-flexband-estimated-wait-ms"]) == ("chat", "0")
    clients = [await WireClient.connect(agent.port) for _ in range(5)]
    for client in clients[:4]:
        client.send(post(chat_body(max_tokens=100, ignore_eos=True)))
    await agent.until(lambda: len(agent.engine.calls) == 4)
    busy = int((await readyz(agent)).headers["x-flexband-estimated-wait-ms"])
    clients[4].send(post(chat_body(max_tokens=100, ignore_eos=True, stream=True)))
    await agent.until(lambda: len(agent.engine.calls) == 5)
    newest = max(agent.engine.calls.values(), key=lambda call: call.serial)
    assert busy > 0 and newest.estimated_wait_us is not None
    assert newest.estimated_wait_us // 1000 == pytest.approx(busy, abs=30)


async def test_health_tells_clock_and_what_was_dropped_and_unknown_is_null(make_agent):
    agent = await make_agent()
    store = SpoolStore(agent.state_dir / "spool")
    store.current = agent.spool

    class Control:
        reachable, trouble, last_answer_us = True, "", 0
        policy, live = agent.policy, agent.live

        def epoch_now(self) -> int:
            return 1

    front = HttpFront(AdminRoutes(agent.engine, store, Control()))
    client = await WireClient.connect(await front.listen("127.0.0.1", 0))
    before = (await client.ask(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")).json
    assert before["ready"] and before["not_ready"] is None
    assert before["clock"] is None and before["traces"] is None
    now_us = agent.engine.clock.now_us()
    agent.engine.clock.compare(now_us, now_us - 5_000_000)
    agent.engine.draining = True
    after = (await client.ask(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")).json
    assert after["not_ready"] == "draining"
    assert after["clock"]["off"] and after["clock"]["offset_us"] == pytest.approx(5_000_000, abs=50_000)
    assert after["spool"]["reports_dropped"] == 0
    await front.close(within_s=0)


async def script(_, body, writer):
    said = json.dumps(body["messages"]).encode()
    if body["max_tokens"] == 1:
        respond(writer, 500, b'{"error":{"message":' + said + b"}}")
    elif body["max_tokens"] == 2:
        writer.write(said)
        writer.close()
    elif body["max_tokens"] == 3:
        begin(writer)
        chunk(writer, b"data: " + said)
        writer.transport.abort()
    elif body["max_tokens"] == 4:
        respond(writer, 400, said)
    else:
        respond(writer, 200, b'{"choices":[{"message":{"content":' + said + b'}}],"usage":{"prompt_tokens":"x"}}')


@pytest.mark.django_db(transaction=True)
@pytest.mark.processes
@pytest.mark.slow
async def test_no_prompt_and_no_key_is_left_in_log_files_or_traces_of_a_whole_run(world, tmp_path):
    token = await cp.in_database(world.token)()
    state = tmp_path / "state"
    with Collector() as collector:
        async with cp.control_plane() as url, Upstream(script) as server:
            more = ("--backend", "openai", "--upstream", server.url, "--otlp-endpoint", collector.url)
            process = await Process.start(url, token, state, *more)
            await cp.until(lambda: _epoch(process))
            await cp.in_database(cp.push_policy)()
            await cp.until(process.ready, 60)
            await cp.until(lambda: _live_number(process))
            statuses = [await ask(process.port, max_tokens=n, stream=n == 3) for n in (1, 2, 3, 4, 5)]
            statuses.append(await ask(process.port, key=WRONG_KEY))
            statuses.append(await ask(process.port, model="no-such-model"))
            statuses.append(await ask(process.port, body=b'{"messages": "' + PROMPT.encode()))
            statuses.append(await ask(process.port, body=json.dumps({"model": {"a": PROMPT}}).encode()))
            gone = await WireClient.connect(process.port)
            gone.send(post(chat_body(messages=[{"role": "user", "content": PROMPT}]), key=cp.SECRET)[:-9])
            gone.abort()
            await asyncio.to_thread(collector.until, 10)
            process.child.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await process.child.wait() == 0
            log = (await process.drain).decode()
    assert statuses[0] == 502 and statuses[3] == 400 and statuses[5:] == [401, 403, 400, 400]
    assert "failed: the inference server answered" in log and "epoch" in log, "it is the whole log"
    kept = b"".join(path.read_bytes() for path in Path(state).rglob("*") if path.is_file())
    assert b"bundle" in kept
    assert collector.spans
    for secret in (cp.SECRET, WRONG_KEY, PROMPT, "Zebedee", token):
        assert secret not in log
        assert secret.encode() not in kept, "nor in the state directory"
        assert not any(secret.encode() in body for body in collector.bodies)


async def ask(port: int, *, key: str = cp.SECRET, body: bytes = b"", **fields) -> int:
    client = await WireClient.connect(port)
    body = body or chat_body(messages=[{"role": "user", "content": PROMPT}], **fields)
    return (await client.ask(post(body, key=key))).status


async def _live_number(process: Process) -> int:
    return (await process.health())["live_number"]


async def _epoch(process: Process) -> int:
    return (await process.health())["epoch"]
