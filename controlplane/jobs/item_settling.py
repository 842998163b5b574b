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

from psycopg import Cursor, sql

from controlplane.core.batch_items import ItemState, Judged, Refused, Reported, StoredItem, judge
from controlplane.jobs.item_partitions import items_table
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
# The lines of a report lie close together: their bounds keep a plan without statistics from reading the whole job.
_LOCK_SQL = sql.SQL("""
SELECT line, ctid, state, attempt, failures, fence FROM {table}
WHERE day = %s AND job_id = %s AND line BETWEEN %s AND %s AND line = ANY(%s) ORDER BY line FOR UPDATE
""")


def _settle_day(
    cursor: Cursor[Any],
    day: date,
    rows: Sequence[Brought],
    facts: Mapping[int, _JobFacts],
    settled: Settled,
    now: datetime,
) -> None:
    table = sql.Identifier(items_table(day))
    items: dict[_Key, StoredItem] = {}
    places: dict[_Key, str] = {}
    for job, lines in _by_job((row.done.job_id, row.done.line) for row in rows).items():
        cancelled = not facts[job].running
        cursor.execute(_LOCK_SQL.format(table=table), (day, job, lines[0], lines[-1], lines))
        for line, place, state, attempt, failures, fence in cursor.fetchall():
            items[(job, line)] = StoredItem(ItemState(state), attempt, failures, fence, cancelled)
            places[(job, line)] = place
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
    _write_items(cursor, table, {places[key]: change for key, change in changed.items()})
    _write_results(cursor, day, results, now)


def _by_job(keys: Iterable[_Key]) -> dict[int, list[int]]:
    """Job -> its lines, both in order: the order in which everybody locks."""
    lines: dict[int, list[int]] = defaultdict(list)
    for job, line in sorted(set(keys)):
        lines[job].append(line)
    return lines


def _reason(done: ItemDone) -> str:
    return done.reason.replace("\x00", "")[:REASON_MOST]


def _count(change: JobChange, judged: Judged, before: StoredItem) -> None:
    change.completed += judged.state is ItemState.DONE
    change.parked += judged.state is ItemState.PARKED
    change.cancelled += judged.state is ItemState.CANCELLED
    change.failed += judged.failures > before.failures


# Rows that this transaction holds are named by where they are.
_DONE_SQL = sql.SQL("""
UPDATE {table} SET state = 2, reason = '', agent_id = NULL, epoch = NULL, lease_expires = NULL
WHERE ctid = ANY(%s::tid[])
""")
_NOT_DONE_SQL = sql.SQL("""
UPDATE {table} SET state = %s, attempt = %s, failures = %s, reason = %s,
    agent_id = NULL, epoch = NULL, lease_expires = NULL
WHERE ctid = ANY(%s::tid[])
""")


def _write_items(cursor: Cursor[Any], table: sql.Identifier, changed: Mapping[str, tuple[Judged, str]]) -> None:
    """Writes what became of locked items; `changed` is by place. Items that changed alike are one statement."""
    done = [place for place, (judged, _) in changed.items() if judged.state is ItemState.DONE]
    if done:
        cursor.execute(_DONE_SQL.format(table=table), (done,))
    alike: dict[tuple[int, int, int, str], list[str]] = defaultdict(list)
    for place, (judged, reason) in changed.items():
        if judged.state is not ItemState.DONE:
            alike[(int(judged.state), judged.attempt, judged.failures, reason)].append(place)
    if alike:
        rows = [(*values, places) for values, places in alike.items()]
        cursor.executemany(_NOT_DONE_SQL.format(table=table), rows)


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
