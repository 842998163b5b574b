"""Interactive contracts: three populations, out-of-range minutes and unknown as outcomes of their own.

Good is counted at the agent against the threshold; this module only adds counts up and judges them. Silence, too few
events and counts that contradict each other are unknown, never 100 %.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from controlplane.core.binomial import Interval, clopper_pearson

MIN_EVENTS = 100


class Population(StrEnum):
    """Which requests a compliance is a share of."""

    OFFERED = "offered"
    ADMITTED = "admitted"
    SUCCESSFUL = "successful"


class Verdict(StrEnum):
    """Outcome of a contract over its window."""

    MET = "met"
    MISSED = "missed"
    UNKNOWN = "unknown"


class UnknownReason(StrEnum):
    """Why a verdict is unknown."""

    SILENCE = "silence"
    FEW_DATA = "few_data"
    NONSENSE = "nonsense"
    NOT_YET_DUE = "not_yet_due"


def exact_share(value: float | str | Fraction, name: str = "target") -> Fraction:
    """A share as the decimal it was written as (0.99 is 99/100); ValueError unless it is over 0 and under 1."""
    try:
        share = value if isinstance(value, Fraction) else Fraction(str(value))
    except ValueError:
        raise ValueError(f"the {name} {value!r} is not a number") from None
    if not 0 < share < 1:
        raise ValueError(f"the {name} must be over 0 and under 1, not {value}")
    return share


@dataclass(frozen=True, slots=True)
class ObjectiveMinute:
    """Counts of one contract version by arrival minute; `bad_by_cause` sums to what is neither good nor neutral.

    Rejected requests are offered and not admitted. `admitted_rate_per_s` is the class's admitted rate in the pool.
    """

    minute_us: int
    offered: int
    admitted: int
    successful: int
    good: int
    neutral: int = 0
    bad_by_cause: Mapping[str, int] = field(default_factory=dict)
    admitted_rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Objective:
    """What a contract promises. Without `load_max_per_s` every minute is in range."""

    target: Fraction
    population: Population = Population.OFFERED
    load_max_per_s: float | None = None
    min_events: int = MIN_EVENTS


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of many requests; neutral ones (cancelled before the threshold) are admitted and not successful."""

    offered: int = 0
    admitted: int = 0
    successful: int = 0
    good: int = 0
    neutral: int = 0

    @property
    def sensible(self) -> bool:
        """Whether the counts can be true together."""
        return (
            0 <= self.good <= self.successful
            and self.neutral >= 0
            and self.successful + self.neutral <= self.admitted <= self.offered
        )

    def size(self, population: Population) -> int:
        """Requests that count in a population: neutral ones count in none."""
        if population is Population.SUCCESSFUL:
            return self.successful
        return (self.offered if population is Population.OFFERED else self.admitted) - self.neutral

    def __add__(self, other: "Totals | ObjectiveMinute") -> "Totals":
        return Totals(
            self.offered + other.offered,
            self.admitted + other.admitted,
            self.successful + other.successful,
            self.good + other.good,
            self.neutral + other.neutral,
        )


@dataclass(frozen=True, slots=True)
class Compliance:
    """One population of a window. Shares are exact; None where there is nothing to divide by."""

    population: Population
    total: int
    good: int
    target: Fraction
    verdict: Verdict
    unknown_reason: UnknownReason | None = None

    @property
    def bad(self) -> int:
        return self.total - self.good

    @property
    def compliance(self) -> Fraction | None:
        return Fraction(self.good, self.total) if self.total else None

    @property
    def burn_rate(self) -> Fraction | None:
        """The share that is bad, in shares that the target allows."""
        return Fraction(self.bad, self.total) / (1 - self.target) if self.total else None

    @property
    def burn(self) -> float | None:
        """The burn rate as the float next to it: whole numbers divide to what the fraction would be made into."""
        return _burn(self.bad, self.total, self.target) if self.total else None

    def burns(self, factor: Fraction) -> bool:
        """Whether the burn rate is known and at least `factor`."""
        return bool(self.total) and _over(self.bad, self.total, self.target, factor.numerator, factor.denominator) >= 0

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the compliance, worked out when asked for: it costs more than the verdict, and few look."""
        return clopper_pearson(self.good, self.total) if self.total else None


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """A contract over its window; `verdict` is that of the contract's own population."""

    populations: Mapping[Population, Compliance]
    verdict: Verdict
    unknown_reason: UnknownReason | None
    neutral: int
    bad_by_cause: Mapping[str, int]
    minutes_in_range: int
    minutes_out_of_range: int
    offered_out_of_range: int


