"""The claim that loans come home in time: what is in it, and what is left out by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.drain_claim import DrainClaim, LoanEnd, drain_claim

BOUND = 40_000_000


def loan(name: str, **facts) -> LoanEnd:
    return LoanEnd(name=name, bound_us=BOUND, **{"home": True, **facts})


def test_nothing_lent_claims_nothing():
    assert drain_claim([]) == DrainClaim(measured=0, within=0, worst_us=None)


def test_the_bound_is_inclusive_and_late_is_named():
    claim = drain_claim([loan("f1", drain_us=BOUND), loan("f2", drain_us=BOUND + 1), loan("f3", drain_us=0)])
    assert (claim.measured, claim.within, claim.worst_us, claim.late) == (3, 2, BOUND + 1, ("f2",))


def test_overdue_and_unmeasured_loans_are_left_out_by_name():
    claim = drain_claim([loan("f1", drain_us=90_000_000, overdue=True), loan("f2"), loan("f3", drain_us=5)])
    assert (claim.measured, claim.within, claim.worst_us) == (1, 1, 5)
    assert (claim.overdue, claim.unmeasured, claim.late) == (("f1",), ("f2",), ())


def test_a_loan_that_runs_is_in_no_list():
    assert drain_claim([loan("f1", home=False)]) == DrainClaim(measured=0, within=0, worst_us=None)


def test_an_overdue_loan_is_named_before_it_is_home():
    assert drain_claim([loan("f1", home=False, overdue=True)]).overdue == ("f1",)


@pytest.mark.parametrize("facts", [{"drain_us": -1}, {"bound_us": 0}])
def test_nonsense_is_refused(facts):
    with pytest.raises(ValueError, match="f1"):
        LoanEnd(**{"name": "f1", "bound_us": BOUND, **facts})


@given(
    st.lists(
        st.builds(
            LoanEnd,
            name=st.text("ab", min_size=1, max_size=3),
            bound_us=st.integers(1, 100),
            drain_us=st.none() | st.integers(0, 200),
            home=st.booleans(),
            overdue=st.booleans(),
        )
    )
)
def test_every_loan_that_ended_is_counted_once(loans):
    claim = drain_claim(loans)
    ended = sum(loan.home or loan.overdue for loan in loans)
    assert claim.within + len(claim.late) + len(claim.overdue) + len(claim.unmeasured) == ended
    assert claim.measured == claim.within + len(claim.late)
