from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.burn import BURN_RULES, BurnRule, Severity, absence_times, evaluate_burn, reachable_rules
from controlplane.core.burn import fires as begins
from controlplane.core.slo import Objective, Totals

OBJECTIVE = Objective(Fraction(99, 100))
FAST = BURN_RULES[0]
TICKET = BURN_RULES[2]


def counts(total: int, bad: int) -> Totals:
    return Totals(total, total, total - bad, total - bad)


def fires(rule: BurnRule, long: Totals, short: Totals, *, was_firing: bool = False) -> bool:
    return evaluate_burn(rule, long, short, OBJECTIVE, was_firing=was_firing).firing


def test_a_page_needs_both_windows_at_the_factor() -> None:
    assert fires(FAST, counts(10_000, 2_000), counts(800, 160))
    assert not fires(FAST, counts(10_000, 2_000), counts(800, 100))
    assert not fires(FAST, counts(10_000, 1_000), counts(800, 160))


def test_one_failure_in_thin_traffic_pages_nobody() -> None:
    state = evaluate_burn(FAST, counts(3, 1), counts(3, 1), OBJECTIVE)
    assert not state.firing
    assert state.reason == "the long window is unknown: few_data"


def test_a_page_needs_the_lower_bound_over_the_factor_and_a_ticket_does_not() -> None:
    # 16 % of 100 burns at 16, but it may well be 10 %
    state = evaluate_burn(FAST, counts(100, 16), counts(50, 10), OBJECTIVE)
    assert not state.firing
    assert state.burn_low is not None and 9 < state.burn_low < 10
    ticket = BurnRule(Severity.TICKET, FAST.factor, FAST.long_us, FAST.short_us)
    assert fires(ticket, counts(100, 16), counts(50, 10))
    # exactly at the factor
    assert fires(TICKET, counts(10_000, 300), counts(1_000, 30))
    assert not fires(TICKET, counts(10_000, 299), counts(1_000, 30))


def test_an_alert_ends_when_the_short_window_is_under_and_not_by_silence() -> None:
    assert not fires(FAST, counts(10_000, 2_000), counts(800, 10), was_firing=True)
    assert fires(FAST, counts(10_000, 500), counts(800, 160), was_firing=True)
    assert fires(FAST, counts(10_000, 2_000), counts(0, 0), was_firing=True)
    assert not fires(FAST, counts(10_000, 2_000), counts(0, 0))


@given(st.integers(100, 20_000), st.floats(0, 1), st.sampled_from(BURN_RULES))
def test_more_failures_never_silence_an_alert(total: int, share: float, rule: BurnRule) -> None:
    bad = int(total * share)
    if fires(rule, counts(total, bad), counts(total, bad)) and bad < total:
        assert fires(rule, counts(total, bad + 1), counts(total, bad + 1))


@given(
    st.integers(0, 20_000), st.floats(0, 1), st.integers(0, 2_000), st.floats(0, 1), st.sampled_from(BURN_RULES),
    st.booleans(),
)  # fmt: skip
def test_the_short_question_whether_a_rule_fires_has_the_same_answer(long, long_bad, short, short_bad, rule, sane):
    windows = counts(long, int(long * long_bad)), counts(short, int(short * short_bad))
    if not sane:
        windows = windows[0], Totals(good=1)
    assert begins(rule, *windows, OBJECTIVE) == fires(rule, *windows)


def test_a_factor_that_cannot_fire_is_dropped_with_its_arithmetic() -> None:
    rules = reachable_rules(Fraction(9, 10))
    assert rules.kept == BURN_RULES[1:]
    (dropped,) = rules.dropped
    assert dropped.arithmetic == "14.4 x (1 - 0.9) = 1.44 > 1: it can never fire"
    assert dropped.offered == BURN_RULES[1]
    assert reachable_rules(Fraction(99, 100)).dropped == ()
    only_page = reachable_rules(Fraction(9, 10), [FAST])
    assert only_page.kept == () and only_page.dropped[0].offered is None


def test_every_kept_rule_fires_when_everything_fails() -> None:
    for target in (Fraction(1, 2), Fraction(9, 10), Fraction(999, 1000)):
        for rule in reachable_rules(target).kept:
            assert evaluate_burn(rule, counts(10**6, 10**6), counts(10**5, 10**5), Objective(target)).firing


def test_absence_is_timed_to_the_budget_that_silence_could_burn() -> None:
    times = absence_times(Fraction(99, 100))
    assert times.warn_us == 259_200_000  # 30 d x 1 % x 1 % = 4.32 min
    assert times.page_us == 5 * 259_200_000
    assert absence_times(Fraction(999, 1000)).warn_us == 25_920_000
