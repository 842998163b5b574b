"""Money of jobs: reserved at submission out of every hard window, handed to agents as leases, given back at the end.

A reservation is a lease row with the job in place of agent and epoch. What agents need for the job's requests is moved
out of that row into leases of theirs, in the same windows: nothing is counted twice, and settled + leased <= limit is
not touched by it. Locks are taken in the order reservations, agents' leases, windows, each in id order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from controlplane.budgets.leases import LEASE_LIFE, RENEW_BEFORE, as_core, take
from controlplane.budgets.windows import budgets_of, windows_at
from controlplane.core.leases import BudgetWindow
from controlplane.usage.sql import SqlCursor

RESERVATION_LIFE = timedelta(days=400)
"""Longer than any job: a reservation ends with its job, never by itself."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What was reserved, 0 where no hard budget holds; or the window that has less than that left."""

    amount_nanos: int
    blocked_by: BudgetWindow | None = None


def reserve(cursor: SqlCursor, *, tenant_id: int, job: UUID, amount_nanos: int, now: datetime) -> Reserved:
    """Takes an amount for a job out of every hard window of its tenant and the ancestors, all of it or nothing.

    Must run in a transaction: the windows are locked in id order until it ends. A job has one open reservation.
    """
    if amount_nanos < 0:
        raise ValueError("a reservation cannot be negative")
    budgets = budgets_of(cursor, [tenant_id], hard=True).get(tenant_id, [])
    if not budgets or not amount_nanos:
        return Reserved(0)
    windows = sorted(
        windows_at(cursor, [(budget, now) for budget in budgets], lock=True).values(), key=lambda row: row.id
    )
    tightest = min(map(as_core, windows), key=lambda window: window.remaining_nanos)
    if tightest.remaining_nanos < amount_nanos:
        return Reserved(0, tightest)
    _insert(cursor, None, job, tenant_id, amount_nanos, now, now + RESERVATION_LIFE, [row.id for row in windows])
    take(cursor, amount_nanos, windows)
    return Reserved(amount_nanos)


@dataclass(frozen=True, slots=True)
class JobNeed:
    """What an agent should be able to spend for a job without asking, in nanos."""

    job: UUID
    nanos: int


def fund(cursor: SqlCursor, agent_id: int, epoch: int, needs: Iterable[JobNeed], now: datetime) -> dict[UUID, int]:
    """Hands an agent what it needs for jobs, out of their reservations as far as they go; returns what it has of each
    then, unspent and unreserved. Jobs without an open reservation are missing.

    Where it has less than it needs, it is given up to twice that, so that it is not topped up with every report.
    Must run in a transaction.
    """
    wanted = {need.job: need.nanos for need in needs if need.nanos > 0}
    reservations = _lock_reservations(cursor, wanted)
    held = _lock_held(cursor, agent_id, epoch, sorted(reservations), now)
    after: dict[UUID, int] = {}
    for job, reservation in reservations.items():
        own = held.get(job)
        free = after[job] = 0 if own is None else own.free_nanos
        if free >= wanted[job] or not reservation.amount_nanos:
            continue
        amount = min(reservation.amount_nanos, 2 * wanted[job] - free)
        cursor.execute(
            "UPDATE budgets_lease SET amount_nanos = amount_nanos - %s WHERE id = %s", (amount, reservation.id)
        )
        if own is None:
            agent = (agent_id, epoch)
            until = now + LEASE_LIFE
            windows = reservation.window_ids
            _insert(cursor, agent, job, reservation.tenant_id, amount, now, until, windows)
        else:
            cursor.execute(
                "UPDATE budgets_lease SET amount_nanos = amount_nanos + %s WHERE id = %s", (amount, own.newest_id)
            )
        after[job] = free + amount
    return after


@dataclass(frozen=True, slots=True)
class _Reservation:
    id: int
    tenant_id: int
    amount_nanos: int
    window_ids: list[int]


def _lock_reservations(cursor: SqlCursor, jobs: Iterable[UUID]) -> dict[UUID, _Reservation]:
    named = sorted(jobs)
    if not named:
        return {}
    cursor.execute(
        """
        SELECT l.job, l.id, l.tenant_id, l.amount_nanos,
               ARRAY(SELECT w.window_id FROM budgets_leasewindow w WHERE w.lease_id = l.id ORDER BY w.window_id)
        FROM budgets_lease l
        WHERE l.job = ANY(%s) AND l.agent_id IS NULL AND l.state = 'open' ORDER BY l.id FOR UPDATE OF l
        """,
        (named,),
    )
    return {job: _Reservation(*columns) for job, *columns in cursor.fetchall()}


