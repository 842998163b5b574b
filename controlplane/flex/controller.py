"""The one-second loop's body: lead, read, decide, write, nudge. One instance a process and shard."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from django.db import connection

from controlplane.core.flex_decision import FlexDecision
from controlplane.core.flex_marks import FlexMarks
from controlplane.core.period import to_us
from controlplane.flex import actions, applying, evidence
from controlplane.flex.applying import Applied, Changes
from controlplane.flex.calm import Calm
from controlplane.flex.deciding import Memory, Nudged, tick_pool
from controlplane.flex.leadership import Leadership, LeadershipLost, own_name, read_shard
from controlplane.flex.pruning import Pruner
from controlplane.flex.reading import PoolReading
from controlplane.flex.resident import Resident
from controlplane.flex.restating import restate
from controlplane.policy.nudges import compose, send_all

log = logging.getLogger(__name__)

#: So many decisions at most are written by one statement: it has to be over while the lease lasts.
DECISIONS_AT_ONCE = 1_000


@dataclass
class Plan:
    """What a tick of these pools wants written, and what is remembered once it is."""

    resident: Resident
    now: datetime
    #: Each is written whole or not at all, and so are all rows of a pool.
    parts: list[Changes] = field(default_factory=lambda: [Changes()])
    memories: dict[int, Memory] = field(default_factory=dict)
    decisions: dict[int, FlexDecision] = field(default_factory=dict)
    nudges: list[Nudged] = field(default_factory=list)

    @property
    def changes(self) -> Changes:
        """The part that the next pool's rows are for."""
        return self.parts[-1]

    @property
    def grants(self) -> int:
        """How many grants are to be changed."""
        return sum(len(part.grants) + len(part.renewals.slot_id) for part in self.parts)


