"""Jobs that wait for money: no more of their items are leased than their tenants' hard budgets pay for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import connection

from controlplane.budgets.job_money import money_of
from controlplane.core.batch_items import UNPAID
from controlplane.core.leases import BudgetWindow
from controlplane.core.period import from_us
from controlplane.jobs.models import Job
from controlplane.jobs.paid_work import Priced, item_bound_nanos
from controlplane.jobs.queries import unfinished_items
from controlplane.usage.sql import SqlCursor

_HELD_SQL = "SELECT job_id, count(*) FROM jobs_item WHERE state = 1 AND job_id = ANY(%s) GROUP BY job_id"


def affordable(cursor: SqlCursor, jobs: Sequence[Priced], now: datetime) -> dict[int, int]:
    """Job id -> how many more of its items can be paid for; jobs without that bound are missing.

    Items that agents hold already have the first claim.
    """
    priced = {job.uuid: job for job in jobs if job.item_bound_nanos > 0}
    money = money_of(cursor, {uuid: job.tenant_id for uuid, job in priced.items()}, now)
    paid = {priced[uuid].id: found.items(priced[uuid].item_bound_nanos) for uuid, found in money.items()}
    tight = [job.id for job in priced.values() if job.id in paid and paid[job.id] < job.unfinished]
    if not tight:
        return {}
    cursor.execute(_HELD_SQL, (tight,))
    held = dict(cursor.fetchall())
    return {job: max(0, paid[job] - held.get(job, 0)) for job in tight}


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a job's items wait: the window that has less left than one of them can be charged."""

    window: BudgetWindow
    item_bound_nanos: int

    @property
    def ends_at(self) -> datetime:
        """When the window ends and the next one begins with its whole limit."""
        return from_us(self.window.ends_at_us)


def shortage_of(job: Job, now: datetime) -> Shortage | None:
    """What a running job of rows waits for, where its tenant's budget does not pay for the item that is next.

    Items differ: where the budget pays for some but not for all, the next one is the judge, if an agent gave it back.
    """
    bound = item_bound_nanos(job)
    if job.state != Job.State.RUNNING or not job.has_items or not bound or not unfinished_items(job):
        return None
    with connection.cursor() as cursor:
        money = money_of(cursor, {job.uuid: job.tenant_id}, now).get(job.uuid)
    if money is None:
        return None
    paid = money.items(bound)
    if paid and (paid >= unfinished_items(job) or not _next_was_unpaid(job)):
        return None
    return Shortage(money.tightest, bound)


def _next_was_unpaid(job: Job) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT reason FROM jobs_item WHERE day = %s AND job_id = %s AND state = 0 ORDER BY line LIMIT 1",
            (job.day, job.pk),
        )
        row = cursor.fetchone()
    return row is not None and row[0].startswith(UNPAID)
