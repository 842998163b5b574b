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


@dataclass(frozen=True, slots=True)
class Payment:
    """How many of a job's unfinished items can be paid for, those that run among them; and of the windows that have too
    little left for the others the one that ends last: until then they wait.
    """

    items: int
    window: BudgetWindow


def payable(jobs: Iterable[Priced], now: datetime) -> dict[int, int]:
    """Job id -> how many of its unfinished items can be paid for, where that is not all: see `payments`."""
    return {job: found.items for job, found in payments(jobs, now).items()}


def payments(jobs: Iterable[Priced], now: datetime) -> dict[int, Payment]:
    """Of jobs that money does not wholly pay for; those of which it pays for all items, and those without a hard budget
    or a known bound, are missing.

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
            paid = _paid(job, money[job.uuid], claimed)
            if paid is not None:
                found[job.id] = paid
    return found


def _paid(job: Priced, money: JobMoney, claimed: dict[BudgetWindow, int]) -> Payment | None:
    """Items that leases pay for, and what the windows pay beyond; adds the latter to what is claimed of them. None
    where that is all of them.
    """
    bound = job.item_bound_nanos
    leased = min(job.unfinished, sum(unspent // bound for unspent in money.unspent_nanos))
    left = {window: window.remaining_nanos - claimed[window] for window in money.windows}
    wanted = job.unfinished - leased
    more = min(wanted, max(0, min(left.values())) // bound)
    for window in money.windows:
        claimed[window] += more * bound
    if more == wanted:
        return None
    short = (window for window, nanos in left.items() if nanos < wanted * bound)
    return Payment(leased + more, max(short, key=lambda window: window.ends_at_us))
