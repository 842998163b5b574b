"""What the controller sees of every pool at one tick: its policy in force, the agents' last reports, jobs and trips.

Bands, floors and flex policy are those of the pool's last fully sent revision, as its agents know them; what is saved
and not pushed changes nothing here. Which agent runs a slot, freezes and archiving act at once.

One clock: instants are the database's, and `now` is read after the rows, so that no report lies ahead of it. A report
that is ahead by more than clocks may differ is not known, as is everything that no agent said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.db import connection
from psycopg import Cursor

from controlplane.core.flex_policy import SECOND_US, FlexPolicy
from controlplane.core.period import Calendar, Window, load_zone, to_us, window_at
from controlplane.core.slot_states import Band, SlotState
from controlplane.fleet.band_report import PackedSlots, classes_of, slots_of, unpack
from controlplane.fleet.band_report import work_of as band_work_of
from controlplane.flex.leadership import Shard
from controlplane.flex.reading import (
    AgentRow,
    Grant,
    Interval,
    PoolReading,
    PoolRow,
    Reading,
    SlotRow,
    TripRow,
)
from controlplane.flex.terms import POLICY_FIELDS, saved_terms, terms_in_force
from controlplane.flex.work import Work, work_of
from controlplane.jobs.batch_capacity import believed

#: Clocks of web processes may differ by this much from the database's; a report further ahead has no known age.
CLOCKS_DIFFER_US = SECOND_US
FOR_EVER_US = 2**62


# Reading


def database_now() -> datetime:
    """The database's clock."""
    now: datetime = _rows("SELECT clock_timestamp()")[0][0]
    return now


def read(
    shard: Shard, now: datetime | None = None, *, only: Collection[int] | None = None, work: Work | None = None
) -> Reading:
    """Every pool of the shard, or `only` those of these ids. `now` is for tests; without it the database's clock after
    the rows were read.

    `work` is what is known already of the jobs of all pools; without it, those of the pools that are read.
    """
    asked = {"only": None if only is None else list(only)}
    agents = _rows(_AGENTS_SQL, asked)
    pools_and_slots = _rows(_SLOTS_SQL, asked)
    trips = _rows(_TRIPS_SQL, asked)
    now = now or database_now()
    now_us = to_us(now)
    pools = _read_pools(shard, now, asked)
    by_slot = _add_slots(pools, pools_and_slots)
    for row in agents:
        if row[1] in pools:
            pools[row[1]].agents[row[0]] = _agent(row, now_us)
    for trip_id, slot_id, fence in trips:
        if slot_id in by_slot:
            by_slot[slot_id].trips.append(TripRow(trip_id, slot_id, fence))
    interactive = _add_classes(pools.values())
    _add_efficiencies(pools, now)
    _add_work(pools, now, work)
    _add_lends(pools, now, asked)
    return Reading(now=now, pools=pools, interactive_classes=interactive)


Report = tuple[int, int, int, int, bytes | None, str | None, str | None]
"""(agent, instant in us, epoch, number, packed, slots, classes), the last two as JSON where there is nothing packed."""


def news(shard: Shard, since: datetime) -> list[Report]:
    """Every agent's last report; without figures where it bears an instant before this one."""
    connection.ensure_connection()
    # Packed bytes as they are: as text they would be written out as digits, and read from them.
    with connection.wrap_database_errors, Cursor(connection.connection) as cursor:
        asked = {"since": since, "parts": shard.parts, "part": shard.part}
        return cursor.execute(_NEWS_SQL, asked, binary=True).fetchall()


def pool_ids(shard: Shard) -> list[int]:
    """Every pool of the shard, those with slots away from home first: their loans end unless they are renewed."""
    return [pool_id for (pool_id,) in _rows(_POOL_IDS_SQL) if shard.has(pool_id)]


