"""Verdict on a contract from the counts of a case in JSON form."""

from typing import Any

from controlplane.core.burn import BUDGET_PERIOD_US, absence_times, reachable_rules
from controlplane.core.json_reader import JsonReader
from controlplane.core.slo import (
    MIN_EVENTS,
    Compliance,
    Objective,
    Population,
    Totals,
    exact_share,
    judge_totals,
)


def explain(case: object) -> dict[str, Any]:
    """Answer of one case.

    Input: `target` and `counts` {offered, rejected, timed_out, successful, good, cancelled_before_threshold}, optional
    `population` and `min_events`. Raises ValueError for unusable input; counts that contradict each other are unknown.
    """
    reader = JsonReader(case, "")
    objective = _objective(reader)
    totals, timed_out = _totals(reader.part_or_empty("counts"))
    result = judge_totals(totals, objective)
    rules = reachable_rules(objective.target)
    absence = absence_times(objective.target, BUDGET_PERIOD_US)
    answer: dict[str, Any] = {str(population): _population(row) for population, row in result.populations.items()}
    answer |= {
        "population": str(objective.population),
        "verdict": str(result.verdict),
        "met": {"met": True, "missed": False}.get(result.verdict),
        "unknown_reason": None if result.unknown_reason is None else str(result.unknown_reason),
        "neutral": totals.neutral,
        "bad_by_cause": {
            "rejected": totals.offered - totals.admitted,
            "timed_out": timed_out,
            "too_slow": totals.successful - totals.good,
            "failed": totals.admitted - totals.successful - totals.neutral - timed_out,
        },
        "rules_dropped": [dropped.arithmetic for dropped in rules.dropped],
        "absence_warn_s": absence.warn_us / 1e6,
        "absence_page_s": absence.page_us / 1e6,
    }
    return answer


def _objective(reader: JsonReader) -> Objective:
    population = reader.choice("population", Population, Population.OFFERED)
    target = exact_share(reader.decimal("target"))
    return Objective(target, population, min_events=reader.integer("min_events", MIN_EVENTS))


def _totals(counts: JsonReader) -> tuple[Totals, int]:
    offered = counts.integer("offered", least=None)
    rejected = counts.integer("rejected", 0, least=None)
    timed_out = counts.integer("timed_out", 0, least=None)
    successful = counts.integer("successful", least=None)
    neutral = counts.integer("cancelled_before_threshold", 0, least=None)
    totals = Totals(offered, offered - rejected, successful, counts.integer("good", least=None), neutral)
    if timed_out < 0 or successful + neutral + timed_out > totals.admitted:
        # more outcomes than admissions: keep the contradiction, so that it is judged as such
        totals = Totals(offered, offered - rejected, successful + timed_out, totals.good, neutral)
    return totals, timed_out


def _population(row: Compliance) -> dict[str, Any]:
    return {
        "total": row.total,
        "good": row.good,
        "bad": row.bad,
        "compliance": None if row.compliance is None else round(float(row.compliance), 6),
        "burn_rate": None if row.burn_rate is None else round(float(row.burn_rate), 4),
        "interval_95": None if row.interval is None else [round(row.interval.low, 6), round(row.interval.high, 6)],
        "verdict": str(row.verdict),
        "unknown_reason": None if row.unknown_reason is None else str(row.unknown_reason),
    }
