"""A promise as a sentence, the same on every page and in every message."""

from dataclasses import dataclass
from datetime import time
from fractions import Fraction
from typing import Any

from controlplane.core.burn import BurnRule, ReachableRules, Severity, reachable_rules
from controlplane.web.numerals import duration

PPM = 1_000_000
US_PER_SECOND = 1_000_000

METRIC_NAMES = {
    "queue_wait": "queue wait",
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "e2e": "end-to-end time",
}
_DOING = {
    "queue_wait": "leave the queue within {limit}",
    "ttft": "start streaming within {limit}",
    "tpot": "produce each output token within {limit} on average",
    "e2e": "finish within {limit}",
}
_POPULATION = {
    "offered": "Refused and timed-out requests count against it.",
    "admitted": "Refused requests do not count; whatever was admitted and failed does.",
    "successful": "Only requests that completed count.",
}


@dataclass(frozen=True, slots=True)
class Phrase:
    """A piece of a sentence; `marked` pieces are the values that the reader should check."""

    text: str
    marked: bool = False


def share_text(target_ppm: int) -> str:
    """990,000 ppm as "99 %": as many decimals as it has."""
    return f"{target_ppm / 10_000:.4f}".rstrip("0").rstrip(".") + "\N{NO-BREAK SPACE}%"


def span_text(seconds: int) -> str:
    """Seconds as the words of a promise: 15 min, 30 d."""
    if seconds and seconds % 86_400 == 0:
        return f"{seconds // 86_400}\N{NO-BREAK SPACE}d"
    return duration(seconds * US_PER_SECOND)


def phrases(values: Any) -> list[Phrase]:
    """The promise of a contract version (or anything with its attributes), piece by piece.

    Raises AttributeError or TypeError when values that the objective needs are missing.
    """
    if values.objective == "deadline":
        return _deadline(values)
    return _latency(values)


def sentence(values: Any) -> str:
    return "".join(phrase.text for phrase in phrases(values))


def _latency(values: Any) -> list[Phrase]:
    before, after = _DOING[values.metric].split("{limit}")
    pieces = [
        Phrase("At least "),
        Phrase(share_text(values.target_ppm), True),
        Phrase(" of "),
        Phrase(str(values.population), True),
        Phrase(f" requests {before}"),
        Phrase(f"{values.threshold_ms:,}\N{NO-BREAK SPACE}ms", True),
        Phrase(f"{after}, over any "),
        Phrase(span_text(values.window_s), True),
    ]
    if values.load_limit_per_s:
        pieces += [
            Phrase(", while admitted load is at most "),
            Phrase(f"{values.load_limit_per_s:g}", True),
            Phrase(" requests per second"),
        ]
    return [*pieces, Phrase(". " + _POPULATION[values.population])]


def _deadline(values: Any) -> list[Phrase]:
    pieces = [
        Phrase("At least "),
        Phrase(share_text(values.target_ppm), True),
        Phrase(" of jobs admitted before "),
        Phrase(_clock(values.admitted_before), True),
        Phrase(" finish by "),
        Phrase(_clock(values.finished_by), True),
        Phrase(f" ({values.zone})"),
    ]
    if values.first_attempt_within_s:
        pieces += [
            Phrase(", and no job waits longer than "),
            Phrase(span_text(values.first_attempt_within_s), True),
            Phrase(" before its first attempt"),
        ]
    return [*pieces, Phrase(". On nights when clocks change the time between is an hour longer or shorter.")]


def _clock(at: time) -> str:
    return at.strftime("%H:%M")


@dataclass(frozen=True, slots=True)
class AlertLine:
    """One burn alert of a contract: what it needs, whether it can fire, the arithmetic, and what to use instead."""

    severity: str
    factor: str
    long: str
    short: str
    reachable: bool
    arithmetic: str
    offered: str


def alert_lines(target_ppm: int) -> list[AlertLine]:
    """Every burn alert at this target, those that can never fire with the arithmetic."""
    rules = reachable_rules(Fraction(target_ppm, PPM))
    lines = [_line(rule, True, _reach(rule, target_ppm), "") for rule in rules.kept]
    for dropped in rules.dropped:
        offered = f"{_severity(dropped.offered)} at burn {float(dropped.offered.factor):g}" if dropped.offered else ""
        lines.append(_line(dropped.rule, False, dropped.arithmetic, offered))
    return sorted(lines, key=lambda line: -float(line.factor))


def _reach(rule: BurnRule, target_ppm: int) -> str:
    share = rule.factor * (1 - Fraction(target_ppm, PPM))
    return f"fires from {float(share * 100):.4g} % bad"


def _line(rule: BurnRule, reachable: bool, arithmetic: str, offered: str) -> AlertLine:
    return AlertLine(
        severity=_severity(rule),
        factor=f"{float(rule.factor):g}",
        long=duration(rule.long_us),
        short=duration(rule.short_us),
        reachable=reachable,
        arithmetic=arithmetic,
        offered=offered,
    )


def _severity(rule: BurnRule) -> str:
    return "page" if rule.severity is Severity.PAGE else "ticket"


def unreachable(target_ppm: int) -> ReachableRules:
    """The rules as the core judges them, for checks."""
    return reachable_rules(Fraction(target_ppm, PPM))
