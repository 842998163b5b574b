"""The JSON form of fair queueing: worked orders and refused input."""

import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.explain_fairness import explain

CASES = json.loads((Path(__file__).parent / "data" / "fairness_cases.json").read_text())


def document(case: dict[str, Any]) -> dict[str, Any]:
    keys = ("id", "tenant", "t_us", "prompt", "output", "gpu_us")
    arrivals = [dict(zip(keys, row, strict=True)) for row in case["requests"]]
    return {"unit": case["unit"], "weights": case["weights"], "w_prompt": 1, "w_output": 2, "arrivals": arrivals}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_worked_order(case: dict[str, Any]) -> None:
    assert explain(document(case))["order"] == case["order"]


def test_order_of_the_list_does_not_matter() -> None:
    given = document(CASES[0])
    given["arrivals"].reverse()
    assert explain(given)["order"] == CASES[0]["order"]


def test_idle_server_waits_for_the_next_arrival() -> None:
    arrivals = [
        {"id": "x", "tenant": "a", "t_us": 0, "prompt": 1, "output": 1, "gpu_us": 5},
        {"id": "y", "tenant": "a", "t_us": 100, "prompt": 1, "output": 1, "gpu_us": 5},
    ]
    assert [entry["t_us"] for entry in explain({"arrivals": arrivals})["dispatches"]] == [0, 100]


def test_final_counters_are_weighted_work() -> None:
    answer = explain(document(CASES[1]))
    # four requests of 100 + 2 x 50 at weight 1, eight at weight 3
    assert answer["counters"]["a"] == 800
    assert answer["counters"]["b"] == pytest.approx(1600 / 3)


def test_fractional_weights_keep_ties_exact() -> None:
    arrivals = [
        {"id": f"{tenant}{i}", "tenant": tenant, "t_us": 0, "prompt": 7, "output": 0, "gpu_us": 1}
        for tenant in "ab"
        for i in range(3)
    ]
    answer = explain({"arrivals": arrivals, "weights": {"a": 0.1, "b": 0.1}})
    assert answer["order"] == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "arrivals must be a list"),
        ({"arrivals": [3]}, r"arrivals\[0\] must be an object"),
        ({"arrivals": [{"id": "x"}]}, "tenant must be a tenant's slug"),
        ({"arrivals": [{"tenant": "a"}]}, "id must be given"),
        ({"arrivals": [{"id": "x", "tenant": "a", "prompt": -1}]}, "prompt must be a whole number"),
        ({"arrivals": [{"id": "x", "tenant": "a"}, {"id": "x", "tenant": "b"}]}, "more than once"),
        ({"arrivals": [], "unit": "watts"}, "unit must be one of"),
        ({"arrivals": [], "weights": {"a": 0}}, "weights.a must be positive"),
        ({"arrivals": [], "weights": {"a": "many"}}, "weights.a must be a number"),
        ({"arrivals": [], "weights": []}, "weights must be an object"),
    ],
)
def test_unusable_input_says_what_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(given)
