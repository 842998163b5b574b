"""What agents spent of their leases is settled, and leases that are over are closed.

A lease's charges move from leased to settled as its agent tells of them, in totals: a repeat changes nothing and an
older total never lowers a newer one. What a closed lease did not spend goes back. A process that is killed cannot say
its last totals: its successor reads them in its journal and tells them in the report that seals the epoch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from controlplane.core.period import to_us
from controlplane.usage.sql import SqlCursor
from controlplane.wire.report import LeaseSpend


@dataclass(frozen=True, slots=True)
class SpendReport:
    """What one report says of one agent's leases. `sent_us` is the agent's clock, which also ends their use."""

    agent_id: int
    sent_us: int
    spends: Sequence[LeaseSpend]


@dataclass(frozen=True, slots=True)
class Overspent:
    """A lease of which an agent reported more than its amount: only the amount was settled."""

    agent_id: int
    lease_id: int
    amount_nanos: int
    spent_nanos: int


@dataclass(frozen=True, slots=True)
class Waiver:
    """A charge that an agent counted as spent of one of its leases, and that nobody pays."""

    agent_id: int
    lease_id: int
    nanos: int


def settle(
    cursor: SqlCursor,
    reports: Sequence[SpendReport],
    now: datetime,
    sealed: Iterable[tuple[int, int]] = (),
    waivers: Sequence[Waiver] = (),
) -> list[Overspent]:
    """Moves what leases spent from leased to settled, and closes those that are over.

    A lease is over when it ended with nothing reserved, or when its epoch is among `sealed`, (agent id, epoch) pairs:
    what it did not spend goes back, to its job's reservation where there is one. Spends are totals: a repeat changes
    nothing and an older total never lowers a newer one. What is waived goes the same way back, out of what was settled,
    also of a lease that is closed. Locks reservations, leases, windows, each once, in id order.
    """
    said = {spend.lease_id: (report, spend) for report in reports for spend in report.spends}
    closing = set(sealed)
    waived: dict[int, Waiver] = {}
    for waiver in waivers:
        before = waived.get(waiver.lease_id)
        nanos = waiver.nanos + (before.nanos if before is not None else 0)
        waived[waiver.lease_id] = replace(waiver, nanos=nanos)
    if not said and not closing and not waived:
        return []
    reservations = _lock_reservations(cursor, {*said, *waived}, closing)
    changes: list[_Change] = []
    overspent: list[Overspent] = []
    for row in _lock_leases(cursor, said, closing, waived):
        report, spend = said.get(row.lease_id, (None, None))
        if report is None or spend is None or report.agent_id != row.agent_id or not row.is_open:
            spend = None
        elif spend.spent_nanos > row.amount_nanos:
            overspent.append(Overspent(row.agent_id, row.lease_id, row.amount_nanos, spend.spent_nanos))
        closes = row.is_open and (
            (row.agent_id, row.epoch) in closing
            or (report is not None and spend is not None and _ended(row, report, spend))
        )
        reservation = None if row.job is None else reservations.get(row.job)
        changes.append(_change(row, spend, waived.get(row.lease_id), closes, reservation))
    _apply(cursor, changes, now)
    return overspent


def _ended(row: _Locked, report: SpendReport, spend: LeaseSpend) -> bool:
    return report.sent_us > to_us(row.expires_at) and spend.reserved_nanos <= 0


def _change(
    row: _Locked, spend: LeaseSpend | None, waiver: Waiver | None, closes: bool, reservation: int | None
) -> _Change:
    """What becomes of one lease; `reservation` is its job's, where that is open."""
    total, reserved = row.spent_nanos, row.reserved_nanos
    if spend is not None:
        total = min(max(spend.spent_nanos, row.spent_nanos), row.amount_nanos)
        reserved = max(0, spend.reserved_nanos)
    waived = 0
    if waiver is not None and waiver.agent_id == row.agent_id:
        waived = min(max(0, waiver.nanos), total - row.waived_nanos)
    rest = row.amount_nanos - total if closes else 0
    back = waived + rest if reservation is not None else 0
    return _Change(
        lease_id=row.lease_id,
        spent_nanos=total,
        waived_nanos=row.waived_nanos + waived,
        reserved_nanos=reserved,
        closes=closes,
        settled_nanos=total - row.spent_nanos - waived,
        freed_nanos=total - row.spent_nanos + rest - back,
        back_to=reservation,
        back_nanos=back,
    )


def close_epochs(cursor: SqlCursor, epochs: Iterable[tuple[int, int]], now: datetime) -> None:
    """Closes every open lease of sealed epochs, (agent id, epoch) pairs: what was not spent goes back."""
    settle(cursor, [], now, epochs)


@dataclass(frozen=True, slots=True)
class _Locked:
    lease_id: int
    agent_id: int
    epoch: int
    amount_nanos: int
    spent_nanos: int
    waived_nanos: int
    reserved_nanos: int
    expires_at: datetime
    job: UUID | None
    is_open: bool


