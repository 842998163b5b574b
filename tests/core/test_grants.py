"""The agent's side of a grant: fences, time to live, the local tripwire, and the measured drain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.flex_policy import FlexPolicy
from controlplane.core.grants import (
    BatchAttempt,
    Grant,
    GrantEnd,
    GrantKind,
    Receipt,
    SlotGrant,
    TripCause,
    TripSign,
    admits_batch,
    after_restart,
    came_home,
    fits_loan,
    lapse,
    must_cancel,
    pull,
    receive,
    token_seen,
    trip_sign,
)
from controlplane.core.slot_states import Band

TTL = 15_000_000
SENT = 1_000_000
EMPTY = SlotGrant(slot="f1", band=Band.FLEX)
SIGN = TripSign(cause=TripCause.OLDEST_WAITING, value=250_000)


def lent(fence: int, ttl_us: int = TTL) -> Grant:
    return Grant(slot="f1", fence=fence, kind=GrantKind.LENT, ttl_us=ttl_us)


def recalled(fence: int) -> Grant:
    return Grant(slot="f1", fence=fence, kind=GrantKind.RECALLED)


def take(held: SlotGrant, grant: Grant, *, sent: int = SENT, now: int = SENT + 100) -> SlotGrant:
    return receive(held, grant, report_sent_at_us=sent, now_us=now).grant


def receipt(held: SlotGrant, grant: Grant) -> Receipt:
    return receive(held, grant, report_sent_at_us=SENT, now_us=SENT + 100).receipt


RUNNING = take(EMPTY, lent(5))


def test_the_time_to_live_counts_from_the_report_and_ends_at_its_instant():
    late_answer = take(EMPTY, lent(1), now=SENT + 4_000_000)
    assert late_answer.expires_at_us == SENT + TTL
    assert late_answer.admits_batch(SENT + TTL - 1)
    assert not late_answer.admits_batch(SENT + TTL)


def test_an_answer_that_took_longer_than_the_time_to_live_lends_nothing():
    held = take(EMPTY, lent(1), now=SENT + TTL)
    assert not held.admits_batch(SENT + TTL)


@pytest.mark.parametrize("grant", [lent(4), recalled(4), lent(1)])
def test_a_lower_fence_is_ignored(grant):
    assert receipt(RUNNING, grant) is Receipt.IGNORED_LOWER_FENCE
    assert take(RUNNING, grant) == RUNNING


def test_an_equal_fence_with_the_same_content_renews():
    renewed = receive(RUNNING, lent(5), report_sent_at_us=SENT + 1_000_000, now_us=SENT + 1_000_100)
    assert renewed.receipt is Receipt.REPEATED
    assert renewed.grant.expires_at_us == SENT + 1_000_000 + TTL


def test_a_late_answer_does_not_shorten_a_later_one():
    renewed = take(RUNNING, lent(5), sent=SENT + 2_000_000)
    assert take(renewed, lent(5), sent=SENT + 1_000_000) == renewed


def test_an_equal_fence_with_other_content_is_refused():
    assert receipt(RUNNING, recalled(5)) is Receipt.REFUSED_CONFLICT
    home = take(RUNNING, recalled(6))
    assert receipt(home, lent(6)) is Receipt.REFUSED_CONFLICT
    assert not take(home, lent(6)).admits_batch(SENT + 100)


def test_a_recall_stops_admission_at_once_and_begins_the_drain():
    held = take(RUNNING, recalled(6), now=SENT + 500)
    assert not held.admits_batch(SENT + 500)
    assert (held.drain.end, held.drain.stop_admit_at_us, held.drain.fence) == (GrantEnd.RECALLED, SENT + 500, 5)
    assert receipt(held, recalled(6)) is Receipt.REPEATED


@pytest.mark.parametrize("band", [Band.INTERACTIVE, Band.BATCH])
def test_a_floor_slot_takes_no_grant(band):
    floor = replace(EMPTY, band=band)
    result = receive(floor, lent(1), report_sent_at_us=SENT, now_us=SENT)
    assert result.receipt is Receipt.REFUSED_NOT_FLEX
    assert result.grant.admits_batch(SENT) is (band is Band.BATCH)


def test_an_interactive_floor_slot_never_admits_batch_whatever_it_holds():
    assert not replace(RUNNING, band=Band.INTERACTIVE).admits_batch(SENT + 1)


def test_a_grant_for_another_slot_is_refused():
    assert receipt(replace(EMPTY, slot="f2"), lent(1)) is Receipt.REFUSED_UNKNOWN_SLOT


def test_a_slot_that_is_not_known_admits_nothing():
    assert admits_batch({"f1": RUNNING}, "f1", SENT + 1)
    assert not admits_batch({"f1": RUNNING}, "f2", SENT + 1)


@pytest.mark.parametrize(("fence", "ttl_us"), [(0, TTL), (-1, TTL), (1, 0)])
def test_a_grant_that_makes_no_sense_is_refused_when_made(fence, ttl_us):
    with pytest.raises(ValueError, match="grant for f1"):
        lent(fence, ttl_us)


# The tripwire


@pytest.mark.parametrize(
    ("oldest_us", "p95_us", "refused", "cause", "value"),
    [
        (200_000, None, {}, TripCause.OLDEST_WAITING, 200_000),
        (199_999, 200_000, {}, TripCause.QUEUE_P95, 200_000),
        (199_999, 199_999, {"rate_limit": 1}, TripCause.REFUSED, 1),
        (None, None, {"queue_full": 2, "wait_too_long": 1}, TripCause.REFUSED, 3),
    ],
)
def test_each_sign_pulls_the_wire_at_its_limit(oldest_us, p95_us, refused, cause, value):
    sign = trip_sign(lend_p95_us=200_000, oldest_waiting_us=oldest_us, p95_60s_us=p95_us, refused_by_reason=refused)
    assert sign == TripSign(cause=cause, value=value)


@pytest.mark.parametrize("refused", [{}, {"rate_limit": 0}, {"budget_exhausted": 9, "key_unknown": 9, "never_fits": 1}])
def test_nothing_pulls_the_wire_under_the_limits(refused):
    quiet = {"oldest_waiting_us": 199_999, "p95_60s_us": 199_999}
    assert trip_sign(lend_p95_us=200_000, refused_by_reason=refused, **quiet) is None


def test_a_trip_ends_every_lent_fence_of_the_agent_for_good():
    other = replace(RUNNING, slot="f2", fence=9)
    floor = SlotGrant(slot="b1", band=Band.BATCH)
    pulled = pull([RUNNING, other, floor, replace(EMPTY, slot="f3")], SIGN, now_us=SENT + 200)
    assert [(t.slot, t.fence, t.at_us, t.value) for t in pulled.trips] == [
        ("f1", 5, SENT + 200, 250_000),
        ("f2", 9, SENT + 200, 250_000),
    ]
    assert [held.admits_batch(SENT + 200) for held in pulled.grants] == [False, False, True, False]
    tripped = pulled.grants[0]
    assert receipt(tripped, lent(5)) is Receipt.IGNORED_AFTER_TRIP
    assert not take(tripped, lent(5)).admits_batch(SENT + 300)
    assert receipt(tripped, recalled(5)) is Receipt.IGNORED_AFTER_TRIP
    confirmed = take(tripped, recalled(6))
    assert confirmed.drain.end is GrantEnd.TRIPPED
    assert take(confirmed, lent(7)).admits_batch(SENT + 300)


def test_a_second_pull_reports_nothing_new():
    pulled = pull([RUNNING], SIGN, now_us=SENT + 200)
    assert pull(pulled.grants, SIGN, now_us=SENT + 300).trips == ()


def test_a_trip_outlives_a_restart_and_a_running_loan_does_not():
    tripped = after_restart(pull([RUNNING], SIGN, now_us=SENT + 200).grants[0])
    assert receipt(tripped, lent(5)) is Receipt.IGNORED_AFTER_TRIP
    restarted = after_restart(RUNNING)
    assert not restarted.admits_batch(0) and not restarted.admits_batch(SENT)
    assert receipt(restarted, lent(4)) is Receipt.IGNORED_LOWER_FENCE
    assert receipt(restarted, lent(5)) is Receipt.IGNORED_AFTER_TRIP, "what ran under it may still run upstream"
    assert take(restarted, lent(7)).admits_batch(SENT + 100)
    assert not after_restart(take(RUNNING, recalled(6))).tripped, "nothing was lent: nothing to give up"


# The drain


def test_an_expiry_is_noted_at_its_instant_however_late_it_is_noticed():
    late = lapse(RUNNING, now_us=SENT + TTL + 999)
    assert (late.drain.end, late.drain.stop_admit_at_us) == (GrantEnd.EXPIRED, SENT + TTL)
    assert lapse(RUNNING, now_us=SENT + TTL - 1) == RUNNING
    recalled_later = take(late, recalled(6), now=SENT + TTL + 5_000)
    assert recalled_later.drain == late.drain


def test_a_renewal_that_comes_late_revives_a_lapsed_loan():
    late = lapse(RUNNING, now_us=SENT + TTL)
    revived = take(late, lent(5), sent=SENT + TTL, now=SENT + TTL + 1)
    assert revived.drain is None and revived.admits_batch(SENT + TTL + 1)


def test_a_drain_is_measured_from_stop_to_home():
    held = take(RUNNING, recalled(6), now=SENT + 500)
    held = token_seen(token_seen(held, now_us=SENT + 600), now_us=SENT + 900)
    assert held.draining and held.drain.drain_us is None
    held = came_home(held, now_us=SENT + 1_000)
    assert (held.drain.last_token_at_us, held.drain.home_at_us, held.drain.drain_us) == (SENT + 900, SENT + 1_000, 500)
    assert not held.draining
    assert came_home(held, now_us=SENT + 9_999) == held == token_seen(held, now_us=SENT + 9_999)


def test_the_agent_cancels_by_itself_at_the_drain_bound():
    late = lapse(RUNNING, now_us=SENT + TTL)
    stop = SENT + TTL
    assert not must_cancel(late, now_us=stop + 29_999_999, drain_bound_us=30_000_000)
    assert must_cancel(late, now_us=stop + 30_000_000, drain_bound_us=30_000_000)
    assert not must_cancel(came_home(late, now_us=stop + 1), now_us=stop + 30_000_000, drain_bound_us=30_000_000)
    assert not must_cancel(RUNNING, now_us=stop - 1, drain_bound_us=1)


def test_without_the_control_plane_a_slot_is_home_within_its_bound():
    policy = FlexPolicy()
    held = take(EMPTY, lent(1, policy.grant_ttl_us))
    now = SENT
    while not must_cancel(held, now_us=now, drain_bound_us=policy.drain_bound_us):
        now += 250_000
        held = lapse(held, now_us=now)
    home = came_home(held, now_us=now + policy.cancel_bound_us)
    assert home.drain.home_at_us - SENT <= policy.grant_ttl_us + policy.drain_bound_us + policy.cancel_bound_us


@pytest.mark.parametrize(
    ("stay_us", "retry_safe", "cancels", "byte_sent", "fits"),
    [
        (10**9, True, True, False, True),
        (10**9, True, True, True, False),
        (10**9, True, False, False, False),
        (10**9, False, True, False, False),
        (7_500_000, False, False, True, True),
        (7_500_001, False, False, True, False),
    ],
)
def test_a_loan_takes_only_work_that_a_recall_can_end_in_time(stay_us, retry_safe, cancels, byte_sent, fits):
    attempt = BatchAttempt(stay_us=stay_us, retry_safe=retry_safe, cancels_promptly=cancels, byte_sent=byte_sent)
    assert fits_loan(attempt, drain_bound_us=30_000_000) is fits


# Any order of messages


def steps() -> st.SearchStrategy[tuple]:
    grants = st.builds(
        Grant,
        slot=st.just("f1"),
        fence=st.integers(1, 6),
        kind=st.sampled_from(GrantKind),
        ttl_us=st.integers(1, 20),
    )
    return st.tuples(
        st.integers(0, 8), st.one_of(grants, grants, grants, st.sampled_from(["trip", "restart"])), st.integers(0, 8)
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(steps(), max_size=25))
def test_in_any_order_fences_never_go_back_and_batch_runs_only_under_a_live_grant(run):
    held, now, tripped_fences = EMPTY, 100, set()
    granted_until: dict[int, int] = {}
    for wait, what, age in run:
        now += wait
        before = held.fence
        if what == "trip":
            pulled = pull([held], SIGN, now_us=now)
            held = pulled.grants[0]
            tripped_fences |= {trip.fence for trip in pulled.trips}
        elif what == "restart":
            if held.kind is GrantKind.LENT:
                tripped_fences.add(held.fence)
            held = after_restart(held)
        else:
            if what.kind is GrantKind.LENT:
                until = now - age + what.ttl_us
                granted_until[what.fence] = max(until, granted_until.get(what.fence, 0))
            held = receive(held, what, report_sent_at_us=now - age, now_us=now).grant
        assert held.fence >= before
        if held.admits_batch(now):
            assert held.fence not in tripped_fences
            assert now < granted_until[held.fence]
