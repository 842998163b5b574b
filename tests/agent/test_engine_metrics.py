"""Pages of inference servers: what is known is right, wherever the page was cut, and what is not is not zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.agent.engine_metrics import EngineReading, EngineTotals, read_page

VLLM = b"""# HELP process_start_time_seconds Start time.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79e+09
# HELP vllm:num_requests_running Requests in execution.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b} \\"c\\""} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a"} 0.0
vllm:num_requests_waiting{engine="1",model_name="a"} 12
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 12
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.875
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a"} 1.5e+06 1790000000000
vllm:prompt_tokens_total{engine="1",model_name="a"} 500 # {trace_id="x"} 1.0 1790000000.5
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="a"} 70.0
vllm:generation_tokens_total{engine="1",model_name="a"} 7.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1"} 1.0
vllm:time_to_first_token_seconds_count 1.0
"""
READ = EngineReading(
    engine="vLLM",
    running=7,
    waiting=12,
    kv_used=0.875,
    prompt_tokens=1_500_500,
    output_tokens=77,
    started_s=1.79e9,
)
SGLANG = b"""sglang:num_running_reqs{model_name="a",tp_rank="0",dp_rank="0"} 2.0
sglang:num_running_reqs{model_name="a",tp_rank="1",dp_rank="0"} 2.0
sglang:num_running_reqs{model_name="a",tp_rank="0",dp_rank="1"} 1.0
sglang:num_queue_reqs{model_name="a"} 5.0\r
sglang:token_usage{model_name="a"} 0.5
sglang:generation_tokens_total{model_name="a"} 9.0
"""
LLAMA = b"""llamacpp:prompt_tokens_total 34
llamacpp:tokens_predicted_total 17
llamacpp:requests_processing 1
llamacpp:requests_deferred 0
"""


@pytest.mark.parametrize(
    ("page", "read"),
    [
        (VLLM, READ),
        (SGLANG, EngineReading("SGLang", running=3, waiting=5, kv_used=0.5, output_tokens=9)),
        (LLAMA, EngineReading("llama.cpp", running=1, waiting=0, prompt_tokens=34, output_tokens=17)),
        (b'vllm:gpu_cache_usage_perc{m="a"} 0.5\n', EngineReading("vLLM", kv_used=0.5)),
        (b"node_load1 3\n", EngineReading()),
        (b"<html>not this\n", EngineReading()),
        (b"", EngineReading()),
    ],
)
def test_each_servers_names(page, read):
    assert read_page(page) == read


@pytest.mark.parametrize("sample", ["-1", "-1.0", "NaN", "nan", "+Inf", "1.8446744073709552e+19", "many", "0x10"])
def test_a_sample_that_is_no_count_makes_its_figure_unknown_and_no_other(sample):
    page = VLLM.replace(b"} 12\nvllm:num_requests_waiting_by", b"} %b\nvllm:num_requests_waiting_by" % sample.encode())
    assert page != VLLM
    read = read_page(page)
    assert read.waiting is None
    assert (read.running, read.kv_used, read.output_tokens) == (7, 0.875, 77)


@pytest.mark.parametrize("share", ["1.5", "-0.1", "87.5", "NaN"])
def test_a_share_beyond_one_is_unknown(share):
    assert read_page(VLLM.replace(b"0.875", share.encode())).kv_used is None


def test_a_page_cut_anywhere_tells_what_is_right_or_nothing():
    """Never a part of a sum: the families before the cut stand, the one at the cut is unknown."""
    known_before = 0
    for end in range(len(VLLM)):
        read = read_page(VLLM[:end], whole=False)
        known = 0
        for name in EngineReading.__slots__:
            value = getattr(read, name)
            assert value in (None, "", getattr(READ, name)), (end, name)
            known += value not in (None, "")
        assert known >= known_before - 1, "at most the family at the cut is taken back"
        known_before = max(known, known_before)
    assert known_before == 7


def test_a_page_without_its_last_line_end_is_taken_for_cut():
    page = LLAMA + b"llamacpp:kv_cache_usage_ratio 0.1"
    assert read_page(page) == read_page(LLAMA), "0.1 may have been 0.125"


def test_a_bad_line_costs_nothing_but_itself():
    page = b'broken{a="b} 1\n\x00\xff\n' + VLLM + b"vllm:num_requests_running\n"
    assert read_page(page) == READ


@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_break_the_reader(page, whole):
    read = read_page(page + b"\nllamacpp:requests_processing " + page, whole=whole)
    assert read.running is None or read.running >= 0


def totals_of(*readings: EngineReading) -> EngineTotals:
    totals = EngineTotals()
    for reading in readings:
        totals.take(reading)
    return totals


def outputs(*counts, started_s=None):
    return [EngineReading("vLLM", output_tokens=count, started_s=started_s) for count in counts]


def test_counters_go_on_across_restarts_of_the_server():
    """10, 20, 5, 8 has increased by 18, and one reading alone by nothing that is known."""
    totals = totals_of(*outputs(10, 20, 5, 8))
    assert (totals.counted["output_tokens"], totals.restarts) == (18, 1)
    assert totals_of(*outputs(10)).counted["output_tokens"] is None
    assert totals_of(*outputs(10, 10)).counted["output_tokens"] == 0


def test_a_restart_that_overtook_its_counter_is_seen_by_its_start_time():
    totals = totals_of(*outputs(10, started_s=100.0), *outputs(50, started_s=200.0))
    assert (totals.counted["output_tokens"], totals.restarts) == (50, 1)


def test_a_figure_that_is_missing_for_a_while_loses_nothing():
    totals = totals_of(*outputs(10, None, None, 30))
    assert (totals.counted["output_tokens"], totals.restarts) == (20, 0)
    assert totals.counted["prompt_tokens"] is None


def test_gpu_memory_of_dcgm_is_read_beside_the_engines_own_figures():
    page = (
        b"vllm:num_requests_running 3\n"
        b'DCGM_FI_DEV_FB_USED{gpu="0"} 40000\nDCGM_FI_DEV_FB_USED{gpu="1"} 20000\n'
        b'DCGM_FI_DEV_FB_FREE{gpu="0"} 1000\nDCGM_FI_DEV_FB_FREE{gpu="1"} 21000\n'
    )
    reading = read_page(page)
    assert (reading.gpu_used_bytes, reading.gpu_total_bytes) == (60_000 << 20, 82_000 << 20)
    without_free = read_page(page[: page.index(b"DCGM_FI_DEV_FB_FREE")])
    assert (without_free.gpu_used_bytes, without_free.gpu_total_bytes) == (60_000 << 20, None)
    assert read_page(b"vllm:num_requests_running 3\n").gpu_used_bytes is None
