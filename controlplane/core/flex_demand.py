"""Batch demand of a pool: slots required by the deadlines, slots available, and the slack between them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from controlplane.core.flex_policy import Ratio, exact
from controlplane.core.flex_snapshot import BatchJob, FlexSlot
from controlplane.core.slot_states import admits_batch

NO_SLACK = -math.inf


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Exact batch demand at one instant; the floats are for screens."""

    #: Slots that meet every deadline; infinite while a job counts as missed.
    required_exact: Ratio
    available_exact: Fraction
    #: Jobs past their deadline that still count, by name.
    missed_now: tuple[str, ...]
    #: Jobs past their deadline and its grace: listed, no longer required.
    missed_before: tuple[str, ...]

    @property
    def required(self) -> float:
        return float(self.required_exact)

    @property
    def available(self) -> float:
        return float(self.available_exact)

    @property
    def slack_exact(self) -> Ratio:
        return slack_of(self.required_exact, self.available_exact)

    @property
    def slack(self) -> float:
        return float(self.slack_exact)

    @property
    def missed(self) -> bool:
        """No number of the slots that serve batch now is enough: slack is minus infinity."""
        return self.slack_exact == NO_SLACK

    def slack_without(self, efficiency: Fraction) -> Ratio:
        """Slack if slots of this batch efficiency, added up, served batch no longer."""
        return slack_of(self.required_exact, self.available_exact - efficiency)


def slack_of(required: Ratio, available: Fraction) -> Ratio:
    """1 - required / available; 1 without backlog, minus infinity when the backlog cannot be served in time."""
    if required == 0:
        return Fraction(1)
    if isinstance(required, float) or available <= 0:
        return NO_SLACK
    return 1 - required / available


def required_slots(jobs: Iterable[BatchJob], *, now_us: int) -> Fraction:
    """max over deadlines d of (work due by d) / (d - now), for jobs whose deadline is ahead."""
    ahead = sorted(
        (job.deadline_us, job.remaining_gpu_us)
        for job in jobs
        if job.deadline_us is not None and job.deadline_us > now_us and job.remaining_gpu_us
    )
    due_gpu_us, worst_work_us, worst_time_us = 0, 0, 1
    for position, (deadline_us, remaining_gpu_us) in enumerate(ahead):
        due_gpu_us += remaining_gpu_us
        if position + 1 < len(ahead) and ahead[position + 1][0] == deadline_us:
            continue
        if due_gpu_us * worst_time_us > worst_work_us * (deadline_us - now_us):
            worst_work_us, worst_time_us = due_gpu_us, deadline_us - now_us
    return Fraction(worst_work_us, worst_time_us)


def demand(jobs: Iterable[BatchJob], slots: Iterable[FlexSlot], *, now_us: int, missed_grace_us: int) -> Demand:
    """Required, available and slack of a pool's batch work.

    A job with work left at its deadline is missed: for ``missed_grace_us`` nothing is enough, then it no longer counts.
    """
    jobs = tuple(jobs)
    missed_now: list[str] = []
    missed_before: list[str] = []
    for job in jobs:
        if job.deadline_us is None or job.deadline_us > now_us or not job.remaining_gpu_us:
            continue
        in_grace = now_us - job.deadline_us < missed_grace_us
        (missed_now if in_grace else missed_before).append(job.name)
    serving = (exact(slot.batch_efficiency) for slot in slots if admits_batch(slot.band, slot.state))
    return Demand(
        required_exact=math.inf if missed_now else required_slots(jobs, now_us=now_us),
        available_exact=sum(serving, Fraction(0)),
        missed_now=tuple(missed_now),
        missed_before=tuple(missed_before),
    )