def _rows(sql: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


_POOL_IDS_SQL = """
SELECT p.id FROM fleet_pool p
LEFT JOIN (
    SELECT DISTINCT s.pool_id FROM flex_grant g JOIN fleet_slot s ON s.id = g.slot_id WHERE g.state <> 'home'
) away ON away.pool_id = p.id
ORDER BY away.pool_id IS NULL, p.id
"""

_PACKED = "(l.band IS NOT NULL AND (l.band_epoch, l.band_seq) IS NOT DISTINCT FROM (l.epoch, l.seq))"

_AGENTS_SQL = f"""
SELECT a.id, a.pool_id, a.uuid::text, a.state = 'active' AND a.drain_requested_at IS NULL,
       (extract(epoch FROM l.reported_at) * 1000000)::bigint, l.epoch, l.seq,
       CASE WHEN {_PACKED} THEN l.band END,
       CASE WHEN NOT {_PACKED} THEN (l.figures -> 'slots')::text END,
       CASE WHEN NOT {_PACKED} THEN (l.figures -> 'classes')::text END
FROM fleet_agent a LEFT JOIN fleet_agentlive l ON l.agent_id = a.id
WHERE a.state <> 'retired' AND (%(only)s::int[] IS NULL OR a.pool_id = ANY(%(only)s::int[]))
ORDER BY a.id
"""  # noqa: S608 - the text is constant

_NEWS_SQL = f"""
SELECT l.agent_id, (extract(epoch FROM l.reported_at) * 1000000)::bigint, l.epoch, l.seq,
       CASE WHEN l.reported_at >= %(since)s AND {_PACKED} THEN l.band END,
       CASE WHEN l.reported_at >= %(since)s AND NOT {_PACKED} THEN (l.figures -> 'slots')::text END,
       CASE WHEN l.reported_at >= %(since)s AND NOT {_PACKED} THEN (l.figures -> 'classes')::text END
FROM fleet_agentlive l JOIN fleet_agent a ON a.id = l.agent_id
WHERE a.state <> 'retired' AND a.pool_id %% %(parts)s = %(part)s
"""  # noqa: S608 - the text is constant

_TRIPS_SQL = """
SELECT t.id, t.slot_id, t.fence
FROM flex_trip t JOIN fleet_slot s ON s.id = t.slot_id
WHERE t.handled_at IS NULL AND (%(only)s::int[] IS NULL OR s.pool_id = ANY(%(only)s::int[]))
ORDER BY t.id
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
LEFT JOIN LATERAL (
    SELECT id, started_at FROM fleet_slottenure WHERE slot_id = s.id AND ended_at IS NULL LIMIT 1
) t ON TRUE
LEFT JOIN LATERAL (
    SELECT id, state, owner_class, started_at FROM fleet_slotinterval WHERE slot_id = s.id AND ended_at IS NULL LIMIT 1
) i ON TRUE
WHERE (s.agent_id IS NOT NULL OR t.id IS NOT NULL OR g.state <> 'home')
  AND (%(only)s::int[] IS NULL OR s.pool_id = ANY(%(only)s::int[]))
ORDER BY s.id
"""  # noqa: S608 - column names are constants

_POOLS_SQL = f"""
SELECT id, slug, archived_at IS NOT NULL, frozen_since, frozen_until,
       isolation, interactive_class, batch_class, safe_rate, {", ".join(POLICY_FIELDS)}
FROM fleet_pool WHERE %(only)s::int[] IS NULL OR id = ANY(%(only)s::int[]) ORDER BY id
"""  # noqa: S608 - column names are constants


def _read_pools(shard: Shard, now: datetime, asked: dict[str, Any]) -> dict[int, PoolReading]:
    rows = [row for row in _rows(_POOLS_SQL, asked) if shard.has(row[0])]
    in_force = terms_in_force([row[0] for row in rows])
    readings = {}
    for pool_id, slug, archived, frozen_since, frozen_until, *saved in rows:
        terms = in_force.get(pool_id) or saved_terms(tuple(saved))
        pool = PoolRow(
            pool_id=pool_id,
            slug=slug,
            lends=terms.isolation == "reserved" and not archived and terms.policy is not None,
            interactive_class=terms.interactive_class,
            batch_class=terms.batch_class,
            policy=terms.policy or FlexPolicy(),
            safe_rate=terms.safe_rate,
            frozen=frozen_since is not None and (frozen_until is None or frozen_until > now),
            shared=terms.isolation == "shared",
        )
        ends_us = to_us(frozen_until) if pool.frozen and frozen_until is not None else FOR_EVER_US
        readings[pool_id] = PoolReading(pool=pool, terms=terms, valid_until_us=ends_us)
    return readings


def _add_slots(pools: dict[int, PoolReading], rows: Iterable[tuple[Any, ...]]) -> dict[int, PoolReading]:
    by_slot = {}
    for row in rows:
        reading = pools.get(row[0])
        if reading is not None:
            reading.slots.append(_slot(row, reading.terms.band_of(row[1], row[3]), reading.terms.has(row[1])))
            by_slot[row[1]] = reading
    return by_slot


@lru_cache(maxsize=32_768)
def _slot(row: tuple[Any, ...], band: Band, in_force: bool) -> SlotRow:
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
        band=band,
        in_force=in_force,
        agent_id=row[4],
        grant=grant,
        manual_recall=row[16],
        interval=interval,
    )


