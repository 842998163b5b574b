"""Batch contracts night by night: the share finished by the wall clock of the contract's zone, and the jobs missed.

Jobs belong to an app above this one, so they are asked for by name, like a foreign key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any, Final

from django.apps import apps

from controlplane.contracts.models import Contract, ContractVersion
from controlplane.core.batch_objective import (
    BatchJob,
    BatchNight,
    BatchObjective,
    BatchResult,
    batch_night,
    judge_night,
)
from controlplane.core.flex_policy import FlexPolicy
from controlplane.core.period import from_us, load_zone, to_us
from controlplane.core.slo import UnknownReason, Verdict

PPM: Final = 1_000_000
NIGHTS_SHOWN: Final = 14
MISSED_SHOWN: Final = 20
GRACE: Final = timedelta(microseconds=FlexPolicy().missed_grace_us)
"""After its deadline a missed job counts as backlog for so long."""
UNKNOWN_WORDS: Final = {
    UnknownReason.SILENCE: "No jobs",
    UnknownReason.FEW_DATA: "Too few jobs",
    UnknownReason.NONSENSE: "Clocks disagree",
    UnknownReason.NOT_YET_DUE: "Not yet due",
}


def objective_of(version: ContractVersion) -> BatchObjective | None:
    """The core's objective; None when the version lacks its wall clocks."""
    if version.admitted_before is None or version.finished_by is None:
        return None
    return BatchObjective(
        zone=load_zone(version.zone),
        admitted_before=version.admitted_before,
        finish_by=version.finished_by,
        target=Fraction(version.target_ppm, PPM),
        first_attempt_max_us=None if version.first_attempt_within_s is None else version.first_attempt_within_s * PPM,
    )


@dataclass(frozen=True, slots=True)
class MissedJob:
    """A promised job that was not finished by the night's end, or that waited too long for its first attempt."""

    job: Any
    finished_late: bool
    waited_us: int | None
    """How long it waited for its first attempt where that was too long."""
    asks_no_more: bool
    """It is still open, but its deadline and the grace after it are past."""

    @property
    def left_backlog_at(self) -> datetime | None:
        """Since when it asks for no slots; None while it does, or when it ended."""
        deadline: datetime = self.job.deadline
        return deadline + GRACE if self.asks_no_more else None

    @property
    def label(self) -> str:
        return self.job.name or str(self.job.uuid)[:8]


@dataclass(frozen=True, slots=True)
class JudgedNight:
    """One night of a contract; `admitted` is the night's window, `due_at` its end, both read in the contract's zone."""

    version: ContractVersion
    zone: str
    opened_at: datetime
    closed_at: datetime
    due_at: datetime
    result: BatchResult
    missed: Sequence[MissedJob]
    missed_in_all: int

    @property
    def grade(self) -> str:
        """`bad`, `unknown`, `neutral` or `ok`, in the words of the status chips."""
        if self.result.unknown_reason is UnknownReason.SILENCE:
            return "neutral"
        return {Verdict.MISSED: "bad", Verdict.MET: "ok"}.get(self.result.verdict, "unknown")

    @property
    def word(self) -> str:
        reason = self.result.unknown_reason
        return UNKNOWN_WORDS[reason] if reason is not None else self.result.verdict.value.capitalize()

    @property
    def share(self) -> float | None:
        return None if self.result.share is None else float(self.result.share)

    @property
    def hours(self) -> float:
        """Between the end of admission and the wall clock by which all is due: another number when clocks change."""
        return (self.due_at - self.closed_at).total_seconds() / 3_600

    @property
    def due_text(self) -> str:
        """The wall clock in the contract's zone."""
        return f"{self.due_at.astimezone(load_zone(self.zone)):%a %-d %b, %H:%M %Z}"


