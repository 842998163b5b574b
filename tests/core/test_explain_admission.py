"""The JSON form of an admission decision: worked cases and refused input."""

import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.admission import CHECK_REASONS
from controlplane.core.explain_admission import explain
from controlplane.core.reasons import Reason

DATA = json.loads((Path(__file__).parent / "data" / "admission_cases.json").read_text())


def changed(change: dict[str, Any]) -> dict[str, Any]:
    document = dict(DATA["base"])
    for key, value in change.items():
        base = document.get(key)
        document[key] = {**base, **value} if isinstance(base, dict) and isinstance(value, dict) else value
    return document


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["name"])
def test_worked_case(case: dict[str, Any]) -> None:
    answer = explain(changed(case["change"]))
    assert {key: answer.get(key) for key in case["expect"]} == case["expect"]


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["name"])
def test_the_named_reason_is_that_of_the_first_check_that_failed(case: dict[str, Any]) -> None:
    answer = explain(changed(case["change"]))
    failed = [check["name"] for check in answer["checks"] if not check["held"]]
    if answer["decision"] == "admit":
        assert failed == []
    elif answer["reason"] is not None:
        assert Reason(answer["reason"]) in CHECK_REASONS[failed[0]]
    else:
        assert set(failed) <= {"memory_kv_tokens"}
    assert [check["name"] for check in answer["checks"]] == list(CHECK_REASONS)


def test_without_a_lease_entry_there_is_no_hard_budget() -> None:
    document = changed({})
    del document["lease"]
    assert explain(document)["decision"] == "queue"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"now": "yesterday"}, "now must be an instant"),
        ({"now": "2026-11-29T20:00:00"}, "must carry its zone"),
        ({"class": 7}, "class must be an object"),
        ({"class": {"overload": "drop"}}, "class.overload must be one of"),
        ({"key": {"state": "lost"}}, "key.state must be one of"),
        ({"tenant": {"state": "gone"}}, "tenant.state must be"),
        ({"request": {"prompt_tokens": -1}}, "prompt_tokens must be a whole number"),
        ({"request": {"prompt_tokens": True}}, "prompt_tokens must be a whole number"),
        ({"bucket": {"level": "full"}}, "level must be a number"),
        ({"slots": "none"}, "slots must be a list"),
        ({"lease": {"outage_posture": "ajar"}}, "outage_posture must be one of"),
        ({"rate_card": {"batch_discount_ppm": 2_000_000}}, "batch_discount_ppm must be between"),
        ({"free_now": "yes"}, "free_now must be true or false"),
    ],
)
def test_unusable_input_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(changed(change))


def test_input_must_be_an_object() -> None:
    with pytest.raises(ValueError, match="must be an object"):
        explain([])  # type: ignore[arg-type]