def _agent(row: tuple[Any, ...], now_us: int) -> AgentRow:
    agent_id, _, uuid, counts, stamped_us, epoch, seq, packed, slots, classes = row
    report = None if stamped_us is None else (stamped_us, epoch, seq)
    return _row(agent_id, uuid, counts, report, packed, slots, classes, now_us)


def told(agent: AgentRow, said: Report, now_us: int) -> AgentRow:
    """An agent after another report."""
    return _row(agent.agent_id, agent.uuid, agent.counts, said[1:4], *said[4:], now_us)


def _row(
    agent_id: int,
    uuid: str,
    counts: bool,
    report: tuple[int, int, int] | None,
    packed: bytes | None,
    slots: str | None,
    classes: str | None,
    now_us: int,
) -> AgentRow:
    reported_at_us = None if report is None else believed_us(report[0], now_us)
    if packed is not None:
        said = unpack(packed)
        return AgentRow(
            agent_id, uuid, counts, reported_at_us, report, PackedSlots(said.slots), said.work, said.classes
        )
    by_id = slots_of(slots)
    return AgentRow(
        agent_id, uuid, counts, reported_at_us, report, by_id, band_work_of(by_id.values()), classes_of(classes)
    )


def believed_us(stamped_us: int | None, now_us: int) -> int | None:
    """The instant of a report as far as it can be believed: never ahead of now."""
    if stamped_us is None or stamped_us <= now_us:
        return stamped_us
    return now_us if stamped_us - now_us <= CLOCKS_DIFFER_US else None


def _add_classes(readings: Iterable[PoolReading]) -> frozenset[int]:
    rows = _rows("SELECT id, slug, kind, retry_safe AND cancellable FROM contracts_workloadclass")
    cancellable = {slug for _, slug, _, may in rows if may}
    for reading in readings:
        said = reading.terms.cancellable
        reading.cancellable = reading.pool.batch_class in cancellable if said is None else said
    return frozenset(class_id for class_id, _, kind, _ in rows if kind == "interactive")


def _add_efficiencies(pools: dict[int, PoolReading], now: datetime) -> None:
    """What a batch slot is worth, where that was measured lately."""
    for pool_id, (efficiency, until) in believed(pools, now).items():
        pools[pool_id].batch_efficiency = efficiency
        pools[pool_id].valid_until_us = min(pools[pool_id].valid_until_us, to_us(until))


def _add_work(pools: dict[int, PoolReading], now: datetime, work: Work | None) -> None:
    """Batch requests without a job are what the agents, read before, say of them."""
    if work is None:
        work = Work()
        work.read(pools.keys())
        work.pay(now)
    for reading in pools.values():
        work.declare(reading, to_us(now))
        reading.jobs = work_of(reading, to_us(now))


def week_start(now: datetime) -> datetime:
    """Monday 00:00 of the present week in the billing zone."""
    return _week(now).start


def _week(now: datetime) -> Window:
    zone = _rows("SELECT billing_zone FROM tenants_installation WHERE id = 1")
    return window_at(load_zone(zone[0][0] if zone else "UTC"), Calendar.WEEK, now)


_LENDS_SQL = """
SELECT pool_id, count(*) FROM flex_lend
WHERE lent_at >= %(since)s AND lent_at <= %(until)s
  AND (%(only)s::int[] IS NULL OR pool_id = ANY(%(only)s::int[]))
GROUP BY pool_id
"""


def _add_lends(pools: dict[int, PoolReading], now: datetime, asked: dict[str, Any]) -> None:
    """Loans begun since Monday 00:00 in the billing zone."""
    week = _week(now)
    lends: dict[int, int] = defaultdict(int, _rows(_LENDS_SQL, asked | {"since": week.start, "until": now}))
    for pool_id, reading in pools.items():
        reading.lends_this_week = lends[pool_id]
        reading.valid_until_us = min(reading.valid_until_us, to_us(week.end))
