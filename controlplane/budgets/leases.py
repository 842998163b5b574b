"""Leases of hard budgets: granted under the lock of every window that must hold, counted until they are closed.

At every instant settled + leased <= limit in each hard window; the database checks it too. A lease's charge moves from
leased to settled as the agent reports it; what it did not spend goes back when the lease is closed: after its end, once
the agent says that no running request holds any of it, or when its epoch is sealed (`budgets.lease_settling`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from controlplane.budgets.windows import WindowRow, budgets_of, until_end, windows_at
from controlplane.core.leases import BudgetWindow, lease_size
from controlplane.core.period import format_utc, to_us
from controlplane.usage.sql import SqlCursor
from controlplane.wire.report import Exhausted, Lease

LEASE_LIFE = timedelta(minutes=10)
RENEW_BEFORE = timedelta(minutes=2)
ACTIVE_WITHIN = timedelta(seconds=30)
# Leases that an agent can use for one tenant at a time; more money than that is added to the newest of them.
OPEN_MAX = 4
# An agent asks between reports when it has less than this many requests' worth; with more in hand it gets no more.
ENOUGH_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Asking:
    """An agent that needs money for a tenant: `need_nanos` is the upper bound of one request, `waiting_nanos` the sum
    of the bounds of all that wait."""

    agent_id: int
    epoch: int
    tenant_id: int
    need_nanos: int
    waiting_nanos: int = 0


@dataclass(frozen=True, slots=True)
class Granted:
    """The answer to one asking: a lease, the window that blocked, or neither where no hard budget holds.

    The lease is a new one, one that was raised, or one that was open and is enough.
    """

    lease: Lease | None
    exhausted: Exhausted | None


def acquire(cursor: SqlCursor, asking: Asking, now: datetime, *, unless_held: bool = False) -> Granted:
    """Takes a lease out of every hard window of the tenant and its ancestors, or names the window that blocks.

    An agent has at most OPEN_MAX leases for a tenant that it can still use for RENEW_BEFORE: beyond these the newest is
    raised. With `unless_held` nothing is taken while it holds what waits and ENOUGH_REQUESTS times the need, unspent
    and unreserved.

    Must run in a transaction: the agent's leases for the tenant, then the windows, are locked in id order until it
    ends.
    """
    budgets = budgets_of(cursor, [asking.tenant_id], hard=True).get(asking.tenant_id, [])
    if not budgets:
        return Granted(None, None)
    _lock_held(cursor, asking)
    windows = sorted(
        windows_at(cursor, [(budget, now) for budget in budgets], lock=True).values(), key=lambda row: row.id
    )
    held = _held(cursor, asking, windows, now)
    enough = next((row for row in held if row.free_nanos >= asking.need_nanos), None) if unless_held else None
    wanted = max(ENOUGH_REQUESTS * max(1, asking.need_nanos), asking.waiting_nanos)
    if enough is not None and sum(row.free_nanos for row in held) >= wanted:
        return Granted(enough.lease, None)
    size = lease_size(
        [as_core(window) for window in windows],
        active_agents=_active_agents(cursor, asking, now),
        recent_spend_nanos=_recent_spend(cursor, asking, now),
        max_request_nanos=max(1, asking.need_nanos),
        waiting_nanos=asking.waiting_nanos,
    )
    if size.blocked_by is not None:
        blocked = size.blocked_by
        return Granted(None, Exhausted(asking.tenant_id, f"{blocked.level}: {blocked.window}", blocked.ends_at_us))
    if len(held) >= OPEN_MAX:
        return Granted(_raise(cursor, held[-1].lease, asking, size.amount_nanos, windows), None)
    lease = _insert(cursor, asking, size.amount_nanos, windows, now)
    return Granted(lease, None)


@dataclass(frozen=True, slots=True)
class _Held:
    lease: Lease
    free_nanos: int


def _lock_held(cursor: SqlCursor, asking: Asking) -> None:
    # before the windows, as in `settle`, so that the two never wait for each other in a circle
    cursor.execute(
        "SELECT id FROM budgets_lease WHERE agent_id = %s AND epoch = %s AND tenant_id = %s AND state = 'open'"
        " AND job IS NULL ORDER BY id FOR UPDATE",
        (asking.agent_id, asking.epoch, asking.tenant_id),
    )


def _held(cursor: SqlCursor, asking: Asking, windows: Sequence[WindowRow], now: datetime) -> list[_Held]:
    """The agent's leases out of exactly these windows, in id order, without those that end within RENEW_BEFORE.

    Where a window ends before that, so would a new lease: those that last as long count.
    """
    ids = [window.id for window in windows]
    cursor.execute(
        """
        SELECT l.id, l.amount_nanos, l.expires_at, l.amount_nanos - l.spent_nanos - l.reserved_nanos
        FROM budgets_lease l
        WHERE l.agent_id = %s AND l.epoch = %s AND l.tenant_id = %s AND l.state = 'open' AND NOT l.outage
          AND l.job IS NULL AND l.expires_at >= %s
          AND ARRAY(SELECT w.window_id FROM budgets_leasewindow w WHERE w.lease_id = l.id ORDER BY w.window_id)
              = %s::bigint[]
        ORDER BY l.id
        """,
        (asking.agent_id, asking.epoch, asking.tenant_id, until_end(windows, now + RENEW_BEFORE), ids),
    )
    return [
        _Held(Lease(lease_id, asking.tenant_id, amount, to_us(expires_at)), free)
        for lease_id, amount, expires_at, free in cursor.fetchall()
    ]


def _raise(cursor: SqlCursor, lease: Lease, asking: Asking, amount_nanos: int, windows: Sequence[WindowRow]) -> Lease:
    """Adds to an open lease. It ends when it would have: what an agent spends is judged by when its leases began."""
    cursor.execute(
        "UPDATE budgets_lease SET amount_nanos = amount_nanos + %s, need_nanos = greatest(need_nanos, %s)"
        " WHERE id = %s RETURNING amount_nanos",
        (amount_nanos, asking.need_nanos, lease.lease_id),
    )
    row = cursor.fetchone()
    assert row is not None
    take(cursor, amount_nanos, windows)
    return Lease(lease.lease_id, lease.tenant_id, row[0], lease.expires_us)


def take(cursor: SqlCursor, amount_nanos: int, windows: Sequence[WindowRow]) -> None:
    """Counts money as leased in locked windows; the database refuses it where a hard limit would not hold."""
    cursor.execute(
        "UPDATE budgets_budgetwindow SET leased_nanos = leased_nanos + %s WHERE id = ANY(%s)",
        (amount_nanos, [window.id for window in windows]),
    )


def as_core(window: WindowRow) -> BudgetWindow:
    """The window as decisions look at it."""
    return BudgetWindow(
        level=window.budget.level,
        window=f"{window.budget.name} ({window.budget.period} from {format_utc(window.starts_at)})",
        ends_at_us=to_us(window.ends_at),
        limit_nanos=window.limit_nanos,
        settled_nanos=window.settled_nanos,
        outstanding_nanos=window.leased_nanos,
    )


def _active_agents(cursor: SqlCursor, asking: Asking, now: datetime) -> int:
    """Agents that reported lately and may serve the tenant: those of all pools, since a budget has no pool."""
    cursor.execute(
        "SELECT count(*) FROM fleet_agentlive WHERE reported_at > %s OR agent_id = %s",
        (now - ACTIVE_WITHIN, asking.agent_id),
    )
    row = cursor.fetchone()
    return max(1, row[0] if row else 1)


def _recent_spend(cursor: SqlCursor, asking: Asking, now: datetime) -> int:
    """What this agent spends for the tenant in 60 s, from the leases of the last minutes; 0 when it had none."""
    cursor.execute(
        """
        SELECT coalesce(sum(spent_nanos + reserved_nanos), 0), min(granted_at) FROM budgets_lease
        WHERE agent_id = %s AND epoch = %s AND tenant_id = %s AND granted_at > %s AND NOT outage
          AND job IS NULL
        """,
        (asking.agent_id, asking.epoch, asking.tenant_id, now - LEASE_LIFE),
    )
    row = cursor.fetchone()
    if row is None or row[1] is None:
        return 0
    age_s = max(1, int((now - row[1]).total_seconds()))
    return int(row[0]) * 60 // age_s


def _insert(cursor: SqlCursor, asking: Asking, amount_nanos: int, windows: Sequence[WindowRow], now: datetime) -> Lease:
    expires_at = until_end(windows, now + LEASE_LIFE)
    lease_id = insert_lease(cursor, asking, amount_nanos, windows, now, expires_at)
    return Lease(lease_id, asking.tenant_id, amount_nanos, to_us(expires_at))


def insert_lease(
    cursor: SqlCursor,
    asking: Asking,
    amount_nanos: int,
    windows: Sequence[WindowRow],
    now: datetime,
    expires_at: datetime,
    *,
    outage: bool = False,
) -> int:
    """Writes a lease that is taken out of locked windows; returns its id."""
    cursor.execute(
        """
        INSERT INTO budgets_lease (agent_id, epoch, tenant_id, amount_nanos, spent_nanos, reserved_nanos, need_nanos,
                                   outage, state, granted_at, expires_at)
        VALUES (%s, %s, %s, %s, 0, 0, %s, %s, 'open', %s, %s) RETURNING id
        """,
        (asking.agent_id, asking.epoch, asking.tenant_id, amount_nanos, asking.need_nanos, outage, now, expires_at),
    )
    row = cursor.fetchone()
    assert row is not None
    window_ids = [window.id for window in windows]
    cursor.execute(
        "INSERT INTO budgets_leasewindow (lease_id, window_id) SELECT %s, unnest(%s::bigint[])", (row[0], window_ids)
    )
    take(cursor, amount_nanos, windows)
    return int(row[0])


def open_leases(cursor: SqlCursor, agents: Iterable[tuple[int, int]]) -> dict[int, list[Lease]]:
    """Agent id -> every open lease of its present epoch, in full; `agents` are (id, epoch) pairs."""
    pairs = sorted(set(agents))
    cursor.execute(
        """
        SELECT l.agent_id, l.id, l.tenant_id, l.amount_nanos, l.expires_at, l.outage, coalesce(l.job::text, '')
        FROM budgets_lease l
        JOIN unnest(%s::int[], %s::int[]) AS a (agent_id, epoch) ON l.agent_id = a.agent_id AND l.epoch = a.epoch
        WHERE l.state = 'open' ORDER BY l.id
        """,
        ([agent_id for agent_id, _ in pairs], [epoch for _, epoch in pairs]),
    )
    found: dict[int, list[Lease]] = defaultdict(list)
    for agent_id, lease_id, tenant_id, amount_nanos, expires_at, outage, job in cursor.fetchall():
        found[agent_id].append(Lease(lease_id, tenant_id, amount_nanos, to_us(expires_at), outage, job))
    return found


def running_low(cursor: SqlCursor, agents: Iterable[tuple[int, int]], now: datetime) -> list[Asking]:
    """Who should get more without asking: tenants of which half of an agent's leases is used up or ends soon.

    Only tenants that the agent spends for now: a lease nobody used is not renewed.
    """
    pairs = sorted(set(agents))
    cursor.execute(
        """
        SELECT l.agent_id, l.epoch, l.tenant_id, max(l.need_nanos)
        FROM budgets_lease l
        JOIN unnest(%s::int[], %s::int[]) AS a (agent_id, epoch) ON l.agent_id = a.agent_id AND l.epoch = a.epoch
        WHERE l.state = 'open' AND NOT l.outage AND l.job IS NULL
        GROUP BY l.agent_id, l.epoch, l.tenant_id
        HAVING sum(l.spent_nanos + l.reserved_nanos) > 0
           AND 2 * coalesce(sum(l.amount_nanos - l.spent_nanos - l.reserved_nanos) FILTER (WHERE l.expires_at > %s), 0)
               <= coalesce(sum(l.amount_nanos) FILTER (WHERE l.expires_at > %s), 0)
        ORDER BY l.tenant_id, l.agent_id
        """,
        (
            [agent_id for agent_id, _ in pairs],
            [epoch for _, epoch in pairs],
            now + RENEW_BEFORE,
            now + RENEW_BEFORE,
        ),
    )
    return [Asking(*row) for row in cursor.fetchall()]
