"""The gates of a rollout's wave: refusals, agents that fell silent, and what contracts burn among the wave's agents.

A wave passes only on what is known. What is not known yet waits; what stays unknown is left to a person.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from controlplane.core.burn import reachable_rules
from controlplane.core.slo import Objective, Totals, UnknownReason, judge_population

PERCENT = 100


class Gate(StrEnum):
    """What is asked of a wave, in the order in which it is told."""

    REFUSALS = "refusals"
    SILENCE = "silence"
    ANSWERS = "answers"
    BURN = "burn"
    HOLD = "hold"


class GateState(StrEnum):
    """`asks`: it stayed unknown for so long that a person has to decide."""

    HELD = "held"
    FAILED = "failed"
    WAITS = "waits"
    ASKS = "asks"


@dataclass(frozen=True, slots=True)
class GateLimits:
    """How much a wave may show. `burn_most` None does not ask for burn; times are microseconds."""

    hold_us: int = 0
    timeout_us: int = 600_000_000
    refusals_most: int = 0
    refusals_most_percent: int = 0
    silent_most: int = 0
    burn_most: Fraction | None = None

    def refusals_allowed(self, agents: int) -> int:
        return max(self.refusals_most, agents * self.refusals_most_percent // PERCENT)


@dataclass(frozen=True, slots=True)
class ContractCounts:
    """What the wave's agents counted of one contract since they applied the revision.

    `running` requests have not ended and are in no population. `expected`: it had at least `min_events` in these pools
    in the hour before, so that silence about it is no good news.
    """

    slug: str
    totals: Totals
    running: int
    objective: Objective
    expected: bool = True


@dataclass(frozen=True, slots=True)
class WaveFacts:
    """One wave at one instant. `silent` spoke when it was sent and do not any more; `unheard` never answered.

    `answered_us` is the instant of the last answer, None while `outstanding` agents may still answer.
    """

    agents: int
    acked: int
    refused: int
    silent: int
    unheard: int
    outstanding: int
    answered_us: int | None
    first_refusal: str = ""
    contracts: tuple[ContractCounts, ...] = ()


@dataclass(frozen=True, slots=True)
class GateReading:
    """One gate with the value it saw and its limit, as an operator reads them."""

    gate: Gate
    state: GateState
    observed: str
    limit: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class WaveVerdict:
    """`state` is the worst of the readings; `why` names the one that decided, empty when all held."""

    state: GateState
    readings: tuple[GateReading, ...]

    @property
    def why(self) -> str:
        return next((reading.why for reading in self.readings if reading.state is self.state), "")


ORDER = (GateState.FAILED, GateState.WAITS, GateState.ASKS, GateState.HELD)


def judge_wave(limits: GateLimits, facts: WaveFacts, now_us: int) -> WaveVerdict:
    """Failed as soon as one gate fails; asks only when nothing else is still to come; held when all are."""
    if not facts.agents:
        return WaveVerdict(GateState.HELD, ())
    readings = (
        _refusals(limits, facts),
        _silence(limits, facts),
        _answers(limits, facts),
        *_burn(limits, facts, now_us),
        _hold(limits, facts, now_us),
    )
    state = next(state for state in ORDER if any(reading.state is state for reading in readings))
    return WaveVerdict(state, readings)


def _refusals(limits: GateLimits, facts: WaveFacts) -> GateReading:
    allowed = limits.refusals_allowed(facts.agents)
    why = f"{_agents(facts.refused)} of {facts.agents} refused it, {allowed} may: {facts.first_refusal}"
    return _at_most(Gate.REFUSALS, facts.refused, allowed, f"at most {allowed} of {facts.agents}", why)


def _silence(limits: GateLimits, facts: WaveFacts) -> GateReading:
    why = f"{_agents(facts.silent)} fell silent after it was sent, {limits.silent_most} may"
    return _at_most(Gate.SILENCE, facts.silent, limits.silent_most, f"at most {limits.silent_most}", why)


def _at_most(gate: Gate, agents: int, allowed: int, limit: str, why: str) -> GateReading:
    if agents > allowed:
        return GateReading(gate, GateState.FAILED, str(agents), limit, why)
    return GateReading(gate, GateState.HELD, str(agents), limit)


def _answers(limits: GateLimits, facts: WaveFacts) -> GateReading:
    answered = facts.acked + facts.refused
    observed, limit = f"{answered} of {facts.agents}", "every agent that speaks"
    if facts.outstanding:
        return GateReading(Gate.ANSWERS, GateState.WAITS, observed, limit, f"{_agents(facts.outstanding)} to answer")
    if facts.unheard + facts.silent > limits.silent_most:
        why = f"{_agents(facts.unheard)} of the wave never answered: silent since before it was sent"
        return GateReading(Gate.ANSWERS, GateState.ASKS, observed, limit, why)
    return GateReading(Gate.ANSWERS, GateState.HELD, observed, limit)


def _hold(limits: GateLimits, facts: WaveFacts, now_us: int) -> GateReading:
    limit = f"{limits.hold_us // 1_000_000} s after the last answer"
    if facts.answered_us is None:
        return GateReading(Gate.HOLD, GateState.WAITS, "not begun", limit, "it is held once its agents have answered")
    passed_us = now_us - facts.answered_us
    state = GateState.HELD if passed_us >= limits.hold_us else GateState.WAITS
    left_s = max(0, -((passed_us - limits.hold_us) // 1_000_000))
    why = f"it is held for another {left_s} s" if state is GateState.WAITS else ""
    return GateReading(Gate.HOLD, state, f"{max(0, passed_us) // 1_000_000} s", limit, why)


def _burn(limits: GateLimits, facts: WaveFacts, now_us: int) -> Sequence[GateReading]:
    """One reading per contract; one that nobody expects to be heard of is told only when enough is known of it."""
    if limits.burn_most is None:
        return ()
    late_us = None if facts.answered_us is None else facts.answered_us + limits.hold_us + limits.timeout_us
    unknown = GateState.ASKS if late_us is not None and now_us >= late_us else GateState.WAITS
    readings = []
    for counts in facts.contracts:
        reading = _burn_of(counts, limits.burn_most, unknown)
        if counts.expected or reading.state in (GateState.FAILED, GateState.HELD):
            readings.append(reading)
    if facts.contracts and not readings:
        why = "no contract has had enough requests to be judged, here or in the hour before"
        return (GateReading(Gate.BURN, unknown, "unknown", f"under {float(limits.burn_most):g}", why),)
    return readings


def _burn_of(counts: ContractCounts, burn_most: Fraction, unknown: GateState) -> GateReading:
    limit = reachable_burn(counts.objective.target, burn_most)
    asked = f"{counts.slug}: under {float(limit):g}"
    totals = Totals(
        counts.totals.offered - counts.running,
        counts.totals.admitted - min(counts.running, counts.totals.admitted),
        counts.totals.successful,
        counts.totals.good,
        counts.totals.neutral,
    )
    judged = judge_population(totals, counts.objective.population, counts.objective)
    if judged.unknown_reason is UnknownReason.NONSENSE:
        why = f"the counts of contract {counts.slug} contradict each other"
        return GateReading(Gate.BURN, unknown, "unknown", asked, why)
    if judged.burn_rate is None or judged.total < counts.objective.min_events:
        why = f"contract {counts.slug} has {judged.total} of the {counts.objective.min_events} requests it needs"
        return GateReading(Gate.BURN, unknown, f"unknown ({judged.total} requests)", asked, why)
    observed = f"{float(judged.burn_rate):.2f} ({judged.bad} of {judged.total} bad)"
    if judged.burn_rate >= limit:
        why = f"contract {counts.slug} burns at {float(judged.burn_rate):.1f} there, {float(limit):g} is the limit"
        return GateReading(Gate.BURN, GateState.FAILED, observed, asked, why)
    return GateReading(Gate.BURN, GateState.HELD, observed, asked)


def reachable_burn(target: Fraction, burn_most: Fraction) -> Fraction:
    """The limit, or where even total failure burns slower, the fastest alert rule that can fire for this target."""
    if burn_most * (1 - target) <= 1:
        return burn_most
    kept = reachable_rules(target).kept
    return max((rule.factor for rule in kept), default=Fraction(1))


def _agents(count: int) -> str:
    return f"{count} agent" + ("" if count == 1 else "s")
