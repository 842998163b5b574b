"""Admission of jobs: the arithmetic, and that its promise is what running in the order of deadlines can keep."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.flex_snapshot import BatchJob
from controlplane.core.job_admission import BatchCapacity, IfLate, JobVerdict, admit_job

HOUR = 3_600_000_000
GRACE = HOUR // 2
NOW = 10 * HOUR
FLOOR = BatchCapacity(floor=Fraction(2), band=Fraction(2))


def job(gpu_s, due_h, name="new"):
    deadline = None if due_h is None else NOW + round(due_h * HOUR)
    return BatchJob(name=name, remaining_gpu_us=gpu_s * 1_000_000, deadline_us=deadline)


def admit(new, *others, capacity=FLOOR, if_late=IfLate.REFUSE):
    return admit_job(new, others, capacity, if_late=if_late, now_us=NOW, missed_grace_us=GRACE)


def test_the_worked_example():
    light = admit(job(9_600, 4))
    assert (light.verdict, light.required) == (JobVerdict.ACCEPTED, Fraction(2, 3))
    assert (light.slack, light.slack_with_band) == (Fraction(2, 3), Fraction(5, 6))
    heavy = admit(job(36_000, 4))
    assert (heavy.verdict, heavy.required) == (JobVerdict.ACCEPTED, Fraction(5, 2))
    assert (heavy.slack, heavy.slack_with_band) == (Fraction(-1, 4), Fraction(3, 8))


def test_exactly_all_of_it_is_enough_and_a_microsecond_more_is_not():
    assert admit(job(4 * 3_600 * 4, 4)).verdict is JobVerdict.ACCEPTED
    over = BatchJob(name="new", remaining_gpu_us=4 * 4 * HOUR + 1, deadline_us=NOW + 4 * HOUR)
    assert admit(over).verdict is JobVerdict.REFUSED
    assert admit(over, if_late=IfLate.BEST_EFFORT).verdict is JobVerdict.BEST_EFFORT


def test_what_is_due_before_it_runs_before_it_and_what_is_due_later_must_still_fit():
    assert admit(job(3_600, 2), job(7 * 3_600, 1, "a")).verdict is JobVerdict.ACCEPTED
    assert admit(job(3_601, 2), job(7 * 3_600, 1, "a")).verdict is JobVerdict.REFUSED
    pushed = admit(job(3_601, 1), job(7 * 3_600, 2, "a"))
    assert (pushed.verdict, pushed.due_us) == (JobVerdict.REFUSED, NOW + 2 * HOUR)


def test_a_deadline_that_fails_before_its_own_is_no_reason_to_refuse():
    lost = job(9 * 3_600, 1, "lost")
    assert admit(job(3_600, 4), lost).verdict is JobVerdict.ACCEPTED
    assert admit(job(3_600, 1), lost).verdict is JobVerdict.REFUSED


def test_missed_jobs_are_ahead_in_their_grace_and_behind_after_it():
    assert admit(job(4 * 3_600, 1), job(1, -0.49, "late")).verdict is JobVerdict.REFUSED
    assert admit(job(4 * 3_600, 1), job(1, -0.5, "late"), job(9_999, None, "someday")).verdict is JobVerdict.ACCEPTED


def test_best_effort_asks_for_nothing_and_no_slot_promises_nothing():
    asked = admit(job(10**6, None))
    assert (asked.verdict, asked.required, asked.slack) == (JobVerdict.BEST_EFFORT, None, None)
    nothing = admit(job(1, 1), capacity=BatchCapacity(floor=Fraction(0), band=Fraction(0)))
    assert (nothing.verdict, nothing.slack, nothing.slack_with_band) == (JobVerdict.REFUSED, None, None)


def test_what_cannot_be_asked():
    with pytest.raises(ValueError, match="has passed"):
        admit(job(1, 0))
    with pytest.raises(ValueError, match="less than no slots"):
        BatchCapacity(floor=Fraction(-1), band=Fraction(0))


def finishes(jobs, rate):
    """Name -> instant at which each job ends when all run one after the other by deadline, at `rate` slots."""
    at, ends = Fraction(NOW), {}
    for one in sorted(jobs, key=lambda one: one.deadline_us):
        at += one.remaining_gpu_us / rate
        ends[one.name] = at
    return ends


works = st.integers(1, 20 * 3_600)
hours = st.integers(1, 12)


@given(
    new=st.tuples(works, hours),
    told=st.lists(st.tuples(works, st.integers(-1, 12).map(lambda h: h / 4 if h < 1 else h)), max_size=6),
    slots=st.tuples(st.integers(1, 4), st.integers(0, 4)),
)
def test_it_is_accepted_exactly_when_it_and_all_that_follow_can_end_in_time(new, told, slots):
    mine = job(*new)
    others = [job(work, due, f"other {number}") for number, (work, due) in enumerate(told)]
    capacity = BatchCapacity(floor=Fraction(slots[0]), band=Fraction(slots[1]))
    found = admit(mine, *others, capacity=capacity)
    ends = finishes([mine, *others], capacity.with_band)
    # jobs of one deadline count together: the last of them has to be in time
    moved = [one for one in [mine, *others] if one.deadline_us >= mine.deadline_us]
    kept = all(ends[one.name] <= one.deadline_us for one in moved)
    assert (found.verdict is JobVerdict.ACCEPTED) == kept
