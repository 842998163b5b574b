"""Burn-rate and absence alerts of a contract (Google SRE workbook, "Alerting on SLOs", multiwindow multi-burn-rate)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from controlplane.core.binomial import clopper_pearson
from controlplane.core.slo import Compliance, Objective, Totals, Verdict, burns_at, judge_population

US_PER_HOUR = 3_600_000_000
US_PER_MINUTE = 60_000_000
BUDGET_PERIOD_US = 30 * 24 * US_PER_HOUR
ABSENCE_WARN_SHARE = Fraction(1, 100)
ABSENCE_PAGE_SHARE = Fraction(5, 100)


class Severity(StrEnum):
    """How loud an alert is."""

    PAGE = "page"
    TICKET = "ticket"


@dataclass(frozen=True, slots=True)
class BurnRule:
    """Fires when the burn rate is at least `factor` over both windows."""

    severity: Severity
    factor: Fraction
    long_us: int
    short_us: int


BURN_RULES = (
    BurnRule(Severity.PAGE, Fraction("14.4"), 1 * US_PER_HOUR, 5 * US_PER_MINUTE),
    BurnRule(Severity.PAGE, Fraction(6), 6 * US_PER_HOUR, 30 * US_PER_MINUTE),
    BurnRule(Severity.TICKET, Fraction(3), 24 * US_PER_HOUR, 2 * US_PER_HOUR),
    BurnRule(Severity.TICKET, Fraction(1), 72 * US_PER_HOUR, 6 * US_PER_HOUR),
)


@dataclass(frozen=True, slots=True)
class DroppedRule:
    """A rule that could not fire even if every request failed, the arithmetic, and the rule offered in its place."""

    rule: BurnRule
    arithmetic: str
    offered: BurnRule | None


@dataclass(frozen=True, slots=True)
class ReachableRules:
    """Rules that can fire for a target, and those dropped from it. `kept` empty means the contract is refused."""

    kept: tuple[BurnRule, ...]
    dropped: tuple[DroppedRule, ...]


def reachable_rules(target: Fraction, rules: Sequence[BurnRule] = BURN_RULES) -> ReachableRules:
    """Keep the rules with factor x (1 - target) <= 1; a burn rate can never be over 1 / (1 - target)."""
    return _reachable_rules(target, tuple(rules))


@lru_cache(maxsize=1_024)
def _reachable_rules(target: Fraction, rules: tuple[BurnRule, ...]) -> ReachableRules:
    kept = tuple(rule for rule in rules if rule.factor * (1 - target) <= 1)
    dropped = []
    for rule in rules:
        if rule in kept:
            continue
        lower = [other for other in kept if other.factor < rule.factor]
        reach = rule.factor * (1 - target)
        text = f"{_decimal(rule.factor)} x (1 - {_decimal(target)}) = {_decimal(reach)} > 1: it can never fire"
        dropped.append(DroppedRule(rule, text, max(lower, key=lambda other: other.factor, default=None)))
    return ReachableRules(kept, tuple(dropped))


def _decimal(value: Fraction) -> str:
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class BurnState:
    """One rule evaluated at one instant, with the numbers behind it. `target` is the objective's."""

    rule: BurnRule
    firing: bool
    long: Compliance
    short: Compliance
    target: Fraction
    reason: str

    @property
    def burn_low(self) -> float | None:
        """The lower 95 % bound of `long`, worked out when asked for."""
        return _burn_low(self.long, self.target)


def evaluate_burn(
    rule: BurnRule, long: Totals, short: Totals, objective: Objective, *, was_firing: bool = False
) -> BurnState:
    """Whether a rule fires. It begins when both windows burn at its factor or faster, and ends when the short is under.

    The long window needs min_events, and a page also the lower bound of its 95 % interval over the factor, so that one
    failure in thin traffic pages nobody. An unknown short window neither begins nor ends an alert.
    """
    long_judged = judge_population(long, objective.population, objective)
    short_judged = judge_population(short, objective.population, objective)
    target = objective.target
    if not short_judged.total:
        reason = f"the short window is unknown: {short_judged.unknown_reason}"
        return BurnState(rule, was_firing, long_judged, short_judged, target, reason)
    if not short_judged.burns(rule.factor):
        return BurnState(rule, False, long_judged, short_judged, target, "the short window is under the factor")
    if was_firing:
        return BurnState(rule, True, long_judged, short_judged, target, "the short window is not under the factor")
    reason = _held_back(rule, long_judged, target)
    return BurnState(rule, not reason, long_judged, short_judged, target, reason or "both windows are at the factor")


def fires(rule: BurnRule, long: Totals, short: Totals, objective: Objective) -> bool:
    """Whether `evaluate_burn` has the rule begin: asked of thousands of contracts, nearly all of which do not."""
    return burns_at(rule.factor, short, objective) and evaluate_burn(rule, long, short, objective).firing


def _held_back(rule: BurnRule, long: Compliance, target: Fraction) -> str:
    if long.verdict is Verdict.UNKNOWN:
        return f"the long window is unknown: {long.unknown_reason}"
    if not long.burns(rule.factor):
        return "the long window is under the factor"
    if rule.severity is Severity.PAGE and ((burn_low := _burn_low(long, target)) is None or burn_low <= rule.factor):
        return "the lower bound of the long window is not over the factor"
    return ""


def _burn_low(judged: Compliance, target: Fraction) -> float | None:
    if not judged.total:
        return None
    return clopper_pearson(judged.bad, judged.total).low / float(1 - target)


@dataclass(frozen=True, slots=True)
class AbsenceTimes:
    """Silence after which telemetry that stopped alerts by itself."""

    warn_us: int
    page_us: int


@lru_cache(maxsize=1_024)
def absence_times(target: Fraction, budget_period_us: int = BUDGET_PERIOD_US) -> AbsenceTimes:
    """Time in which silence, if it were nothing but errors, burns 1 % (warning) and 5 % (page) of the budget."""
    budget_us = budget_period_us * (1 - target)
    return AbsenceTimes(round(budget_us * ABSENCE_WARN_SHARE), round(budget_us * ABSENCE_PAGE_SHARE))
