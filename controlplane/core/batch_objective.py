"""Batch contracts: of the jobs admitted before one wall clock time, the share finished by another."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, time, timedelta
from fractions import Fraction
from zoneinfo import ZoneInfo

from controlplane.core.period import Window, to_us, wall_clock_instant
from controlplane.core.slo import UnknownReason, Verdict


@dataclass(frozen=True, slots=True)
class BatchObjective:
    """`target` of the jobs admitted before `admitted_before` finish by the next `finish_by`, in the contract's zone.

    No job waits longer than `first_attempt_max_us` before its first attempt. `min_jobs` is 1 by default because the
    jobs of a night are all of them, not a sample.
    """

    zone: ZoneInfo
    admitted_before: time
    finish_by: time
    target: Fraction
    first_attempt_max_us: int | None = None
    min_jobs: int = 1


@dataclass(frozen=True, slots=True)
class BatchJob:
    """One job in UTC microseconds; None for what has not happened."""

    admitted_us: int
    first_attempt_us: int | None = None
    finished_us: int | None = None


@dataclass(frozen=True, slots=True)
class BatchNight:
    """Jobs admitted in `admission` belong to the night; they are due at `due_us`."""

    admission: Window
    due_us: int


@dataclass(frozen=True, slots=True)
class BatchResult:
    """A batch contract over one night. `share` is None without jobs."""

    jobs: int
    finished_in_time: int
    waited_too_long: int
    share: Fraction | None
    verdict: Verdict
    unknown_reason: UnknownReason | None = None


def batch_night(objective: BatchObjective, day: date) -> BatchNight:
    """The night whose admissions close on a local date; 20:00 to 06:00 is 9 or 11 hours when clocks change."""
    closes = wall_clock_instant(objective.zone, day, objective.admitted_before)
    opened = wall_clock_instant(objective.zone, day - timedelta(days=1), objective.admitted_before)
    due_day = day if objective.finish_by > objective.admitted_before else day + timedelta(days=1)
    due = wall_clock_instant(objective.zone, due_day, objective.finish_by)
    return BatchNight(Window(opened, closes, day.isoformat()), to_us(due))


def judge_night(objective: BatchObjective, night: BatchNight, jobs: Iterable[BatchJob], now_us: int) -> BatchResult:
    """Verdict of a night at an instant: missed as soon as it cannot be met, met as soon as it cannot be missed."""
    window = night.admission
    own = [job for job in jobs if window.start_us <= job.admitted_us < window.end_us]
    if not own:
        return BatchResult(0, 0, 0, None, Verdict.UNKNOWN, UnknownReason.SILENCE)
    if any(_nonsense(job) for job in own):
        return BatchResult(len(own), 0, 0, None, Verdict.UNKNOWN, UnknownReason.NONSENSE)
    finished = sum(job.finished_us is not None and job.finished_us <= min(night.due_us, now_us) for job in own)
    late = sum(_waited_too_long(job, objective, now_us) for job in own)
    open_jobs = 0 if now_us >= night.due_us else len(own) - finished
    share = Fraction(finished, len(own))
    verdict, reason = _verdict(objective, night, own, now_us, share, Fraction(finished + open_jobs, len(own)), late)
    return BatchResult(len(own), finished, late, share, verdict, reason)


def _verdict(
    objective: BatchObjective,
    night: BatchNight,
    own: list[BatchJob],
    now_us: int,
    share: Fraction,
    share_possible: Fraction,
    late: int,
) -> tuple[Verdict, UnknownReason | None]:
    if now_us < night.admission.end_us:
        return (Verdict.MISSED, None) if late else (Verdict.UNKNOWN, UnknownReason.NOT_YET_DUE)
    if len(own) < objective.min_jobs:
        return Verdict.UNKNOWN, UnknownReason.FEW_DATA
    if late or share_possible < objective.target:
        return Verdict.MISSED, None
    unattempted = objective.first_attempt_max_us is not None and any(job.first_attempt_us is None for job in own)
    if share < objective.target or unattempted:
        return Verdict.UNKNOWN, UnknownReason.NOT_YET_DUE
    return Verdict.MET, None


def _waited_too_long(job: BatchJob, objective: BatchObjective, now_us: int) -> bool:
    if objective.first_attempt_max_us is None:
        return False
    begun_us = job.first_attempt_us if job.first_attempt_us is not None else max(now_us, job.admitted_us)
    return begun_us - job.admitted_us > objective.first_attempt_max_us


def _nonsense(job: BatchJob) -> bool:
    begun_us = job.admitted_us if job.first_attempt_us is None else job.first_attempt_us
    return begun_us < job.admitted_us or (job.finished_us is not None and job.finished_us < begun_us)
