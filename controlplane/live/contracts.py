"""Contracts judged from the exact counts of `objective_minute`: window, error budget, burn and absence alerts.

Sums are made in the database, one row per contract and span, so that a tick costs one statement whatever the number
of contracts. A request that is still running is not judged yet: for `SETTLING` it leaves every population, after that
it is bad like everything that is neither good nor neutral.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any

from django.db import connection

from controlplane.contracts.models import Contract, ContractVersion
from controlplane.contracts.queries import Standing, standings
from controlplane.core.burn import (
    AbsenceTimes,
    BurnState,
    Severity,
    absence_times,
    evaluate_burn,
    reachable_rules,
)
from controlplane.core.slo import (
    Compliance,
    Objective,
    ObjectiveResult,
    Population,
    Totals,
    Verdict,
    budget_remaining,
    judge_totals,
)

PPM = 1_000_000
SETTLING = timedelta(minutes=6)
BURN_SPANS_S = (300, 1_800, 3_600, 7_200, 21_600, 86_400, 259_200)
FIVE_MINUTES_S, HOUR_S = 300, 3_600
WINDOW, PERIOD = "window", "period"
AT_RISK_BUDGET = Fraction(1, 4)

_SPANS = """
WITH minutes AS (
  SELECT version.contract_id, counts.minute, counts.offered, counts.admitted, counts.successful, counts.good,
         counts.neutral, counts.bad,
         CASE WHEN counts.minute < %(settled)s THEN 0
              ELSE greatest(0, counts.offered - counts.good - counts.neutral - coalesce(causes.bad, 0)) END AS running,
         version.load_limit_per_s IS NOT NULL AND max(counts.admitted) OVER (
             PARTITION BY contract.workload_class_id, counts.pool_id, counts.minute) / 60.0
             > version.load_limit_per_s AS outside,
         NOT (least(counts.offered, counts.admitted, counts.successful, counts.good, counts.neutral) >= 0
              AND counts.good <= counts.successful
              AND counts.successful + counts.neutral <= counts.admitted
              AND counts.admitted <= counts.offered) AS nonsense
    FROM contracts_objectiveminute AS counts
    JOIN contracts_contractversion AS version ON version.id = counts.contract_version_id
    JOIN contracts_contract AS contract ON contract.id = version.contract_id
    LEFT JOIN LATERAL (SELECT sum(value::bigint) AS bad FROM jsonb_each_text(counts.bad)) AS causes ON true
   WHERE counts.minute >= %(since)s AND counts.minute < %(until)s
     AND (%(pool)s::int IS NULL OR counts.pool_id = %(pool)s)
)
SELECT span.contract_id, span.name,
       coalesce(sum(m.offered - m.running) FILTER (WHERE NOT m.outside), 0)::bigint,
       coalesce(sum(m.admitted - m.running) FILTER (WHERE NOT m.outside), 0)::bigint,
       coalesce(sum(m.successful) FILTER (WHERE NOT m.outside), 0)::bigint,
       coalesce(sum(m.good) FILTER (WHERE NOT m.outside), 0)::bigint,
       coalesce(sum(m.neutral) FILTER (WHERE NOT m.outside), 0)::bigint,
       coalesce(bool_or(m.nonsense) FILTER (WHERE NOT m.outside), false),
       count(DISTINCT m.minute) FILTER (WHERE NOT m.outside),
       count(DISTINCT m.minute) FILTER (WHERE m.outside),
       coalesce(sum(m.offered) FILTER (WHERE m.outside), 0)::bigint,
       coalesce(sum(m.running), 0)::bigint,
       max(m.minute)
  FROM unnest(%(contracts)s::int[], %(names)s::text[], %(starts)s::timestamptz[]) AS span (contract_id, name, begins)
  JOIN minutes AS m ON m.contract_id = span.contract_id AND m.minute >= span.begins
 GROUP BY span.contract_id, span.name
