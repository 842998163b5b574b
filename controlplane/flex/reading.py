"""One pool at one tick, as rows say it, and the core's picture of it. No input, no output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache

import msgspec

from controlplane.core.flex_policy import SECOND_US, FlexPolicy, SafeRate
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.histogram import quantile_index, upper_edge_us
from controlplane.core.period import to_us
from controlplane.core.slot_states import BORROWED, Band, SlotState
from controlplane.fleet.band_report import NO_WAITS, NOT_PACKED, ReportedClass, ReportedSlot

#: Pools take turns over a minute, so that what each does once a minute is spread over its ticks.
MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class Grant:
    """The stored word on one flex slot; instants in microseconds."""

    fence: int = 0
    action: str = "recall"
    reason: str = ""
    ttl_us: int = 0
    state: SlotState = SlotState.HOME
    lent_at_us: int | None = None
    renewed_at_us: int | None = None
    recalled_at_us: int | None = None
    cancelled_at_us: int | None = None
    expires_at_us: int | None = None

    def renewed(self, at_us: int, expires_at_us: int | None, ttl_us: int) -> Grant:
        """The same loan for another TTL."""
        return Grant(
            self.fence, self.action, self.reason, ttl_us, self.state, self.lent_at_us, at_us, self.recalled_at_us,
            self.cancelled_at_us, expires_at_us,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """The slot's open interval; None as state is a slot in the fleet without one."""

    state: str | None
    owner_class: str
    started_at_us: int


@dataclass(frozen=True)
class SlotRow:
    slot_id: int
    name: str
    band: Band
    #: Whether the pool's revision has it: agents do not know a slot that was saved and not pushed.
    in_force: bool
    agent_id: int | None
    #: None for a floor slot that was never flex.
    grant: Grant | None
    manual_recall: bool
    #: None when the slot is not part of the fleet now.
    interval: Interval | None

    def under(self, grant: Grant | None) -> SlotRow:
        """The slot under another grant."""
        row = object.__new__(SlotRow)
        row.__dict__.update({name: value for name, value in self.__dict__.items() if name not in _FOLLOWS_GRANT})
        row.__dict__["grant"] = grant
        return row

    # Both are asked for a dozen times a tick.
    @cached_property
    def state(self) -> SlotState:
        """A floor slot's state is in its interval, a flex slot's in its grant."""
        if self.is_flex and self.grant is not None:
            return self.grant.state
        return SlotState.LOST if self.interval is not None and self.interval.state == SlotState.LOST else SlotState.HOME

    @cached_property
    def is_flex(self) -> bool:
        """A borrowed slot is flex until it is home, whatever its band was changed to."""
        return (self.band is Band.FLEX and self.in_force) or (self.grant is not None and self.grant.state in BORROWED)


_FOLLOWS_GRANT = frozenset({"state", "is_flex"})


@dataclass(frozen=True, slots=True)
class Terms:
    """What a pool's slots run under. `policy` is None when its numbers contradict each other."""

    isolation: str
    interactive_class: str
    batch_class: str
    policy: FlexPolicy | None
    safe_rate: SafeRate | None
    #: By slot id; None in a pool without a revision, where saved bands hold.
    bands: Mapping[int, Band] | None
    #: Whether the batch class may be cancelled; None as above.
    cancellable: bool | None

    def has(self, slot_id: int) -> bool:
        return self.bands is None or slot_id in self.bands

    def band_of(self, slot_id: int, saved: str) -> Band:
        """The band in force; the saved one where no revision names the slot."""
        band = None if self.bands is None else self.bands.get(slot_id)
        return Band(saved) if band is None else band


class AgentRow(msgspec.Struct, frozen=True, gc=False):
    """An agent and its last report: one is made of each report."""

    agent_id: int
    uuid: str
    #: Reports of agents that are drained, retired or not yet approved do not count for the pool.
    counts: bool
    #: None when there is no report; never ahead of now.
    reported_at_us: int | None
    #: (instant as it is stored, by the clock of the web process that took it; epoch; number): names a report.
    report: tuple[int, int, int] | None
    slots: Mapping[int, ReportedSlot]
    #: Batch work in us, by slot id, of the slots that run any.
    work: Mapping[int, int]
    #: None when the report had no figures.
    classes: Sequence[ReportedClass] | None


@dataclass(frozen=True, slots=True)
class TripRow:
    trip_id: int
    slot_id: int
    fence: int


@dataclass(frozen=True, slots=True)
class PoolRow:
    pool_id: int
    slug: str
    lends: bool
    """Reserved and in use: new loans are possible at all."""
    interactive_class: str
    batch_class: str
    policy: FlexPolicy
    safe_rate: SafeRate | None
    frozen: bool
    shared: bool

    @property
    def turn_us(self) -> int:
        """How far past each full minute this pool is read again, and its minute's sample and decision are written."""
        return self.pool_id % MINUTE_S * SECOND_US


@dataclass(slots=True)
class PoolReading:
    """Everything of one pool at one tick."""

    pool: PoolRow
    terms: Terms
    slots: list[SlotRow] = field(default_factory=list)
    agents: dict[int, AgentRow] = field(default_factory=dict)
    jobs: tuple[BatchJob, ...] = ()
    #: Of `jobs` those that were declared; the rest are requests of clients, as agents tell.
    declared: tuple[BatchJob, ...] = ()
    #: UUIDs of the pool's running jobs.
    running: frozenset[str] = frozenset()
    trips: list[TripRow] = field(default_factory=list)
    lends_this_week: int = 0
    #: Batch of this pool may be cancelled: retry_safe, on a backend that cancels.
    cancellable: bool = False
    #: What a slot is worth while it serves batch; 1 unless it was measured.
    batch_efficiency: float = 1.0
    #: From this instant on the same rows may read differently: a freeze ends, a week begins, a job leaves the backlog.
    valid_until_us: int = 0

    @property
    def flex(self) -> bool:
        return any(slot.is_flex for slot in self.slots)

    def reported(self, slot: SlotRow) -> ReportedSlot | None:
        agent = self.agents.get(slot.agent_id) if slot.agent_id is not None else None
        return None if agent is None else agent.slots.get(slot.slot_id)


