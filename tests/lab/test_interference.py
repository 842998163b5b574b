"""The three stages, the bisection between them, and what the gate makes of it."""

from __future__ import annotations

import pytest

from controlplane.lab.interference import bisect, interference, text
from tests.lab.nights import azure_file, mooncake_file


def asked(tmp_path, **changes):
    base = {
        "trace": f"{azure_file(tmp_path, 250)}", "job": [f"{mooncake_file(tmp_path, 100)}:deadline_h=0.5"], "slots": 5,
        "per_slot": 2, "kv_tokens": 0, "floor": ["interactive=2", "batch=1"], "service": None, "curve": None,
        "objective_ms": 1_500.0, "target": 0.9, "quality_bound": 0.05, "forecast": 1.0, "tenants": 2, "seed": 1,
        "hours": None,
    }  # fmt: skip
    base["service"] = "base_ms=20,prompt_us=20,output_us=4000"
    return {**base, **changes}


def test_bisection_ends_at_the_highest_factor_that_meets():
    rate, result = bisect(lambda factor: {"rate": factor}, lambda one: one["rate"] <= 5.0, lambda one: one["rate"])
    assert rate == result["rate"] and 4.95 < rate <= 5.0
    assert bisect(lambda factor: {"rate": factor}, lambda one: False, lambda one: 1.0) == (0.0, None)
    rate, _ = bisect(lambda factor: {"rate": factor}, lambda one: one["rate"] <= 0.3, lambda one: one["rate"])
    assert 0.29 < rate <= 0.3


def test_all_stages_are_told_and_more_slots_carry_more(tmp_path):
    answer = interference(asked(tmp_path))
    rates = {int(slots): rate for slots, rate in answer["safe_rates"].items()}
    assert list(rates) == [1, 2, 4] and 0 < rates[1] < rates[2] < rates[4]
    alone, both = answer["stages"]["interactive_alone"], answer["stages"]["both"]
    assert alone["attained"] >= 0.9 and both["batch_items"] == 100
    assert answer["stages"]["batch_alone"]["batch_tokens_per_gpu_s"] > 0
    said = text(answer)
    assert "no GPU was involved" in said and "verdict: " in said


def test_a_forecast_that_the_floor_cannot_carry_is_a_reason_to_buy(tmp_path):
    answer = interference(asked(tmp_path, forecast=60.0, job=[]))
    assert answer["verdict"] == "buy" and "no_failure_headroom" in answer["reasons"]


def test_without_a_job_batch_was_not_tested(tmp_path):
    answer = interference(asked(tmp_path, job=[], forecast=0.5))
    assert answer["evidence"]["batch_met"] is None and answer["verdict"] == "unknown"


def test_targets_that_make_no_sense_are_refused(tmp_path):
    for wrong in ({"target": 1.0}, {"forecast": 0.0}, {"floor": ["interactive=9"]}):
        with pytest.raises(ValueError):
            interference(asked(tmp_path, **wrong))
