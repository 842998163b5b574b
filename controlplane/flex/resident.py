"""What the leader keeps in memory of its pools, so that a tick reads what changed since the last one and nothing else.

Reports are asked for each tick: agents send them every second or two. Everything else comes from the pools that were
noted as changed (`pool_changes`). Each pool is read again once a minute besides, so that nothing that might be missed
stays missed. A new leader, and one whose last tick failed, begins by reading everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from datetime import datetime, timedelta

from msgspec import structs

from controlplane.core.flex_policy import SECOND_US
from controlplane.core.period import to_us
from controlplane.flex import applying, pool_changes, telemetry
from controlplane.flex.calm import Calm, calm_of
from controlplane.flex.deciding import PoolTick
from controlplane.flex.leadership import Leadership, Shard
from controlplane.flex.reading import MINUTE_S, AgentRow, PoolReading
from controlplane.flex.work import Work, holds_direct, work_of

#: A report that becomes visible so long after the instant that it bears comes with the tick's one query.
LATE = timedelta(milliseconds=500)
#: So many pools are read by a leader's first tick, and by each after it until all are: reading all of a large fleet
#: would take longer than its loans last, and its figures would be old before they were decided on.
BEGIN_AT_ONCE = 2_000


class Resident:
    """One shard's pools under one term. `pools` are as they were read last, `calm` those that may tick shortly."""

    def __init__(self, leadership: Leadership, shard: Shard) -> None:
        self._leadership = leadership
        self._shard = shard
        self._work = Work()
        self._pool_of: dict[int, int] = {}
        #: Agents whose last report bears an instant that was ahead of the tick's.
        self._ahead: set[int] = set()
        #: Pools that were not read yet; the next ones last.
        self._waiting: list[int] = []
        #: Agents of which a report is known.
        self._reporting: set[int] = set()
        self.now: datetime
        self.now_us = 0
        self.interactive_classes: frozenset[int] = frozenset()
        self.pools: dict[int, PoolReading] = {}
        self.calm: dict[int, Calm] = {}
        #: Pools that an agent reported for since the tick before.
        self.heard: set[int] = set()
        #: Pools that have to be decided in full, whatever their calm says: their rows or their backlog changed.
        self.changed: set[int] = set()

    def begin(self, now: datetime | None) -> None:
        """Reads everything, of a large fleet some pools only; `now` is for tests."""
        pool_changes.take(self._leadership, self._shard)
        self._waiting = telemetry.pool_ids(self._shard)[::-1]
        for first in range(0, len(self._waiting), BEGIN_AT_ONCE):
            # What is paid is shared out among all jobs.
            self._work.read(self._waiting[first : first + BEGIN_AT_ONCE])
            self._leadership.keep()
        self._set(now or telemetry.database_now())
        self._work.pay(self.now)
        self._read(self._next_ones())

    def refresh(self, now: datetime | None) -> None:
        """Reads what changed since the last call."""
        self.changed.clear()
        changed = pool_changes.take(self._leadership, self._shard)
        since = self.now - LATE
        reports = telemetry.news(self._shard, since)
        last_us = self.now_us
        self._set(now or telemetry.database_now())
        again = {pool_id for pool_id in changed.pools if self._shard.has(pool_id)}
        again |= self._hear(reports, to_us(since))
        again |= self._due(last_us)
        again.update(self._next_ones())
        jobs = (changed.jobs & self.pools.keys()) - again
        if again or jobs:
            self._work.read(again, jobs)
        # Money is shared out among all jobs; a pool that waits to be read is told of its own when that happens.
        repaid = self._work.pay(self.now) & self.pools.keys()
        if again:
            self._read(again)
        self._declare((jobs | repaid) - again)

    def open(self, pool_id: int) -> tuple[PoolReading, int | None]:
        """A pool that has to be decided in full, and when it ticked last, if only its calm remembers that."""
        reading, calm = self.pools[pool_id], self.calm.pop(pool_id, None)
        reading.jobs = work_of(reading, self.now_us)
        if calm is None:
            return reading, None
        if calm.loans:
            reading.slots = [calm.kept(slot) for slot in reading.slots]
        return reading, calm.ticked_us if calm.flex else None

    def close(self, pool_id: int, tick: PoolTick) -> None:
        """After that: its grants as they are once the tick is written, and its calm, if it is calm."""
        reading = self.pools[pool_id]
        if any(slot.grant != tick.grants.get(slot.slot_id, slot.grant) for slot in reading.slots):
            reading.slots = [
                slot
                if slot.grant == tick.grants.get(slot.slot_id, slot.grant)
                else slot.under(tick.grants[slot.slot_id])
                for slot in reading.slots
            ]
        calm = calm_of(reading, tick)
        if calm is not None:
            self.calm[pool_id] = calm

    def _next_ones(self) -> list[int]:
        """Some of the pools that were not read yet."""
        next_ones, self._waiting = self._waiting[-BEGIN_AT_ONCE:], self._waiting[:-BEGIN_AT_ONCE]
        return next_ones

    def _set(self, now: datetime) -> None:
        self.now, self.now_us = now, to_us(now)

    def _read(self, pool_ids: Collection[int]) -> None:
        """Takes these pools from their rows; flex slots without a grant get one first."""
        reading = telemetry.read(self._shard, self.now, only=pool_ids, work=self._work)
        missing = [
            slot.slot_id
            for pool in reading.pools.values()
            for slot in pool.slots
            if slot.is_flex and slot.grant is None
        ]
        if missing:
            applying.ensure_grants(self._leadership, missing)
            reading = telemetry.read(self._shard, self.now, only=pool_ids, work=self._work)
        self.interactive_classes = reading.interactive_classes
        for pool_id in pool_ids:
            before, calm = self.pools.pop(pool_id, None), self.calm.get(pool_id)
            self._reporting.difference_update(() if before is None else before.agents)
            if calm is not None:
                calm.loans = ()
        self.pools.update(reading.pools)
        self.changed.update(reading.pools)
        for pool_id, pool in reading.pools.items():
            for agent in pool.agents.values():
                self._pool_of[agent.agent_id] = pool_id
                self._note(agent)

    def _note(self, agent: AgentRow) -> None:
        if agent.report is not None:
            self._reporting.add(agent.agent_id)
            if agent.report[0] > self.now_us:
                self._ahead.add(agent.agent_id)

    def _hear(self, reports: Iterable[telemetry.Report], since_us: int) -> set[int]:
        """Takes reports in; the pools that have to be read, for a report came late or is gone."""
        self.heard.clear()
        again, seen = set(), set()
        ahead, self._ahead = self._ahead, set()
        pools, pool_of, heard, now_us = self.pools, self._pool_of, self.heard, self.now_us
        for said in reports:
            agent_id, stamped_us = said[0], said[1]
            pool_id = pool_of.get(agent_id, -1)
            reading = pools.get(pool_id)
            agent = None if reading is None else reading.agents.get(agent_id)
            if reading is None or agent is None:
                continue
            seen.add(agent_id)
            if said[1:4] != agent.report:
                if stamped_us < since_us:
                    again.add(pool_id)
                    continue
                agent = telemetry.told(agent, said, now_us)
                heard.add(pool_id)
            elif agent_id in ahead:
                agent = structs.replace(agent, reported_at_us=telemetry.believed_us(stamped_us, self.now_us))
            else:
                continue
            reading.agents[agent_id] = agent
            self._note(agent)
        again.update(self._pool_of[agent_id] for agent_id in self._reporting - seen)
        return again

    def _due(self, last_us: int) -> set[int]:
        """Pools of which the same rows read differently from now on, and those whose second of the minute it is."""
        seconds = range(last_us // SECOND_US + 1, self.now_us // SECOND_US + 1)
        turns = {second % MINUTE_S for second in seconds[-MINUTE_S:]}
        return {
            pool_id
            for pool_id, reading in self.pools.items()
            if self.now_us >= reading.valid_until_us or pool_id % MINUTE_S in turns
        }

    def _declare(self, pool_ids: Set[int]) -> None:
        """Takes other jobs in, and what agents hold of clients: where slack crosses a limit by it, calm ends."""
        now_us, pools = self.now_us, self.pools
        for pool_id in pool_ids:
            self._work.declare(pools[pool_id], now_us)
        direct = [pool_id for pool_id in self.heard if pool_id not in pool_ids and holds_direct(pools[pool_id])]
        for pool_id in (*pool_ids, *direct):
            reading = pools[pool_id]
            jobs = work_of(reading, now_us)
            if jobs != reading.jobs:
                reading.jobs = jobs
                calm = self.calm.get(pool_id)
                if calm is not None and not calm.work(reading, now_us):
                    self.changed.add(pool_id)