@dataclass(frozen=True, slots=True)
class Reading:
    now: datetime
    pools: dict[int, PoolReading]
    interactive_classes: frozenset[int]

    @property
    def now_us(self) -> int:
        return to_us(self.now)


# What a pool's figures are


def interactive_figures(reading: PoolReading, interactive_classes: frozenset[int]) -> InteractiveFigures:
    """Merged over the pool's agents: p95 of 60 s of waits, admitted rate, and the age of the oldest report.

    With nothing waiting and every agent heard, p95 is 0; with an agent that said nothing it is not known.
    """
    agents = [agent for agent in reading.agents.values() if agent.counts]
    if not agents:
        return InteractiveFigures(admitted_per_s=None, p95_queue_us=None, p95_below_since_us=None, telemetry_at_us=None)
    reported = [agent.reported_at_us for agent in agents]
    known = all(agent.classes is not None and agent.reported_at_us is not None for agent in agents)
    admitted, p95_us = merged(agents, interactive_classes) if known else (None, None)
    return InteractiveFigures(
        admitted_per_s=admitted,
        p95_queue_us=p95_us,
        p95_below_since_us=None,
        telemetry_at_us=None if None in reported else min(at for at in reported if at is not None),
    )


def merged(agents: Iterable[AgentRow], interactive_classes: frozenset[int]) -> tuple[float, int]:
    """(admitted requests a second, p95 of the waits in us) of agents that all said their figures."""
    rows = []
    for agent in agents:
        for row in agent.classes or ():
            if row.class_id in interactive_classes:
                rows.append(row)
    # Most pools' waits are those of one agent and one class: nothing to add up.
    if len(rows) == 1 and rows[0].p95_bucket != NOT_PACKED:
        p95: int | None = rows[0].p95_bucket
    else:
        counts: dict[int, int] = {}
        for row in rows:
            for index, count in row.wait_60s.items():
                counts[index] = counts.get(index, 0) + count
        p95 = quantile_index(counts, 0.95)
    admitted = 0.0
    for row in rows:
        admitted += row.admitted_per_s_60s
    return admitted, 0 if p95 is None or p95 == NO_WAITS else _edge_us(p95)


_edge_us = lru_cache(maxsize=1_024)(upper_edge_us)


def snapshot_of(
    reading: PoolReading, grants: Mapping[int, Grant], now_us: int, interactive_classes: frozenset[int]
) -> FlexSnapshot:
    """The core's picture of a pool; `grants` by slot id are the stored ones after what was observed in this tick."""
    slots, manual, trips = [], set(), set()
    agents, lends, told = reading.agents, reading.pool.lends, reading.trips
    for row in reading.slots:
        grant, agent_id = grants.get(row.slot_id), row.agent_id
        if (agent_id is None or not row.in_force) and (grant is None or grant.state not in BORROWED):
            continue
        slots.append(_flex_slot(reading, row, grant))
        if row.is_flex and not row.manual_recall:
            agent = agents.get(agent_id) if agent_id is not None else None
            stays = row.band is Band.FLEX and row.in_force and lends
            if agent is None or not agent.counts or not stays:
                manual.add(row.name)
        elif row.manual_recall:
            manual.add(row.name)
        if told and grant is not None and any(_is_present(trip, grant) for trip in told if trip.slot_id == row.slot_id):
            trips.add(row.name)
    return FlexSnapshot(
        now_us=now_us,
        policy=reading.pool.policy,
        safe_rate=reading.pool.safe_rate,
        slots=tuple(slots),
        interactive=interactive_figures(reading, interactive_classes),
        jobs=reading.jobs,
        lends_this_week=reading.lends_this_week,
        frozen=reading.pool.frozen,
        manual_recalls=frozenset(manual),
        trips=frozenset(trips),
    )


def _is_present(trip: TripRow, grant: Grant) -> bool:
    """Of the loan that runs, or of the one whose recall crossed it; an older one was answered by its return."""
    if grant.state is SlotState.LENT:
        return trip.fence == grant.fence
    return grant.state in BORROWED and trip.fence == grant.fence - 1


@lru_cache(maxsize=32_768)
def _floor_slot(name: str, band: Band, state: SlotState, efficiency: float) -> FlexSlot:
    return FlexSlot(name=name, band=band, state=state, batch_efficiency=efficiency)


def _flex_slot(reading: PoolReading, row: SlotRow, grant: Grant | None) -> FlexSlot:
    if not row.is_flex or grant is None:
        return _floor_slot(row.name, row.band, row.state, reading.batch_efficiency)
    said = reading.reported(row)
    return FlexSlot(
        name=row.name,
        band=Band.FLEX,
        state=grant.state,
        batch_efficiency=reading.batch_efficiency,
        fence=grant.fence,
        lent_at_us=grant.lent_at_us,
        grant_expires_at_us=grant.expires_at_us,
        recalled_at_us=grant.recalled_at_us,
        cancelled_at_us=grant.cancelled_at_us,
        running_batch_gpu_us=max(0, said.running_batch_gpu_us) if said is not None else 0,
        cancellable=reading.cancellable,
    )
