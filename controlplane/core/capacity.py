"""How many slots a class needs, and whether that is a reason to buy."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

TREND_US = 15 * 60_000_000
US_PER_SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class DemandSample:
    """Demand of a class at an instant, in slots."""

    at_us: int
    slots: float


@dataclass(frozen=True, slots=True)
class ScalingInput:
    """State of one class; `mean_service_us` is slot time per request, `history` its demand before now."""

    now_us: int
    arrival_rate_per_s: float
    mean_service_us: float
    backlog_gpu_us: int
    target_drain_us: int
    target_utilisation: float
    start_up_lag_us: int
    history: Sequence[DemandSample] = ()


@dataclass(frozen=True, slots=True)
class ScalingSignal:
    """Slots needed, and each term of the sum; all but `needed_slots` are fractional slots."""

    needed_slots: int
    arrivals_slots: float
    backlog_slots: float
    demand_now_slots: float
    trend_slots_per_s: float
    demand_forecast_slots: float
    target_utilisation: float


def scaling_signal(state: ScalingInput) -> ScalingSignal:
    """needed = ceil(demand(now + start_up_lag) / target_utilisation), by the linear trend of the last 15 minutes.

    The forecast is never below the demand of now. Raises ValueError for a utilisation outside (0, 1] or no drain time.
    """
    if not 0 < state.target_utilisation <= 1:
        raise ValueError(f"target_utilisation must be over 0 and at most 1, not {state.target_utilisation}")
    if state.target_drain_us <= 0:
        raise ValueError(f"target_drain_us must be over 0, not {state.target_drain_us}")
    arrivals = state.arrival_rate_per_s * state.mean_service_us / US_PER_SECOND
    backlog = state.backlog_gpu_us / state.target_drain_us
    demand = arrivals + backlog
    samples = [*state.history, DemandSample(state.now_us, demand)]
    trend = trend_per_s([sample for sample in samples if state.now_us - TREND_US <= sample.at_us <= state.now_us])
    forecast = max(demand, demand + trend * state.start_up_lag_us / US_PER_SECOND)
    needed = ceil(forecast / state.target_utilisation - 1e-9)
    return ScalingSignal(needed, arrivals, backlog, demand, trend, forecast, state.target_utilisation)


def trend_per_s(samples: Sequence[DemandSample]) -> float:
    """Least-squares slope in slots per second; 0 when all samples are of one instant."""
    if not samples:
        return 0.0
    origin_us = samples[0].at_us
    times = [(sample.at_us - origin_us) / US_PER_SECOND for sample in samples]
    mean_time = sum(times) / len(times)
    mean_slots = sum(sample.slots for sample in samples) / len(samples)
    spread = sum((at - mean_time) ** 2 for at in times)
    if not spread:
        return 0.0
    return sum((at - mean_time) * (sample.slots - mean_slots) for at, sample in zip(times, samples)) / spread


class PurchaseVerdict(StrEnum):
    """Outcome of the purchase gate."""

    BUY = "buy"
    DO_NOT_BUY = "do_not_buy"
    UNKNOWN = "unknown"


class PurchaseReason(StrEnum):
    """Why the gate says so."""

    ISOLATION_SUFFICES = "isolation_suffices"
    INTERACTIVE_MISSED_AT_FORECAST = "interactive_missed_at_forecast"
    BATCH_MISSED_AT_FORECAST = "batch_missed_at_forecast"
    NO_FAILURE_HEADROOM = "no_failure_headroom"
    NOT_TESTED = "not_tested"


@dataclass(frozen=True, slots=True)
class IsolationEvidence:
    """What the interference test found for the isolated design on today's fleet at the forecast load.

    None means that it was not tested. `safe_rate_one_failed_per_s` is what the interactive floor less one slot serves.
    """

    interactive_met: bool | None
    batch_met: bool | None
    forecast_rate_per_s: float
    safe_rate_one_failed_per_s: float | None


@dataclass(frozen=True, slots=True)
class PurchaseDecision:
    """Verdict of the gate with every reason that holds."""

    verdict: PurchaseVerdict
    reasons: tuple[PurchaseReason, ...]


def purchase_gate(evidence: IsolationEvidence) -> PurchaseDecision:
    """Buy only if isolation misses an objective at the forecast load or the floor cannot lose one slot.

    What was not tested cannot be a reason against buying: then the verdict is unknown, never "do not buy".
    """
    reasons = []
    if evidence.interactive_met is False:
        reasons.append(PurchaseReason.INTERACTIVE_MISSED_AT_FORECAST)
    if evidence.batch_met is False:
        reasons.append(PurchaseReason.BATCH_MISSED_AT_FORECAST)
    safe_rate = evidence.safe_rate_one_failed_per_s
    if safe_rate is not None and safe_rate < evidence.forecast_rate_per_s:
        reasons.append(PurchaseReason.NO_FAILURE_HEADROOM)
    if reasons:
        return PurchaseDecision(PurchaseVerdict.BUY, tuple(reasons))
    if None in (evidence.interactive_met, evidence.batch_met, safe_rate):
        return PurchaseDecision(PurchaseVerdict.UNKNOWN, (PurchaseReason.NOT_TESTED,))
    return PurchaseDecision(PurchaseVerdict.DO_NOT_BUY, (PurchaseReason.ISOLATION_SUFFICES,))
