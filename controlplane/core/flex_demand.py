"""Batch demand of a pool: slots required by the deadlines, slots available, and the slack between them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import itemgetter

from controlplane.core.flex_policy import Ratio, exact
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot
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

    @cached_property
    def slack_exact(self) -> Ratio:
        return slack_of(self.required_exact, self.available_exact)

    @cached_property
    def slack(self) -> float:
        return float(self.slack_exact)

    @property
    def missed(self) -> bool:
        """No number of the slots that serve batch now is enough: slack is minus infinity."""
        return self.slack_exact == NO_SLACK

    def slack_without(self, efficiency: Fraction) -> Ratio:
        """Slack if slots of this batch efficiency, added up, served batch no longer."""
        known, key = self._slack_without, efficiency.as_integer_ratio()
        slack = known.get(key)
        if slack is None:
            slack = known[key] = slack_of(self.required_exact, self.available_exact - efficiency)
        return slack

    @cached_property
    def _slack_without(self) -> dict[tuple[int, int], Ratio]:
        """Lent slots are mostly alike, and both the marks and the decision ask of each."""
        return {}


def slack_of(required: Ratio, available: Fraction) -> Ratio:
    """1 - required / available; 1 without backlog, minus infinity when the backlog cannot be served in time."""
    if required == 0:
        return Fraction(1)
    if isinstance(required, float) or available <= 0:
        return NO_SLACK
    # In one step: each of two would look for a common divisor.
    work, time = required.as_integer_ratio()
    slots, of = available.as_integer_ratio()
    return Fraction(time * slots - work * of, time * slots)


def required_slots(jobs: Iterable[BatchJob], *, now_us: int) -> Fraction:
    """max over deadlines d of (work due by d) / (d - now), for jobs whose deadline is ahead."""
    return Fraction(*most_required(dues_of(jobs, now_us=now_us), now_us=now_us))


def dues_of(jobs: Iterable[BatchJob], *, now_us: int) -> tuple[tuple[int, int], ...]:
    """(deadline, work due by then) in us, by deadline, of jobs whose deadline is ahead."""
    due: dict[int, int] = {}
    for job in jobs:
        if job.deadline_us is not None and job.deadline_us > now_us and job.remaining_gpu_us:
            due[job.deadline_us] = due.get(job.deadline_us, 0) + job.remaining_gpu_us
    total_us, dues = 0, []
    for deadline_us in sorted(due):
        total_us += due[deadline_us]
        dues.append((deadline_us, total_us))
    return tuple(dues)


def most_required(dues: Iterable[tuple[int, int]], *, now_us: int) -> tuple[int, int]:
    """`required_slots` as (work, time) in us, of dues that all lie ahead; (0, 1) without work."""
    work_us, time_us = 0, 1
    for deadline_us, due_us in dues:
        if due_us * time_us > work_us * (deadline_us - now_us):
            work_us, time_us = due_us, deadline_us - now_us
    return work_us, time_us


@dataclass(frozen=True, slots=True)
class Room:
    """What a job with a deadline ahead asks for: all work due by then, and the time until then, both in us.

    Of a pool the deadline that asks for most decides (`required_slots`); of a job its own does, for whatever is due
    before it goes first.
    """

    due_us: int
    time_us: int

    @property
    def required(self) -> float:
        """In slots."""
        return self.due_us / self.time_us

    def slack(self, available: Fraction) -> float | None:
        """`slack_of` over these slots as a float, from whole numbers; None where no number of them is enough."""
        if not self.due_us:
            return 1.0
        if available <= 0:
            return None
        whole = self.time_us * available.numerator
        return (whole - self.due_us * available.denominator) / whole


def room_at(dues: Sequence[tuple[int, int]], deadline_us: int, *, now_us: int) -> Room:
    """Of a job with this deadline, which lies ahead, among the dues of its pool."""
    place = bisect_right(dues, deadline_us, key=itemgetter(0))
    return Room(dues[place - 1][1] if place else 0, deadline_us - now_us)


def available_slots(slots: Iterable[FlexSlot]) -> Fraction:
    """What the slots that serve batch now are worth together."""
    alike: dict[float, int] = {}
    for slot in slots:
        if admits_batch(slot.band, slot.state):
            alike[slot.batch_efficiency] = alike.get(slot.batch_efficiency, 0) + 1
    return sum([exact(efficiency) * count for efficiency, count in alike.items()], Fraction(0))


def demand_of(snapshot: FlexSnapshot) -> Demand:
    """The demand of a pool's snapshot."""
    return demand(
        snapshot.jobs, snapshot.slots, now_us=snapshot.now_us, missed_grace_us=snapshot.policy.missed_grace_us
    )


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
    return Demand(
        required_exact=math.inf if missed_now else required_slots(jobs, now_us=now_us),
        available_exact=available_slots(slots),
        missed_now=tuple(missed_now),
        missed_before=tuple(missed_before),
    )