def _lock_reservations(
    cursor: SqlCursor, lease_ids: Iterable[int], epochs: Iterable[tuple[int, int]]
) -> dict[UUID, int]:
    """The open reservations of jobs that these leases are of, locked: job -> its lease id."""
    pairs = sorted(epochs)
    cursor.execute(
        """
        SELECT DISTINCT job FROM budgets_lease
        WHERE job IS NOT NULL AND agent_id IS NOT NULL
          AND (id = ANY(%s) OR state = 'open' AND (agent_id, epoch) IN (SELECT * FROM unnest(%s::int[], %s::int[])))
        """,
        (sorted(lease_ids), [agent_id for agent_id, _ in pairs], [epoch for _, epoch in pairs]),
    )
    jobs = [job for (job,) in cursor.fetchall()]
    if not jobs:
        return {}
    cursor.execute(
        "SELECT job, id FROM budgets_lease WHERE job = ANY(%s) AND agent_id IS NULL AND state = 'open'"
        " ORDER BY id FOR UPDATE",
        (jobs,),
    )
    return dict(cursor.fetchall())


def _lock_leases(
    cursor: SqlCursor, lease_ids: Iterable[int], epochs: Iterable[tuple[int, int]], waived: Iterable[int]
) -> list[_Locked]:
    """Open leases that are named or of these epochs; those of which something is waived are closed ones too."""
    pairs = sorted(epochs)
    cursor.execute(
        """
        SELECT id, agent_id, epoch, amount_nanos, spent_nanos, waived_nanos, reserved_nanos, expires_at, job,
               state = 'open'
        FROM budgets_lease
        WHERE agent_id IS NOT NULL
          AND (state = 'open'
               AND (id = ANY(%s) OR (agent_id, epoch) IN (SELECT * FROM unnest(%s::int[], %s::int[])))
               OR id = ANY(%s))
        ORDER BY id FOR UPDATE
        """,
        (sorted(lease_ids), [agent_id for agent_id, _ in pairs], [epoch for _, epoch in pairs], sorted(waived)),
    )
    return [_Locked(*row) for row in cursor.fetchall()]


@dataclass(frozen=True, slots=True)
class _Change:
    """New values of a lease, and what moves: in each of its windows `settled_nanos` is added to what is settled and
    `freed_nanos` taken off what is leased; `back_nanos` is added to a reservation out of the same windows."""

    lease_id: int
    spent_nanos: int
    waived_nanos: int
    reserved_nanos: int
    closes: bool
    settled_nanos: int
    freed_nanos: int
    back_to: int | None
    back_nanos: int


def _apply(cursor: SqlCursor, changes: Sequence[_Change], now: datetime) -> None:
    if not changes:
        return
    cursor.execute(
        "SELECT lease_id, window_id FROM budgets_leasewindow WHERE lease_id = ANY(%s)",
        ([change.lease_id for change in changes],),
    )
    _move(cursor, changes, cursor.fetchall())
    _give_back(cursor, changes)
    cursor.execute(
        """
        UPDATE budgets_lease l SET spent_nanos = r.spent, waived_nanos = r.waived, reserved_nanos = r.reserved,
            state = CASE WHEN r.closes THEN 'closed' ELSE l.state END,
            closed_at = CASE WHEN r.closes THEN %s ELSE l.closed_at END
        FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bool[])
            AS r (id, spent, waived, reserved, closes)
        WHERE l.id = r.id
        """,
        (
            now,
            [change.lease_id for change in changes],
            [change.spent_nanos for change in changes],
            [change.waived_nanos for change in changes],
            [change.reserved_nanos for change in changes],
            [change.closes for change in changes],
        ),
    )


def _move(cursor: SqlCursor, changes: Sequence[_Change], pairs: Sequence[tuple[int, int]]) -> None:
    by_lease = {change.lease_id: change for change in changes}
    moves: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for lease_id, window_id in pairs:
        change = by_lease[lease_id]
        moves[window_id][0] += change.settled_nanos
        moves[window_id][1] += change.freed_nanos
    moved = [(window_id, *amounts) for window_id, amounts in sorted(moves.items()) if any(amounts)]
    if not moved:
        return
    ids = [row[0] for row in moved]
    cursor.execute("SELECT id FROM budgets_budgetwindow WHERE id = ANY(%s) ORDER BY id FOR UPDATE", (ids,))
    cursor.execute(
        """
        UPDATE budgets_budgetwindow w
        SET settled_nanos = w.settled_nanos + r.settled, leased_nanos = w.leased_nanos - r.freed
        FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS r (id, settled, freed) WHERE w.id = r.id
        """,
        (ids, [row[1] for row in moved], [row[2] for row in moved]),
    )


def _give_back(cursor: SqlCursor, changes: Sequence[_Change]) -> None:
    """What leases of jobs did not spend, and what was waived, to the reservations that they were taken out of."""
    rests: dict[int, int] = defaultdict(int)
    for change in changes:
        if change.back_to is not None and change.back_nanos:
            rests[change.back_to] += change.back_nanos
    if rests:
        cursor.execute(
            "UPDATE budgets_lease l SET amount_nanos = l.amount_nanos + r.rest"
            " FROM unnest(%s::bigint[], %s::bigint[]) AS r (id, rest) WHERE l.id = r.id",
            (list(rests), list(rests.values())),
        )
