"""Counts of many contracts over many spans of time, added up in the database: one row per contract and span.

A request that is still running is not judged yet: for `SETTLING` it leaves every population, after that it is bad like
everything that is neither good nor neutral.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import itemgetter

from django.db import connection

from controlplane.contracts.hours import JOIN_LOADS, LOADS, MINUTE_BIT, NONSENSE, OVER
from controlplane.core.slo import Totals

SETTLING = timedelta(minutes=6)
WINDOW, PERIOD = "window", "period"

# What minutes and hours have in common: whose they are, in which span they lie, above the load range or not.
_COLUMNS = """
  SELECT asked.contract_id, cardinality(asked.bounds) - width_bucket(counts.{at}, asked.bounds) AS place"""
_MINUTES = f"""{_COLUMNS.format(at="minute")}, {{outside}} AS outside,
         date_trunc('hour', counts.minute, 'UTC') AS hour, {MINUTE_BIT} AS minutes,
         {NONSENSE} AS nonsense,
         counts.offered, counts.admitted, counts.successful, counts.good, counts.neutral,
         CASE WHEN counts.minute < %(settled)s THEN 0
              ELSE greatest(0, counts.offered - counts.good - counts.neutral - coalesce((
                   SELECT sum(value::bigint) FROM jsonb_each_text(counts.bad)), 0)) END AS running
    FROM minutes AS counts
    JOIN asked ON asked.id = counts.contract_version_id {{loads}}
   WHERE asked.load_limit_per_s {{limited}}"""  # noqa: S608 - put together from constants
_LOADED = JOIN_LOADS.format(whose="asked")

# One pass: a minute is counted in the shortest span that holds it (`place`), and longer spans add up what is in theirs.
# `bounds` are the instants at which spans begin, oldest first, so the more of them lie before a minute the shorter is
# its span. Most contracts have the same, so each kind is told once. Hours that are folded and lie in one span whatever
# the kind are read as such (`whole`), the others by their minutes (`apart`).
_SPANS = f"""
WITH asked AS MATERIALIZED (
  SELECT version.id, version.contract_id, version.load_limit_per_s, contract.workload_class_id,
         (%(bounds)s::timestamptz[])[kind * %(each)s + 1 : (kind + 1) * %(each)s] AS bounds
    FROM unnest(%(contracts)s::int[], %(kinds)s::int[]) AS given (contract_id, kind)
    JOIN contracts_contract AS contract ON contract.id = given.contract_id
    JOIN contracts_contractversion AS version ON version.contract_id = contract.id
), whole AS MATERIALIZED (
  SELECT folded.hour FROM contracts_foldedhour AS folded
   WHERE folded.hour >= %(since)s AND folded.hour + interval '1 hour' <= %(settled)s
     AND NOT EXISTS (SELECT FROM unnest(%(bounds)s::timestamptz[]) AS bound
                      WHERE bound > folded.hour AND bound < folded.hour + interval '1 hour')
), apart AS MATERIALIZED (
  SELECT greatest(series.hour, %(since)s) AS since, least(series.hour + interval '1 hour', %(until)s) AS until
    FROM generate_series(date_trunc('hour', %(since)s::timestamptz, 'UTC'), %(until)s, interval '1 hour')
         AS series (hour)
   WHERE NOT EXISTS (SELECT FROM whole WHERE whole.hour = series.hour)
), minutes AS MATERIALIZED (
  SELECT counts.* FROM apart CROSS JOIN LATERAL (
    SELECT * FROM contracts_objectiveminute AS counts
     WHERE minute >= apart.since AND minute < apart.until AND (%(pool)s::int IS NULL OR pool_id = %(pool)s) OFFSET 0
  ) AS counts
), loads AS MATERIALIZED (
  {LOADS.format(minutes="minutes")}
   WHERE contract.workload_class_id IN (SELECT workload_class_id FROM asked WHERE load_limit_per_s IS NOT NULL)
   GROUP BY 1, 2, 3
), counted AS (
  {_MINUTES.format(outside="false", loads="", limited="IS NULL")}
   UNION ALL
  {_MINUTES.format(outside=OVER.format(limit="asked.load_limit_per_s"), loads=_LOADED, limited="IS NOT NULL")}
   UNION ALL
  {_COLUMNS.format(at="hour")}, counts.outside, counts.hour, counts.minutes, counts.nonsense,
         counts.offered, counts.admitted, counts.successful, counts.good, counts.neutral, 0 AS running
    FROM whole
    JOIN contracts_objectivehour AS counts ON counts.hour = whole.hour
    JOIN asked ON asked.id = counts.contract_version_id
   WHERE %(pool)s::int IS NULL OR counts.pool_id = %(pool)s
), hours AS (
  SELECT contract_id, place, outside, bit_count(bit_or(minutes)::bit(64)) AS minutes, bool_or(nonsense) AS nonsense,
         sum(offered) AS offered, sum(admitted) AS admitted, sum(successful) AS successful, sum(good) AS good,
         sum(neutral) AS neutral, sum(running) AS running
    FROM counted GROUP BY contract_id, place, outside, hour
)
SELECT contract_id, place, outside,
       sum(offered - running)::bigint, sum(admitted - running)::bigint, sum(successful)::bigint, sum(good)::bigint,
       sum(neutral)::bigint, bool_or(nonsense), sum(minutes)::bigint, sum(offered)::bigint, sum(running)::bigint
  FROM hours GROUP BY 1, 2, 3 ORDER BY 1, 2
