"""Policies, tables of safe rates, and the demand that deadlines make."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.flex_demand import NO_SLACK, dues_of, required_slots, room_at, slack_of
from controlplane.core.flex_policy import (
    FlexPolicy,
    SafeRate,
    leaves_contract_no_room,
    safe_rate_share,
)
from controlplane.core.flex_snapshot import BatchJob
from tests.core.flex_worlds import START_US, TABLE


@pytest.mark.parametrize(("slots", "rate"), [(0, 0), (1, 4), (2, 8), (3, 10), (4, 12), (6, 18), (7, 18), (99, 18)])
def test_safe_rate_is_proportional_then_linear_then_constant(slots, rate):
    table = SafeRate(entries=((6, 18.0), (2, 8.0), (4, 12.0)))
    expected = 15 if slots == 5 else rate
    assert table.at(slots) == expected


def test_an_agents_share_of_the_safe_rate_follows_its_slots():
    assert safe_rate_share(TABLE, pool_slots=4, own_slots=1) == 4
    assert safe_rate_share(TABLE, pool_slots=0, own_slots=0) == 0


def test_a_table_expires_at_its_instant():
    table = SafeRate(entries=((1, 1.0),), valid_until_us=START_US)
    assert table.expired(START_US) and not table.expired(START_US - 1)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**9)), max_size=8))
def test_required_is_the_largest_over_deadlines(work):
    backlog = [BatchJob(name=str(n), remaining_gpu_us=w, deadline_us=START_US + d) for n, (w, d) in enumerate(work)]
    exact = [sum(w for w, other in work if other <= d) / d for _, d in work]
    assert float(required_slots(backlog, now_us=START_US)) == pytest.approx(max(exact, default=0))


def test_every_problem_of_a_policy_is_named_at_once():
    with pytest.raises(ValueError) as error:
        FlexPolicy(lend_p95_us=0, cooldown_us=-1, max_lent=-1, lend_slack=math.nan)
    assert all(name in str(error.value) for name in ("lend_p95_us", "cooldown_us", "max_lent", "lend_slack"))


def test_a_contract_without_room_is_noticed_at_equality():
    assert leaves_contract_no_room(lend_p95_us=200, rest_of_ttft_us=500, threshold_us=700)
    assert not leaves_contract_no_room(lend_p95_us=200, rest_of_ttft_us=499, threshold_us=700)


@given(
    st.lists(st.tuples(st.integers(0, 10**13), st.integers(-(10**10), 10**12)), max_size=6),
    st.fractions(-1, 50, max_denominator=100),
)
def test_the_room_of_a_job_is_all_work_due_by_its_deadline(given_jobs, available):
    jobs = [
        BatchJob(name=str(number), remaining_gpu_us=us, deadline_us=START_US + due)
        for number, (us, due) in enumerate(given_jobs)
    ]
    dues = dues_of(jobs, now_us=START_US)
    rooms = {
        job.deadline_us: room_at(dues, job.deadline_us, now_us=START_US) for job in jobs if job.deadline_us > START_US
    }
    for deadline_us, room in rooms.items():
        ahead = (job for job in jobs if START_US < job.deadline_us <= deadline_us)
        assert room.due_us == sum(job.remaining_gpu_us for job in ahead)
        slack = slack_of(Fraction(room.due_us, room.time_us), available)
        assert room.slack(available) == (None if slack == NO_SLACK else float(slack))
    most = max((Fraction(room.due_us, room.time_us) for room in rooms.values()), default=Fraction(0))
    assert most == required_slots(jobs, now_us=START_US), "the deadline that asks for most decides for the pool"
