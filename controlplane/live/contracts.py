"""Contracts judged from the exact counts of `objective_minute`: window, error budget, burn and absence alerts.

Sums are made in the database (`span_counts`), so that a tick costs one statement whatever the number of contracts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from django.db import connection

from controlplane.contracts.models import Contract, ContractVersion
from controlplane.contracts.queries import Standing
from controlplane.core.burn import (
    AbsenceTimes,
    BurnRule,
    BurnState,
    Severity,
    absence_times,
    evaluate_burn,
    fires,
    reachable_rules,
)
from controlplane.core.slo import (
    Compliance,
    Objective,
    ObjectiveResult,
    Population,
    Totals,
    Verdict,
    budget_is_under,
    budget_remaining,
    burn_of,
    judge_population,
    judge_totals,
)
from controlplane.live.span_counts import NO_REQUESTS, NOTHING, PERIOD, SETTLING, WINDOW, Counts, Span, Spans, counted

PPM = 1_000_000
BURN_SPANS_S = (300, 1_800, 3_600, 7_200, 21_600, 86_400, 259_200)
US_PER_S = 1_000_000
BURN_SPANS_US = {str(seconds): seconds * US_PER_S for seconds in BURN_SPANS_S}
_SPAN_NAMES = {seconds: str(seconds) for seconds in BURN_SPANS_S}
FIVE_MINUTES_S, HOUR_S = 300, 3_600
GRADES = ("bad", "risk", "unknown", "ok")
"""Of a contract, the one that needs somebody most first."""
BURNS_SHOWN = 3
AT_RISK_BUDGET = Fraction(1, 4)

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
       sum(CASE WHEN counts.minute < %(settled)s THEN 0
                ELSE coalesce((SELECT sum(value::bigint) FROM jsonb_each_text(counts.bad)), 0) END)::bigint
  FROM contracts_objectiveminute AS counts
  JOIN contracts_contractversion AS version ON version.id = counts.contract_version_id
 WHERE counts.minute >= %(since)s AND counts.minute < %(until)s AND version.contract_id = ANY(%(contracts)s)
 GROUP BY version.contract_id, counts.minute
"""


