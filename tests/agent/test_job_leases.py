"""Leases of jobs on an agent: what a job reserved pays for its requests first, and for nobody else's."""

from __future__ import annotations

from controlplane.agent.purses import EXHAUSTED_MEMORY_US, LeaseBook
from controlplane.core.admission_snapshot import BudgetView, LeaseState
from controlplane.wire.report import Exhausted, Lease

NIGHT, OTHER = "night", "other"
NOW = 10**9
LATER = NOW + 10**9


def book(*leases: Lease, exhausted: list[Exhausted] | None = None) -> LeaseBook:
    found = LeaseBook()
    found.apply(list(leases), exhausted or [], asked_us=NOW, now_us=NOW)
    return found


def granted(found: LeaseBook, bound: int, job: str = "", now_us: int = NOW) -> int | None:
    """The size of the lease that would pay for a request of this bound; None without one that covers it."""
    view = BudgetView(None)
    found.look_up(view, 1, bound, now_us, job)
    return None if view.purse is None or view.purse.remaining_nanos < bound else view.purse.granted_nanos


def state(found: LeaseBook, job: str = "", now_us: int = NOW) -> LeaseState:
    view = BudgetView(None)
    found.look_up(view, 1, 10, now_us, job)
    return view.state


def test_a_job_is_paid_from_its_own_lease_first_then_from_the_tenants():
    found = book(Lease(1, 1, 100, LATER), Lease(2, 1, 50, LATER, job=NIGHT))
    assert granted(found, 10, NIGHT) == 50
    assert granted(found, 60, NIGHT) == 100
    assert granted(found, 101, NIGHT) is None


def test_nobody_else_is_paid_from_a_jobs_lease():
    found = book(Lease(2, 1, 50, LATER, job=NIGHT))
    assert granted(found, 10) is None
    assert granted(found, 10, OTHER) is None
    assert granted(found, 10, NIGHT, LATER) is None, "it ended"


def test_what_is_left_is_counted_for_whom_it_is():
    found = book(Lease(1, 1, 100, LATER), Lease(2, 1, 50, LATER, job=NIGHT))
    assert [found.remaining_nanos(1, NOW, job) for job in ("", NIGHT, OTHER)] == [100, 150, 100]
    assert [found.runs_low(1, 30, NOW, job) for job in ("", NIGHT)] == [True, False]
    assert {spend.lease_id for spend in found.spends(1)} == {1, 2}


def test_a_used_up_budget_is_no_answer_to_a_job_that_may_have_reserved():
    found = book(exhausted=[Exhausted(1, "acme", LATER)])
    assert state(found) is LeaseState.EXHAUSTED
    assert state(found, NIGHT) is LeaseState.ABSENT
    assert not found.runs_low(1, 10, NOW) and found.runs_low(1, 10, NOW, NIGHT)
    found.nothing_for(1, NIGHT, NOW)
    assert state(found, NIGHT) is LeaseState.EXHAUSTED
    assert state(found, OTHER) is LeaseState.ABSENT
    assert state(found, NIGHT, NOW + EXHAUSTED_MEMORY_US) is LeaseState.ABSENT