@dataclass(frozen=True)
class Tick:
    """What a tick did. `decisions` by pool id are those of pools with a flex band that had something to decide."""

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
        #: None until everything is read, and again when a tick was not written as it was planned.
        self._resident: Resident | None = None
        self._pruner = Pruner()

    @property
    def leads(self) -> bool:
        return self.leadership.term is not None

    def tick(self, now: datetime | None = None) -> Tick:
        """One second of the shard. `now` is for tests; the lease is always by the database's clock."""
        if self.leadership.hold() is None:
            return Tick(leads=False)
        try:
            plan = self.plan(now)
            applied = self.apply(plan)
        except LeadershipLost:
            log.warning("leadership of %s was lost in a tick: the rest of it was not written", self.shard.name)
            self._step_down()
            return Tick(leads=False)
        self._nudge(plan)
        self._keep_house(plan.now)
        return Tick(True, plan.now, self.leadership.term, plan.decisions, applied, tuple(plan.nudges))

    def plan(self, now: datetime | None = None) -> Plan:
        """Reads what changed and decides; writes nothing but missing grant rows."""
        return self._decide_all(self._read(now))

    def _decide_all(self, resident: Resident) -> Plan:
        """One tick of every pool, a short one where it is calm."""
        plan = Plan(resident, resident.now)
        calms, changed, heard = resident.calm, resident.changed, resident.heard
        for pool_id, reading in resident.pools.items():
            calm = None if pool_id in changed else calms.get(pool_id)
            if calm is not None and calm.step(
                reading, plan.changes.samples, plan.changes.renewals, now_us=resident.now_us,
                heard=pool_id in heard, interactive_classes=resident.interactive_classes,
            ):  # fmt: skip
                continue
            if len(plan.changes.decisions) >= DECISIONS_AT_ONCE:
                self.leadership.keep()
                plan.parts.append(Changes())
            if calm is None or not calm.crossed or not self._restate(plan, calm, reading):
                self._decide(plan, resident, pool_id)
        return plan

    def _read(self, now: datetime | None) -> Resident:
        """What is so now. A new leader reads everything, and so does one that cannot know what became of its tick."""
        resident, self._resident = self._resident, None
        if resident is None or self._term != self.leadership.term:
            resident = Resident(self.leadership, self.shard)
            resident.begin(now)
            self._remember_from_rows(resident.now)
        else:
            resident.refresh(now)
        return resident

    def _restate(self, plan: Plan, calm: Calm, reading: PoolReading) -> bool:
        """Decides one pool of which nothing but the load crossed a limit; False when that is not enough."""
        pool_id = reading.pool.pool_id
        restated = restate(calm, reading, self._memories[pool_id], plan.changes, now_us=plan.resident.now_us)
        if restated is None:
            return False
        plan.memories[pool_id] = restated.memory
        plan.decisions[pool_id] = restated.decision
        return True

    def _decide(self, plan: Plan, resident: Resident, pool_id: int) -> None:
        """Decides one pool in full."""
        reading, ticked_us = resident.open(pool_id)
        memory = self._memories.get(pool_id, Memory())
        if ticked_us is not None:
            memory = replace(memory, marks=replace(memory.marks, ticked_at_us=ticked_us))
        outcome = tick_pool(
            reading,
            memory,
            plan.changes,
            now_us=resident.now_us,
            leading_since_us=self._leading_since_us,
            interactive_classes=resident.interactive_classes,
        )
        plan.memories[pool_id] = outcome.memory
        plan.nudges.extend(outcome.nudges)
        if outcome.decision is not None:
            plan.decisions[pool_id] = outcome.decision
        resident.close(pool_id, outcome)

    def apply(self, plan: Plan) -> Applied:
        """Writes a plan, a statement for each part. Raises LeadershipLost when the term is over: then that part and
        those after it were not written.
        """
        applied = Applied()
        try:
            for part in plan.parts:
                self.leadership.keep()
                applied += applying.apply(part, self.leadership, plan.now)
        except LeadershipLost:
            self._step_down()
            raise
        self._memories.update(plan.memories)
        if applied.grants + applied.renewals == plan.grants:
            self._resident = plan.resident
        else:
            # Whoever changed them is not a controller of this term; the next tick reads what is so and goes on.
            changed = applied.grants + applied.renewals
            log.error("%d of %d grants had changed under the tick", plan.grants - changed, plan.grants)
        return applied

    def _step_down(self) -> None:
        self.leadership.term = self._term = self._resident = None

    def resign(self) -> None:
        """Ends the lease now, so that a standby leads at its next tick."""
        self.leadership.release()

    def _remember_from_rows(self, now: datetime) -> None:
        """The memory that was left with the last samples, and with the ledger of loans where there is none."""
        if self._term != self.leadership.term:
            self._memories = {}
            self._leading_since_us = to_us(now)
            self._term = self.leadership.term
        self._memories = {
            pool_id: replace(self._memories.get(pool_id, Memory()), marks=marks)
            for pool_id, marks in _stored_marks().items()
        }

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
        self._pruner.prune(now)


_MARKS_SQL = """
SELECT p.id, coalesce(whole.figures, s.figures) -> 'marks', CASE WHEN s.whole_at IS NOT NULL THEN s.at END,
    l.lent_at, l.recalled_at
FROM fleet_pool p
LEFT JOIN LATERAL (
    SELECT at, whole_at, figures FROM flex_poolsample WHERE pool_id = p.id ORDER BY at DESC LIMIT 1
) s ON TRUE
LEFT JOIN flex_poolsample whole ON whole.pool_id = p.id AND whole.at = s.whole_at AND whole.whole_at IS NULL
LEFT JOIN LATERAL (
    SELECT max(lent_at) AS lent_at, max(recalled_at) AS recalled_at FROM flex_lend WHERE pool_id = p.id
) l ON TRUE
"""


def _stored_marks() -> dict[int, FlexMarks]:
    with connection.cursor() as cursor:
        cursor.execute(_MARKS_SQL)
        rows = cursor.fetchall()
    marks = {}
    for pool_id, stored, ticked_at, lent_at, recalled_at in rows:
        said = _as_dict(stored)
        if said and ticked_at is not None:
            said["ticked_at_us"] = to_us(ticked_at)
        for name, at in (("last_lend_at_us", lent_at), ("last_recall_at_us", recalled_at)):
            if at is not None:
                said[name] = max(said.get(name) or 0, to_us(at))
        marks[pool_id] = evidence.read_marks(said)
    return marks


def _as_dict(stored: object) -> dict[str, Any]:
    if isinstance(stored, str):
        stored = json.loads(stored)
    return dict(stored) if isinstance(stored, dict) else {}
