"""DCGM's exporter under watch: fresh or unknown, bounded, through restarts, up to report, metrics and health."""

import asyncio

import pytest
import pytest_asyncio

from controlplane.agent import gpu_watch, pages
from controlplane.agent.agent_process import make_watch
from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.engine_watch import EngineWatch
from controlplane.agent.errors import UsageError
from controlplane.agent.gpu_metrics import GpuMemory
from controlplane.agent.gpu_watch import GpuWatch
from controlplane.agent.health import health_details
from controlplane.agent.live_figures import picture
from controlplane.agent.options import parse
from controlplane.agent.policy_state import LiveList, PolicyState
from controlplane.agent.spool_store import SpoolStore
from tests.agent import dcgm_pages as dcgm
from tests.agent.test_engine_watch import Conversation, Server, metrics_of, ok
from tests.agent.test_gpu_metrics import BOTH, FIRST, UNKNOWN

GIVEN = ["--control-plane", "http://127.0.0.1:1", "--name", "a", "--state-dir", "/tmp/x"]
UPSTREAM = ["--backend", "openai", "--upstream", "http://127.0.0.1:8000"]


@pytest_asyncio.fixture
async def exporter():
    made = Server()
    made.answers = {"/metrics": ok(dcgm.page())}
    await made.start()
    yield made
    await made.stop()


def address(exporter: Server) -> str:
    return f"http://127.0.0.1:{exporter.port}/metrics"


@pytest_asyncio.fixture
async def watch(exporter, monkeypatch):
    """A watch that looks when it is told, and waits for as long as a busy machine takes."""
    monkeypatch.setattr(pages, "TIMEOUT_S", 60.0)
    made = GpuWatch(address(exporter))
    yield made
    await made.close()


async def test_it_is_unknown_until_it_was_read(watch):
    assert watch.memory == UNKNOWN and watch.age_s is None
    await watch.scrape()
    assert watch.memory == BOTH and watch.age_s < 10


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "timeout"),
        (b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", "status"),
        (ok(dcgm.page()).replace(b" 200 OK", b" 503 X"), "status"),
        (b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n", "status"),
        (b"HTTP/1.1 302 X\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n", "status"),
        (ok(b""), "unreadable"),
        (ok(b"node_load1 1\n"), "unreadable"),
        (b"HELLO\r\n\r\nconnection: close", "broken"),
    ],
)
async def test_a_look_that_brings_nothing_is_counted(watch, exporter, monkeypatch, answer, reason):
    if reason == "timeout":
        monkeypatch.setattr(pages, "TIMEOUT_S", 0.8)
    exporter.answers = {"/metrics": answer, "/elsewhere": ok(dcgm.page())}
    await watch.scrape()
    assert watch.failed == {reason: 1} and watch.memory == UNKNOWN


async def test_a_page_without_end_is_not_read(watch, exporter, monkeypatch):
    monkeypatch.setattr(pages, "PAGE_BYTES_MAX", 1 << 16)
    exporter.answers["/metrics"] = ok(dcgm.page() * 100)
    await watch.scrape()
    assert watch.failed == {"too_large": 1} and watch.memory == UNKNOWN


async def test_a_dump_that_breaks_off_is_unknown_where_it_was_cut(watch, exporter):
    whole = dcgm.page()
    at = whole.index(b"DCGM_FI_DEV_FB_USED{") + 10
    exporter.answers["/metrics"] = ok(whole[:at], length=len(whole))
    await watch.scrape()
    assert watch.memory == UNKNOWN and watch.failed == {}
    at = whole.index(b"# HELP DCGM_FI_DEV_FB_RESERVED") + 10
    exporter.answers["/metrics"] = ok(whole[:at], length=len(whole))
    await watch.scrape()
    assert watch.memory == GpuMemory(BOTH.used_bytes, None), "what is reserved may only be missing"


async def test_through_a_restart_the_last_figures_stand_until_they_are_old(watch, exporter, monkeypatch):
    """Down, then up and still empty, then there again: as the exporter does it before its first collection."""
    await watch.scrape()
    await exporter.stop()
    await watch.scrape()
    assert watch.memory == BOTH and sum(watch.failed.values()) == 1
    await exporter.start(exporter.port)
    exporter.answers["/metrics"] = ok(b"")
    await watch.scrape()
    assert watch.memory == BOTH and watch.failed["unreadable"] == 1
    monkeypatch.setattr(gpu_watch, "STALE_S", 0.05)
    await asyncio.sleep(0.06)
    assert watch.memory == UNKNOWN and watch.age_s > 0.05, "old is a dash, not the last figure and not zero"
    monkeypatch.setattr(gpu_watch, "STALE_S", 60.0)
    exporter.answers["/metrics"] = ok(dcgm.page(used=(100, 100)))
    await watch.scrape()
    assert watch.memory.used_bytes == 200 << 20


