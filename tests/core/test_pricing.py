"""Charges: one rounding per line, credits that cancel, bounds that hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.pricing import RateCard, capped, charge, charge_upper_bound_nanos

CARD = RateCard(1_400_000_000, 260_000_000, 4_400_000_000)
prices = st.integers(0, 10**10)
cards = st.builds(RateCard, prices, prices, prices, st.none() | prices, st.integers(0, 1_000_000))


def test_worked_bound() -> None:
    assert charge_upper_bound_nanos(CARD, 1_000, 500) == 1_000 * 1_400 + 500 * 4_400


def test_bound_rounds_each_line_up() -> None:
    card = RateCard(1, 0, 1, 1)
    assert charge_upper_bound_nanos(card, 1, 1, 1, 1) == 3
    assert charge_upper_bound_nanos(card, 0, 0, 1, 0) == 0


def test_bound_takes_the_gpu_price_for_the_stage_timeout() -> None:
    card = RateCard(0, 0, 0, 3_600)
    assert charge_upper_bound_nanos(card, 9, 9, 1, 1_500_000) == 2


def test_charge_splits_cached_from_prompt() -> None:
    lines = charge(CARD, prompt_tokens=1_000, cached_tokens=400, output_tokens=10, gpu_us=0)
    assert (lines.prompt_nanos, lines.cached_nanos, lines.output_nanos) == (840_000, 104_000, 44_000)
    assert lines.total_nanos == 988_000


@pytest.mark.parametrize(
    ("price", "tokens", "nanos"), [(500_000, 1, 0), (500_000, 3, 2), (500_000, 5, 2), (500_001, 1, 1)]
)
def test_halves_go_to_the_even_nano(price: int, tokens: int, nanos: int) -> None:
    card = RateCard(price, 0, 0)
    assert charge(card, prompt_tokens=tokens, cached_tokens=0, output_tokens=0, gpu_us=0).prompt_nanos == nanos


def test_discount_is_inside_the_one_rounding() -> None:
    card = RateCard(1_000_000, 0, 0, None, 500_000)
    assert charge(card, prompt_tokens=3, cached_tokens=0, output_tokens=0, gpu_us=0, batch=True).prompt_nanos == 2
    assert charge(card, prompt_tokens=3, cached_tokens=0, output_tokens=0, gpu_us=0).prompt_nanos == 3


@given(
    cards, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**10), st.booleans()
)
@settings(max_examples=300)
def test_a_credit_cancels_its_charge(card: RateCard, new: int, cached: int, out: int, gpu: int, batch: bool) -> None:
    there = charge(card, prompt_tokens=new + cached, cached_tokens=cached, output_tokens=out, gpu_us=gpu, batch=batch)
    back = charge(
        card, prompt_tokens=-new - cached, cached_tokens=-cached, output_tokens=-out, gpu_us=-gpu, batch=batch
    )
    assert there.total_nanos + back.total_nanos == 0
    assert there.prompt_nanos == -back.prompt_nanos
    lines = (there.prompt_nanos, there.cached_nanos, there.output_nanos, there.gpu_nanos)
    assert there.total_nanos == sum(lines)


@given(cards, st.integers(0, 10**5), st.data(), st.integers(0, 10**5), st.integers(0, 10**9), st.booleans())
@settings(max_examples=300)
def test_the_bound_holds(card: RateCard, prompt: int, data: st.DataObject, most: int, gpu: int, batch: bool) -> None:
    cached = data.draw(st.integers(0, prompt))
    out = data.draw(st.integers(0, most))
    lines = charge(card, prompt_tokens=prompt, cached_tokens=cached, output_tokens=out, gpu_us=gpu, batch=batch)
    # prompt and cached are two rounded lines under one bound: halves of both may add one nano
    assert lines.total_nanos <= charge_upper_bound_nanos(card, prompt, most, 1, gpu) + 1


@given(cards, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**9), st.integers(0, 10**12))
@settings(max_examples=200)
def test_a_capped_charge_is_its_bound_and_no_line_grows(
    card: RateCard, prompt: int, out: int, gpu: int, most: int
) -> None:
    lines = charge(card, prompt_tokens=prompt, cached_tokens=prompt // 2, output_tokens=out, gpu_us=gpu)
    kept = capped(lines, most)
    assert kept.total_nanos == min(lines.total_nanos, most) == sum(kept[:4])
    assert all(0 <= after <= before for after, before in zip(kept, lines, strict=True))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="not a part of prompt_tokens"):
        charge(CARD, prompt_tokens=1, cached_tokens=2, output_tokens=0, gpu_us=0)
    with pytest.raises(ValueError, match="cannot be negative"):
        RateCard(-1, 0, 0)
    with pytest.raises(ValueError, match="batch_discount_ppm"):
        RateCard(1, 0, 0, None, 1_000_001)