@dataclass(frozen=True)
class Evaluation:
    """One latency contract at one instant, from its counts over each span (those in which nothing was counted are
    missing). `bad_by_cause` is None where causes were not asked for.

    What follows from the counts is worked out when it is asked for: of thousands of contracts all are graded, and few
    are looked at.
    """

    contract: Contract
    version: ContractVersion
    at: datetime
    spans: Mapping[str, Span]
    bad_by_cause: Mapping[str, int] | None

    @cached_property
    def objective(self) -> Objective:
        return objective_of(self.version)

    @property
    def window(self) -> Span:
        return self.spans.get(WINDOW, NOTHING)

    @cached_property
    def own(self) -> Compliance:
        """The contract's own population over its window."""
        return judge_population(self.window.judged, self.objective.population, self.objective)

    @cached_property
    def result(self) -> ObjectiveResult:
        """All populations over the window."""
        return judge_totals(self.window.judged, self.objective)

    @cached_property
    def burn(self) -> Mapping[int, float | None]:
        """A span in seconds -> its burn rate; None is unknown."""
        return {seconds: self.burn_over(seconds) for seconds in BURN_SPANS_S}

    def burn_over(self, seconds: int) -> float | None:
        """One of them."""
        return burn_of(self._over(seconds), self.objective)

    def _over(self, seconds: int) -> Totals:
        return self.spans.get(_SPAN_NAMES[seconds], NOTHING).judged

    @property
    def rules(self) -> tuple[BurnState, ...]:
        """Every rule that can fire for this target, as it stands."""
        return tuple(self._state(rule) for rule in _rules(self.version.target_ppm))

    @cached_property
    def firing(self) -> tuple[BurnState, ...]:
        own, rules = self.objective, _rules(self.version.target_ppm)
        return tuple(self._state(rule) for rule in rules if fires(rule, *self._windows(rule), own))

    def _windows(self, rule: BurnRule) -> tuple[Totals, Totals]:
        return self._over(rule.long_us // US_PER_S), self._over(rule.short_us // US_PER_S)

    def _state(self, rule: BurnRule) -> BurnState:
        return evaluate_burn(rule, *self._windows(rule), self.objective)

    @property
    def budget_left(self) -> Fraction | None:
        return budget_remaining(self._period, self.objective)

    @property
    def _period(self) -> Totals:
        return self.spans.get(PERIOD, NOTHING).judged

    @property
    def absence(self) -> AbsenceTimes:
        return absence_times(self.objective.target, self.version.budget_period_s * US_PER_S)

    @cached_property
    def grade(self) -> str:
        """`bad`, `risk`, `unknown` or `ok`: how much attention it needs, in the words of the status chips."""
        verdict = self.own.verdict
        if verdict is Verdict.MISSED or any(s.rule.severity is Severity.PAGE for s in self.firing):
            return "bad"
        if self.firing or budget_is_under(AT_RISK_BUDGET, self._period, self.objective):
            return "risk"
        return "unknown" if verdict is Verdict.UNKNOWN else "ok"


@lru_cache(maxsize=1_024)
def _rules(target_ppm: int) -> tuple[BurnRule, ...]:
    # By the whole number: what a fraction's own hash takes is most of what looking rules up by it would.
    return tuple(reachable_rules(Fraction(target_ppm, PPM)).kept)


def objective_of(version: ContractVersion) -> Objective:
    """The core's objective of a version."""
    return _objective(version.target_ppm, version.population, version.load_limit_per_s, version.min_events)


@lru_cache(maxsize=1_024)
def _objective(target_ppm: int, population: str, load_max_per_s: float | None, min_events: int) -> Objective:
    # Of thousands of contracts few promise something of their own.
    return Objective(Fraction(target_ppm, PPM), Population(population), load_max_per_s, min_events)


def evaluate(
    rows: Iterable[Standing], now: datetime, *, pool_id: int | None = None, with_causes: bool = True
) -> dict[int, Evaluation]:
    """Contract id -> evaluation, for latency contracts with a version in force; two statements, one without causes."""
    versions = [row.in_force for row in rows if row.in_force is not None and row.in_force.objective == "latency"]
    contracts = {row.contract.pk: row.contract for row in rows}
    if not versions:
        return {}
    spans = [Spans(v.contract_id, v.window_s * US_PER_S, v.budget_period_s * US_PER_S) for v in versions]
    counts = counted(spans, BURN_SPANS_US, now, pool_id)
    begun = [(v.contract_id, now - timedelta(seconds=v.window_s)) for v in versions]
    causes = _causes(begun, now, pool_id) if with_causes else None
    return {
        version.contract_id: _evaluation(contracts[version.contract_id], version, counts, causes, now)
        for version in versions
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
    counts: Counts,
    causes: Mapping[int, Mapping[str, int]] | None,
    now: datetime,
) -> Evaluation:
    bad_by_cause = None if causes is None else causes.get(version.contract_id, {})
    return Evaluation(contract, version, now, counts.get(version.contract_id, {}), bad_by_cause)


def watched(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Those whose burn minute by minute somebody looks at: in trouble, and the first BURNS_SHOWN of the others."""
    known = ((GRADES.index(one.grade), one) for one in evaluations if one.burn_over(HOUR_S) is not None)
    ordered = sorted(
        known, key=lambda pair: (pair[0], -(pair[1].burn_over(FIVE_MINUTES_S) or 0.0), pair[1].contract.slug)
    )
    in_trouble = (GRADES.index("bad"), GRADES.index("risk"))
    return [one for number, (place, one) in enumerate(ordered) if place in in_trouble or number < BURNS_SHOWN]


class BurnSeries(Mapping[int, list[tuple[datetime, float | None]]]):
    """Contract id -> (minute, burn over the `span` minutes that end with it), worked out for those that are looked at.

    The burn is None where nothing was counted.
    """

    def __init__(
        self,
        versions: Sequence[ContractVersion],
        counts: Mapping[int, Mapping[datetime, Totals]],
        instants: Sequence[datetime],
        span: int,
    ) -> None:
        self._versions = {version.contract_id: version for version in versions}
        self._counts, self._instants, self._span = counts, instants, span
        self._made: dict[int, list[tuple[datetime, float | None]]] = {}
        self._silent: list[tuple[datetime, float | None]] = [(at, None) for at in instants]

    def __getitem__(self, contract_id: int) -> list[tuple[datetime, float | None]]:
        if contract_id not in self._made:
            version, own = self._versions[contract_id], self._counts.get(contract_id)
            if own is None:
                return self._silent
            self._made[contract_id] = [(at, self._burn(version, own, at)) for at in self._instants]
        return self._made[contract_id]

    def _burn(self, version: ContractVersion, own: Mapping[datetime, Totals], at: datetime) -> float | None:
        minutes = (at - timedelta(minutes=back) for back in range(self._span))
        totals = sum((own[minute] for minute in minutes if minute in own), NO_REQUESTS)
        return burn_of(totals, objective_of(version))

    def __iter__(self) -> Iterator[int]:
        return iter(self._versions)

    def __len__(self) -> int:
        return len(self._versions)


def burn_series(versions: Sequence[ContractVersion], now: datetime, *, minutes: int = 60, span: int = 5) -> BurnSeries:
    """The last `minutes` minutes of each version's contract; one statement."""
    last = now.replace(second=0, microsecond=0)
    first = last - timedelta(minutes=minutes - 1)
    counts: dict[int, dict[datetime, Totals]] = {}
    with connection.cursor() as cursor:
        since, settled = first - timedelta(minutes=span), now - SETTLING
        asked = [version.contract_id for version in versions]
        cursor.execute(_BURN_SERIES, {"since": since, "until": now, "settled": settled, "contracts": asked})
        for contract_id, minute, offered, admitted, successful, good, neutral, bad in cursor.fetchall():
            running = max(0, offered - good - neutral - bad) if minute >= settled else 0
            totals = Totals(offered - running, admitted - running, successful, good, neutral)
            counts.setdefault(contract_id, {})[minute] = totals
    instants = [first + timedelta(minutes=number) for number in range(minutes)]
    return BurnSeries(versions, counts, instants, span)


def evaluate_range(contract: Contract, version: ContractVersion, since: datetime, until: datetime) -> Evaluation:
    """One contract over [since, until) in place of its window, judged by the version that is in force at the end."""
    whole_us = (until - since) // timedelta(microseconds=1)
    lengths = {name: min(us, whole_us) for name, us in BURN_SPANS_US.items()}
    counts = counted([Spans(contract.pk, whole_us, whole_us)], lengths, until, None)
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
        "bad_by_cause": dict(sorted((evaluation.bad_by_cause or {}).items())),
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
        "compliance": row.good / row.total if row.total else None,
        "burn_rate": row.burn,
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
        "long_burn": state.long.burn,
        "short_burn": state.short.burn,
        "firing": state.firing,
        "reason": state.reason,
    }
