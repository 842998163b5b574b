import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.explain_attribution import explain

DATA = json.loads((Path(__file__).parent / "data" / "attributions.json").read_text())
POOL: dict[str, Any] = DATA["eight_slots"]


@pytest.mark.parametrize("row", DATA["by_idle"], ids=lambda row: row["name"])
def test_idle_goes_by_the_policy_and_the_whole_stays_whole(row: dict[str, Any]) -> None:
    answer = explain(POOL | {"idle": row["idle"], "weights": row.get("weights", {})})
    assert answer["total_nanos"] == 20_000_000_000
    assert answer["by_tenant_nanos"] == row["by_tenant_nanos"]
    assert sum(line["nanos"] for line in answer["lines"]) == answer["total_nanos"]
    assert answer["unobserved"] == []
    json.dumps(answer)


def test_idle_of_a_class_that_nobody_used_is_a_line_of_the_platform() -> None:
    answer = explain(POOL | {"usage": POOL["usage"][:2]})
    assert answer["by_tenant_nanos"] == {"a": 9_166_666_667, "b": 4_583_333_333, "platform": 6_250_000_000}


def test_thirds_do_not_divide_and_the_first_gets_the_rest() -> None:
    slot = {"slot": "s1", "owners": [{"class": "chat", "from_s": 0, "to_s": 3600}]}
    usage = [{"tenant": tenant, "class": "chat", "gpu_us": 1_000_000_000} for tenant in "zyx"]
    answer = explain({"rate_nanos_per_slot_hour": 10**9, "interval_s": [0, 3600], "slots": [slot], "usage": usage})
    assert answer["by_tenant_nanos"] == {"x": 333_333_334, "y": 333_333_333, "z": 333_333_333}


def test_every_cause_of_idle_is_a_line_of_its_own() -> None:
    kinds = explain(POOL | {"idle": "platform"})["by_kind_nanos"]
    assert set(kinds) == {"direct", "batch_floor_unused", "flex_not_lent", "interactive_floor_unused", "lent_unused"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interval_s": [0]}, "interval_s"),
        ({"interval_s": [3600, 0]}, "interval is empty"),
        ({"rate_nanos_per_slot_hour": -1}, "rate_nanos_per_slot_hour"),
        ({"idle": "fair"}, "idle: must be one of"),
        ({"slots": [POOL["slots"][0]] * 2}, "listed twice"),
        ({"slots": [{"slot": "x", "owners": [{"class": "c", "from_s": 5, "to_s": 5}]}]}, "not after its start"),
        (
            {"slots": [{"slot": "x", "owners": [{"class": "", "from_s": 0, "to_s": 5}]}]},
            "class: must be a text",
        ),
        ({"usage": [{"tenant": "platform", "class": "chat", "gpu_us": 1}]}, "reserved"),
        (
            {"usage": [{"tenant": "a", "class": "chat", "gpu_us": -1}]},
            "gpu_us: must be a whole number",
        ),
        ({"usage": [{"tenant": "a", "class": "chat", "gpu_us": 1, "slot": "nope"}]}, "not in the pool"),
        ({"usage": {}}, "usage: must be a list"),
        ({"slots": None}, "slots: must be a list"),
        ({"weights": {"chat": {"a": -1}}}, "weight is negative"),
        ({"lend_price_share": 2}, "lend price share"),
    ],
)
def test_unusable_input_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(POOL | change)
