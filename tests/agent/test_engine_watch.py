"""The inference server under watch: slots follow its health, figures are fresh or unknown, looks are bounded."""

import asyncio
import time
from dataclasses import dataclass

import pytest
import pytest_asyncio

from controlplane.agent import engine_watch, pages
from controlplane.agent.agent_slot import BROKEN, READY, WARMING
from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.engine_metrics import EngineReading
from controlplane.agent.engine_watch import EngineWatch
from controlplane.agent.health import health_details
from controlplane.agent.live_figures import picture
from controlplane.agent.metrics import render
from controlplane.agent.policy_state import LiveList, PolicyState
from controlplane.agent.slot_readiness import FAILURES_MAX, Health
from controlplane.agent.spool_store import SpoolStore
from controlplane.embedded.ports import free_port
from tests.agent import upstreams as up
from tests.agent import worlds
from tests.agent.test_engine_metrics import LLAMA
from tests.agent.wire_client import WireClient, chat_body, post

NOTHING = EngineReading()


class Server:
    """Answers GET by path with what it is told; requests for inference as `upstreams.whole`."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {"/health": ok(b""), "/metrics": ok(LLAMA)}
        self.asked: list[str] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port or free_port())
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _serve(self, reader, writer) -> None:
        self.writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                self.asked.append(path)
                if "content-length: " in head:
                    await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
                    up.respond(writer, 200, up.WHOLE)
                    continue
                answer = self.answers.get(path, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                writer.write(answer)
                if not answer or b"connection: close" in answer:
                    if answer:
                        return
                    await asyncio.sleep(30)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


def ok(body: bytes, *, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    ending = b"" if length is None else b"connection: close\r\n"
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%b\r\n%b" % (size, ending, body)


@pytest_asyncio.fixture
async def server():
    made = Server()
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def watch(server, monkeypatch):
    """A watch that looks when it is told, and waits for as long as a busy machine takes."""
    monkeypatch.setattr(pages, "TIMEOUT_S", 60.0)
    made = EngineWatch(server.url)
    yield made
    await made.close()


@pytest.fixture
def short_wait(watch, monkeypatch):
    """For a server that says nothing."""
    monkeypatch.setattr(pages, "TIMEOUT_S", 0.8)


async def test_a_healthy_server_is_ready_and_its_figures_are_read(watch):
    await watch.check()
    await watch.scrape()
    assert (watch.health.state, watch.health.why) == (READY, "")
    assert (watch.reading.engine, watch.reading.running, watch.reading.waiting) == ("llama.cpp", 1, 0)
    assert watch.reading.kv_used is None, "it has no such figure"


async def test_it_looks_by_itself_and_goes_on_when_looks_fail(watch, server, monkeypatch, short_wait):
    monkeypatch.setattr(engine_watch, "HEALTH_EVERY_S", 0.02)
    monkeypatch.setattr(engine_watch, "METRICS_EVERY_S", 0.02)
    server.answers = {"/health": b"", "/metrics": b""}
    watch.start()
    async with asyncio.timeout(60):
        while not watch.failed:
            await asyncio.sleep(0.02)
    assert watch.health.state == WARMING and set(watch.failed) == {"timeout"}
    server.answers = {"/health": ok(b""), "/metrics": ok(LLAMA)}
    async with asyncio.timeout(60):
        while watch.health.state != READY or watch.reading.running is None or server.asked.count("/metrics") < 4:
            await asyncio.sleep(0.02)


async def test_a_server_without_a_health_page_is_asked_for_its_models(watch, server):
    del server.answers["/health"]
    await watch.check()
    assert watch.health.state == WARMING
    server.answers["/v1/models"] = ok(b'{"data":[]}')
    await watch.check()
    assert watch.health.state == READY


async def test_a_server_that_loads_its_model_is_warming_until_it_is_ready(watch, server):
    server.answers["/health"] = b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n"
    for _ in range(FAILURES_MAX + 2):
        await watch.check()
    assert watch.health.state == WARMING
    assert "answers 503" in watch.health.why


async def test_a_busy_server_may_miss_a_check_a_dead_one_not(watch, server, short_wait):
    await watch.check()
    server.answers["/health"] = b""
    for _ in range(FAILURES_MAX - 1):
        await watch.check()
        assert watch.health.state == READY
    await watch.check()
    assert watch.health.state == BROKEN and "timeout" in watch.health.why
    server.answers["/health"] = ok(b"")
    await watch.check()
    assert watch.health.state == READY
    await server.stop()
    await watch.check()
    await watch.check()
    assert watch.health.state == BROKEN and "nothing listens" in watch.health.why
    await server.start(server.port)


def test_one_good_check_forgives_the_bad_ones_before_it():
    health = Health()
    health.good()
    for _ in range(10):
        for _ in range(FAILURES_MAX - 1):
            health.bad("slow", proof=False)
        health.good()
    assert health.state == READY


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "timeout"),
        (b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", "status"),
        (b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n", "status"),
        (b"HTTP/1.1 302 X\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n", "status"),
        (ok(b"node_load1 1\n"), "unreadable"),
        (b"HELLO\r\n\r\nconnection: close", "broken"),
    ],
)
async def test_a_page_that_brings_nothing_is_counted_and_leaves_no_figure(watch, server, monkeypatch, answer, reason):
    if reason == "timeout":
        monkeypatch.setattr(pages, "TIMEOUT_S", 0.8)
    server.answers["/metrics"] = answer
    has_page = await watch.scrape()
    assert has_page == (b" 404 " not in answer)
    assert watch.failed == {reason: 1}
    assert watch.reading == NOTHING


async def test_a_page_without_end_is_not_read(watch, server, monkeypatch):
    monkeypatch.setattr(pages, "PAGE_BYTES_MAX", 1 << 16)
    server.answers["/metrics"] = ok(LLAMA * 1000)
    await watch.scrape()
    assert watch.failed == {"too_large": 1}
    assert watch.reading == NOTHING


async def test_a_page_that_breaks_off_tells_what_is_whole(watch, server):
    server.answers["/metrics"] = ok(LLAMA, length=len(LLAMA) + 100)
    await watch.scrape()
    assert (watch.reading.running, watch.reading.waiting) == (1, None), "the family at the cut may have had more"


async def test_old_figures_are_unknown_not_full_and_not_zero(watch, server, monkeypatch, short_wait):
    await watch.scrape()
    monkeypatch.setattr(engine_watch, "STALE_S", 0.1)
    server.answers["/metrics"] = b""
    await asyncio.sleep(0.15)
    await watch.scrape()
    assert watch.reading == NOTHING
    assert watch.reading_age_s > 0.1


@dataclass
class Conversation:
    """What health tells of the control plane; here it is not the matter."""

    policy: PolicyState
    live: LiveList
    reachable: bool = True
    trouble: str = ""
    last_answer_us: int = 0

    def epoch_now(self) -> int:
        return 1


async def followed(make_agent, server: Server, watch: EngineWatch) -> worlds.Agent:
    agent = await make_agent(backend=OpenAIBackend(server.url))
    agent.engine.readiness.follow(watch)
    return agent


def metrics_of(agent: worlds.Agent, store) -> dict[str, float]:
    page, _ = render(agent.engine, store)
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in page.decode().splitlines() if not line.startswith("#"))
    }


async def test_slots_follow_the_server_and_what_runs_goes_on(make_agent, server, watch):
    """Not ready: nothing is dispatched, readiness says why, the queue goes on when the server is back."""
    doc = worlds.document(
        classes=[worlds.class_policy(overload="queue"), worlds.class_policy("bulk", kind="batch")],
    )
    agent = await make_agent(doc, backend=OpenAIBackend(server.url))
    agent.engine.readiness.follow(watch)
    client, other = await WireClient.connect(agent.port), await WireClient.connect(agent.port)
    await watch.check()
    assert {slot.state for slot in agent.engine.slots.values()} == {READY}
    assert (await client.ask(post(chat_body()))).status == 200
    server.answers["/health"] = b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"
    for _ in range(FAILURES_MAX):
        await watch.check()
    assert {slot.state for slot in agent.engine.slots.values()} == {BROKEN}
    ready = await other.ask(b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n")
    assert ready.status == 503 and b"answers 500" in ready.body
    client.send(post(chat_body()))
    await agent.until(lambda: len(agent.engine.calls) == 1)
    one_more = [*doc.pool.slots, worlds.slot(4)]
    agent.apply(worlds.document(2, classes=doc.classes, pool={"slots": one_more}))
    assert [slot.state for slot in agent.engine.slots.values()] == [BROKEN] * 4, "a revision does not heal a server"
    assert not any(slot.ready for slot in agent.engine.scheduler.slots)
    assert next(iter(agent.engine.calls.values())).slot is None
    server.answers["/health"] = ok(b"")
    back_s = time.perf_counter()
    await watch.check()
    assert (await client.answer()).status == 200
    print(f"the waiting request was answered {(time.perf_counter() - back_s) * 1000:.0f} ms after the check began")
    assert (await other.ask(b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n")).status == 200
    agent.assert_nothing_held()


async def test_a_request_that_runs_is_not_ended_by_a_failed_check(make_agent, watch):
    """Only its own end is proof of it; it stays counted however long it is silent."""
    gate = asyncio.Event()

    async def script(_, __, writer):
        await gate.wait()
        up.respond(writer, 200, up.WHOLE)

    async with up.Upstream(script) as engine:
        agent = await make_agent(backend=OpenAIBackend(engine.url))
        agent.engine.readiness.follow(watch)
        await watch.check()
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body()))
        await agent.until(lambda: len(engine.bodies) == 1)
        for _ in range(FAILURES_MAX):
            watch.health.bad("gone", proof=True)
            watch.on_change()
        assert len(agent.engine.calls) == 1
        assert sum(len(slot.running) for slot in agent.engine.scheduler.slots) == 1
        gate.set()
        assert (await client.answer()).status == 200
        agent.assert_nothing_held()


async def test_figures_are_shown_while_they_are_fresh(make_agent, server, watch, monkeypatch, tmp_path):
    agent = await followed(make_agent, server, watch)
    store = SpoolStore(tmp_path / "reports", bytes_max=1 << 20)
    told = Conversation(agent.policy, agent.live)
    await watch.check()
    await watch.scrape()
    server.answers["/metrics"] = ok(LLAMA.replace(b"total 17", b"total 20"))
    await watch.scrape()
    shown = metrics_of(agent, store)
    assert shown["flexband_slots_ready"] == 1
    assert shown['flexband_server_requests{phase="running"}'] == 1
    assert shown['flexband_server_requests{phase="waiting"}'] == 0
    assert shown['flexband_server_tokens_total{kind="output"}'] == 3
    assert "flexband_server_kv_used_ratio" not in shown, "unknown has no sample"
    details = health_details(agent.engine, store, told)["inference_server"]
    assert (details["state"], details["running"], details["kv_used"]) == (READY, 1, None)
    monkeypatch.setattr(engine_watch, "STALE_S", 0.0)
    shown = metrics_of(agent, store)
    assert not any(name.startswith("flexband_server_requests") for name in shown)
    assert health_details(agent.engine, store, told)["inference_server"]["running"] is None


async def test_a_server_that_sends_tokens_is_busy_not_dead(make_agent, server, watch, short_wait):
    """Its health is not answered for as long as a stream flows; when both are silent it is taken for dead."""
    flowing = True

    async def script(_, __, writer):
        up.begin(writer)
        up.chunk(writer, up.ROLE)
        while True:
            if flowing:
                up.chunk(writer, up.word("a"))
            await asyncio.sleep(0.05)

    async with up.Upstream(script) as engine:
        upstream = OpenAIBackend(engine.url)
        agent = await make_agent(backend=upstream)
        watch.heard = upstream.reads
        await watch.check()
        client = await WireClient.connect(agent.port)
        client.send(post(chat_body(stream=True)))
        await agent.until(lambda: upstream.reads() > 2)
        server.answers["/health"] = b""
        for _ in range(FAILURES_MAX + 1):
            await watch.check()
        assert watch.health.state == READY
        flowing = False
        await asyncio.sleep(0.1)
        for _ in range(FAILURES_MAX):
            await watch.check()
        assert watch.health.state == BROKEN
        client.abort()
        await agent.until(lambda: not agent.engine.calls)


async def test_a_connect_that_fails_is_looked_after_at_once(make_agent, server, watch, monkeypatch):
    """The requests of the next second are not sent to a server that is known to be gone."""
    upstream = OpenAIBackend(server.url)
    upstream.unreachable = watch.look_now
    monkeypatch.setattr(engine_watch, "HEALTH_EVERY_S", 60)
    agent = await make_agent(backend=upstream)
    agent.engine.readiness.follow(watch)
    watch.start()
    await agent.until(lambda: agent.engine.readiness.state == READY)
    await server.stop()
    died_s = time.perf_counter()
    client = await WireClient.connect(agent.port)
    assert (await client.ask(post(chat_body()))).status in (429, 502)
    await agent.until(lambda: agent.engine.readiness.state == BROKEN)
    print(f"slots were taken out {(time.perf_counter() - died_s) * 1000:.0f} ms after the server died")
    assert watch.health.state == BROKEN
    await server.start(server.port)
    watch.look_now()
    await agent.until(lambda: agent.engine.readiness.state == READY)


async def test_a_watch_outlives_what_goes_wrong_in_it(watch, server, monkeypatch, caplog):
    monkeypatch.setattr(engine_watch, "HEALTH_EVERY_S", 0.02)
    looks = 0

    def fails() -> None:
        nonlocal looks
        looks += 1
        raise RuntimeError("a mistake of ours")

    watch.on_change = fails
    watch.start()
    async with asyncio.timeout(60):
        while looks < 3:
            await asyncio.sleep(0.02)
    assert "the next look comes" in caplog.text


async def test_the_servers_address_is_not_told_to_tenants(make_agent, server, watch):
    agent = await followed(make_agent, server, watch)
    await server.stop()
    await watch.check()
    client = await WireClient.connect(agent.port)
    ready = await client.ask(b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n")
    assert ready.status == 503 and b"nothing listens" in ready.body
    assert str(server.port).encode() not in ready.body
    await server.start(server.port)


async def test_figures_that_are_missing_stop_nothing(make_agent, server, watch, short_wait):
    """A metrics page that hangs or is not there is no reason to hold requests back."""
    agent = await followed(make_agent, server, watch)
    await watch.check()
    client = await WireClient.connect(agent.port)
    for answer in (b"", b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n", ok(b"vllm:num_requests_running -1\n")):
        server.answers["/metrics"] = answer
        await watch.scrape()
        assert watch.reading.running is None
        assert (await client.ask(post(chat_body()))).status == 200
    assert agent.engine.ready


async def test_the_report_says_which_slots_are_broken_and_meters_that_time(make_agent, server, watch):
    agent = await followed(make_agent, server, watch)
    await watch.check()
    now_us = agent.engine.clock.now_us
    assert {slot.state for slot in picture(agent.engine, now_us()).figures.slots} == {READY}
    await server.stop()
    await watch.check()
    assert {slot.state for slot in picture(agent.engine, now_us()).figures.slots} == {BROKEN}
    for slot in agent.engine.slots.values():
        slot.metered.collect(now_us(), warming=False, broken=False)
    await asyncio.sleep(0.15)
    for slot in agent.engine.slots.values():
        _, seen = slot.metered.collect(now_us(), warming=slot.state == WARMING, broken=slot.state == BROKEN)
        assert sum(row.broken_us for row in seen) >= 100_000
    await server.start(server.port)