"""  # noqa: S608 - put together from constants


@dataclass(frozen=True, slots=True)
class Span:
    """Counts of one contract over one span of time; minutes above the load range are apart."""

    totals: Totals
    nonsense: bool = False
    minutes_in_range: int = 0
    minutes_out_of_range: int = 0
    offered_out_of_range: int = 0
    running: int = 0

    def __add__(self, earlier: Span) -> Span:
        """With a part that shares no minute with it and lies before it."""
        return Span(
            self.totals + earlier.totals,
            self.nonsense or earlier.nonsense,
            self.minutes_in_range + earlier.minutes_in_range,
            self.minutes_out_of_range + earlier.minutes_out_of_range,
            self.offered_out_of_range + earlier.offered_out_of_range,
            self.running + earlier.running,
        )

    @property
    def judged(self) -> Totals:
        """Totals for the core; counts that contradict each other in any minute are nonsense as a whole."""
        return Totals(good=1) if self.nonsense else self.totals


NO_REQUESTS = Totals()
NOTHING = Span(NO_REQUESTS)


@dataclass(frozen=True, slots=True)
class Spans:
    """What is counted of a contract beside its burn: the window and the budget's period that end now."""

    contract_id: int
    window_us: int
    period_us: int


Counts = Mapping[int, Mapping[str, Span]]
"""Contract id -> its spans by name; what nothing was counted of is missing."""


def counted(spans: Sequence[Spans], lengths: Mapping[str, int], until: datetime, pool_id: int | None) -> Counts:
    kinds: dict[tuple[int, int], _Kind] = {}
    for one in spans:
        key = one.window_us, one.period_us
        if key not in kinds:
            kinds[key] = _Kind.of(len(kinds), {**lengths, WINDOW: one.window_us, PERIOD: one.period_us})
    own = [kinds[one.window_us, one.period_us] for one in spans]
    parts: dict[int, list[tuple[int, Span]]] = {}
    with connection.cursor() as cursor:
        cursor.execute(
            _SPANS,
            {
                "settled": until - SETTLING,
                "since": until - timedelta(microseconds=max(kind.bounds_us[-1] for kind in kinds.values())),
                "until": until,
                "pool": pool_id,
                "contracts": [one.contract_id for one in spans],
                "kinds": [kind.number for kind in own],
                "bounds": [at for kind in kinds.values() for at in kind.begun(until)],
                "each": len(lengths) + 2,
            },
        )
        for contract_id, place, outside, *counts in cursor.fetchall():
            parts.setdefault(contract_id, []).append((place, _part(outside, *counts)))
    return {
        one.contract_id: _added_up(kind, parts[one.contract_id])
        for one, kind in zip(spans, own, strict=True)
        if one.contract_id in parts
    }


@dataclass(frozen=True, slots=True)
class _Kind:
    """Spans that contracts have in common: by length in us (`bounds_us`), and each name with the place of its length
    there.
    """

    number: int
    bounds_us: tuple[int, ...]
    names: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, number: int, lengths: Mapping[str, int]) -> _Kind:
        ordered = sorted(lengths.items(), key=itemgetter(1))
        bounds = tuple(us for _, us in ordered)
        return cls(number, bounds, tuple((name, bisect_left(bounds, us)) for name, us in ordered))

    def begun(self, until: datetime) -> Iterator[datetime]:
        """When they began, oldest first."""
        return (until - timedelta(microseconds=us) for us in reversed(self.bounds_us))


def _part(
    outside: bool, offered: int, admitted: int, successful: int, good: int, neutral: int, nonsense: bool, minutes: int,
    counted: int, running: int,
) -> Span:  # fmt: skip
    """A row of `_SPANS`; of minutes above the load range only their number counts, and what was offered in them."""
    if outside:
        return Span(NO_REQUESTS, False, 0, minutes, counted, running)
    return Span(Totals(offered, admitted, successful, good, neutral), nonsense, minutes, 0, 0, running)


def _added_up(kind: _Kind, parts: Sequence[tuple[int, Span]]) -> dict[str, Span]:
    """The spans by length, each with the parts of all in it; those in which nothing was counted are missing."""
    found: dict[str, Span] = {}
    whole, at = NOTHING, 0
    for name, place in kind.names:
        while at < len(parts) and parts[at][0] <= place:
            whole, at = (whole + parts[at][1] if at else parts[at][1]), at + 1
        if at:
            found[name] = whole
    return found
