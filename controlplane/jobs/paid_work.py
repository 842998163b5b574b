"""How much of running jobs their tenants' hard budgets pay for: items that nothing pays for cannot run, and are no
backlog.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import connection

from controlplane.budgets.job_money import JobMoney, money_of
from controlplane.core.leases import BudgetWindow
from controlplane.jobs.models import Job


@dataclass(frozen=True, slots=True)
class Priced:
    """A job as far as money goes: what one of its items can be charged at most, on average, and how many are open."""

    id: int
    uuid: UUID
    tenant_id: int
    item_bound_nanos: int
    unfinished: int


def item_bound_nanos(job: Job) -> int:
    """What one item can be charged at most, on average over the job; 0 where it was not known at its admission."""
    bound: int = (job.admission or {}).get("bound_nanos") or 0
    return -(-bound // job.items)


def payable(jobs: Iterable[Priced], now: datetime) -> dict[int, int]:
    """Job id -> how many of its unfinished items can be paid for, those that run among them; jobs of which all can be,
    and those without a hard budget or a known bound, are missing.

    What a window has left pays once: for the first of the jobs in their order. What is leased to agents for anything of
    a tenant counts for each of its jobs; it is a minute's spend at most.
    """
    priced = [job for job in jobs if job.item_bound_nanos > 0 and job.unfinished > 0]
    if not priced:
        return {}
    with connection.cursor() as cursor:
        money = money_of(cursor, {job.uuid: job.tenant_id for job in priced}, now)
    claimed: dict[BudgetWindow, int] = defaultdict(int)
    found = {}
    for job in priced:
        if job.uuid in money:
            items = _paid(job, money[job.uuid], claimed)
            if items < job.unfinished:
                found[job.id] = items
    return found


def _paid(job: Priced, money: JobMoney, claimed: dict[BudgetWindow, int]) -> int:
    """Items that leases pay for, and what the windows pay beyond; adds the latter to what is claimed of them."""
    bound = job.item_bound_nanos
    leased = min(job.unfinished, sum(unspent // bound for unspent in money.unspent_nanos))
    left_nanos = max(0, min(window.remaining_nanos - claimed[window] for window in money.windows))
    more = min(job.unfinished - leased, left_nanos // bound)
    for window in money.windows:
        claimed[window] += more * bound
    return leased + more
