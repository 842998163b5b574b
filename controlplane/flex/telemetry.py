"""What the controller sees of every pool at one tick: rows of the fleet, the agents' last reports, jobs and trips.

One clock: instants are the database's, and `now` is read after the rows, so that no report lies ahead of it. A report
that is ahead by more than clocks may differ is not known, as is everything that no agent said.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec
from django.db import connection

from controlplane.core.flex_policy import SECOND_US, FlexPolicy, SafeRate, SpilloverAction
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.histogram import Histogram
from controlplane.core.period import Calendar, load_zone, to_us, window_at
from controlplane.core.slot_states import BORROWED, Band, SlotState
from controlplane.fleet.models import Pool
from controlplane.flex.leadership import Shard
from controlplane.jobs.models import Job
from controlplane.jobs.queries import MISSED_GRACE, remaining_gpu_us

log = logging.getLogger(__name__)

#: Clocks of web processes may differ by this much from the database's; a report further ahead has no known age.
CLOCKS_DIFFER_US = SECOND_US


class ReportedSlot(msgspec.Struct, frozen=True):
    """What the flex band needs of `wire.report.SlotLive`."""

    slot_id: int
    flex: str
    fence: int
    running_batch: int
    running_batch_gpu_us: int
    stop_admit_us: int | None = None
    home_us: int | None = None


class ReportedClass(msgspec.Struct, frozen=True):
    """What the flex band needs of `wire.report.ClassLive`."""

    class_id: int
    admitted_per_s_60s: float
    wait_60s: list[tuple[int, int]]


_slots_decoder = msgspec.json.Decoder(list[ReportedSlot])
_classes_decoder = msgspec.json.Decoder(list[ReportedClass])


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


@dataclass(frozen=True, slots=True)
class Interval:
    """The slot's open interval; None as state is a slot in the fleet without one."""

    state: str | None
    owner_class: str
    started_at_us: int


@dataclass(frozen=True, slots=True)
class SlotRow:
    slot_id: int
    name: str
    band: Band
    agent_id: int | None
    #: None for a floor slot that was never flex.
    grant: Grant | None
    manual_recall: bool
    #: None when the slot is not part of the fleet now.
    interval: Interval | None

    @property
    def state(self) -> SlotState:
        """A floor slot's state is in its interval, a flex slot's in its grant."""
        if self.is_flex and self.grant is not None:
            return self.grant.state
        return SlotState.LOST if self.interval is not None and self.interval.state == SlotState.LOST else SlotState.HOME

    @property
    def is_flex(self) -> bool:
        """A borrowed slot is flex until it is home, whatever its band was changed to."""
        return self.band is Band.FLEX or (self.grant is not None and self.grant.state in BORROWED)


@dataclass(frozen=True, slots=True)
class AgentRow:
    agent_id: int
    uuid: str
    #: Reports of agents that are drained, retired or not yet approved do not count for the pool.
    counts: bool
    #: None when there is no report; never ahead of now.
    reported_at_us: int | None
    slots: Mapping[int, ReportedSlot]
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


@dataclass(slots=True)
class PoolReading:
    """Everything of one pool at one tick."""

    pool: PoolRow
    slots: list[SlotRow] = field(default_factory=list)
    agents: dict[int, AgentRow] = field(default_factory=dict)
    jobs: tuple[BatchJob, ...] = ()
    trips: list[TripRow] = field(default_factory=list)
    lends_this_week: int = 0
    #: Batch of this pool may be cancelled: retry_safe, on a backend that cancels.
    cancellable: bool = False

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
    waits, admitted = Histogram(), 0.0
    for agent in agents:
        for row in agent.classes or ():
            if row.class_id in interactive_classes:
                admitted += row.admitted_per_s_60s
                for index, count in row.wait_60s:
                    waits.counts[index] = waits.counts.get(index, 0) + count
    p95_us = waits.quantile_us(0.95)
    return InteractiveFigures(
        admitted_per_s=admitted if known else None,
        p95_queue_us=(0 if p95_us is None else p95_us) if known else None,
        p95_below_since_us=None,
        telemetry_at_us=None if None in reported else min(at for at in reported if at is not None),
    )


