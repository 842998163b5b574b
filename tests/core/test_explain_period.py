import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.explain_period import explain

CASES = json.loads((Path(__file__).parent / "data" / "periods.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['zone']} {case['period']}")
def test_a_period_is_answered_in_utc(case: dict[str, Any]) -> None:
    answer = explain({"zone": case["zone"], "period": case["period"]})
    assert {key: answer[key] for key in ("start", "end", "hours")} == {
        key: case[key] for key in ("start", "end", "hours")
    }


def test_an_anchor_and_the_pieces_of_attribution() -> None:
    answer = explain({"zone": "Europe/Berlin", "period": "2027-02", "anchor_day": 31})
    assert (answer["start"], answer["end"]) == ("2027-02-27T23:00:00Z", "2027-03-30T22:00:00Z")
    kolkata = explain({"zone": "Asia/Kolkata", "period": "2026-11"})
    # 721 UTC hours are touched, and the 29 days after the first begin inside one
    assert (kolkata["days"], kolkata["attribution_intervals"]) == (30, 750)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"zone": "UTC"},
        {"zone": "X/Y", "period": "2026-01"},
        {"zone": "UTC", "period": 5},
        {"zone": "UTC", "period": "2026-01", "anchor_day": 0},
    ],
)
def test_unusable_input_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"missing|IANA|period|anchor"):
        explain(case)
