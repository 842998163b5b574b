"""The weekly review of a flex band and its advice on floors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.core.flex_policy import SafeRate
from controlplane.core.flex_review import (
    WEEK_US,
    FlexWeek,
    FloorAdvice,
    ReviewFinding,
    SlotWeek,
    interactive_slots_for,
    review,
)

TABLE = SafeRate(entries=((4, 16.0), (8, 32.0)))
MIXED = SlotWeek(slot="f1", interactive_us=WEEK_US // 2, batch_us=WEEK_US // 2)
CALM = FlexWeek(
    lends=20,
    spillover_per_week=20,
    queue_p99_us=120,
    queue_p99_before_us=100,
    mean_slack=0.4,
    mean_slack_before=0.4,
    interactive_floor=4,
    batch_floor=2,
    flex_slots=(MIXED,),
    peak_admitted_per_s=11.0,
    load_limit=0.7,
    safe_rate=TABLE,
)


def test_a_calm_week_finds_nothing():
    found = review(CALM)
    assert found.findings == () and found.advice is None


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"lends": 21}, ReviewFinding.LENDS_OVER_BUDGET),
        ({"queue_p99_us": 121}, ReviewFinding.QUEUE_P99_RISING),
        ({"mean_slack": 0.39}, ReviewFinding.SLACK_SHRINKING),
    ],
)
def test_each_finding_alone(changes, finding):
    assert review(replace(CALM, **changes)).findings == (finding,)


@pytest.mark.parametrize(
    "changes",
    [{"lends": 999, "spillover_per_week": None}, {"queue_p99_before_us": None}, {"mean_slack": None}],
)
def test_what_is_not_known_finds_nothing(changes):
    assert review(replace(CALM, **changes)).findings == ()


def batch_for(us: int) -> SlotWeek:
    return SlotWeek(slot="f1", interactive_us=WEEK_US - us, batch_us=us)


def test_a_slot_settles_above_95_percent_not_at_it():
    at = WEEK_US * 95 // 100
    assert review(replace(CALM, flex_slots=(batch_for(at),))).findings == ()
    settled = review(replace(CALM, flex_slots=(batch_for(at + 1),)))
    assert settled.findings == (ReviewFinding.RESIZE_PARTITION,)
    assert settled.settled_with_batch == ("f1",)
    assert settled.advice == FloorAdvice(interactive_floor=4, batch_floor=3, flex=0, supported=True)


def test_the_batch_floor_grows_only_as_far_as_the_peak_allows():
    """11.2/16 is at the limit with four slots, so the peak needs a fifth and the flex slot has to stay."""
    settled = review(replace(CALM, flex_slots=(batch_for(WEEK_US),), peak_admitted_per_s=11.2))
    assert settled.advice == FloorAdvice(interactive_floor=4, batch_floor=2, flex=1, supported=False)


def test_without_a_tested_table_no_floor_is_supported():
    settled = review(replace(CALM, flex_slots=(batch_for(WEEK_US),), safe_rate=None))
    assert settled.advice is not None and not settled.advice.supported
    assert settled.advice.batch_floor == 2


def test_a_slot_that_is_never_lent_belongs_to_interactive():
    settled = review(replace(CALM, flex_slots=(batch_for(0), replace(MIXED, slot="f2"))))
    assert settled.settled_with_interactive == ("f1",)
    assert settled.advice == FloorAdvice(interactive_floor=5, batch_floor=2, flex=1, supported=True)


def test_unobserved_time_belongs_to_nobody():
    partly = SlotWeek(slot="f1", interactive_us=0, batch_us=WEEK_US * 9 // 10)
    assert review(replace(CALM, flex_slots=(partly,))).findings == ()


def test_more_than_a_week_is_refused():
    with pytest.raises(ValueError, match="fit into one week"):
        SlotWeek(slot="f1", interactive_us=WEEK_US, batch_us=1)


@pytest.mark.parametrize(("rate", "slots"), [(0.1, 1), (2.79, 1), (2.8, 2), (11.2, 5), (99.0, None)])
def test_slots_for_a_rate_keep_load_under_the_limit(rate, slots):
    assert interactive_slots_for(rate, safe_rate=TABLE, load_limit=0.7, at_most=8) == slots
