"""Usage for pages and reports: always rollups and open deltas together, read in one statement, never records' scans."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
from django.db import connection

from controlplane.core.histogram import Histogram
from controlplane.core.period import US_PER_QUARTER, Calendar, Window, from_us, to_us, window_at
from controlplane.core.stage_stack import StageStack
from controlplane.usage.models import DecisionSample, RollupDay, UsageRecord
from controlplane.usage.retired_records import records_of_request
from controlplane.usage.rollup_keys import KEY_COLUMNS, ROLLUP_COLUMNS, SUM_COLUMNS
from controlplane.usage.rollups import billing_zone
from controlplane.usage.sketch import Sketch, merge_groups

DIMENSIONS = KEY_COLUMNS
# A record arrives within seconds; one of an agent that was cut off may take as long as its spool is kept.
_DAY = timedelta(days=1)
_USUAL_DELAY = timedelta(days=1)
_LONGEST_DELAY = timedelta(days=15)


@dataclass(frozen=True)
class Scope:
    """Which usage: [since, until) by the instant of end; None is every one."""

    since: datetime
    until: datetime
    pool_id: int | None = None
    class_id: int | None = None
    tenant_ids: Sequence[int] | None = None
    model_id: int | None = None
    outcome: int | None = None


@dataclass(frozen=True)
class Totals:
    """Sums of one group; `key` holds the dimensions that were asked for, and `minute` or `quarter` for series."""

    key: dict[str, Any]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    gpu_us: int
    charge_prompt_nanos: int
    charge_cached_nanos: int
    charge_output_nanos: int
    charge_gpu_nanos: int

    @property
    def charge_nanos(self) -> int:
        return self.charge_prompt_nanos + self.charge_cached_nanos + self.charge_output_nanos + self.charge_gpu_nanos


@dataclass(frozen=True)
class Breakdown:
    """Where requests spent their time: each stage's histogram (and `ttft`), and the end-to-end stack."""

    requests: int
    stages: dict[str, Histogram]
    stack: StageStack


Piece = tuple[str, str, datetime | date, datetime | date]
"""A table of rollups, its column of time, and the part of it to read."""