def snapshot_of(
    reading: PoolReading, grants: Mapping[int, Grant], now_us: int, interactive_classes: frozenset[int]
) -> FlexSnapshot:
    """The core's picture of a pool; `grants` by slot id are the stored ones after what was observed in this tick."""
    slots, manual, trips = [], set(), set()
    for row in reading.slots:
        grant = grants.get(row.slot_id)
        if row.agent_id is None and (grant is None or grant.state not in BORROWED):
            continue
        slots.append(_flex_slot(reading, row, grant))
        agent = reading.agents.get(row.agent_id) if row.agent_id is not None else None
        leaving = agent is None or not agent.counts or not reading.pool.lends or row.band is not Band.FLEX
        if row.manual_recall or (leaving and row.is_flex):
            manual.add(row.name)
        if grant is not None and any(_is_present(trip, grant) for trip in reading.trips if trip.slot_id == row.slot_id):
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
def _floor_slot(name: str, band: Band, state: SlotState) -> FlexSlot:
    return FlexSlot(name=name, band=band, state=state)


def _flex_slot(reading: PoolReading, row: SlotRow, grant: Grant | None) -> FlexSlot:
    if not row.is_flex or grant is None:
        return _floor_slot(row.name, row.band, row.state)
    said = reading.reported(row)
    return FlexSlot(
        name=row.name,
        band=Band.FLEX,
        state=grant.state,
        fence=grant.fence,
        lent_at_us=grant.lent_at_us,
        grant_expires_at_us=grant.expires_at_us,
        recalled_at_us=grant.recalled_at_us,
        cancelled_at_us=grant.cancelled_at_us,
        running_batch_gpu_us=max(0, said.running_batch_gpu_us) if said is not None else 0,
        cancellable=reading.cancellable,
    )


# Reading


def database_now() -> datetime:
    """The database's clock."""
    now: datetime = _rows("SELECT clock_timestamp()")[0][0]
    return now


def read(shard: Shard, now: datetime | None = None) -> Reading:
    """Every pool of the shard. `now` is for tests; without it the database's clock after the rows were read."""
    agents = _rows(_AGENTS_SQL)
    pools_and_slots = _rows(_SLOTS_SQL)
    trips = _rows("SELECT id, slot_id, fence FROM flex_trip WHERE handled_at IS NULL ORDER BY id")
    now = now or database_now()
    now_us = to_us(now)
    pools = {row[0]: PoolReading(pool=_pool(row, now)) for row in _rows(_POOLS_SQL) if shard.has(row[0])}
    by_slot = _add_slots(pools, pools_and_slots)
    for row in agents:
        if row[1] in pools:
            pools[row[1]].agents[row[0]] = _agent(row, now_us)
    for trip_id, slot_id, fence in trips:
        if slot_id in by_slot:
            by_slot[slot_id].trips.append(TripRow(trip_id, slot_id, fence))
    interactive = _add_classes(pools.values())
    _add_jobs(pools, now)
    _add_lends(pools, now)
    return Reading(now=now, pools=pools, interactive_classes=interactive)


