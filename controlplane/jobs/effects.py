"""What an action on a job would do to the slack of its pool, before it is done; and what was measured afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.apps import apps

from controlplane.audit.models import AuditEntry
from controlplane.jobs import queries
from controlplane.jobs.batch_actions import RETRIES_MOST
from controlplane.jobs.batch_capacity import efficiencies
from controlplane.jobs.models import Job
from controlplane.jobs.queries import PoolSlack

ACTS: Final = {
    "job.cancel": "Cancelled",
    "job.retry_parked": "Parked items tried again",
    "job.extend_deadline": "Deadline extended",
}
ACTS_SHOWN: Final = 5
Work = tuple[int, datetime | None]
"""(remaining GPU time in us, deadline)"""
MEASURED_AFTER: Final = timedelta(seconds=30)
MEASURED_BEFORE: Final = timedelta(minutes=3)


@dataclass(frozen=True, slots=True)
class Effect:
    """The pool's demand now and as it would be; `items` are those that the action moves.

    `own_before` and `own_after` are of the jobs of its tenant alone: what others do is not for that one to see.
    """

    before: PoolSlack
    after: PoolSlack
    own_before: PoolSlack
    own_after: PoolSlack
    items: int

    def noted(self) -> dict[str, Any]:
        """What the audit log keeps of it, to compare with what is measured later."""
        return {"slack_before": self.before.slack, "slack_expected": self.after.slack}


def of_cancel(job: Job, now: datetime) -> Effect:
    """Its items count as backlog no longer."""
    return _effect(job, 0, job.deadline, queries.unfinished_items(job), now)


def of_retry(job: Job, now: datetime) -> Effect:
    """Its parked items are to be done again, as far as one action takes them."""
    items = min(job.items_parked, RETRIES_MOST)
    estimate = queries.estimate_of(job, job.pool)
    worth = _worth(job, now)
    # what was learnt is slot time as it went: turned into work, as the backlog is
    again_us = round(items * estimate.gpu_us_per_item * (worth if estimate.learnt else 1.0))
    return _effect(job, queries.demanded_gpu_us(job, job.pool, worth) + again_us, job.deadline, items, now)


def of_extension(job: Job, deadline: datetime, now: datetime) -> Effect:
    """The same work, due later."""
    remaining_us = queries.demanded_gpu_us(job, job.pool, _worth(job, now))
    return _effect(job, remaining_us, deadline, queries.unfinished_items(job), now)


def _worth(job: Job, now: datetime) -> float:
    """The batch efficiency of the job's pool; 1 while it was not measured."""
    return efficiencies([job.pool_id], now).get(job.pool_id, 1.0)


def _effect(job: Job, remaining_us: int, deadline: datetime | None, items: int, now: datetime) -> Effect:
    pairs = queries.backlog_jobs(job.pool_id, now)
    slots = queries.slots_of([job.pool_id], now).get(job.pool_id, [])
    direct = queries.direct_backlog(job.pool_id, now)
    then = [(remaining_us, deadline)] if remaining_us else []

    def before_and_after(rows: list[tuple[Job, int]], beside: list[Work]) -> tuple[PoolSlack, PoolSlack]:
        work: list[Work] = [(us, other.deadline) for other, us in rows]
        kept: list[Work] = [(us, other.deadline) for other, us in rows if other.pk != job.pk]
        return (
            queries.slack_for(work + beside, slots, now),
            queries.slack_for(kept + then + beside, slots, now),
        )

    before, after = before_and_after(pairs, direct)
    own = [(other, us) for other, us in pairs if other.tenant_id == job.tenant_id]
    own_before, own_after = before_and_after(own, [])
    return Effect(before, after, own_before, own_after, items)


@dataclass(frozen=True, slots=True)
class Act:
    """An action that was taken on a job, with the slack that was expected of it and the one measured afterwards.

    None is a slack that nobody measured, or that has no number.
    """

    what: str
    entry: AuditEntry
    before: float | None
    expected: float | None
    measured: float | None
    measured_at: datetime | None
    known: bool


def acts_on(job: Job) -> list[Act]:
    """The last actions on a job, newest first."""
    rows = AuditEntry.objects.filter(noun="job", object_id=str(job.uuid), action__in=list(ACTS))
    return [_act(job, entry) for entry in rows.order_by("-id")[:ACTS_SHOWN]]


def _act(job: Job, entry: AuditEntry) -> Act:
    noted: Mapping[str, Any] = entry.after or {}
    at, slack = _measured(job.pool_id, entry.at)
    return Act(
        what=ACTS[entry.action],
        entry=entry,
        before=noted.get("slack_before"),
        expected=noted.get("slack_expected"),
        measured=slack,
        measured_at=at,
        known="slack_expected" in noted,
    )


def _measured(pool_id: int, at: datetime) -> tuple[datetime | None, float | None]:
    """What the controller saw about a minute later. Its samples belong to an app above this one, so they are asked for
    by name, like a foreign key.
    """
    rows = apps.get_model("flex", "PoolSample").objects.filter(
        pool_id=pool_id, at__gte=at + MEASURED_AFTER, at__lte=at + MEASURED_BEFORE
    )
    found = rows.order_by("at").values_list("at", "slack").first()
    return found or (None, None)
