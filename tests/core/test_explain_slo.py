import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.explain_slo import explain

CASES = json.loads((Path(__file__).parent / "data" / "objectives.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_three_populations_are_answered_side_by_side(case: dict[str, Any]) -> None:
    answer = explain({"target": case["target"], "counts": case["counts"]})
    assert {name: answer[name]["compliance"] for name in ("offered", "admitted", "successful")} == case["compliance"]
    assert answer["offered"]["burn_rate"] == case["burn_rate"]
    assert answer["verdict"] == case["verdict"]
    json.dumps(answer)


def test_the_answer_names_causes_rules_and_absence() -> None:
    answer = explain({"target": 0.9, "counts": CASES[0]["counts"], "population": "admitted"})
    assert answer["bad_by_cause"] == {"rejected": 200, "timed_out": 100, "too_slow": 50, "failed": 0}
    assert answer["rules_dropped"] == ["14.4 x (1 - 0.9) = 1.44 > 1: it can never fire"]
    assert answer["met"] is True
    assert (answer["absence_warn_s"], answer["absence_page_s"]) == (2592.0, 12960.0)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"counts": {"offered": 1, "successful": 1, "good": 1}}, "target: is missing"),
        ({"target": 1, "counts": {"offered": 1, "successful": 1, "good": 1}}, "under 1"),
        ({"target": "x", "counts": {}}, "^target"),
        ({"target": 0.9, "counts": {"offered": 1.5}}, r"counts\.offered: must be a whole number"),
        ({"target": 0.9, "counts": {"offered": 1, "good": 1}}, r"counts\.successful: is missing"),
        ({"target": 0.9, "counts": [1]}, "counts: must be an object"),
        ({"target": 0.9, "population": "all", "counts": {}}, "population: must be one of"),
    ],
)
def test_unusable_input_names_the_key(case: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(case)
