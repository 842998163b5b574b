"""The life of an item as one table: every pair of states is allowed or forbidden, and every end is judged."""

from itertools import product

import pytest

from controlplane.core.batch_items import (
    ATTEMPTS_MOST,
    FAILURES_MOST,
    FOLLOWS,
    ItemState,
    Refused,
    Reported,
    StoredItem,
    is_verdict,
    judge,
    lapse,
)
from controlplane.core.reasons import OUTCOME_CODES, Outcome

DONE, LEASED, WAITING, PARKED, CANCELLED = (
    ItemState.DONE, ItemState.LEASED, ItemState.WAITING, ItemState.PARKED, ItemState.CANCELLED,
)  # fmt: skip
COMPLETED, FAILED = OUTCOME_CODES[Outcome.COMPLETED], OUTCOME_CODES[Outcome.UPSTREAM_ERROR]
FORBIDDEN = {
    (WAITING, WAITING), (WAITING, PARKED), (LEASED, LEASED), (DONE, WAITING), (DONE, LEASED), (DONE, DONE),
    (DONE, PARKED), (DONE, CANCELLED), (PARKED, LEASED), (PARKED, DONE), (PARKED, PARKED), (CANCELLED, WAITING),
    (CANCELLED, LEASED), (CANCELLED, DONE), (CANCELLED, PARKED), (CANCELLED, CANCELLED),
}  # fmt: skip


def item(state=LEASED, *, attempt=1, failures=0, fence=5, cancelled=False) -> StoredItem:
    return StoredItem(state, attempt, failures, fence, cancelled)


def test_allowed_and_forbidden_pairs_together_are_every_pair():
    allowed = {(before, after) for before, afters in FOLLOWS.items() for after in afters}
    assert allowed | FORBIDDEN == set(product(ItemState, ItemState))
    assert not allowed & FORBIDDEN


def test_whatever_is_reported_only_what_may_follow_follows():
    stored = [
        item(state, attempt=attempt, failures=failures, cancelled=cancelled)
        for state in ItemState
        for attempt in (1, ATTEMPTS_MOST)
        for failures in range(FAILURES_MOST)
        for cancelled in (False, True)
    ]
    for each, fence, outcome, status in product(stored, range(7), OUTCOME_CODES.values(), (0, 200, 400, 429, 500)):
        judged = judge(each, Reported(fence, outcome, status))
        if judged.refused is None:
            assert judged.state in FOLLOWS[each.state], (each, fence, outcome, status)
        else:
            assert (judged.state, judged.charged, judged.result) == (each.state, False, False)
        assert not judged.charged or judged.state in (DONE, CANCELLED)
        # a result is kept exactly for the ends that a file shows
        assert not judged.result or judged.state in (DONE, PARKED)


def test_the_first_result_wins_even_after_its_lease_lapsed():
    assert judge(item(WAITING), Reported(5, COMPLETED, 200)).state is DONE
    assert judge(item(LEASED, fence=9), Reported(5, COMPLETED, 200)).state is DONE
    assert judge(item(DONE), Reported(5, COMPLETED, 200)).refused is Refused.HAS_RESULT


def test_a_lease_that_was_never_given_settles_nothing():
    for fence in (0, 6):
        assert judge(item(fence=5), Reported(fence, COMPLETED, 200)).refused is Refused.NEVER_LEASED


def test_a_late_failure_says_nothing_about_the_lease_after_it():
    assert judge(item(LEASED, fence=9), Reported(5, FAILED, 502)).refused is Refused.LAPSED


def test_three_failures_park_and_lapses_do_not_until_there_are_many():
    one = item()
    for failures in range(1, FAILURES_MOST):
        judged = judge(one, Reported(5, FAILED, 502))
        assert (judged.state, judged.failures, judged.attempt) == (WAITING, failures, failures + 1)
        one = item(attempt=judged.attempt, failures=judged.failures)
    assert judge(one, Reported(5, FAILED, 502)).state is PARKED
    assert lapse(item(attempt=FAILURES_MOST)).state is WAITING
    assert lapse(item(attempt=ATTEMPTS_MOST)).state is PARKED
    assert lapse(item(cancelled=True)).state is CANCELLED


@pytest.mark.parametrize(("status", "final"), [(400, True), (404, True), (408, False), (429, False), (500, False)])
def test_only_a_verdict_on_the_request_is_final_at_once(status, final):
    assert is_verdict(status) is final
    assert (judge(item(), Reported(5, FAILED, status)).state is PARKED) is final
