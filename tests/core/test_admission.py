"""Admission over live views: what is taken, what is not, and that decision and explanation agree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.admission import (
    CHECK_REASONS,
    BudgetView,
    ClassView,
    Decision,
    KeyState,
    KeyView,
    LeaseState,
    OutagePosture,
    Overload,
    Snapshot,
    TenantView,
    decide,
    explain_checks,
    reserve,
)
from controlplane.core.pricing import RateCard
from controlplane.core.reasons import Reason
from controlplane.core.reservations import ConcurrencyCounter, LeasePurse, TokenBucket


def bucket(level: int, burst: int = 100) -> TokenBucket:
    return TokenBucket(
        rate_micro_per_s=1_000_000, burst_micro=burst * 1_000_000, level_micro=level * 1_000_000, now_us=0
    )


def snapshot(**changes) -> Snapshot:
    plain = {
        "now_us": 0,
        "key": KeyView(),
        "tenant": TenantView("acme"),
        "workload_class": ClassView("chat", 8192, 2048, 3, 2_000_000),
        "card": RateCard(1_000_000, 0, 1_000_000),
        "prompt_tokens": 10,
        "prompt_bound_tokens": 10,
        "max_output_tokens": 10,
    }
    return Snapshot(**{**plain, **changes})


def test_fifty_at_once_share_one_lease_and_ten_are_admitted() -> None:
    purse = LeasePurse(1_000)
    s = snapshot(budget=BudgetView(purse), prompt_bound_tokens=60, max_output_tokens=40, free_now=True)
    answers = []
    for _ in range(50):
        answer = decide(s)
        answers.append(answer.reason)
        if answer.decision is Decision.ADMIT:
            reserve(s, answer)
        assert purse.settled_nanos + purse.reserved_nanos <= 1_000
    assert answers == [None] * 10 + [Reason.BUDGET_EXHAUSTED] * 40


def test_nothing_is_taken_by_a_refusal() -> None:
    purse, counter, rate, tokens = LeasePurse(1_000), ConcurrencyCounter(5), bucket(5), bucket(90)
    s = snapshot(
        budget=BudgetView(purse),
        tenant=TenantView("acme", concurrency=counter, token_bucket=tokens),
        workload_class=ClassView("chat", max_queue=0, rate_bucket=rate),
    )
    levels = (purse.remaining_nanos, counter.held, rate.level_pico, tokens.level_pico)
    answer = decide(s)
    assert answer.reason is Reason.QUEUE_FULL
    assert (purse.remaining_nanos, counter.held, rate.level_pico, tokens.level_pico) == levels
    with pytest.raises(ValueError, match="reserves nothing"):
        reserve(s, answer)


def test_everything_is_taken_together_and_comes_back() -> None:
    purse, of_tenant, of_key, rate, tokens = (
        LeasePurse(1_000),
        ConcurrencyCounter(5),
        ConcurrencyCounter(5),
        bucket(5),
        bucket(90),
    )
    s = snapshot(
        budget=BudgetView(purse),
        key=KeyView(concurrency=of_key, token_bucket=tokens),
        tenant=TenantView("acme", concurrency=of_tenant),
        workload_class=ClassView("chat", rate_bucket=rate),
        free_now=True,
    )
    held = reserve(s, decide(s))
    assert (purse.reserved_nanos, of_tenant.held, of_key.held) == (20, 1, 1)
    assert (rate.level_pico // 10**12, tokens.level_pico // 10**12) == (4, 70)
    held.start()
    assert held.settle(15, 12) == 0
    assert (purse.remaining_nanos, of_tenant.held, of_key.held) == (985, 0, 0)
    assert tokens.level_pico // 10**12 == 78


def test_open_posture_spends_the_slice_and_nothing_else() -> None:
    lease, slice_ = LeasePurse(5), LeasePurse(25)
    budget = BudgetView(lease, LeaseState.CUT_OFF, OutagePosture.OPEN, slice_)
    s = snapshot(budget=budget, free_now=True)
    reserve(s, decide(s))
    assert (lease.remaining_nanos, slice_.remaining_nanos) == (5, 5)
    assert decide(s).reason is Reason.NO_LEASE
    budget.posture = OutagePosture.CLOSED
    assert decide(s).reason is Reason.NO_LEASE


def test_an_answered_refusal_of_the_control_plane_is_the_budget() -> None:
    s = snapshot(budget=BudgetView(None, LeaseState.EXHAUSTED, window_ends_at_us=90_000_001))
    answer = decide(s)
    assert (answer.reason, answer.retry_after_s) == (Reason.BUDGET_EXHAUSTED, 91)


def test_downgrade_takes_one_step_and_reserves_what_served() -> None:
    purse = LeasePurse(1_000)
    asked = snapshot(
        budget=BudgetView(purse),
        workload_class=ClassView("chat", max_queue=0, overload=Overload.DOWNGRADE),
    )
    served = snapshot(
        budget=BudgetView(purse),
        workload_class=ClassView("economy", max_queue=0, overload=Overload.DOWNGRADE),
        card=RateCard(500_000, 0, 500_000),
        free_now=True,
    )
    answer = decide(asked, lambda: served)
    assert (answer.decision, answer.reason) == (Decision.DOWNGRADE, Reason.QUEUE_FULL)
    assert answer.served is not None and answer.served.decision is Decision.ADMIT
    reserve(asked, answer)
    assert purse.reserved_nanos == 10
    served.free_now = False
    again = decide(asked, lambda: served)
    assert (again.decision, again.reason) == (Decision.REJECT, Reason.QUEUE_FULL)


def test_downgrade_is_not_asked_for_what_it_cannot_help() -> None:
    def never() -> Snapshot:
        raise AssertionError("only a queue bound may downgrade")

    s = snapshot(
        tenant=TenantView("acme", concurrency=ConcurrencyCounter(0)),
        workload_class=ClassView("chat", max_queue=0, overload=Overload.DOWNGRADE),
    )
    assert decide(s, never).reason is Reason.CONCURRENCY_LIMIT


def test_displacing_frees_a_queue_place_never_time() -> None:
    full = snapshot(
        workload_class=ClassView("chat", max_queue=3, max_wait_us=2_000_000, overload=Overload.CANCEL),
        queue_depth=3,
        displaceable_id="later",
    )
    assert decide(full).displaces == "later"
    full.work_ahead_gpu_us = 2_000_001
    assert decide(full).reason is Reason.QUEUE_FULL
    full.queue_depth = 2
    assert decide(full).reason is Reason.WAIT_TOO_LONG


def maybe(value):
    return st.none() | st.just(value)


snapshots = st.builds(
    snapshot,
    now_us=st.integers(0, 3),
    key=st.builds(
        KeyView,
        st.sampled_from(KeyState),
        st.none() | st.integers(0, 5),
        maybe(frozenset({"chat"})) | maybe(frozenset({"other"})),
        maybe(frozenset({"m"})) | maybe(frozenset({"x"})),
        st.none() | st.builds(ConcurrencyCounter, st.integers(0, 1)),
        st.none() | st.builds(bucket, st.integers(0, 2)),
        st.none() | st.builds(bucket, st.integers(0, 40)),
    ),
    tenant=st.builds(
        TenantView,
        st.just("acme"),
        st.booleans(),
        concurrency=st.none() | st.builds(ConcurrencyCounter, st.integers(0, 1)),
    ),
    workload_class=st.builds(
        ClassView,
        st.just("chat"),
        st.none() | st.integers(5, 20),
        st.none() | st.integers(5, 20),
        st.none() | st.integers(0, 3),
        st.none() | st.integers(0, 10),
        st.sampled_from(Overload),
        rate_bucket=st.none() | st.builds(bucket, st.integers(0, 2)),
    ),
    budget=st.none()
    | st.builds(
        BudgetView,
        st.none() | st.builds(LeasePurse, st.integers(0, 40)),
        st.sampled_from(LeaseState),
        st.sampled_from(OutagePosture),
        st.none() | st.builds(LeasePurse, st.integers(0, 40)),
    ),
    model=st.none() | st.just("m"),
    queue_depth=st.integers(0, 4),
    work_ahead_gpu_us=st.integers(0, 40),
    first_free_us=st.integers(0, 10),
    serving_slots=st.integers(0, 3),
    free_now=st.booleans(),
    displaceable_id=st.none() | st.just("z"),
    largest_slot_kv_tokens=st.none() | st.integers(10, 30),
    free_kv_tokens=st.none() | st.integers(0, 30),
)


@given(snapshots)
@settings(max_examples=500, deadline=None)
def test_decision_and_explanation_agree(s: Snapshot) -> None:
    answer, checks = decide(s), explain_checks(s)
    assert [check.name for check in checks] == list(CHECK_REASONS)
    failed = [check.name for check in checks if not check.held]
    refusing = [name for name in failed if name != "memory_kv_tokens"]
    if answer.decision is Decision.REJECT:
        assert answer.reason in CHECK_REASONS[refusing[0]]
        assert answer.reserve_from is None
    else:
        assert refusing == []
        assert (answer.decision is Decision.ADMIT) == (s.free_now and not failed)


@given(snapshots)
@settings(max_examples=300, deadline=None)
def test_what_is_reserved_is_covered_and_comes_back(s: Snapshot) -> None:
    answer = decide(s)
    if answer.decision is Decision.REJECT:
        return
    held = reserve(s, answer)
    for purse in (s.budget.purse, s.budget.outage_purse) if s.budget else ():
        assert purse is None or purse.remaining_nanos >= 0
    held.release()
    for counter in (s.key.concurrency, s.tenant.concurrency):
        assert counter is None or counter.held == 0
    assert answer.reserve_from is None or answer.reserve_from.reserved_nanos == 0


def test_an_explanation_quotes_only_the_start_of_a_long_name() -> None:
    s = snapshot(model="m" * 2_000_000)
    quoted = next(check.value for check in explain_checks(s) if check.name == "model")
    short = explain_checks(snapshot(model="m" * 200))
    assert quoted == f"{'m' * 200}… (2000000 characters)"
    assert next(check.value for check in short if check.name == "model") == "m" * 200
