"""Synthetic traffic: seeded, within its tables, with the rate and burst that were asked for."""

from itertools import islice, takewhile
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.lab import synthetic
from controlplane.lab.synthetic import CODE_OUTPUT, CODE_PROMPT, Burst, arrivals, draw, requests


def trace(seed, **values):
    settings = {"rate_per_s": 5.0, "variation": 1.3, "prompt": CODE_PROMPT, "output": CODE_OUTPUT, **values}
    return requests(rng=Random(seed), **settings)


def test_the_same_seed_gives_the_same_trace_and_another_another():
    assert list(islice(trace(7), 500)) == list(islice(trace(7), 500))
    assert list(islice(trace(7), 500)) != list(islice(trace(8), 500))


@given(seed=st.integers(0, 2**32))
def test_draws_stay_within_the_table(seed):
    rng = Random(seed)
    for table in (CODE_PROMPT, CODE_OUTPUT, synthetic.CONVERSATION_PROMPT, synthetic.CONVERSATION_OUTPUT):
        assert table[0][1] <= draw(table, rng) <= table[-1][1]


def test_the_median_of_many_draws_is_the_tables():
    rng = Random(3)
    drawn = sorted(draw(CODE_PROMPT, rng) for _ in range(20_001))
    assert abs(drawn[10_000] - 1469) < 60


def test_the_rate_is_the_one_asked_for():
    count = len(list(takewhile(lambda request: request.at_us < 2_000_000_000, trace(1))))
    assert abs(count / 2_000 - 5.0) < 0.4


def test_a_burst_multiplies_the_rate_in_its_time_only():
    burst = Burst(first_s=30, every_s=60, length_s=10, factor=6)
    found = list(takewhile(lambda at_s: at_s < 6_000, arrivals(
        rate_per_s=4, variation=1.0, rng=Random(2), factor_at=burst.factor_at)))  # fmt: skip
    inside = sum(1 for at_s in found if burst.factor_at(at_s) > 1)
    assert 5 < (inside / 1_000) / ((len(found) - inside) / 5_000) < 7


@pytest.mark.parametrize("values", [{"rate_per_s": 0}, {"variation": -1}])
def test_impossible_rates_are_refused(values):
    with pytest.raises(ValueError, match="positive"):
        next(trace(1, **values))


def test_maxima_cut_draws():
    assert all(
        r.prompt_tokens <= 100 and r.output_tokens <= 9 for r in islice(trace(1, prompt_max=100, output_max=9), 300)
    )
