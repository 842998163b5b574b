"""What a Triton server says of itself: readiness, figures of whole, cut and odd pages, restarts."""

import pytest

from controlplane.agent.agent_slot import READY, WARMING
from controlplane.agent.backends.triton import TritonBackend
from controlplane.agent.backends.triton_metrics import TritonReading, TritonTotals, read_triton_page
from controlplane.agent.backends.triton_watch import TritonWatch, metrics_url
from controlplane.agent.errors import UsageError
from controlplane.agent.options import parse
from tests.agent import worlds
from tests.agent.test_one_shot import ask
from tests.agent.triton_server import TritonServer

PAGE = b"""# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
nv_inference_count{model="e5",version="1"} 40
nv_inference_count{model="e5",version="2"} 8
nv_inference_count{model="other",version="1"} 1000
# HELP nv_inference_exec_count Number of model executions performed (does not include cached requests)
# TYPE nv_inference_exec_count counter
nv_inference_exec_count{model="e5",version="1"} 10
nv_inference_exec_count{model="e5",version="2"} 2
nv_inference_exec_count{model="other",version="1"} 5
# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="e5",version="1"} 3
nv_inference_pending_request_count{model="e5",version="2"} 4
nv_inference_pending_request_count{model="other",version="1"} 9
"""


def test_a_page_is_read_for_one_model_over_its_versions() -> None:
    assert read_triton_page(PAGE, "e5") == TritonReading(True, 7, 48, 12)
    assert read_triton_page(PAGE, "other") == TritonReading(True, 9, 1000, 5)
    assert read_triton_page(PAGE, "") == TritonReading(True, 16, 1048, 17)
    assert read_triton_page(PAGE.replace(b"\n", b"\r\n"), "e5").waiting == 7


def test_what_is_not_there_is_unknown_and_not_zero() -> None:
    assert read_triton_page(PAGE, "absent") == TritonReading(True, None, None, None)
    assert read_triton_page(b"", "e5") == TritonReading()
    assert read_triton_page(b"<html>nothing</html>\n", "e5") == TritonReading()
    older = b"\n".join(line for line in PAGE.split(b"\n") if b"pending" not in line)
    assert read_triton_page(older, "e5") == TritonReading(True, None, 48, 12)


@pytest.mark.parametrize("value", [b"-1", b"NaN", b"+Inf", b"18446744073709551615", b"x", b"1e300"])
def test_a_sentinel_makes_its_figure_unknown_and_no_other(value: bytes) -> None:
    page = PAGE.replace(
        b'pending_request_count{model="e5",version="2"} 4', b'pending_request_count{model="e5",version="2"} ' + value
    )
    assert read_triton_page(page, "e5") == TritonReading(True, None, 48, 12)
    assert read_triton_page(page, "other").waiting == 9


def test_a_cut_anywhere_never_gives_a_wrong_figure() -> None:
    whole = read_triton_page(PAGE, "e5")
    for at in range(len(PAGE)):
        cut = read_triton_page(PAGE[:at], "e5", whole=False)
        assert cut.waiting in (None, whole.waiting), at
        assert cut.inferences in (None, whole.inferences), at
        assert cut.executions in (None, whole.executions), at


def test_labels_in_another_order_and_quotes_in_a_name() -> None:
    page = b'nv_inference_count{version="1",model="a\\"b",x="model=\\"e5\\""} 5\n'
    assert read_triton_page(page, 'a"b').inferences == 5
    assert read_triton_page(page, "e5").inferences is None


def test_counts_go_on_across_restarts() -> None:
    totals = TritonTotals()
    for inferences, executions in ((100, 10), (160, 20), (None, None), (8, 2), (10, 3)):
        totals.take(TritonReading(True, 0, inferences, executions))
    assert (totals.counted, totals.restarts) == ({"inferences": 70, "executions": 13}, 1)
    fresh = TritonTotals()
    fresh.take(TritonReading(True, 0, 5, 5))
    assert fresh.counted == {"inferences": None, "executions": None}, "one look tells no increase"


# Against a server


@pytest.fixture
async def served(make_agent):
    async with TritonServer(worlds.MODEL) as server:
        agent = await make_agent(backend=TritonBackend(server.url))
        watch = TritonWatch(server.url, server.url + "/metrics", lambda: agent.engine.registry.model)
        agent.engine.readiness.follow(watch)
        yield server, agent, watch
        await watch.close()


async def test_slots_are_as_ready_as_the_server_and_its_model(served):
    server, agent, watch = served
    assert watch.health.state == WARMING and not agent.engine.ready
    server.loaded = False
    await watch.check()
    assert f"has not loaded the model {worlds.MODEL}" in watch.health.why
    server.loaded = True
    await watch.check()
    assert watch.health.state == READY and agent.engine.ready
    assert (await ask(agent, {"input": "now"})).status == 200
    server.live = False
    for _ in range(3):
        await watch.check()
    assert watch.health.state != READY and "when asked whether it is ready" in watch.health.why


async def test_its_figures_are_told(served):
    server, _, watch = served
    server.metrics = PAGE.replace(b'"e5"', f'"{worlds.MODEL}"'.encode())
    assert await watch.scrape()
    assert (watch.reading.engine, watch.reading.waiting, watch.reading.running) == ("Triton", 7, None)
    server.metrics = server.metrics.replace(b"} 40", b"} 72").replace(b"} 10\n", b"} 14\n")
    assert await watch.scrape()
    assert watch.batched == {"inferences": 32, "executions": 4}
    server.metrics = b"# nothing of Triton's\n"
    await watch.scrape()
    assert watch.failed == {"unreadable": 1}


def test_options_of_a_triton_agent(tmp_path) -> None:
    base = ["--control-plane", "http://127.0.0.1:1", "--name", "a", "--state-dir", str(tmp_path), "--backend", "triton"]
    with pytest.raises(UsageError, match="--backend triton needs --upstream"):
        parse(base)
    options = parse([*base, "--upstream", "http://gpu-1:8000", "--triton-text-input", "sentences"])
    assert options.triton_text_input == "sentences"
    assert metrics_url(options.upstream, options.triton_metrics) == "http://gpu-1:8002/metrics"
    assert metrics_url("http://[::1]:8000", "") == "http://[::1]:8002/metrics"
    assert metrics_url("http://gpu-1:8000", "http://gpu-1:9/m") == "http://gpu-1:9/m"
    for wrong in (["--triton-metrics", "ftp://x"], ["--triton-text-input", ""], ["--sim-batch-fixed", "-1"]):
        with pytest.raises(UsageError):
            parse([*base, "--upstream", "http://gpu-1:8000", *wrong])


def test_gpu_memory_is_that_of_all_gpus_whatever_the_model():
    page = (
        b'nv_inference_count{model="m",version="1"} 7\n'
        b'nv_gpu_memory_used_bytes{gpu_uuid="a"} 5\nnv_gpu_memory_used_bytes{gpu_uuid="b"} 6\n'
        b'nv_gpu_memory_total_bytes{gpu_uuid="a"} 10\nnv_gpu_memory_total_bytes{gpu_uuid="b"} 10\n'
    )
    reading = read_triton_page(page, "m")
    assert (reading.inferences, reading.gpu_used_bytes, reading.gpu_total_bytes) == (7, 11, 20)
    assert read_triton_page(page.replace(b" 6\n", b" nan\n"), "m").gpu_used_bytes is None
