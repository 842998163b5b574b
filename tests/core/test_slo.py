from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.core.slo import (
    Objective,
    ObjectiveMinute,
    Population,
    Totals,
    UnknownReason,
    Verdict,
    budget_is_under,
    budget_remaining,
    burn_of,
    burns_at,
    exact_share,
    judge_population,
    judge_totals,
    judge_window,
)

OBJECTIVE = Objective(Fraction(99, 100))


def minute(
    at: int, offered: int, good: int, *, rate: float = 1.0, rejected: int = 0, neutral: int = 0
) -> ObjectiveMinute:
    admitted = offered - rejected
    return ObjectiveMinute(at * 60_000_000, offered, admitted, good, good, neutral, {"queue_full": rejected}, rate)


def sensible_totals() -> st.SearchStrategy[Totals]:
    parts = st.tuples(*[st.integers(0, 2_000)] * 5)
    return parts.map(lambda p: Totals(sum(p), sum(p[1:]), p[2] + p[3], p[3], p[4]))


@given(sensible_totals(), st.sampled_from(Population))
def test_a_population_is_made_of_good_and_bad_and_one_more_good_never_hurts(totals: Totals, own: Population) -> None:
    judged = judge_population(totals, own, OBJECTIVE)
    if judged.compliance is None:
        assert judged.verdict is Verdict.UNKNOWN
        return
    assert judged.good + judged.bad == judged.total
    assert judged.interval is not None
    assert judged.interval.low <= judged.compliance <= judged.interval.high
    more = judge_population(totals + Totals(1, 1, 1, 1), own, OBJECTIVE)
    fewer = judge_population(
        totals + Totals(1, 1, 0, 0) if own is not Population.SUCCESSFUL else totals + Totals(1, 1, 1), own, OBJECTIVE
    )
    assert more.compliance is not None and fewer.compliance is not None
    assert more.compliance >= judged.compliance >= fewer.compliance
    assert (judged.verdict is Verdict.UNKNOWN) == (judged.total < 100)


@given(sensible_totals())
def test_counting_more_failures_never_improves_a_population(totals: Totals) -> None:
    shares = [judge_population(totals, own, OBJECTIVE).compliance for own in Population]
    known = [share for share in shares if share is not None]
    assert known == sorted(known)


@given(sensible_totals(), st.integers(0, 500))
def test_early_cancellations_change_nothing(totals: Totals, cancelled: int) -> None:
    for own in Population:
        before = judge_population(totals, own, OBJECTIVE)
        after = judge_population(totals + Totals(cancelled, cancelled, 0, 0, cancelled), own, OBJECTIVE)
        assert (before.compliance, before.verdict) == (after.compliance, after.verdict)


def test_minutes_above_the_load_range_leave_the_verdict_and_are_counted() -> None:
    objective = Objective(Fraction(99, 100), load_max_per_s=18.0)
    minutes = [minute(0, 500, 500, rate=18.0), minute(1, 5_000, 100, rate=18.01, rejected=400)]
    result = judge_window(minutes, objective)
    assert result.verdict is Verdict.MET
    assert (result.minutes_in_range, result.minutes_out_of_range, result.offered_out_of_range) == (1, 1, 5_000)
    assert judge_window(minutes, OBJECTIVE).verdict is Verdict.MISSED
    assert judge_window(minutes[1:], objective).unknown_reason is UnknownReason.SILENCE


def test_the_window_adds_causes_and_needs_every_minute_to_make_sense() -> None:
    minutes = [minute(0, 200, 150, rejected=50), minute(1, 100, 80, rejected=20, neutral=0)]
    result = judge_window(minutes, OBJECTIVE)
    assert result.bad_by_cause == {"queue_full": 70}
    assert result.populations[Population.OFFERED].compliance == Fraction(230, 300)
    broken = ObjectiveMinute(120_000_000, 10, 10, 5, 7)
    assert judge_window([*minutes, broken], OBJECTIVE).unknown_reason is UnknownReason.NONSENSE
    negative = ObjectiveMinute(120_000_000, -1, -1, -1, -1)
    assert judge_window([negative], OBJECTIVE).unknown_reason is UnknownReason.NONSENSE


def test_silence_and_few_events_are_unknown_and_never_perfect() -> None:
    assert judge_window([], OBJECTIVE).unknown_reason is UnknownReason.SILENCE
    assert judge_totals(Totals(99, 99, 99, 99), OBJECTIVE).unknown_reason is UnknownReason.FEW_DATA
    assert judge_totals(Totals(100, 100, 100, 100), OBJECTIVE).verdict is Verdict.MET


def test_the_population_of_the_contract_decides() -> None:
    totals = Totals(10_000, 9_800, 9_700, 9_650)
    assert judge_totals(totals, OBJECTIVE).verdict is Verdict.MISSED
    assert judge_totals(totals, Objective(Fraction(99, 100), Population.SUCCESSFUL)).verdict is Verdict.MET


def test_constant_success_keeps_the_whole_budget() -> None:
    minutes = [minute(at, 60, 60) for at in range(0, 7 * 1_440, 7)]
    total = sum(minutes, Totals())
    assert budget_remaining(total, OBJECTIVE) == 1
    assert budget_remaining(Totals(1_000, 1_000, 980, 980), OBJECTIVE) == -1
    assert budget_remaining(Totals(), OBJECTIVE) is None


@given(
    st.lists(st.integers(-1, 40), min_size=5, max_size=5), st.sampled_from(Population),
    st.sampled_from([Fraction(9, 10), Fraction(99, 100), Fraction(1, 3)]), st.fractions(-1, 1, max_denominator=20),
)  # fmt: skip
@example([20, 20, 20, 19, 0], Population.OFFERED, Fraction(9, 10), Fraction(1, 2))
def test_short_ways_agree_with_exact_shares(counted, population, target, share) -> None:
    totals, objective = Totals(*counted), Objective(target, population)
    judged, left = judge_population(totals, population, objective), budget_remaining(totals, objective)
    assert judged.burn == burn_of(totals, objective) == (None if left is None else float(1 - left))
    assert budget_is_under(share, totals, objective) == (left is not None and left < share)
    for factor in (share, 1 - share):
        over = left is not None and 1 - left >= factor
        assert judged.burns(factor) == burns_at(factor, totals, objective) == over
    assert totals.sensible == (
        min(counted) >= 0
        and totals.good <= totals.successful
        and totals.successful + totals.neutral <= totals.admitted <= totals.offered
    )


@pytest.mark.parametrize("value", [0, 1, 1.5, "ninety", -0.1])
def test_a_target_lies_between_none_and_all(value: float) -> None:
    with pytest.raises(ValueError, match="target"):
        exact_share(value)
    assert exact_share(0.99) == Fraction(99, 100)