@dataclass(frozen=True, slots=True)
class _Held:
    newest_id: int
    free_nanos: int


def _lock_held(
    cursor: SqlCursor, agent_id: int, epoch: int, jobs: Sequence[UUID], now: datetime
) -> Mapping[UUID, _Held]:
    """The agent's leases of these jobs that it can still use for RENEW_BEFORE, by job."""
    if not jobs:
        return {}
    cursor.execute(
        """
        SELECT job, id, amount_nanos - spent_nanos - reserved_nanos FROM budgets_lease
        WHERE agent_id = %s AND epoch = %s AND state = 'open' AND job = ANY(%s) AND expires_at >= %s
        ORDER BY id FOR UPDATE
        """,
        (agent_id, epoch, list(jobs), now + RENEW_BEFORE),
    )
    found: dict[UUID, _Held] = {}
    for job, lease_id, free in cursor.fetchall():
        before = found.get(job)
        found[job] = _Held(lease_id, free + (0 if before is None else before.free_nanos))
    return found


def _insert(
    cursor: SqlCursor,
    agent: tuple[int, int] | None,
    job: UUID,
    tenant_id: int,
    amount_nanos: int,
    now: datetime,
    expires_at: datetime,
    window_ids: Sequence[int],
) -> None:
    agent_id, epoch = agent or (None, None)
    cursor.execute(
        """
        INSERT INTO budgets_lease (agent_id, epoch, job, tenant_id, amount_nanos, spent_nanos, reserved_nanos,
                                   need_nanos, outage, state, granted_at, expires_at)
        VALUES (%s, %s, %s, %s, %s, 0, 0, 0, false, 'open', %s, %s) RETURNING id
        """,
        (agent_id, epoch, job, tenant_id, amount_nanos, now, expires_at),
    )
    row = cursor.fetchone()
    assert row is not None
    cursor.execute(
        "INSERT INTO budgets_leasewindow (lease_id, window_id) SELECT %s, unnest(%s::bigint[])",
        (row[0], list(window_ids)),
    )


def release(cursor: SqlCursor, jobs: Iterable[UUID], now: datetime) -> int:
    """Ends the reservations of jobs: what no agent holds goes back to its windows; returns the nanos that did.

    What agents still hold follows when their leases end. Must run in a transaction.
    """
    reservations = _lock_reservations(cursor, jobs)
    back: dict[int, int] = {}
    for reservation in reservations.values():
        for window_id in reservation.window_ids:
            back[window_id] = back.get(window_id, 0) + reservation.amount_nanos
    ids = sorted(back)
    if ids:
        cursor.execute("SELECT id FROM budgets_budgetwindow WHERE id = ANY(%s) ORDER BY id FOR UPDATE", (ids,))
        cursor.execute(
            "UPDATE budgets_budgetwindow w SET leased_nanos = w.leased_nanos - r.nanos"
            " FROM unnest(%s::bigint[], %s::bigint[]) AS r (id, nanos) WHERE w.id = r.id",
            (ids, [back[window_id] for window_id in ids]),
        )
    cursor.execute(
        "UPDATE budgets_lease SET amount_nanos = 0, state = 'closed', closed_at = %s WHERE id = ANY(%s)",
        (now, [reservation.id for reservation in reservations.values()]),
    )
    return sum(reservation.amount_nanos for reservation in reservations.values())


def open_reservations(cursor: SqlCursor) -> list[UUID]:
    """The jobs that have an open reservation."""
    cursor.execute(
        "SELECT job FROM budgets_lease WHERE job IS NOT NULL AND agent_id IS NULL AND state = 'open' ORDER BY id"
    )
    return [job for (job,) in cursor.fetchall()]


def reserved_nanos(cursor: SqlCursor, jobs: Sequence[UUID]) -> dict[UUID, int]:
    """Job -> what it still holds of its reservation, in its own row and with agents; jobs without one are missing."""
    cursor.execute(
        "SELECT job, sum(amount_nanos - spent_nanos)::bigint FROM budgets_lease"
        " WHERE job = ANY(%s) AND state = 'open' GROUP BY job",
        (list(jobs),),
    )
    return dict(cursor.fetchall())