async def test_it_looks_by_itself_and_goes_on_when_looks_fail(exporter, monkeypatch):
    monkeypatch.setattr(gpu_watch, "EVERY_S", 0.02)
    exporter.answers["/metrics"] = ok(b"")
    watch = GpuWatch(address(exporter), ["0"])
    watch.start()
    async with asyncio.timeout(60):
        while watch.failed.get("unreadable", 0) < 3:
            await asyncio.sleep(0.01)
        exporter.answers["/metrics"] = ok(dcgm.page())
        while watch.memory != FIRST:
            await asyncio.sleep(0.01)
    await watch.close()


async def test_reports_metrics_and_health_have_it_beside_what_the_server_tells(make_agent, exporter, tmp_path):
    server = Server()
    await server.start()
    agent = await make_agent(backend=OpenAIBackend(server.url))
    watch = EngineWatch(server.url)
    watch.gpus = GpuWatch(address(exporter))
    agent.engine.readiness.follow(watch)
    store = SpoolStore(tmp_path / "spool")
    control = Conversation(PolicyState(tmp_path, lambda _: None), LiveList(tmp_path))
    now_us = agent.engine.clock.now_us()
    assert picture(agent.engine, now_us).figures.engine is None, "nothing is known yet"
    await watch.gpus.scrape()
    said = picture(agent.engine, now_us).figures.engine
    assert (said.engine, said.running, said.gpu_used_bytes, said.gpu_total_bytes) == (
        "", None, BOTH.used_bytes, BOTH.total_bytes,
    ), "DCGM alone"  # fmt: skip
    await watch.scrape()
    said = picture(agent.engine, now_us).figures.engine
    assert (said.engine, said.running, said.gpu_used_bytes) == ("llama.cpp", 1, BOTH.used_bytes)
    told = metrics_of(agent, store)
    assert told['flexband_server_gpu_memory_bytes{kind="used"}'] == BOTH.used_bytes
    assert told['flexband_server_gpu_memory_bytes{kind="total"}'] == BOTH.total_bytes
    assert health_details(agent.engine, store, control)["inference_server"]["gpus"]["used_bytes"] == BOTH.used_bytes
    exporter.answers["/metrics"] = ok(dcgm.page(used=("NaN", 1)))
    await watch.gpus.scrape()
    said = picture(agent.engine, now_us).figures.engine
    assert (said.running, said.gpu_used_bytes, said.gpu_total_bytes) == (1, None, None)
    assert not any("gpu_memory" in name for name in metrics_of(agent, store)), "unknown has no sample"
    exporter.answers["/metrics"] = ok(b"")
    await watch.gpus.scrape()
    assert metrics_of(agent, store)['flexband_gpu_scrapes_failed_total{reason="unreadable"}'] == 1
    await watch.close()
    await server.stop()


async def test_options_name_the_page_and_the_gpus():
    options = parse([*GIVEN, *UPSTREAM, "--dcgm-metrics", "http://127.0.0.1:9400", "--dcgm-gpus", "0, GPU-1b,0/7,"])
    assert options.dcgm_metrics == "http://127.0.0.1:9400/metrics"
    assert options.dcgm_gpus == ("0", "GPU-1b", "0/7")
    watch = make_watch(options, None)
    assert watch.gpus is not None
    await watch.close()
    assert parse([*GIVEN, *UPSTREAM, "--dcgm-metrics", "http://h:1/a?b=c"]).dcgm_metrics == "http://h:1/a?b=c"
    plain = make_watch(parse([*GIVEN, *UPSTREAM]), None)
    assert plain.gpus is None
    for wrong in (
        [*UPSTREAM, "--dcgm-metrics", "ftp://x"], ["--dcgm-metrics", "http://h:1"], [*UPSTREAM, "--dcgm-gpus", "0"],
    ):  # fmt: skip
        with pytest.raises(UsageError, match="--dcgm"):
            parse([*GIVEN, *wrong])