"""

_CAUSES = """
SELECT version.contract_id, cause.key, sum(cause.value::bigint)::bigint
  FROM contracts_objectiveminute AS counts
  JOIN contracts_contractversion AS version ON version.id = counts.contract_version_id
 CROSS JOIN LATERAL jsonb_each_text(counts.bad) AS cause
  JOIN unnest(%(contracts)s::int[], %(starts)s::timestamptz[]) AS span (contract_id, begins)
    ON span.contract_id = version.contract_id AND counts.minute >= span.begins
 WHERE counts.minute >= %(since)s AND counts.minute < %(until)s
   AND (%(pool)s::int IS NULL OR counts.pool_id = %(pool)s)
 GROUP BY version.contract_id, cause.key
"""

_BURN_SERIES = """
SELECT version.contract_id, counts.minute, sum(counts.offered)::bigint, sum(counts.admitted)::bigint,
       sum(counts.successful)::bigint, sum(counts.good)::bigint, sum(counts.neutral)::bigint,
       coalesce(sum(causes.bad), 0)::bigint
  FROM contracts_objectiveminute AS counts
  JOIN contracts_contractversion AS version ON version.id = counts.contract_version_id
  LEFT JOIN LATERAL (SELECT sum(value::bigint) AS bad FROM jsonb_each_text(counts.bad)) AS causes ON true
 WHERE counts.minute >= %s AND counts.minute < %s AND version.contract_id = ANY(%s)
 GROUP BY version.contract_id, counts.minute
"""


@dataclass(frozen=True, slots=True)
class Span:
    """Counts of one contract over one span of time; minutes above the load range are apart."""

    totals: Totals
    nonsense: bool = False
    minutes_in_range: int = 0
    minutes_out_of_range: int = 0
    offered_out_of_range: int = 0
    running: int = 0
    last_minute: datetime | None = None

    @property
    def judged(self) -> Totals:
        """Totals for the core; counts that contradict each other in any minute are nonsense as a whole."""
        return Totals(good=1) if self.nonsense else self.totals


NOTHING = Span(Totals())


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One latency contract at one instant. `burn` maps a span in seconds to its rate; None is unknown."""

    contract: Contract
    version: ContractVersion
    at: datetime
    window: Span
    result: ObjectiveResult
    burn: Mapping[int, float | None]
    rules: tuple[BurnState, ...]
    budget_left: Fraction | None
    absence: AbsenceTimes
    bad_by_cause: Mapping[str, int]

    @property
    def own(self) -> Compliance:
        return self.result.populations[Population(self.version.population)]

    @property
    def firing(self) -> tuple[BurnState, ...]:
        return tuple(state for state in self.rules if state.firing)

    @property
    def grade(self) -> str:
        """`bad`, `risk`, `unknown` or `ok`: how much attention it needs, in the words of the status chips."""
        if self.result.verdict is Verdict.MISSED or any(s.rule.severity is Severity.PAGE for s in self.firing):
            return "bad"
        if self.firing or (self.budget_left is not None and self.budget_left < AT_RISK_BUDGET):
            return "risk"
        return "unknown" if self.result.verdict is Verdict.UNKNOWN else "ok"


def objective_of(version: ContractVersion) -> Objective:
    """The core's objective of a version."""
    return Objective(
        target=Fraction(version.target_ppm, PPM),
        population=Population(version.population),
        load_max_per_s=version.load_limit_per_s,
        min_events=version.min_events,
    )


def in_force(now: datetime, contracts: Sequence[Contract] | None = None) -> list[Standing]:
    """Contracts that are not archived with the version in force, by slug."""
    if contracts is None:
        contracts = list(
            Contract.objects.filter(archived_at=None).select_related("workload_class", "tenant").order_by("slug")
        )
    return standings(contracts, now)