def nights_of(
    contracts: Iterable[Contract],
    now: datetime,
    *,
    tenants: Collection[int] | None = None,
    nights: int = NIGHTS_SHOWN,
) -> dict[int, list[JudgedNight]]:
    """Contract id -> its last nights, newest first, in two statements; contracts without a batch promise are left out.

    With `tenants` only their jobs are counted: what others hand in is not for them. Each night is judged by the version
    in force when its admission closed; a night without a job stands there too, once it was begun.
    """
    rows = list(contracts)
    versions: dict[int, list[ContractVersion]] = {}
    found = ContractVersion.objects.filter(contract__in=rows, objective="deadline").order_by("-effective_from")
    for version in found:
        versions.setdefault(version.contract_id, []).append(version)
    batch = [row for row in rows if row.pk in versions]
    if not batch:
        return {}
    jobs = _promised({row.workload_class_id for row in batch}, now - timedelta(days=nights + 2), tenants)
    judged = {}
    for row in batch:
        own = [
            job
            for job in jobs
            if job.workload_class_id == row.workload_class_id and row.tenant_id in (None, job.tenant_id)
        ]
        judged[row.pk] = _judged(versions[row.pk], own, now, nights)
    return judged


def last_night(rows: Sequence[JudgedNight]) -> JudgedNight | None:
    """The newest that had jobs."""
    return next((night for night in rows if night.result.jobs), None)


def _promised(classes: Collection[int], since: datetime, tenants: Collection[int] | None) -> list[Any]:
    """Jobs that were admitted with a deadline: not those that were refused, that run as best effort by their owner's
    choice, or that were taken back."""
    rows = apps.get_model("jobs", "Job").objects.filter(
        workload_class__in=classes, created_at__gte=since, deadline__isnull=False
    )
    if tenants is not None:
        rows = rows.filter(tenant__in=tenants)
    fields = ("uuid", "name", "tenant__slug", "workload_class_id", "created_at", "first_attempt_at", "finished_at",
              "deadline", "state")  # fmt: skip
    kept = rows.exclude(state__in=("cancelled", "failed", "importing"))
    return list(kept.select_related("tenant").only(*fields).order_by("created_at", "pk"))


def _judged(versions: Sequence[ContractVersion], jobs: Sequence[Any], now: datetime, nights: int) -> list[JudgedNight]:
    found = []
    known = [(version, objective) for version in versions if (objective := objective_of(version)) is not None]
    for back in range(-1, nights + 1):
        for version, objective in known:
            night = batch_night(objective, now.astimezone(objective.zone).date() - timedelta(days=back))
            if night.admission.end_us < to_us(version.effective_from):
                continue
            if night.admission.start_us <= to_us(now):
                found.append(_night(version, objective, night, jobs, now))
            break
    return found[:nights]


def _night(
    version: ContractVersion, objective: BatchObjective, night: BatchNight, jobs: Sequence[Any], now: datetime
) -> JudgedNight:
    window = night.admission
    own = [job for job in jobs if window.start_us <= to_us(job.created_at) < window.end_us]
    missed = [found for job in own if (found := _missed(job, objective, night, now)) is not None]
    return JudgedNight(
        version=version,
        zone=version.zone,
        opened_at=from_us(window.start_us),
        closed_at=from_us(window.end_us),
        due_at=from_us(night.due_us),
        result=judge_night(objective, night, [batch_job(job) for job in own], to_us(now)),
        missed=missed[:MISSED_SHOWN],
        missed_in_all=len(missed),
    )


def batch_job(job: Any) -> BatchJob:
    """A row as the core judges it. One that expired is not finished."""
    finished_at = None if job.state == "expired" else job.finished_at
    return BatchJob(to_us(job.created_at), _us(job.first_attempt_at), _us(finished_at))


def _missed(job: Any, objective: BatchObjective, night: BatchNight, now: datetime) -> MissedJob | None:
    row, now_us = batch_job(job), to_us(now)
    late = now_us >= night.due_us and (row.finished_us is None or row.finished_us > night.due_us)
    waited_us = (now_us if row.first_attempt_us is None else row.first_attempt_us) - row.admitted_us
    too_long = objective.first_attempt_max_us is not None and waited_us > objective.first_attempt_max_us
    if not late and not too_long:
        return None
    asks_no_more = job.finished_at is None and now >= job.deadline + GRACE
    return MissedJob(job, late, waited_us if too_long else None, asks_no_more)


def _us(at: datetime | None) -> int | None:
    return None if at is None else to_us(at)
