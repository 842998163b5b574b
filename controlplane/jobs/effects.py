"""What an action on a job would do to the slack of its pool, before it is done; and what was measured afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.apps import apps

from controlplane.audit.models import AuditEntry
from controlplane.jobs import queries
from controlplane.jobs.batch_actions import RETRIES_MOST
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
    return _effect(_with(job, state=Job.State.CANCELLED), queries.unfinished_items(job), now)


def of_retry(job: Job, now: datetime) -> Effect:
    """Its parked items are to be done again, as far as one action takes them."""
    items = min(job.items_parked, RETRIES_MOST)
    return _effect(_with(job, state=Job.State.RUNNING, items_parked=job.items_parked - items), items, now)


def of_extension(job: Job, deadline: datetime, now: datetime) -> Effect:
    """The same work, due later."""
    return _effect(_with(job, deadline=deadline), queries.unfinished_items(job), now)


def _with(job: Job, **values: Any) -> Job:
    """The job with other values; nothing is written."""
    changed = copy(job)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


def _effect(changed: Job, items: int, now: datetime) -> Effect:
    """Of a job becoming `changed`: both backlogs are counted alike, with what of each job is paid for."""
    slots = queries.slots_of([changed.pool_id], now).get(changed.pool_id, [])
    direct = queries.direct_backlog(changed.pool_id, now)

    def slack(rows: list[tuple[Job, int]], beside: list[Work]) -> PoolSlack:
        return queries.slack_for([*((us, job.deadline) for job, us in rows), *beside], slots, now)

    def own(rows: list[tuple[Job, int]]) -> list[tuple[Job, int]]:
        return [(job, us) for job, us in rows if job.tenant_id == changed.tenant_id]

    before = queries.backlog_jobs([changed.pool_id], now)
    after = queries.backlog_jobs([changed.pool_id], now, instead=changed)
    return Effect(slack(before, direct), slack(after, direct), slack(own(before), []), slack(own(after), []), items)


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