def evaluate(rows: Iterable[Standing], now: datetime, *, pool_id: int | None = None) -> dict[int, Evaluation]:
    """Contract id -> evaluation, for latency contracts with a version in force; two statements."""
    versions = [row.in_force for row in rows if row.in_force is not None and row.in_force.objective == "latency"]
    contracts = {row.contract.pk: row.contract for row in rows}
    if not versions:
        return {}
    spans = [(v.contract_id, *span) for v in versions for span in _spans_of(v, now)]
    counts = _counted(spans, now, pool_id)
    causes = _causes([(v.contract_id, now - timedelta(seconds=v.window_s)) for v in versions], now, pool_id)
    return {
        version.contract_id: _evaluation(contracts[version.contract_id], version, counts, causes, now)
        for version in versions
    }


def _spans_of(version: ContractVersion, now: datetime) -> list[tuple[str, datetime]]:
    seconds = {str(s): s for s in BURN_SPANS_S} | {WINDOW: version.window_s, PERIOD: version.budget_period_s}
    return [(name, now - timedelta(seconds=length)) for name, length in seconds.items()]


def _counted(
    spans: Sequence[tuple[int, str, datetime]], until: datetime, pool_id: int | None
) -> dict[tuple[int, str], Span]:
    with connection.cursor() as cursor:
        cursor.execute(
            _SPANS,
            {
                "settled": until - SETTLING,
                "since": min(begins for _, _, begins in spans),
                "until": until,
                "pool": pool_id,
                "contracts": [contract_id for contract_id, _, _ in spans],
                "names": [name for _, name, _ in spans],
                "starts": [begins for _, _, begins in spans],
            },
        )
        return {
            (contract_id, name): Span(Totals(*sums), nonsense, inside, outside, offered_outside, running, last)
            for contract_id, name, *sums, nonsense, inside, outside, offered_outside, running, last in cursor.fetchall()
        }


def _causes(spans: Sequence[tuple[int, datetime]], until: datetime, pool_id: int | None) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {}
    with connection.cursor() as cursor:
        cursor.execute(
            _CAUSES,
            {
                "contracts": [contract_id for contract_id, _ in spans],
                "starts": [begins for _, begins in spans],
                "since": min(begins for _, begins in spans),
                "until": until,
                "pool": pool_id,
            },
        )
        for contract_id, cause, count in cursor.fetchall():
            found.setdefault(contract_id, {})[cause] = count
    return found


