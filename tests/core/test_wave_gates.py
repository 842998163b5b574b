from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.slo import Objective, Totals
from controlplane.core.wave_gates import (
    ContractCounts,
    Gate,
    GateLimits,
    GateState,
    WaveFacts,
    judge_wave,
    reachable_burn,
)

S = 1_000_000
LIMITS = GateLimits(hold_us=60 * S, timeout_us=300 * S, burn_most=Fraction(6))
OBJECTIVE = Objective(Fraction(99, 100))


def contract(total: int, bad: int, *, running: int = 0, expected: bool = True) -> ContractCounts:
    good = total - bad
    return ContractCounts("chat", Totals(total + running, total + running, good, good), running, OBJECTIVE, expected)


def facts(**values) -> WaveFacts:
    given = {"agents": 10, "acked": 10, "refused": 0, "silent": 0, "unheard": 0, "outstanding": 0, "answered_us": 0}
    return WaveFacts(**{**given, **values})


def state(now_s: float = 60, limits: GateLimits = LIMITS, **values) -> GateState:
    return judge_wave(limits, facts(contracts=(contract(1_000, 10),), **values), round(now_s * S)).state


def burn_state(counts: ContractCounts, now_s: int = 60) -> GateState:
    return judge_wave(LIMITS, facts(contracts=(counts,)), now_s * S).state


def test_a_wave_passes_when_everybody_applied_it_and_it_was_held():
    assert state() is GateState.HELD
    assert state(59.9) is GateState.WAITS
    assert state(acked=9, outstanding=1, answered_us=None) is GateState.WAITS


def test_one_refusal_too_many_fails_at_once_and_says_whose():
    verdict = judge_wave(
        LIMITS, facts(acked=8, refused=1, outstanding=1, answered_us=None, first_refusal="a1 says: no"), 0
    )
    assert verdict.state is GateState.FAILED
    assert verdict.why == "1 agent of 10 refused it, 0 may: a1 says: no"


def test_refusals_may_be_allowed_by_count_or_share_whichever_is_more():
    assert state(limits=GateLimits(refusals_most=1), acked=9, refused=1) is GateState.HELD
    assert state(limits=GateLimits(refusals_most_percent=20), acked=8, refused=2) is GateState.HELD
    assert state(limits=GateLimits(refusals_most_percent=19), acked=8, refused=2) is GateState.FAILED


def test_agents_that_fall_silent_fail_and_those_that_were_silent_before_are_left_to_a_person():
    assert state(silent=1) is GateState.FAILED
    assert state(limits=GateLimits(silent_most=1), acked=9, silent=1) is GateState.HELD
    assert state(acked=9, unheard=1) is GateState.ASKS
    assert state(limits=GateLimits(silent_most=1), acked=9, unheard=1) is GateState.HELD


def test_burn_at_the_limit_fails_under_it_holds():
    assert burn_state(contract(1_000, 60)) is GateState.FAILED
    assert burn_state(contract(1_000, 59)) is GateState.HELD
    assert judge_wave(GateLimits(), facts(contracts=(contract(1_000, 1_000),)), 0).state is GateState.HELD


def test_too_few_requests_wait_and_then_ask_and_never_pass():
    few = contract(99, 0)
    assert burn_state(few, 60) is GateState.WAITS
    assert burn_state(few, 359) is GateState.WAITS
    assert burn_state(few, 360) is GateState.ASKS
    assert burn_state(few, 10**9) is GateState.ASKS


def test_running_requests_are_in_no_population():
    assert burn_state(contract(100, 0, running=900)) is GateState.HELD
    assert burn_state(contract(99, 0, running=900)) is GateState.WAITS


def test_a_contract_nobody_expects_to_hear_of_is_not_asked_but_still_fails():
    quiet = contract(3, 0, expected=False)
    known = contract(1_000, 0)
    assert judge_wave(LIMITS, facts(contracts=(quiet, known)), 60 * S).state is GateState.HELD
    assert burn_state(contract(1_000, 500, expected=False)) is GateState.FAILED
    # with no contract that can be judged at all, nothing is known
    assert burn_state(quiet, 10_000) is GateState.ASKS


def test_counts_that_contradict_each_other_are_unknown():
    nonsense = ContractCounts("chat", Totals(100, 100, 100, 200), 0, OBJECTIVE)
    assert burn_state(nonsense, 10_000) is GateState.ASKS


def test_a_limit_that_total_failure_could_not_reach_is_lowered_to_one_that_can_fire():
    assert reachable_burn(Fraction(99, 100), Fraction(6)) == 6
    assert reachable_burn(Fraction(9, 10), Fraction(14)) == 6
    assert reachable_burn(Fraction(1, 2), Fraction(6)) == 1


@given(
    acked=st.integers(0, 8), refused=st.integers(0, 8), silent=st.integers(0, 8), unheard=st.integers(0, 8),
    outstanding=st.integers(0, 8), total=st.integers(0, 400), bad=st.integers(0, 400), now_s=st.integers(0, 2_000),
)  # fmt: skip
def test_never_held_while_anything_is_unknown_or_over_its_limit(
    acked, refused, silent, unheard, outstanding, total, bad, now_s
):
    counts = contract(total, min(bad, total))
    agents = acked + refused + silent + unheard + outstanding
    answered = None if outstanding else 0
    verdict = judge_wave(
        LIMITS, WaveFacts(agents, acked, refused, silent, unheard, outstanding, answered, "", (counts,)), now_s * S
    )
    if not agents:
        return
    quiet = not (refused or silent or unheard or outstanding)
    sound = total >= 100 and min(bad, total) * 100 < 6 * total
    assert (verdict.state is GateState.HELD) == (quiet and sound and now_s >= 60)
    assert (verdict.state is GateState.FAILED) == bool(refused or silent or (total >= 100 and not sound))
    if verdict.state is not GateState.HELD:
        assert verdict.why


def test_an_empty_wave_holds_nobody_up():
    assert judge_wave(LIMITS, WaveFacts(0, 0, 0, 0, 0, 0, None), 0).state is GateState.HELD
    assert {reading.gate for reading in judge_wave(LIMITS, facts(contracts=(contract(1_000, 1),)), 0).readings} == set(
        Gate
    )
