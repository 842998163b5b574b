"""The batch work that pools' decisions see: declared jobs as far as money pays for them, and requests of clients.

What `jobs.queries.backlog` says of one pool, for many pools in few queries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection
from psycopg import Cursor

from controlplane.core.flex_policy import SECOND_US
from controlplane.core.flex_snapshot import BatchJob
from controlplane.core.period import from_us
from controlplane.fleet.models import Pool
from controlplane.flex.reading import PoolReading
from controlplane.jobs.direct_work import SILENT_S, as_jobs
from controlplane.jobs.models import Job
from controlplane.jobs.paid_work import item_bound_nanos, payable
from controlplane.jobs.queries import MISSED_GRACE, counted_by_deadline, demanded_gpu_us, priced

_FIELDS = (
    "id", "uuid", "pool_id", "state", "items", "items_completed", "items_parked", "items_cancelled",
    "gpu_us_done", "prompt_tokens", "expected_output_tokens", "tenant_id",
)  # fmt: skip
#: To read a UUID as one takes longer than all the rest of its row.
_COLUMNS = {"uuid": "uuid::text"}
_JOBS_SQL = f"""
SELECT {", ".join(_COLUMNS.get(name, name) for name in _FIELDS)}, (extract(epoch FROM deadline) * 1000000)::bigint,
    (admission ->> 'bound_nanos')::numeric::bigint
FROM jobs_job
WHERE state = 'running' AND pool_id = ANY(%s::int[]) ORDER BY id
"""  # noqa: S608 - column names are constants


_MISSED_GRACE_US = MISSED_GRACE // timedelta(microseconds=1)


@dataclass(slots=True)
class _Running:
    """A running job; its model's UUID and deadline are only right where it has a bound."""

    job: Job
    name: str
    uuid: str = ""
    deadline_us: int | None = None
    #: As it was declared last.
    said: BatchJob | None = None


class Work:
    """Running jobs by pool as they were read last, and what of them is paid for now."""

    def __init__(self) -> None:
        self._jobs: dict[int, list[_Running]] = defaultdict(list)
        #: By pool, the UUIDs of these.
        self._uuids: dict[int, frozenset[str]] = {}
        self._constants: dict[int, Pool] = {}
        self._paid: dict[int, int] = {}
        self._priced: list[Job] | None = None

    def read(self, pools: Collection[int], jobs: Collection[int] = ()) -> None:
        """Reads the running jobs of these pools again, and of `pools` the constants too that work is estimated by."""
        pool_ids = [*pools, *jobs]
        known = {one.job.id: one for pool_id in pool_ids for one in self._jobs.pop(pool_id, ())}
        came = False
        for row in _rows(pool_ids):
            one = known.pop(row[0], None)
            if one is None:
                one, came = _Running(Job(pk=row[0]), f"job {row[0]}"), True
            # Most jobs are as they were but for a count or two: setting all is cheaper than another object.
            one.job.__dict__.update(zip(_FIELDS, row, strict=False))
            one.uuid, one.deadline_us, bound_nanos = row[1], row[-2], row[-1]
            one.job.admission = None if bound_nanos is None else {"bound_nanos": bound_nanos}
            if bound_nanos is not None:
                one.job.uuid = UUID(one.uuid)
                one.job.deadline = None if one.deadline_us is None else from_us(one.deadline_us)
            self._jobs[row[2]].append(one)
        if came or known:
            self._uuids.clear()
        unknown = [pool_id for pool_id in jobs if pool_id not in self._constants]
        constants = Pool.objects.only("prefill_us_per_token", "decode_us_per_token")
        self._constants.update(constants.in_bulk([*pools, *unknown]))
        self._priced = None

    def pay(self, now: datetime) -> set[int]:
        """Asks anew what is paid for; the pools of jobs of which that changed. Jobs without a bound cost no query."""
        if self._priced is None:
            self._priced = [
                one.job
                for jobs in self._jobs.values()
                for one in jobs
                if one.job.admission and item_bound_nanos(one.job) > 0
            ]
        if not self._priced and not self._paid:
            return set()
        counted = counted_by_deadline(self._priced, now)
        before, self._paid = self._paid, payable([priced(job) for job in counted], now)
        return {job.pool_id for job in self._priced if before.get(job.pk) != self._paid.get(job.pk)}

    def declare(self, reading: PoolReading, now_us: int) -> None:
        """Fills in what is declared, and until when that holds; `work_of` adds what clients sent without a job."""
        pool_id = reading.pool.pool_id
        running = self._jobs.get(pool_id, ())
        jobs = []
        for one in running:
            deadline_us = one.deadline_us
            if deadline_us is not None:
                if now_us - deadline_us >= _MISSED_GRACE_US:
                    continue
                reading.valid_until_us = min(reading.valid_until_us, deadline_us + _MISSED_GRACE_US)
            paid = self._paid.get(one.job.id) if self._paid else None
            remaining_us = demanded_gpu_us(one.job, self._constants[pool_id], reading.batch_efficiency, paid)
            if remaining_us:
                said = one.said
                if said is None or said.deadline_us != deadline_us:
                    said = BatchJob(name=one.name, remaining_gpu_us=remaining_us, deadline_us=deadline_us)
                else:
                    said = said.with_left(remaining_us)
                one.said = said
                jobs.append(said)
        reading.declared = tuple(jobs)
        uuids = self._uuids.get(pool_id)
        if uuids is None:
            uuids = self._uuids[pool_id] = frozenset([one.uuid for one in running])
        reading.running = uuids


def _rows(pool_ids: Sequence[int]) -> list[tuple[Any, ...]]:
    """Running jobs of these pools by key: `_FIELDS`, the deadline in us, the bound of what all items are charged."""
    connection.ensure_connection()
    with connection.wrap_database_errors, Cursor(connection.connection) as cursor:
        return cursor.execute(_JOBS_SQL, (pool_ids,), binary=True).fetchall()


def work_of(reading: PoolReading, now_us: int) -> tuple[BatchJob, ...]:
    """Declared jobs, and the batch requests that no job counts."""
    if not says_direct(reading):
        return reading.declared
    direct = [*_direct(reading, now_us)]
    return (*reading.declared, *as_jobs(direct)) if direct else reading.declared


def holds_direct(reading: PoolReading) -> bool:
    """Whether agents hold batch requests of clients, or held some: that backlog changes as they report."""
    return len(reading.jobs) != len(reading.declared) or says_direct(reading)


def says_direct(reading: PoolReading) -> bool:
    """Whether any agent holds batch requests of clients."""
    for agent in reading.agents.values():
        if agent.classes:
            for row in agent.classes:
                if row.direct:
                    return True
    return False


def _direct(reading: PoolReading, now_us: int) -> Iterable[tuple[int, int]]:
    """(instant due, GPU time) of batch requests that no job counts, as the agents of a pool said last."""
    for agent in reading.agents.values():
        if not agent.counts or agent.reported_at_us is None or now_us - agent.reported_at_us >= SILENT_S * SECOND_US:
            continue
        for row in agent.classes or ():
            yield from ((due_us, gpu_us) for job, due_us, gpu_us in row.direct if job not in reading.running)
