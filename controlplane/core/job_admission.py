"""Whether a pool can promise a new job its deadline, with the arithmetic that says so.

Work runs in the order of deadlines, so a new job moves what is due at or after its own deadline and nothing before it.
It can be kept when, at each of these deadlines, the work due by then fits into the time that is left, at the rate of
the batch floor and of what the flex band may lend at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from controlplane.core.flex_snapshot import BatchJob


class IfLate(StrEnum):
    """What its tenant wants of a job whose deadline cannot be met."""

    REFUSE = "refuse"
    BEST_EFFORT = "best_effort"


class JobVerdict(StrEnum):
    ACCEPTED = "accepted"
    BEST_EFFORT = "best_effort"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class BatchCapacity:
    """Slots that may run batch, each worth its batch efficiency: the floor always, the band when it is lent.

    Raises ValueError for less than nothing.
    """

    floor: Fraction
    band: Fraction

    def __post_init__(self) -> None:
        if self.floor < 0 or self.band < 0:
            raise ValueError("a pool cannot have less than no slots for batch")

    @property
    def with_band(self) -> Fraction:
        return self.floor + self.band


@dataclass(frozen=True, kw_only=True)
class JobAdmission:
    """The verdict on a job. `required` slots are those of the worst deadline that it moves, `due_us`, for `work_gpu_us`
    that is due by then; None for a job that asked for no deadline.
    """

    verdict: JobVerdict
    capacity: BatchCapacity
    required: Fraction | None = None
    due_us: int | None = None
    work_gpu_us: int = 0

    @property
    def slack(self) -> Fraction | None:
        """1 - required / floor; None where there is no floor, or nothing is required."""
        return _slack(self.required, self.capacity.floor)

    @property
    def slack_with_band(self) -> Fraction | None:
        """The same with everything that the band may lend."""
        return _slack(self.required, self.capacity.with_band)


def admit_job(
    job: BatchJob,
    others: Iterable[BatchJob],
    capacity: BatchCapacity,
    *,
    if_late: IfLate,
    now_us: int,
    missed_grace_us: int,
) -> JobAdmission:
    """The verdict on a new job beside those that were admitted.

    Those past their deadline are ahead of everybody while they are in their grace, and behind everybody after it; best
    effort is behind everybody. Raises ValueError for a deadline that has passed.
    """
    if job.deadline_us is None:
        return JobAdmission(verdict=JobVerdict.BEST_EFFORT, capacity=capacity)
    if job.deadline_us <= now_us:
        raise ValueError(f"the deadline of {job.name} has passed")
    due = sorted(
        (other.deadline_us, other.remaining_gpu_us)
        for other in others
        if other.deadline_us is not None and now_us - other.deadline_us < missed_grace_us
    )
    work_gpu_us = job.remaining_gpu_us + sum(us for at_us, us in due if at_us <= job.deadline_us)
    worst = Fraction(work_gpu_us, job.deadline_us - now_us), job.deadline_us, work_gpu_us
    for at_us, remaining_gpu_us in due:
        if at_us > job.deadline_us:
            work_gpu_us += remaining_gpu_us
            worst = max(worst, (Fraction(work_gpu_us, at_us - now_us), at_us, work_gpu_us))
    required, due_us, work_gpu_us = worst
    late = JobVerdict.BEST_EFFORT if if_late is IfLate.BEST_EFFORT else JobVerdict.REFUSED
    return JobAdmission(
        verdict=JobVerdict.ACCEPTED if required <= capacity.with_band else late,
        capacity=capacity,
        required=required,
        due_us=due_us,
        work_gpu_us=work_gpu_us,
    )


def _slack(required: Fraction | None, available: Fraction) -> Fraction | None:
    return None if required is None or not available else 1 - required / available
