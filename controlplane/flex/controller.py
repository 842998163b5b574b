"""The one-second loop's body: lead, read, decide, write, nudge. One instance a process and shard."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import connection

from controlplane.core.flex_decision import FlexDecision
from controlplane.core.flex_marks import FlexMarks
from controlplane.core.period import to_us
from controlplane.flex import actions, applying, evidence, telemetry
from controlplane.flex.applying import Applied, Changes, LeadershipLost
from controlplane.flex.deciding import Memory, Nudged, tick_pool
from controlplane.flex.leadership import Leadership, own_name, read_shard
from controlplane.policy.nudges import compose, send_all

log = logging.getLogger(__name__)

SAMPLES_KEPT = timedelta(hours=48)
MINUTES_KEPT = timedelta(days=90)
PRUNE_EVERY = timedelta(minutes=1)
PRUNE_BATCH = 20_000


@dataclass
class Plan:
    """What a tick wants written, and what is remembered once it is."""

    now: datetime
    changes: Changes
    memories: dict[int, Memory] = field(default_factory=dict)
    decisions: dict[int, FlexDecision] = field(default_factory=dict)
    nudges: list[Nudged] = field(default_factory=list)


@dataclass(frozen=True)
class Tick:
    """What a tick did. `decisions` by pool id are those of pools with a flex band."""

    leads: bool
    now: datetime | None = None
    term: int | None = None
    decisions: dict[int, FlexDecision] = field(default_factory=dict)
    applied: Applied | None = None
    nudges: tuple[Nudged, ...] = ()


class Controller:
    """Drives the flex bands of one shard while it leads; a standby does nothing but ask to lead."""

    def __init__(self, shard: str = "main", holder: str | None = None) -> None:
        """Raises ValueError for a shard that there is not."""
        self.shard = read_shard(shard)
        self.leadership = Leadership(shard, holder or own_name())
        self._term: int | None = None
        self._memories: dict[int, Memory] = {}
        self._leading_since_us = 0
        self._pruned_at: datetime | None = None

    @property
    def leads(self) -> bool:
        return self.leadership.term is not None

    def tick(self, now: datetime | None = None) -> Tick:
        """One second of the shard. `now` is for tests; the lease is always by the database's clock."""
        if self.leadership.hold() is None:
            return Tick(leads=False)
        plan = self.plan(now)
        try:
            applied = self.apply(plan)
        except LeadershipLost:
            log.warning("leadership of %s was lost in a tick: nothing of it was written", self.shard.name)
            return Tick(leads=False)
        self._nudge(plan)
        self._keep_house(plan.now)
        return Tick(True, plan.now, self.leadership.term, plan.decisions, applied, tuple(plan.nudges))

    def plan(self, now: datetime | None = None) -> Plan:
        """Reads and decides; writes nothing but missing grant rows."""
        reading = telemetry.read(self.shard, now)
        missing = [
            slot.slot_id
            for pool in reading.pools.values()
            for slot in pool.slots
            if slot.is_flex and slot.grant is None
        ]
        if missing:
            applying.ensure_grants(self.leadership, missing)
            reading = telemetry.read(self.shard, now)
        if self._term != self.leadership.term:
            self._remember_from_rows(reading.now)
        plan = Plan(reading.now, Changes())
        for pool_id, pool in reading.pools.items():
            outcome = tick_pool(
                pool,
                self._memories.get(pool_id, Memory()),
                plan.changes,
                now_us=reading.now_us,
                leading_since_us=self._leading_since_us,
                interactive_classes=reading.interactive_classes,
            )
            plan.memories[pool_id] = outcome.memory
            plan.nudges.extend(outcome.nudges)
            if outcome.decision is not None:
                plan.decisions[pool_id] = outcome.decision
        return plan

    def apply(self, plan: Plan) -> Applied:
        """Writes a plan in one statement. Raises LeadershipLost when the term is over: then nothing was written."""
        try:
            applied = applying.apply(plan.changes, self.leadership, plan.now)
        except LeadershipLost:
            self.leadership.term = self._term = None
            raise
        self._memories = plan.memories
        if applied.grants != len(plan.changes.grants):
            # Whoever changed them is not a controller of this term; the next tick reads what is so and goes on.
            log.error("%d of %d grants had changed under the tick", applied.grants, len(plan.changes.grants))
        return applied

    def resign(self) -> None:
        """Ends the lease now, so that a standby leads at its next tick."""
        self.leadership.release()

    def _remember_from_rows(self, now: datetime) -> None:
        """The memory that the leader before left: its last samples, and the ledger of loans where there is none."""
        self._memories = {pool_id: Memory(marks) for pool_id, marks in _stored_marks().items()}
        self._leading_since_us = to_us(now)
        self._term = self.leadership.term

    def _nudge(self, plan: Plan) -> None:
        send_all(
            [
                compose(
                    nudged.kind, pool=nudged.pool, agent=nudged.agent, slot_id=nudged.slot_id, fence=nudged.fence,
                    now=plan.now,
                )
                for nudged in plan.nudges
            ]
        )  # fmt: skip

    def _keep_house(self, now: datetime) -> None:
        actions.end_expired_freezes(now)
        if self._pruned_at is None or now - self._pruned_at >= PRUNE_EVERY:
            prune_samples(now)
            self._pruned_at = now


_MARKS_SQL = """
SELECT p.id, s.figures -> 'marks', l.lent_at, l.recalled_at
FROM fleet_pool p
LEFT JOIN LATERAL (SELECT figures FROM flex_poolsample WHERE pool_id = p.id ORDER BY at DESC LIMIT 1) s ON TRUE
LEFT JOIN LATERAL (
    SELECT max(lent_at) AS lent_at, max(recalled_at) AS recalled_at FROM flex_lend WHERE pool_id = p.id
) l ON TRUE
"""


def _stored_marks() -> dict[int, FlexMarks]:
    with connection.cursor() as cursor:
        cursor.execute(_MARKS_SQL)
        rows = cursor.fetchall()
    marks = {}
    for pool_id, stored, lent_at, recalled_at in rows:
        said = _as_dict(stored)
        for name, at in (("last_lend_at_us", lent_at), ("last_recall_at_us", recalled_at)):
            if at is not None:
                said[name] = max(said.get(name) or 0, to_us(at))
        marks[pool_id] = evidence.read_marks(said)
    return marks


def _as_dict(stored: object) -> dict[str, Any]:
    if isinstance(stored, str):
        stored = json.loads(stored)
    return dict(stored) if isinstance(stored, dict) else {}


_PRUNE_SQL = """
DELETE FROM flex_poolsample WHERE id IN (
    SELECT id FROM flex_poolsample
    WHERE at < %(seconds)s AND (at < %(minutes)s OR (at >= %(looked)s AND date_part('second', at) >= 1))
    LIMIT %(batch)s
)
"""


def prune_samples(now: datetime) -> int:
    """Removes a batch of samples: after 48 h those but of a minute's first second, after 90 days all.

    Only the week before the limit is looked at, so that minutes that are kept are not read again each time.
    """
    limit = now - SAMPLES_KEPT
    with connection.cursor() as cursor:
        cursor.execute(
            _PRUNE_SQL,
            {
                "seconds": limit,
                "minutes": now - MINUTES_KEPT,
                "looked": limit - timedelta(days=7),
                "batch": PRUNE_BATCH,
            },
        )
        return int(cursor.rowcount)
