"""The JSON face of the flex-band decision: worked cases with their bounds, and unusable questions."""

from __future__ import annotations

import json

import pytest

from controlplane.core.explain_flex import explain
from controlplane.core.flex_decision import FlexNote
from tests.core.flex_worlds import load_cases

CASES = load_cases()


def said(answer: dict) -> list[str]:
    return [" ".join(action.values()) for action in answer["actions"]]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case):
    answer = explain(case["input"])
    assert said(answer) == case["expect"]["actions"]
    for key, right in case["expect"].items():
        if key == "actions":
            continue
        if isinstance(right, float):
            assert answer[key] == pytest.approx(right, abs=5e-5), key
        else:
            assert answer[key] == right, key
    assert "ignored_keys" not in answer
    json.dumps(answer, allow_nan=False)


def test_answers_list_every_check_with_its_use():
    answer = explain(CASES[2]["input"])
    assert all({"name", "value", "limit", "held", "used_for"} <= set(check) for check in answer["checks"])
    lend = [check for check in answer["checks"] if check["used_for"] == "lend"]
    assert len(lend) >= 12 and all(check["held"] for check in lend)
    by_name = {check["name"]: check for check in answer["checks"]}
    assert by_name["p95_queue_ms"] == {
        "name": "p95_queue_ms",
        "value": 80,
        "limit": 200,
        "held": True,
        "used_for": "lend",
    }
    assert by_name["telemetry_age_s"]["value"] == 1


def test_a_refused_loan_names_the_check_that_refused():
    answer = explain(next(case["input"] for case in CASES if "push load" in case["name"]))
    refused = [check for check in answer["checks"] if check["used_for"] == "lend" and not check["held"]]
    assert [(check["name"], check["value"]) for check in refused] == [("load_with_one_slot_less", 0.725)]


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("now",), "yesterday", "now: 'yesterday' is not an ISO 8601 instant"),
        (("now",), "2026-11-29T20:00:00", "names no zone"),
        (("now",), None, "now: must be an ISO 8601 instant, not null"),
        (("policy", "load_limit"), "0.7", "policy.load_limit: must be a finite number, not a text"),
        (("policy", "load_limit"), 70, "policy: load_limit must be above 0 and at most 1"),
        (("policy", "return_slack"), 0.25, "policy: return_slack (0.25) must be above lend_slack (0.25)"),
        (("policy", "drain_bound_s"), -1, "policy.drain_bound_s: must be 0 or more"),
        (("policy", "spillover_action"), "shout", "policy.spillover_action: must be one of warn, block, not 'shout'"),
        (("safe_rate",), {}, "safe_rate: a safe rate table needs at least one entry"),
        (("safe_rate",), {"four": 1}, "safe_rate.four: the key must be a number of slots"),
        (("safe_rate",), {"4": 0}, "safe_rate: the safe rate for 4 slots must be a finite number above 0"),
        (("slots",), {}, "slots: must be a list, not an object"),
        (("slots", 0, "state"), "asleep", "slots[0].state: must be one of home, lent"),
        (("slots", 0, "state"), "draining", "slots[0].recalled_at: is missing"),
        (("slots", 0, "state"), "lent", "slots[0].grant_expires_at: is missing"),
        (("slots", 0, "state"), "overdue", "slots[0]: slot i1 belongs to the interactive floor"),
        (("slots", 1, "slot"), "i1", "slots: named more than once: i1"),
        (("interactive", "admitted_per_s"), True, "interactive.admitted_per_s: must be a finite number"),
        (("interactive", "p95_queue_ms"), float("nan"), "interactive.p95_queue_ms: must be a finite number"),
        (("batch", "jobs", 0, "remaining_gpu_s"), -5, "batch.jobs[0].remaining_gpu_s: must be 0 or more"),
        (("batch", "jobs", 0), 3, "batch.jobs[0]: must be an object"),
        (("lends_this_week",), 1.5, "lends_this_week: must be a whole number"),
        (("frozen",), "no", "frozen: must be true or false, not a text"),
        (("trips",), ["f9"], "trips: not among the slots: f9"),
        (("manual_recalls",), "f1", "manual_recalls: must be a list of slot names"),
    ],
)
def test_unusable_input_names_the_key_and_the_problem(path, value, problem):
    question = json.loads(json.dumps(CASES[1]["input"]))
    place = question
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError) as error:
        explain(question)
    assert problem in str(error.value)


@pytest.mark.parametrize("path", [("policy",), ("safe_rate",), ("slots",), ("interactive",), ("batch",), ("now",)])
def test_a_missing_part_is_named(path):
    question = {key: value for key, value in CASES[1]["input"].items() if key != path[0]}
    with pytest.raises(ValueError, match=f"{path[0]}: is missing"):
        explain(question)


def test_a_forgotten_deadline_is_not_best_effort():
    question = {**CASES[1]["input"], "batch": {"jobs": [{"remaining_gpu_s": 1}]}}
    with pytest.raises(ValueError, match=r"batch\.jobs\[0\]\.deadline: is missing"):
        explain(question)


def test_keys_that_mean_nothing_are_said():
    question = {**CASES[1]["input"], "frozn": True, "policy": {**CASES[1]["input"]["policy"], "lend_p95_s": 1}}
    assert explain(question)["ignored_keys"] == ["frozn", "policy.lend_p95_s"]


def test_min_hold_that_is_overridden_is_said():
    answer = explain(next(case["input"] for case in CASES if "short loans too" in case["name"]))
    assert answer["notes"] == [FlexNote.MIN_HOLD_OVERRIDDEN]