def _evaluation(
    contract: Contract,
    version: ContractVersion,
    counts: Mapping[tuple[int, str], Span],
    causes: Mapping[int, Mapping[str, int]],
    now: datetime,
) -> Evaluation:
    objective = objective_of(version)

    def span(name: str | int) -> Span:
        return counts.get((version.contract_id, str(name)), NOTHING)

    window, period = span(WINDOW), span(PERIOD)
    result = judge_totals(window.judged, objective)
    rules = tuple(
        evaluate_burn(rule, span(rule.long_us // 10**6).judged, span(rule.short_us // 10**6).judged, objective)
        for rule in reachable_rules(objective.target).kept
    )
    return Evaluation(
        contract=contract,
        version=version,
        at=now,
        window=window,
        result=result,
        burn={seconds: _burn(span(seconds), objective) for seconds in BURN_SPANS_S},
        rules=rules,
        budget_left=budget_remaining(period.judged, objective),
        absence=absence_times(objective.target, version.budget_period_s * 10**6),
        bad_by_cause=causes.get(version.contract_id, {}),
    )


def _burn(span: Span, objective: Objective) -> float | None:
    judged = judge_totals(span.judged, objective).populations[objective.population]
    return None if judged.burn_rate is None else float(judged.burn_rate)


def burn_series(
    versions: Sequence[ContractVersion], now: datetime, *, minutes: int = 60, span: int = 5
) -> dict[int, list[tuple[datetime, float | None]]]:
    """Contract id -> (minute, burn over the `span` minutes that end with it); None where nothing was counted."""
    last = now.replace(second=0, microsecond=0)
    first = last - timedelta(minutes=minutes - 1)
    counts: dict[int, dict[datetime, Totals]] = {}
    with connection.cursor() as cursor:
        cursor.execute(_BURN_SERIES, [first - timedelta(minutes=span), now, [v.contract_id for v in versions]])
        for contract_id, minute, offered, admitted, successful, good, neutral, bad in cursor.fetchall():
            running = max(0, offered - good - neutral - bad) if minute >= now - SETTLING else 0
            totals = Totals(offered - running, admitted - running, successful, good, neutral)
            counts.setdefault(contract_id, {})[minute] = totals
    series = {}
    for version in versions:
        own, objective = counts.get(version.contract_id, {}), objective_of(version)
        points = []
        for number in range(minutes):
            at = first + timedelta(minutes=number)
            totals = sum((own[m] for back in range(span) if (m := at - timedelta(minutes=back)) in own), Totals())
            points.append((at, _burn(Span(totals), objective) if totals.offered else None))
        series[version.contract_id] = points
    return series


def evaluate_range(contract: Contract, version: ContractVersion, since: datetime, until: datetime) -> Evaluation:
    """One contract over [since, until) in place of its window, judged by the version that is in force at the end."""
    spans = [(contract.pk, WINDOW, since), (contract.pk, PERIOD, since)]
    spans += [(contract.pk, str(s), max(since, until - timedelta(seconds=s))) for s in BURN_SPANS_S]
    counts = _counted(spans, until, None)
    return _evaluation(contract, version, counts, _causes([(contract.pk, since)], until, None), until)


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """What `manage.py slo` prints and REST answers: three populations side by side, and every other outcome."""
    result, version = evaluation.result, evaluation.version
    return {
        "contract": evaluation.contract.slug,
        "version": version.number,
        "at": evaluation.at.isoformat(),
        "target": version.target_ppm / PPM,
        "population": version.population,
        "verdict": str(result.verdict),
        "unknown_reason": None if result.unknown_reason is None else str(result.unknown_reason),
        "met": {"met": True, "missed": False}.get(str(result.verdict)),
        "populations": {str(name): _population(row) for name, row in result.populations.items()},
        "neutral": evaluation.window.totals.neutral,
        "running": evaluation.window.running,
        "bad_by_cause": dict(sorted(evaluation.bad_by_cause.items())),
        "minutes_in_range": evaluation.window.minutes_in_range,
        "minutes_out_of_range": evaluation.window.minutes_out_of_range,
        "offered_out_of_range": evaluation.window.offered_out_of_range,
        "budget_left": None if evaluation.budget_left is None else float(evaluation.budget_left),
        "burn": {f"{seconds // 60} min": rate for seconds, rate in evaluation.burn.items()},
        "alerts": [_alert(state) for state in evaluation.rules],
        "state": evaluation.grade,
    }


def _population(row: Compliance) -> dict[str, Any]:
    return {
        "total": row.total,
        "good": row.good,
        "bad": row.bad,
        "compliance": None if row.compliance is None else float(row.compliance),
        "burn_rate": None if row.burn_rate is None else float(row.burn_rate),
        "interval": None if row.interval is None else [row.interval.low, row.interval.high],
        "verdict": str(row.verdict),
        "unknown_reason": None if row.unknown_reason is None else str(row.unknown_reason),
    }


def _alert(state: BurnState) -> dict[str, Any]:
    return {
        "severity": str(state.rule.severity),
        "factor": float(state.rule.factor),
        "long_s": state.rule.long_us // 10**6,
        "short_s": state.rule.short_us // 10**6,
        "long_burn": None if state.long.burn_rate is None else float(state.long.burn_rate),
        "short_burn": None if state.short.burn_rate is None else float(state.short.burn_rate),
        "firing": state.firing,
        "reason": state.reason,
    }