def _sources(scope: Scope, *, days: bool = False) -> tuple[str, list[Any]]:
    """The union of the levels that cover the scope exactly: quarters inside, minutes at the edges, open deltas.

    With `days` whole days of the billing zone are read as such where there are some; `at` is no instant then.
    """
    first = from_us(-(-to_us(scope.since) // US_PER_QUARTER) * US_PER_QUARTER)
    last = from_us(to_us(scope.until) // US_PER_QUARTER * US_PER_QUARTER)
    pieces: list[Piece] = []
    if first < last:
        pieces += _of_quarters(first, last, days=days)
        pieces.append(("usage_rollupminute", "minute", scope.since, first))
        pieces.append(("usage_rollupminute", "minute", last, scope.until))
    else:
        pieces.append(("usage_rollupminute", "minute", scope.since, scope.until))
    pieces.append(("usage_rollupdelta", "minute", scope.since, scope.until))
    where, given = _conditions(scope)
    selects, parameters = [], []
    for table, column, since, until in pieces:
        if since < until:  # type: ignore[operator]  # both are instants or both are dates
            selects.append(
                f"SELECT {'NULL::timestamptz' if days else column} AS at, {', '.join(ROLLUP_COLUMNS)} FROM {table}"  # noqa: S608 - names are constants
                f" WHERE {column} >= %s AND {column} < %s{where}"
            )
            parameters += [since, until, *given]
    return " UNION ALL ".join(selects), parameters


def _of_quarters(first: datetime, last: datetime, *, days: bool) -> list[Piece]:
    """What covers [first, last), whole quarters: days inside where they are wanted and there are any."""
    within = whole_days(billing_zone(), first, last) if days and last - first > _DAY else None
    if within is None:
        return [("usage_rollupquarter", "quarter", first, last)]
    begin, end = within
    return [
        ("usage_rollupquarter", "quarter", first, begin.start),
        ("usage_rollupday", "day", date.fromisoformat(begin.label), date.fromisoformat(end.label)),
        ("usage_rollupquarter", "quarter", end.start, last),
    ]


def whole_days(zone: ZoneInfo, first: datetime, last: datetime) -> tuple[Window, Window] | None:
    """The first whole day of a zone in [first, last) and the day after the last; None where there is none.

    Folds put whole quarters into days: a zone whose days begin elsewhere has none.
    """
    begin, end = window_at(zone, Calendar.DAY, first), window_at(zone, Calendar.DAY, last)
    if begin.start < first:
        begin = window_at(zone, Calendar.DAY, begin.end)
    starts = (to_us(begin.start), to_us(end.start))
    return None if starts[0] >= starts[1] or any(us % US_PER_QUARTER for us in starts) else (begin, end)


def _conditions(scope: Scope) -> tuple[str, list[Any]]:
    where, given = "", []
    for column in ("pool_id", "class_id", "model_id", "outcome"):
        value = getattr(scope, column)
        if value is not None:
            where += f" AND {column} = %s"
            given.append(value)
    if scope.tenant_ids is not None:
        where += " AND tenant_id = ANY(%s)"
        given.append(list(scope.tenant_ids))
    return where, given


def totals(scope: Scope, by: Sequence[str] = ()) -> list[Totals]:
    """Sums by the dimensions asked for (of DIMENSIONS), in their order; one row of zeros when there is no dimension."""
    _check_dimensions(by)
    return _totals(scope, list(by), list(by))


@dataclass(frozen=True, slots=True)
class TenantCharge:
    """What a tenant's requests are charged."""

    requests: int
    nanos: int


def charges_by_tenant(scope: Scope) -> dict[int, TenantCharge]:
    """Tenant id -> its charge: of `totals` the two sums that a list of ten thousand tenants shows."""
    source, parameters = _sources(scope, days=True)
    charge = " + ".join(name for name in SUM_COLUMNS if name.startswith("charge_"))
    sql = f"SELECT tenant_id, sum(requests)::bigint, sum({charge})::bigint FROM ({source}) AS u GROUP BY 1"  # noqa: S608 - names are constants
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return {tenant_id: TenantCharge(requests, nanos) for tenant_id, requests, nanos in cursor.fetchall()}


def series(scope: Scope, step: timedelta, by: Sequence[str] = ()) -> list[Totals]:
    """Sums by step of time (key `at`, the step's start) and dimension; `step` is a whole number of minutes.

    Inside quarters of an hour only steps of whole quarters are exact where the scope is longer than three hours, so
    steps under 15 minutes are read from minutes alone.
    """
    _check_dimensions(by)
    seconds = int(step.total_seconds())
    if seconds < 60 or seconds % 60:
        raise ValueError("a step is a whole number of minutes")
    bucket = f"to_timestamp(floor(extract(epoch FROM at) / {seconds}) * {seconds})"
    return _totals(scope, [f"{bucket} AS step", *by], ["at", *by], fine=seconds % 900 != 0)


def _check_dimensions(by: Sequence[str]) -> None:
    if wrong := [name for name in by if name not in DIMENSIONS]:
        raise ValueError(f"usage has no dimension {wrong[0]!r}: use {', '.join(DIMENSIONS)}")


def _minutes_only(scope: Scope) -> tuple[str, list[Any]]:
    where, given = _conditions(scope)
    selects = [
        f"SELECT minute AS at, {', '.join(ROLLUP_COLUMNS)} FROM {table}"  # noqa: S608 - names are constants
        f" WHERE minute >= %s AND minute < %s{where}"
        for table in ("usage_rollupminute", "usage_rollupdelta")
    ]
    return " UNION ALL ".join(selects), [scope.since, scope.until, *given] * 2


def _totals(scope: Scope, expressions: list[str], names: list[str], *, fine: bool = False) -> list[Totals]:
    source, parameters = _minutes_only(scope) if fine else _sources(scope, days="at" not in names)
    sums = ", ".join(f"coalesce(sum({name}), 0)::bigint" for name in SUM_COLUMNS)
    columns = ", ".join([*expressions, sums])
    grouping = ", ".join(str(at + 1) for at in range(len(expressions)))
    sql = f"SELECT {columns} FROM ({source}) AS u"  # noqa: S608 - names are constants
    if grouping:
        sql += f" GROUP BY {grouping} ORDER BY {grouping}"
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return [Totals(dict(zip(names, row, strict=False)), *row[len(names) :]) for row in cursor.fetchall()]


def breakdown(
    pool_id: int | None,
    since: datetime,
    until: datetime,
    *,
    class_id: int | None = None,
    tenant_ids: Sequence[int] | None = None,
    outcome: int | None = None,
) -> Breakdown:
    """Merged histograms and stack of the requests that ended in [since, until)."""
    return breakdowns(Scope(since, until, pool_id, class_id, tenant_ids, outcome=outcome)).get((), _nothing())


def _nothing() -> Breakdown:
    empty = Sketch()
    return Breakdown(0, empty.histograms, empty.stack)


def breakdowns(scope: Scope, by: Sequence[str] = ()) -> dict[tuple[int, ...], Breakdown]:
    """Breakdowns by the values of the dimensions asked for."""
    _check_dimensions(by)
    source, parameters = _sources(scope, days=True)
    columns = ", ".join([*by, "requests", "stages"])
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {columns} FROM ({source}) AS u", parameters)  # noqa: S608 - names are constants
        rows = cursor.fetchall()
    keys = sorted({row[: len(by)] for row in rows})
    number = {key: at for at, key in enumerate(keys)}
    groups = np.array([number[row[: len(by)]] for row in rows], dtype=np.int64)
    merged = merge_groups(groups, len(keys), [bytes(row[-1]) for row in rows])
    if not keys:
        return {}
    requests = np.bincount(groups, weights=[row[-2] for row in rows], minlength=len(keys))
    return {key: _breakdown(int(count), blob) for key, count, blob in zip(keys, requests, merged, strict=True)}


def _breakdown(requests: int, blob: bytes) -> Breakdown:
    sketch = Sketch.from_bytes(blob)
    return Breakdown(requests, sketch.histograms, sketch.stack)


@dataclass(frozen=True)
class Refusals:
    """Refusals of one reason (`core.reasons`), counted exactly by minute of arrival."""

    key: dict[str, Any]
    count: int


def refusals(scope: Scope, by: Sequence[str] = ("reason",)) -> list[Refusals]:
    """Refusal counts by `reason`, `tenant_id`, `class_id`, `pool_id` or `minute`."""
    allowed = ("reason", "tenant_id", "class_id", "pool_id", "minute")
    if wrong := [name for name in by if name not in allowed]:
        raise ValueError(f"refusals have no dimension {wrong[0]!r}: use {', '.join(allowed)}")
    where, given = _conditions(Scope(scope.since, scope.until, scope.pool_id, scope.class_id, scope.tenant_ids))
    names = ", ".join(by)
    sql = (
        f"SELECT {names + ', ' if names else ''}coalesce(sum(count), 0)::bigint FROM usage_refusalminute"  # noqa: S608
        f" WHERE minute >= %s AND minute < %s{where}"
    )
    if names:
        sql += f" GROUP BY {names} ORDER BY {names}"
    with connection.cursor() as cursor:
        cursor.execute(sql, [scope.since, scope.until, *given])
        return [Refusals(dict(zip(by, row, strict=False)), row[-1]) for row in cursor.fetchall()]


@dataclass(frozen=True)
class RequestStory:
    """What is known of one request: its records (one per closed attempt) and, where it was kept, the decision.

    `archived`: some of the records are no longer in the database, but in a file of their day.
    """

    records: list[UsageRecord]
    sample: DecisionSample | None
    archived: bool = False


def find_request(request_id: uuid.UUID, *, now: datetime) -> RequestStory:
    """The records and the decision sample of a request.

    Records have no index by id; a version 7 id says when the request arrived, so only the partitions that can hold it
    are read: those of the first day, and of the time that a cut-off agent may need when nothing was there. Days that
    are retired are read from their files; raises ArchiveChanged for one that is gone.
    """
    arrived = arrival_of(request_id)
    sample = DecisionSample.objects.filter(request_id=request_id).first()
    if arrived is None:
        arrived = sample.at if sample is not None else now - _USUAL_DELAY
    begin = arrived - timedelta(minutes=10)
    for delay in (_USUAL_DELAY, _LONGEST_DELAY):
        until = min(arrived + delay, now + timedelta(minutes=1))
        found = UsageRecord.objects.filter(received_at__gte=begin, received_at__lt=until, request_id=request_id)
        retired = records_of_request(request_id, begin, until)
        records = sorted([*found, *retired], key=lambda record: record.attempt)
        if records:
            return RequestStory(records, sample, archived=bool(retired))
    return RequestStory([], sample)


def anything_served() -> bool:
    """Whether any request was ever admitted and ended, its record still in the database or only in the rollups."""
    return UsageRecord.objects.exists() or RollupDay.objects.exists()


def arrival_of(request_id: uuid.UUID) -> datetime | None:
    """When a request arrived, as its version 7 id says; None for another kind of id."""
    if request_id.version != 7:
        return None
    return datetime.fromtimestamp((request_id.int >> 80) / 1000, UTC)
