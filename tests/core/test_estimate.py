"""Estimates: bounded by what was asked, learning from what came."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.estimate import BIAS_MAX, BIAS_MIN, DemandEstimate, WorkRates, prompt_tokens_bound, raw_gpu_us

RATES = WorkRates(10.0, 100.0)


def test_unknown_output_is_taken_at_its_limit() -> None:
    assert DemandEstimate().output_tokens(500) == 500


def test_expected_output_follows_and_is_bounded_by_the_request() -> None:
    demand = DemandEstimate(alpha=0.5)
    demand.learn_output(100)
    demand.learn_output(200)
    assert demand.output_tokens(500) == 150
    assert demand.output_tokens(40) == 40
    assert demand.output_tokens(0) == 0


def test_cost_is_prefill_and_decode_and_the_bias_follows_what_they_were() -> None:
    demand = DemandEstimate(alpha=1.0)
    assert raw_gpu_us(RATES, 1_000, 20) == 12_000
    assert raw_gpu_us(RATES, 1_000, 2 * 20) == 14_000
    demand.learn_gpu_us(12_000, 24_000)
    assert demand.bias == 2.0


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=50), st.floats(0.01, 1))
def test_bias_stays_within_its_clamp(pairs: list[tuple[int, int]], alpha: float) -> None:
    demand = DemandEstimate(alpha=alpha)
    for estimated, actual in pairs:
        demand.learn_gpu_us(estimated, actual)
        assert BIAS_MIN <= demand.bias <= BIAS_MAX


def test_declaring_less_than_is_used_does_not_buy_capacity() -> None:
    demand = DemandEstimate(expected_output=10)
    for _ in range(100):
        demand.learn_gpu_us(1_000, 3_000)
    assert demand.bias == pytest.approx(3.0, rel=1e-3)


def test_bytes_to_tokens_is_learnt_and_money_takes_the_bytes() -> None:
    demand = DemandEstimate(alpha=1.0)
    assert demand.prompt_tokens(401) == 101
    demand.learn_bytes(1_000, 500)
    assert demand.prompt_tokens(401) == 201
    demand.learn_bytes(10, 90)
    assert demand.tokens_per_byte == 1.0
    assert prompt_tokens_bound(401, 32) == 433


def test_alpha_must_be_a_share() -> None:
    with pytest.raises(ValueError, match="alpha"):
        DemandEstimate(alpha=0)
