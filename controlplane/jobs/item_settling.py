"""Results come back: each item gets exactly one, in the transaction that stores the usage of the report it came with.

The order of locks is items by (day, job, line), then holders, then jobs; whoever loses a race over an item is refused
and its usage becomes repeated work.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from psycopg import Cursor

from controlplane.core.batch_items import ItemState, Judged, Refused, Reported, StoredItem, judge
from controlplane.wire.report import ItemDone

REASON_MOST = 400
NO_RESPONSE = b"null"


@dataclass(frozen=True, slots=True)
class Brought:
    """A result with who brought it: an agent of `pool_id`."""

    agent_id: int
    pool_id: int
    done: ItemDone


@dataclass
class JobChange:
    """What a transaction of results adds to one job."""

    completed: int = 0
    parked: int = 0
    cancelled: int = 0
    failed: int = 0


@dataclass
class Settled:
    """`charged` are the ids of requests whose usage is charged; every other record of a job with items is not."""

    charged: set[str] = field(default_factory=set)
    jobs: dict[int, JobChange] = field(default_factory=lambda: defaultdict(JobChange))
    refused: dict[Refused, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(frozen=True, slots=True)
class _JobFacts:
    pool_id: int
    day: date
    running: bool


def settle(cursor: Cursor[Any], brought: Sequence[Brought], now: datetime) -> Settled:
    """Takes the results of a group of reports: states, results and what is charged. Call it before records are stored.

    The counts of the jobs are left to `ingest.note_progress`, which locks jobs last.
    """
    settled = Settled()
    if not brought:
        return settled
    facts = _facts(cursor, {row.done.job_id for row in brought})
    by_day: dict[date, list[Brought]] = defaultdict(list)
    for row in brought:
        job = facts.get(row.done.job_id)
        if job is None or job.pool_id != row.pool_id:
            settled.refused[Refused.UNKNOWN_ITEM] += 1
        else:
            by_day[job.day].append(row)
    for day in sorted(by_day):
        _settle_day(cursor, day, by_day[day], facts, settled, now)
    return settled


def _facts(cursor: Cursor[Any], job_ids: Iterable[int]) -> Mapping[int, _JobFacts]:
    rows = cursor.execute(
        "SELECT id, pool_id, day, state = 'running' FROM jobs_job WHERE id = ANY(%s) AND has_items", (list(job_ids),)
    ).fetchall()
    return {row[0]: _JobFacts(*row[1:]) for row in rows}


_Key = tuple[int, int]
_LOCK_SQL = """
SELECT i.job_id, i.line, i.state, i.attempt, i.failures, i.fence
FROM jobs_item i JOIN unnest(%(jobs)s::bigint[], %(lines)s::int[]) AS r (job_id, line)
  ON i.job_id = r.job_id AND i.line = r.line
WHERE i.day = %(day)s ORDER BY i.job_id, i.line FOR UPDATE OF i
"""


def _settle_day(
    cursor: Cursor[Any],
    day: date,
    rows: Sequence[Brought],
    facts: Mapping[int, _JobFacts],
    settled: Settled,
    now: datetime,
) -> None:
    keys = sorted({(row.done.job_id, row.done.line) for row in rows})
    cursor.execute(_LOCK_SQL, {"day": day, "jobs": [key[0] for key in keys], "lines": [key[1] for key in keys]})
    items = {
        (job, line): StoredItem(ItemState(state), attempt, failures, fence, cancelled=not facts[job].running)
        for job, line, state, attempt, failures, fence in cursor.fetchall()
    }
    changed: dict[_Key, tuple[Judged, str]] = {}
    results: dict[_Key, Brought] = {}
    for row in rows:
        key = (row.done.job_id, row.done.line)
        item = items.get(key)
        if item is None:
            settled.refused[Refused.UNKNOWN_ITEM] += 1
            continue
        judged = judge(item, Reported(row.done.fence, row.done.outcome, row.done.status))
        if judged.refused is not None:
            settled.refused[judged.refused] += 1
            continue
        items[key] = StoredItem(judged.state, judged.attempt, judged.failures, item.fence, item.cancelled)
        changed[key] = (judged, "" if judged.state is ItemState.DONE else _reason(row.done))
        if judged.result:
            results[key] = row
        if judged.charged:
            settled.charged.add(row.done.request_id)
        _count(settled.jobs[key[0]], judged, item)
    _write_items(cursor, day, changed)
    _write_results(cursor, day, results, now)


def _reason(done: ItemDone) -> str:
    return done.reason.replace("\x00", "")[:REASON_MOST]


def _count(change: JobChange, judged: Judged, before: StoredItem) -> None:
    change.completed += judged.state is ItemState.DONE
    change.parked += judged.state is ItemState.PARKED
    change.cancelled += judged.state is ItemState.CANCELLED
    change.failed += judged.failures > before.failures


_ITEMS_SQL = """
UPDATE jobs_item i SET state = r.state, attempt = r.attempt, failures = r.failures, reason = r.reason,
    agent_id = NULL, epoch = NULL, lease_expires = NULL
FROM unnest(%(jobs)s::bigint[], %(lines)s::int[], %(states)s::smallint[], %(attempts)s::smallint[],
            %(failures)s::smallint[], %(reasons)s::text[]) AS r (job_id, line, state, attempt, failures, reason)
WHERE i.day = %(day)s AND i.job_id = r.job_id AND i.line = r.line
"""


def _write_items(cursor: Cursor[Any], day: date, changed: Mapping[_Key, tuple[Judged, str]]) -> None:
    if not changed:
        return
    judged = [judged for judged, _ in changed.values()]
    cursor.execute(
        _ITEMS_SQL,
        {
            "day": day,
            "jobs": [job for job, _ in changed],
            "lines": [line for _, line in changed],
            "states": [int(each.state) for each in judged],
            "attempts": [each.attempt for each in judged],
            "failures": [each.failures for each in judged],
            "reasons": [reason for _, reason in changed.values()],
        },
    )


_RESULT_SQL = (
    "COPY jobs_itemresult (day, job_id, line, agent_id, finished_at, request_id, attempt, outcome, status, response)"
    " FROM STDIN (FORMAT BINARY)"
)
_RESULT_TYPES = ["date", "int8", "int4", "int4", "timestamptz", "uuid", "int2", "int2", "int2", "bytea"]


def _write_results(cursor: Cursor[Any], day: date, results: Mapping[_Key, Brought], now: datetime) -> None:
    if not results:
        return
    with cursor.copy(_RESULT_SQL) as copy:
        copy.set_types(_RESULT_TYPES)
        for (job, line), row in results.items():
            done = row.done
            copy.write_row(
                (
                    day, job, line, row.agent_id, now, _uuid(done.request_id), done.attempt, done.outcome, done.status,
                    bytes(done.response) or NO_RESPONSE,
                )
            )  # fmt: skip


def _uuid(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        return uuid.UUID(int=0)
