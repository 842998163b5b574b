"""Outage slices: what each agent holds in advance for tenants that go on while the control plane cannot be asked.

A slice is a lease like any other and counts as leased from the moment it is granted, so settled + leased <= limit holds
through every outage. It is kept as long as the tenant's posture is open and the agent reports: renewed before it ends,
filled up again after it was spent. One that is not renewed ends by itself and goes back with the agent's next report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection, transaction

from controlplane.budgets.leases import ACTIVE_WITHIN, Asking, as_core, insert_lease, take
from controlplane.budgets.windows import WindowRow, budgets_of, until_end, windows_at
from controlplane.core.leases import outage_slice_nanos
from controlplane.usage.sql import SqlCursor

SLICE_LIFE = timedelta(hours=1)
"""For so long an agent that is cut off may go on; a slice is renewed when half of it has passed."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An agent in its present epoch."""

    agent_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class _Slice:
    lease_id: int
    amount_nanos: int
    unspent_nanos: int
    expires_at: datetime


def keep_outage_slices(now: datetime) -> int:
    """Grants, fills and renews the slices of all tenants; returns how many leases were written or changed.

    Safe to run any number of times, also at once: one transaction for each tenant.
    """
    percent = min(100, max(0, settings.OUTAGE_SLICE_PERCENT))
    if not percent:
        return 0
    with connection.cursor() as cursor:
        wanted = _wanted(cursor, now)
    changed = 0
    for tenant_id in sorted(wanted):
        with transaction.atomic(), connection.cursor() as cursor:
            changed += keep_slices(cursor, tenant_id, wanted[tenant_id], now, percent=percent)
    return changed


# Agents that reported lately, and the tenants with an open posture that their pools serve.
_WANTED_SQL = """
SELECT t.id, a.id, a.epoch
FROM tenants_tenant t
JOIN fleet_pool p ON p.archived_at IS NULL
JOIN fleet_servedmodel m ON m.id = p.model_id
JOIN fleet_agent a ON a.pool_id = p.id AND a.state = 'active'
JOIN fleet_agentlive l ON l.agent_id = a.id AND l.epoch = a.epoch AND l.reported_at > %s
WHERE t.outage_posture = 'open' AND t.state = 'active'
  AND (t.model_names = '{}' OR m.name = ANY(t.model_names))
  AND EXISTS (
      SELECT 1 FROM contracts_workloadclass c
      WHERE c.slug = ANY(t.classes) AND c.state <> 'archived'
        AND (c.slug IN (p.interactive_class, p.batch_class) OR m.name = ANY(c.model_names))
  )
ORDER BY t.id, a.id
"""


def _wanted(cursor: SqlCursor, now: datetime) -> dict[int, list[Holder]]:
    cursor.execute(_WANTED_SQL, (now - ACTIVE_WITHIN,))
    found: dict[int, list[Holder]] = {}
    for tenant_id, agent_id, epoch in cursor.fetchall():
        found.setdefault(tenant_id, []).append(Holder(agent_id, epoch))
    return found


def keep_slices(cursor: SqlCursor, tenant_id: int, holders: Sequence[Holder], now: datetime, *, percent: int) -> int:
    """Brings the slices of one tenant to their size; returns how many were written or changed.

    Must run in a transaction: the tenant's slices, then the windows of its hard budgets, are locked in id order.
    """
    budgets = budgets_of(cursor, [tenant_id], hard=True).get(tenant_id, [])
    if not budgets or not holders:
        return 0
    cursor.execute(
        "SELECT id FROM budgets_lease WHERE tenant_id = %s AND outage AND state = 'open' ORDER BY id FOR UPDATE",
        (tenant_id,),
    )
    windows = sorted(
        windows_at(cursor, [(budget, now) for budget in budgets], lock=True).values(), key=lambda row: row.id
    )
    core = [as_core(window) for window in windows]
    size = outage_slice_nanos(core, agents=len(holders), percent=percent)
    room = min(_room(cursor, windows, percent), min(window.remaining_nanos for window in core) // 2)
    present = _present(cursor, tenant_id, windows)
    changed = 0
    for holder in holders:
        held = present.get((holder.agent_id, holder.epoch))
        unspent = 0 if held is None else held.unspent_nanos
        # filled up when half of it is gone: a little spending is no reason to write
        amount = max(0, min(size - unspent, room)) if 2 * unspent <= size else 0
        until = until_end(windows, now + SLICE_LIFE)
        if held is None and amount:
            asking = Asking(holder.agent_id, holder.epoch, tenant_id, 0)
            insert_lease(cursor, asking, amount, windows, now, until, outage=True)
        elif held is not None and (amount or _due(held, until, now)):
            _change(cursor, held, amount, until, windows)
        else:
            continue
        room -= amount
        changed += 1
    return changed


def _due(held: _Slice, until: datetime, now: datetime) -> bool:
    """Whether a slice is to be renewed: half of its life is over, and it can last longer than it does."""
    return held.expires_at - now < SLICE_LIFE / 2 and until > held.expires_at


def _room(cursor: SqlCursor, windows: Sequence[WindowRow], percent: int) -> int:
    """What slices of all tenants and agents may still take out of these windows."""
    cursor.execute(
        """
        SELECT w.window_id, sum(l.amount_nanos - l.spent_nanos)::bigint
        FROM budgets_leasewindow w JOIN budgets_lease l ON l.id = w.lease_id
        WHERE w.window_id = ANY(%s) AND l.outage AND l.state = 'open' GROUP BY w.window_id
        """,
        ([window.id for window in windows],),
    )
    out: dict[int, int] = dict(cursor.fetchall())
    return max(0, min(window.limit_nanos * percent // 100 - out.get(window.id, 0) for window in windows))


def _present(cursor: SqlCursor, tenant_id: int, windows: Sequence[WindowRow]) -> dict[tuple[int, int], _Slice]:
    """(agent id, epoch) -> its newest open slice out of exactly these windows."""
    cursor.execute(
        """
        SELECT l.agent_id, l.epoch, l.id, l.amount_nanos, l.amount_nanos - l.spent_nanos, l.expires_at
        FROM budgets_lease l
        WHERE l.tenant_id = %s AND l.outage AND l.state = 'open'
          AND ARRAY(SELECT w.window_id FROM budgets_leasewindow w WHERE w.lease_id = l.id ORDER BY w.window_id)
              = %s::bigint[]
        ORDER BY l.id
        """,
        (tenant_id, [window.id for window in windows]),
    )
    return {(agent_id, epoch): _Slice(*columns) for agent_id, epoch, *columns in cursor.fetchall()}


def _change(cursor: SqlCursor, held: _Slice, amount: int, until: datetime, windows: Sequence[WindowRow]) -> None:
    """More money and a later end; the end only moves on: an agent believes the one that it was told."""
    cursor.execute(
        "UPDATE budgets_lease SET amount_nanos = amount_nanos + %s, expires_at = greatest(expires_at, %s)"
        " WHERE id = %s",
        (amount, until, held.lease_id),
    )
    if amount:
        take(cursor, amount, windows)