def _burn(bad: int, total: int, target: Fraction) -> float:
    return bad * target.denominator / (total * (target.denominator - target.numerator))


def _over(bad: int, total: int, target: Fraction, numerator: int, denominator: int) -> int:
    """Over 0, 0 or under it as the burn rate is over numerator / denominator, equal or under; exact, without fractions:
    thousands of contracts are compared for one page.
    """
    return bad * target.denominator * denominator - numerator * total * (target.denominator - target.numerator)


def judge_population(totals: Totals, population: Population, objective: Objective) -> Compliance:
    """Compliance, burn rate and verdict of one population."""
    if not totals.sensible:
        return Compliance(population, 0, 0, objective.target, Verdict.UNKNOWN, UnknownReason.NONSENSE)
    total = totals.size(population)
    if not total:
        return Compliance(population, 0, 0, objective.target, Verdict.UNKNOWN, UnknownReason.SILENCE)
    verdict, reason = Verdict.MISSED, None
    if total < objective.min_events:
        verdict, reason = Verdict.UNKNOWN, UnknownReason.FEW_DATA
    elif totals.good * objective.target.denominator >= objective.target.numerator * total:
        verdict = Verdict.MET
    return Compliance(population, total, totals.good, objective.target, verdict, reason)


def burn_of(totals: Totals, objective: Objective) -> float | None:
    """The burn rate of the contract's own population as `judge_population` has it; None where that is unknown."""
    total = totals.size(objective.population)
    if not total or not totals.sensible:
        return None
    return _burn(total - totals.good, total, objective.target)


def burns_at(factor: Fraction, totals: Totals, objective: Objective) -> bool:
    """`Compliance.burns` of the contract's own population, without the row around it."""
    total = totals.size(objective.population)
    if not total or not totals.sensible:
        return False
    return _over(total - totals.good, total, objective.target, factor.numerator, factor.denominator) >= 0


def judge_totals(totals: Totals, objective: Objective) -> ObjectiveResult:
    """Judge counts that are already added up and in range."""
    populations = {population: judge_population(totals, population, objective) for population in Population}
    own = populations[objective.population]
    return ObjectiveResult(populations, own.verdict, own.unknown_reason, totals.neutral, {}, 0, 0, 0)


def judge_window(minutes: Iterable[ObjectiveMinute], objective: Objective) -> ObjectiveResult:
    """Judge the minutes of a window: those above the load range are counted apart and leave the verdict.

    One minute whose counts contradict each other makes the verdict unknown, whatever the others say.
    """
    totals, causes = Totals(), dict[str, int]()
    inside = outside = offered_outside = 0
    nonsense = False
    for minute in minutes:
        if objective.load_max_per_s is not None and minute.admitted_rate_per_s > objective.load_max_per_s:
            outside += 1
            offered_outside += minute.offered
            continue
        inside += 1
        nonsense = nonsense or not (Totals() + minute).sensible
        totals = totals + minute
        for cause, count in minute.bad_by_cause.items():
            causes[cause] = causes.get(cause, 0) + count
    if nonsense:
        totals = Totals(good=1)  # more good than successful: judged as nonsense in every population
    judged = judge_totals(totals, objective)
    return ObjectiveResult(
        judged.populations,
        judged.verdict,
        judged.unknown_reason,
        0 if nonsense else totals.neutral,
        causes,
        inside,
        outside,
        offered_outside,
    )


def budget_remaining(totals: Totals, objective: Objective) -> Fraction | None:
    """Share of the error budget that is left over its period, negative when overspent; None when unknown.

    Recomputed from the events each time, so a period without a bad event has exactly 1 left.
    """
    judged = judge_population(totals, objective.population, objective)
    return None if judged.burn_rate is None else 1 - judged.burn_rate


def budget_is_under(share: Fraction, totals: Totals, objective: Objective) -> bool:
    """Whether `budget_remaining` is known and under a share, without making its fraction."""
    judged = judge_population(totals, objective.population, objective)
    spent = share.denominator - share.numerator
    return bool(judged.total) and _over(judged.bad, judged.total, objective.target, spent, share.denominator) > 0
