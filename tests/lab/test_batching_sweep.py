"""The sweep of batch sizes and waits: by hand, against single service, and repeatable."""

from __future__ import annotations

import pytest

from controlplane.core.batching import BatchPolicy, ServiceTime
from controlplane.lab.batching import arrivals_us, cell, sweep, text
from controlplane.lab.reference import fifo_recursion

CURVE = ServiceTime(fixed_us=4_000, per_input_us=500)
ASKED = {
    "requests": 400, "rate": 200.0, "seed": 42, "fixed_ms": 4.0, "per_input_ms": 0.5, "workers": 1, "slow": 1.0,
    "burst": 1.0, "sizes": [1, 4], "waits_ms": [0.0, 5.0],
}  # fmt: skip


def test_batches_of_one_are_a_single_queue():
    at_us = arrivals_us(500, 180.0, 3, 1.0)
    found = cell(at_us, BatchPolicy(1, 0), CURVE, workers=2, slow=1.0)
    starts = fifo_recursion(at_us, [4_500] * 500, 2)
    latencies = sorted(start + 4_500 - now for start, now in zip(starts, at_us, strict=True))
    assert found["p50_ms"] == latencies[249] / 1_000 and found["p99_ms"] == latencies[494] / 1_000
    assert found["mean_batch"] == 1


def test_a_batch_closes_full_or_when_its_oldest_has_waited():
    found = cell([0, 1_000, 2_000, 50_000], BatchPolicy(3, 10_000), CURVE, workers=1, slow=1.0)
    # Three go at 2 ms for 5.5 ms; the fourth waits 10 ms alone and runs 4.5 ms.
    assert found["mean_batch"] == 2 and found["p50_ms"] == 6.5 and found["p99_ms"] == 14.5
    assert found["throughput_per_s"] == pytest.approx(4 / 0.0645)


def test_a_slow_worker_and_bursts_make_the_tail_longer():
    plain = sweep(ASKED)["cells"][0]
    assert (
        sweep({**ASKED, "workers": 2, "slow": 4.0})["cells"][0]["p99_ms"]
        > sweep({**ASKED, "workers": 2})["cells"][0]["p99_ms"]
    )
    assert sweep({**ASKED, "burst": 3.0})["cells"][0]["p99_ms"] > plain["p99_ms"]


def test_a_sweep_begins_with_one_and_no_wait_marks_a_knee_and_repeats_itself():
    answer = sweep(ASKED)
    assert answer == sweep(ASKED) != sweep({**ASKED, "seed": 43})
    first = answer["cells"][0]
    assert (first["max_batch_size"], first["max_wait_ms"]) == (1, 0.0)
    assert sum(row["knee"] for row in answer["cells"]) == 1
    assert "no GPU was involved" in text(answer) and "<- knee" in text(answer)


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"rate": 0.0}, {"workers": 0}, {"slow": 0.5}, {"burst": 0.0}])
def test_numbers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError):
        sweep({**ASKED, **wrong})