def _rows(sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


_AGENTS_SQL = """
SELECT a.id, a.pool_id, a.uuid::text, a.state = 'active' AND a.drain_requested_at IS NULL,
       (extract(epoch FROM l.reported_at) * 1000000)::bigint,
       (l.figures -> 'slots')::text, (l.figures -> 'classes')::text
FROM fleet_agent a LEFT JOIN fleet_agentlive l ON l.agent_id = a.id
WHERE a.state <> 'retired'
"""

_GRANT_INSTANTS = ("lent_at", "renewed_at", "recalled_at", "cancelled_at", "expires_at")


def _epoch_us(column: str) -> str:
    """An instant as an integer: thousands of rows are read each second, and integers are read fastest."""
    return f"(extract(epoch FROM {column}) * 1000000)::bigint"


_SLOTS_SQL = f"""
SELECT s.pool_id, s.id, s.name, s.band, s.agent_id,
       g.slot_id IS NOT NULL, g.fence, g.action, g.reason, g.ttl_us, g.state,
       {", ".join(_epoch_us(f"g.{name}") for name in _GRANT_INSTANTS)}, coalesce(g.manual_recall, FALSE),
       {_epoch_us("t.started_at")}, i.state, i.owner_class, {_epoch_us("i.started_at")}, i.id IS NOT NULL
FROM fleet_slot s
LEFT JOIN flex_grant g ON g.slot_id = s.id
LEFT JOIN fleet_slottenure t ON t.slot_id = s.id AND t.ended_at IS NULL
LEFT JOIN fleet_slotinterval i ON i.slot_id = s.id AND i.ended_at IS NULL
WHERE s.agent_id IS NOT NULL OR t.id IS NOT NULL OR g.state <> 'home'
ORDER BY s.id
"""  # noqa: S608 - column names are constants

_POLICY_COLUMNS = (
    "lend_p95_ms", "lend_hold_s", "load_limit", "lend_slack", "return_slack", "return_hold_s", "min_hold_s",
    "drain_bound_s", "grant_ttl_s", "cooldown_s", "decision_interval_s", "max_lent", "spillover_per_week",
    "spillover_action",
)  # fmt: skip
_POOLS_SQL = f"""
SELECT id, slug, isolation, archived_at IS NOT NULL, interactive_class, batch_class, frozen_since, frozen_until,
       safe_rate, {", ".join(_POLICY_COLUMNS)}
FROM fleet_pool ORDER BY id
"""  # noqa: S608 - column names are constants


def _pool(row: tuple[Any, ...], now: datetime) -> PoolRow:
    pool_id, slug, isolation, archived, interactive_class, batch_class, frozen_since, frozen_until, rates = row[:9]
    policy = _policy(*row[9:])
    return PoolRow(
        pool_id=pool_id,
        slug=slug,
        lends=isolation == "reserved" and not archived and policy is not None,
        interactive_class=interactive_class,
        batch_class=batch_class,
        policy=policy or FlexPolicy(),
        safe_rate=safe_rate_of(rates),
        frozen=frozen_since is not None and (frozen_until is None or frozen_until > now),
        shared=isolation == "shared",
    )


@lru_cache(maxsize=4_096)
def _policy(*values: Any) -> FlexPolicy | None:
    """None when the stored numbers contradict each other: such a pool lends nothing, and the others go on."""
    given = dict(zip(_POLICY_COLUMNS, values, strict=True))
    try:
        return _read_policy(given)
    except ValueError as problem:
        log.error("a pool's flex policy is unsound, nothing is lent by it: %s", problem)
        return None


def _read_policy(given: Mapping[str, Any]) -> FlexPolicy:
    return FlexPolicy(
        lend_p95_us=given["lend_p95_ms"] * 1_000,
        load_limit=given["load_limit"],
        lend_slack=given["lend_slack"],
        return_slack=given["return_slack"],
        max_lent=given["max_lent"],
        spillover_per_week=given["spillover_per_week"],
        spillover_action=SpilloverAction(given["spillover_action"]),
        **{f"{name.removesuffix('_s')}_us": given[name] * SECOND_US for name in _POLICY_COLUMNS if name.endswith("_s")},
    )


def safe_rate_of(stored: Any) -> SafeRate | None:
    """The table of `Pool.safe_rate`; None when nothing was tested or it cannot be read: then nothing is lent."""
    return _safe_rate(stored if isinstance(stored, str) else msgspec.json.encode(stored).decode())


@lru_cache(maxsize=4_096)
def _safe_rate(text: str) -> SafeRate | None:
    raw = msgspec.json.decode(text) or {}
    try:
        entries = tuple((int(slots), float(rate)) for slots, rate in (raw.get("entries") or {}).items())
        until = raw.get("valid_until") or None
        until_us = None if until is None else to_us(_instant(str(until)))
        return SafeRate(entries=entries, valid_until_us=until_us) if entries else None
    except (ValueError, TypeError, AttributeError):
        return None


def _instant(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _us(at: datetime | None) -> int | None:
    return None if at is None else to_us(at)


def _add_slots(pools: dict[int, PoolReading], rows: Iterable[tuple[Any, ...]]) -> dict[int, PoolReading]:
    by_slot = {}
    for row in rows:
        reading = pools.get(row[0])
        if reading is not None:
            reading.slots.append(_slot(row))
            by_slot[row[1]] = reading
    return by_slot


@lru_cache(maxsize=32_768)
def _slot(row: tuple[Any, ...]) -> SlotRow:
    """Most slots are as they were a second ago, so most rows were read before."""
    grant = None
    if row[5]:
        fence, action, reason, ttl_us, state, lent, renewed, recalled, cancelled, expires = row[6:16]
        grant = Grant(
            fence=fence, action=action, reason=reason, ttl_us=ttl_us, state=SlotState(state), lent_at_us=lent,
            renewed_at_us=renewed, recalled_at_us=recalled, cancelled_at_us=cancelled, expires_at_us=expires,
        )  # fmt: skip
    tenure_from, state, owner, since, has_interval = row[17:22]
    interval = None
    if has_interval:
        interval = Interval(state, owner, since)
    elif tenure_from is not None:
        interval = Interval(None, "", tenure_from)
    return SlotRow(
        slot_id=row[1],
        name=row[2],
        band=Band(row[3]),
        agent_id=row[4],
        grant=grant,
        manual_recall=row[16],
        interval=interval,
    )


def _agent(row: tuple[Any, ...], now_us: int) -> AgentRow:
    agent_id, _, uuid, counts, reported_us, slots, classes = row
    if reported_us is not None and reported_us > now_us:
        reported_us = now_us if reported_us - now_us <= CLOCKS_DIFFER_US else None
    return AgentRow(
        agent_id=agent_id,
        uuid=uuid,
        counts=counts,
        reported_at_us=reported_us,
        slots={} if slots is None else {slot.slot_id: slot for slot in _slots_decoder.decode(slots)},
        classes=None if classes is None else _classes_decoder.decode(classes),
    )


def _add_classes(readings: Iterable[PoolReading]) -> frozenset[int]:
    rows = _rows("SELECT id, slug, kind, retry_safe AND cancellable FROM contracts_workloadclass")
    cancellable = {slug for _, slug, _, may in rows if may}
    for reading in readings:
        reading.cancellable = reading.pool.batch_class in cancellable
    return frozenset(class_id for class_id, _, kind, _ in rows if kind == "interactive")


def _add_jobs(pools: dict[int, PoolReading], now: datetime) -> None:
    """What `jobs.queries.backlog` says of one pool, for all pools in two queries."""
    rows = Job.objects.filter(state=Job.State.RUNNING, pool_id__in=list(pools)).order_by("pk").only(*_JOB_FIELDS)
    counted = [job for job in rows if job.deadline is None or now - job.deadline < MISSED_GRACE]
    constants = Pool.objects.only("prefill_us_per_token", "decode_us_per_token")
    known = constants.in_bulk({job.pool_id for job in counted})
    jobs: dict[int, list[BatchJob]] = defaultdict(list)
    for job in counted:
        remaining_us = remaining_gpu_us(job, known[job.pool_id])
        if remaining_us:
            name = f"job {job.pk}"
            jobs[job.pool_id].append(BatchJob(name=name, remaining_gpu_us=remaining_us, deadline_us=_us(job.deadline)))
    for pool_id, found in jobs.items():
        pools[pool_id].jobs = tuple(found)


_JOB_FIELDS = (
    "pool_id", "state", "deadline", "items", "items_completed", "items_failed", "gpu_us_done", "prompt_tokens",
    "expected_output_tokens",
)  # fmt: skip


def week_start(now: datetime) -> datetime:
    """Monday 00:00 of the present week in the billing zone."""
    zone = _rows("SELECT billing_zone FROM tenants_installation WHERE id = 1")
    return window_at(load_zone(zone[0][0] if zone else "UTC"), Calendar.WEEK, now).start


def _add_lends(pools: dict[int, PoolReading], now: datetime) -> None:
    """Loans begun since Monday 00:00 in the billing zone."""
    monday = week_start(now)
    counted = _rows(
        "SELECT pool_id, count(*) FROM flex_lend WHERE lent_at >= %s AND lent_at <= %s GROUP BY pool_id", (monday, now)
    )
    lends: dict[int, int] = defaultdict(int, counted)
    for pool_id, reading in pools.items():
        reading.lends_this_week = lends[pool_id]
