"""What the controller sees of every pool at one tick: its policy in force, the agents' last reports, jobs and trips.

Bands, floors and flex policy are those of the pool's last fully sent revision, as its agents know them; what is saved
and not pushed changes nothing here. Which agent runs a slot, freezes and archiving act at once.

One clock: instants are the database's, and `now` is read after the rows, so that no report lies ahead of it. A report
that is ahead by more than clocks may differ is not known, as is everything that no agent said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec
from django.db import connection

from controlplane.core.flex_policy import SECOND_US, FlexPolicy
from controlplane.core.flex_snapshot import BatchJob
from controlplane.core.period import Calendar, load_zone, to_us, window_at
from controlplane.core.slot_states import Band, SlotState
from controlplane.fleet.models import Pool
from controlplane.flex.leadership import Shard
from controlplane.flex.reading import (
    AgentRow,
    Grant,
    Interval,
    PoolReading,
    PoolRow,
    Reading,
    ReportedClass,
    ReportedSlot,
    SlotRow,
    TripRow,
)
from controlplane.flex.terms import POLICY_FIELDS, saved_terms, terms_in_force
from controlplane.jobs.batch_capacity import efficiencies
from controlplane.jobs.direct_work import SILENT_S, as_jobs
from controlplane.jobs.models import Job
from controlplane.jobs.paid_work import payable
from controlplane.jobs.queries import counted_by_deadline, demanded_gpu_us, priced

#: Clocks of web processes may differ by this much from the database's; a report further ahead has no known age.
CLOCKS_DIFFER_US = SECOND_US


_slots_decoder = msgspec.json.Decoder(list[ReportedSlot])
_classes_decoder = msgspec.json.Decoder(list[ReportedClass])


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
    pools = _read_pools(shard, now)
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

_POOLS_SQL = f"""
SELECT id, slug, archived_at IS NOT NULL, frozen_since, frozen_until,
       isolation, interactive_class, batch_class, safe_rate, {", ".join(POLICY_FIELDS)}
FROM fleet_pool ORDER BY id
"""  # noqa: S608 - column names are constants


def _read_pools(shard: Shard, now: datetime) -> dict[int, PoolReading]:
    rows = [row for row in _rows(_POOLS_SQL) if shard.has(row[0])]
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
        readings[pool_id] = PoolReading(pool=pool, terms=terms)
    return readings


def _us(at: datetime | None) -> int | None:
    return None if at is None else to_us(at)


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
        said = reading.terms.cancellable
        reading.cancellable = reading.pool.batch_class in cancellable if said is None else said
    return frozenset(class_id for class_id, _, kind, _ in rows if kind == "interactive")


def _add_jobs(pools: dict[int, PoolReading], now: datetime) -> None:
    """What `jobs.queries.backlog` says of one pool, for all pools in few queries, and what a batch slot is worth.

    Batch requests without a job are what the agents, read before, say of them.
    """
    rows = Job.objects.filter(state=Job.State.RUNNING, pool_id__in=list(pools)).only(*_JOB_FIELDS)
    running = {(job.pool_id, str(job.uuid)) for job in rows}
    counted = counted_by_deadline(rows, now)
    worth = efficiencies(pools, now)
    for pool_id, efficiency in worth.items():
        pools[pool_id].batch_efficiency = efficiency
    constants = Pool.objects.only("prefill_us_per_token", "decode_us_per_token")
    known = constants.in_bulk({job.pool_id for job in counted})
    paid = payable([priced(job) for job in counted], now)
    jobs: dict[int, list[BatchJob]] = defaultdict(list)
    for job in sorted(counted, key=lambda job: job.pk):
        remaining_us = demanded_gpu_us(job, known[job.pool_id], worth.get(job.pool_id, 1.0), paid.get(job.pk))
        if remaining_us:
            name = f"job {job.pk}"
            jobs[job.pool_id].append(BatchJob(name=name, remaining_gpu_us=remaining_us, deadline_us=_us(job.deadline)))
    for pool_id, reading in pools.items():
        reading.jobs = (*jobs[pool_id], *as_jobs(_direct_work(pool_id, reading, running, to_us(now))))


def _direct_work(
    pool_id: int, reading: PoolReading, running: Container[tuple[int, str]], now_us: int
) -> Iterable[tuple[int, int]]:
    """(instant due, GPU time) of batch requests that no job counts, as the agents of a pool said last."""
    for agent in reading.agents.values():
        if not agent.counts or agent.reported_at_us is None or now_us - agent.reported_at_us >= SILENT_S * SECOND_US:
            continue
        for row in agent.classes or ():
            yield from ((due_us, gpu_us) for job, due_us, gpu_us in row.direct if (pool_id, job) not in running)


_JOB_FIELDS = (
    "uuid", "pool_id", "state", "deadline", "items", "items_completed", "items_parked", "items_cancelled",
    "gpu_us_done", "prompt_tokens", "expected_output_tokens", "tenant_id", "admission",
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
