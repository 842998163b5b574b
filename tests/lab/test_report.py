"""What a report says can be recomputed from the columns."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.histogram import Histogram
from controlplane.lab.report import deadline_met, histogram_of, report
from controlplane.lab.summary import difference, distribution, longest_queue
from tests.lab.nights import band, job, night, traffic


@given(st.lists(st.integers(0, 1 << 45), min_size=1, max_size=60))
def test_the_sketch_of_many_is_that_of_each(values):
    one_by_one = Histogram()
    for us in values:
        one_by_one.record(us)
    assert histogram_of(np.asarray(values, np.int64)) == one_by_one


def test_the_sketch_is_exact_on_every_edge():
    for power in range(48):
        for us in (2**power - 1, 2**power, 2**power + 1):
            one = Histogram()
            one.record(us)
            assert histogram_of(np.asarray([us], np.int64)) == one


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=300))
def test_percentiles_are_nearest_rank(values):
    found = distribution(np.asarray(values, np.int64), 1)
    for percent in (50, 90, 95, 99):
        value = found[f"p{percent}"]
        assert sum(other <= value for other in values) >= percent / 100 * len(values)
        assert sum(other < value for other in values) < percent / 100 * len(values)
    assert found["max"] == max(values)


def test_the_longest_queue_counts_nobody_who_starts_at_once():
    assert longest_queue(np.asarray([0, 1, 2]), np.asarray([0, 1, 2])) == 0
    assert longest_queue(np.asarray([0, 0, 0, 5]), np.asarray([0, 5, 10, 15])) == 2


def test_a_report_adds_up_and_is_json():
    simulator, control = night(band(), traffic(12, 4.0, 30.0), [job(500, 20)], minutes=25)
    answer = json.loads(json.dumps(report(simulator, control, objective_ms=300)))
    whole, own = answer["all"], answer["classes"]["interactive"]
    assert whole["arrivals"] == len(simulator.workload) == whole["started"] + whole["rejected"]
    assert own["rejected"] == sum(own["refused"].values())
    assert sum(row["arrivals"] for row in answer["tenants"]) == whole["arrivals"]
    merged = Histogram()
    for row in answer["histograms"]:
        merged.merge(Histogram.from_sparse(row["wait"]))
    assert merged.count == whole["completed"]
    # Little's law: everybody who came has left, so the two are the same number.
    assert abs(whole["in_system_mean"] - whole["lambda_x_w"]) < 1e-9 * whole["in_system_mean"]


def test_a_deadline_nobody_can_judge_yet_is_unknown():
    assert deadline_met(None, 5, 9) is None
    assert deadline_met(10, None, 9) is None
    assert deadline_met(10, None, 10) is False
    assert deadline_met(10, 10, 20) is True
    assert deadline_met(10, 11, 20) is False


def test_a_difference_is_unknown_where_either_side_is():
    assert difference({"a": 1, "b": {"c": 2.0, "d": None}}, {"a": 3, "b": {"c": 1.5, "d": 4}}) == {
        "a": 2, "b": {"c": -0.5, "d": None},
    }  # fmt: skip
