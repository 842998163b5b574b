"""Batch contracts judged from jobs: the last night that is due, or the one that is open, in one statement for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import QuerySet

from controlplane.contracts.models import ContractVersion
from controlplane.contracts.nights import batch_job, objective_of
from controlplane.contracts.queries import Standing
from controlplane.core.batch_objective import (
    BatchJob,
    BatchNight,
    BatchObjective,
    BatchResult,
    batch_night,
    judge_night,
)
from controlplane.core.period import to_us
from controlplane.core.slo import Verdict
from controlplane.jobs.models import Job


@dataclass(frozen=True, slots=True)
class Night:
    """One batch contract at one instant, over the night that matters now."""

    version: ContractVersion
    night: BatchNight
    result: BatchResult

    @property
    def grade(self) -> str:
        """`bad`, `unknown` or `ok`, in the words of the status chips."""
        return {Verdict.MISSED: "bad", Verdict.MET: "ok"}.get(self.result.verdict, "unknown")


def evaluate(rows: Iterable[Standing], now: datetime) -> dict[int, Night]:
    """Contract id -> its night. The night is the newest whose jobs exist, looking back two days."""
    batch = [
        (row, objective)
        for row in rows
        if row.in_force is not None
        and row.in_force.objective == "deadline"
        and (objective := objective_of(row.in_force)) is not None
    ]
    if not batch:
        return {}
    jobs = list(_promised(now))
    found = {}
    for row, objective in batch:
        own = [
            batch_job(job)
            for job in jobs
            if job.workload_class_id == row.contract.workload_class_id
            and row.contract.tenant_id in (None, job.tenant_id)
        ]
        assert row.in_force is not None
        found[row.contract.pk] = _night(row.in_force, objective, own, now)
    return found


def _promised(now: datetime) -> QuerySet[Job]:
    """Jobs that were admitted with a deadline: not those that were refused, that run as best effort by their owner's
    choice, or that were taken back."""
    rows = Job.objects.filter(created_at__gte=now - timedelta(days=4), deadline__isnull=False)
    return rows.exclude(state__in=(Job.State.CANCELLED, Job.State.FAILED, Job.State.IMPORTING))


def _night(version: ContractVersion, objective: BatchObjective, jobs: list[BatchJob], now: datetime) -> Night:
    today = now.astimezone(objective.zone).date()
    newest: Night | None = None
    for back in (-1, 0, 1, 2):
        night = batch_night(objective, today - timedelta(days=back))
        if night.admission.start_us > to_us(now):
            continue
        judged = Night(version, night, judge_night(objective, night, jobs, to_us(now)))
        newest = newest or judged
        if judged.result.jobs:
            return judged
    assert newest is not None, "the night that admits now has begun"
    return newest
