import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.capacity import (
    DemandSample,
    IsolationEvidence,
    PurchaseReason,
    PurchaseVerdict,
    ScalingInput,
    purchase_gate,
    scaling_signal,
    trend_per_s,
)

MINUTE = 60_000_000


def state(history: list[DemandSample] | None = None, rate: float = 4.0, backlog_us: int = 0) -> ScalingInput:
    return ScalingInput(15 * MINUTE, rate, 500_000.0, backlog_us, 600_000_000, 0.8, 5 * MINUTE, history or [])


def test_demand_is_arrivals_and_backlog_over_utilisation() -> None:
    signal = scaling_signal(state(backlog_us=1_200_000_000))
    assert (signal.arrivals_slots, signal.backlog_slots, signal.demand_now_slots) == (2.0, 2.0, 4.0)
    assert signal.needed_slots == 5
    assert signal.trend_slots_per_s == 0


def test_a_rising_demand_is_met_when_the_slots_will_be_up() -> None:
    # one slot more every five minutes, up to the two of now
    rising = [DemandSample(at * MINUTE, -1 + at / 5) for at in range(15)]
    signal = scaling_signal(state(rising))
    assert signal.demand_forecast_slots == pytest.approx(3.0)
    assert signal.needed_slots == 4
    assert scaling_signal(state([DemandSample(-MINUTE, 100.0)])).trend_slots_per_s == 0  # older than 15 minutes


@given(st.lists(st.tuples(st.integers(0, 15 * MINUTE), st.floats(0, 100)), max_size=20))
def test_the_forecast_is_never_below_now(points: list[tuple[int, float]]) -> None:
    signal = scaling_signal(state([DemandSample(at, slots) for at, slots in points]))
    assert signal.demand_forecast_slots >= signal.demand_now_slots
    assert signal.needed_slots * 0.8 >= signal.demand_forecast_slots - 1e-6


def test_unusable_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="target_utilisation"):
        scaling_signal(ScalingInput(0, 1.0, 1.0, 0, 1, 0.0, 0))
    with pytest.raises(ValueError, match="target_drain_us"):
        scaling_signal(ScalingInput(0, 1.0, 1.0, 0, 0, 0.5, 0))
    assert trend_per_s([]) == 0


@pytest.mark.parametrize(
    ("evidence", "verdict", "reasons"),
    [
        ((True, True, 10.0, 10.0), PurchaseVerdict.DO_NOT_BUY, [PurchaseReason.ISOLATION_SUFFICES]),
        ((False, True, 10.0, 12.0), PurchaseVerdict.BUY, [PurchaseReason.INTERACTIVE_MISSED_AT_FORECAST]),
        ((True, False, 10.0, 12.0), PurchaseVerdict.BUY, [PurchaseReason.BATCH_MISSED_AT_FORECAST]),
        ((True, True, 10.0, 9.9), PurchaseVerdict.BUY, [PurchaseReason.NO_FAILURE_HEADROOM]),
        ((None, True, 10.0, 12.0), PurchaseVerdict.UNKNOWN, [PurchaseReason.NOT_TESTED]),
        ((True, True, 10.0, None), PurchaseVerdict.UNKNOWN, [PurchaseReason.NOT_TESTED]),
        ((None, False, 10.0, None), PurchaseVerdict.BUY, [PurchaseReason.BATCH_MISSED_AT_FORECAST]),
    ],
)
def test_the_gate_buys_only_for_a_miss_or_no_headroom(
    evidence: tuple[bool | None, bool | None, float, float | None], verdict: str, reasons: list[str]
) -> None:
    decision = purchase_gate(IsolationEvidence(*evidence))
    assert (decision.verdict, list(decision.reasons)) == (verdict, reasons)
