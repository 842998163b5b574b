"""Bounds of jobs: never under the sum of the bounds of their items, whatever the items are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.job_money import JobSize, job_bound_nanos, job_estimate_nanos
from controlplane.core.pricing import RateCard, charge_upper_bound_nanos

prices = st.integers(0, 5_000_000_000)
cards = st.builds(RateCard, prices, prices, prices, st.integers(0, 10**11))


def size(items, outputs=None):
    prompts, answers = sum(p for p, _ in items), sum(o for _, o in items)
    return JobSize(
        items=len(items), prompt_tokens=prompts, output_tokens=outputs or answers, prompt_bound_tokens=prompts,
        output_bound_tokens=answers,
    )  # fmt: skip


@given(
    items=st.lists(st.tuples(st.integers(0, 9_999), st.integers(0, 999)), min_size=1, max_size=30),
    several=st.lists(cards, min_size=1, max_size=3),
    timeout=st.integers(0, 10**9),
)
def test_a_job_is_bounded_by_no_less_than_its_items(items, several, timeout):
    bound = job_bound_nanos(several, size(items), stage_timeout_us=timeout)
    sums = [sum(charge_upper_bound_nanos(card, p, o, 1, timeout) for p, o in items) for card in several]
    assert max(sums) <= bound <= max(sums) + 3 * len(items)


def test_without_a_card_nothing_is_charged_and_a_free_card_reserves_nothing():
    assert job_bound_nanos([], size([(10, 10)]), stage_timeout_us=1) == 0
    assert job_bound_nanos([RateCard(0, 0, 0)], size([(10, 10)]), stage_timeout_us=1) == 0


def test_the_estimate_has_the_discount_the_bound_has_not():
    card = RateCard(1_000_000, 1_000_000, 2_000_000, 3_600_000_000, batch_discount_ppm=500_000)
    job = size([(100, 50), (100, 50)])
    assert job_estimate_nanos(card, job, gpu_us=1_000_000) == 100 + 100 + 500_000
    assert job_bound_nanos([card], job, stage_timeout_us=1_000_000) == 200 + 200 + 2 * 1_000_000 + 6
