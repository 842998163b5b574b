"""The flex-band decision: what holds for every snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.flex import decide, has_nothing_to_do
from controlplane.core.flex_decision import FlexActionKind, FlexDecision, RecallReason, worth_a_row
from controlplane.core.flex_marks import FlexMarks, at_rest, observe, remember
from controlplane.core.flex_policy import (
    MINUTE_US,
    SECOND_US,
    FlexPolicy,
    SpilloverAction,
)
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.slot_states import Band, SlotState
from tests.core.flex_worlds import START_US, TABLE, policies, snapshots


def names(decision: FlexDecision, kind: FlexActionKind) -> set[str]:
    return {action.slot for action in decision.of_kind(kind)}


@settings(max_examples=120, deadline=None)
@given(snapshots())
def test_actions_are_one_per_slot_in_order_and_fit_the_slot(snapshot):
    decision = decide(snapshot)
    acted = [action.slot for action in decision.actions]
    assert acted == sorted(set(acted))
    by_name = {slot.name: slot for slot in snapshot.slots}
    needed = {
        FlexActionKind.LEND: SlotState.HOME,
        FlexActionKind.RENEW: SlotState.LENT,
        FlexActionKind.RECALL: SlotState.LENT,
        FlexActionKind.CANCEL: SlotState.DRAINING,
    }
    for action in decision.actions:
        slot = by_name[action.slot]
        assert slot.band is Band.FLEX
        if action.kind is FlexActionKind.OVERDUE:
            assert slot.state in (SlotState.DRAINING, SlotState.CANCELLING)
        else:
            assert slot.state is needed[action.kind]
        assert (action.reason is not None) == (action.kind is FlexActionKind.RECALL)
        grows = action.kind in (FlexActionKind.LEND, FlexActionKind.RECALL)
        assert action.fence == slot.fence + grows
    lent = {slot.name for slot in snapshot.slots if slot.state is SlotState.LENT}
    assert names(decision, FlexActionKind.RENEW) | names(decision, FlexActionKind.RECALL) == lent


@settings(max_examples=300, deadline=None)
@given(snapshots(), st.integers(0, 2))
def test_where_there_is_nothing_to_do_a_decision_acts_on_nothing_and_is_remembered_as_seen(snapshot, calm):
    if calm:
        home = [replace(slot, state=SlotState.HOME) for slot in snapshot.slots]
        idle = tuple(replace(job, deadline_us=None) for job in snapshot.jobs) if calm == 2 else snapshot.jobs
        snapshot = replace(snapshot, slots=tuple(home), trips=frozenset(), jobs=idle)
    before = FlexMarks(ticked_at_us=START_US - SECOND_US, last_lend_at_us=5, last_recall_at_us=7)
    after, filled = observe(before, snapshot)
    decision = decide(filled)
    resting = has_nothing_to_do((slot.state for slot in snapshot.slots), snapshot.jobs)
    assert resting or calm < 2
    if resting:
        assert not decision.actions and decision.slack == 1.0
    if resting and not snapshot.trips:
        figures = snapshot.interactive
        assert remember(after, decision) == at_rest(
            before,
            snapshot.policy,
            now_us=snapshot.now_us,
            p95_queue_us=figures.p95_queue_us,
            telemetry_at_us=figures.telemetry_at_us,
        )


@settings(max_examples=120, deadline=None)
@given(snapshots())
def test_at_most_one_loan_and_none_beside_a_recall(snapshot):
    for decision in (decide(snapshot), decide(made_ready(snapshot))):
        lends = decision.of_kind(FlexActionKind.LEND)
        assert len(lends) <= 1
        assert not (lends and decision.of_kind(FlexActionKind.RECALL))
        assert bool(lends) == (not decision.lend_blocked_by)


def ready_to_lend() -> FlexSnapshot:
    """A snapshot in which every guard of a loan holds."""
    return FlexSnapshot(
        now_us=START_US,
        policy=FlexPolicy(max_lent=2, spillover_per_week=5, spillover_action=SpilloverAction.BLOCK),
        safe_rate=replace(TABLE, valid_until_us=START_US + 1),
        slots=(
            *(FlexSlot(name=f"i{n}", band=Band.INTERACTIVE) for n in range(3)),
            FlexSlot(name="b", band=Band.BATCH),
            FlexSlot(name="f1", band=Band.FLEX),
            FlexSlot(name="f2", band=Band.FLEX),
        ),
        interactive=InteractiveFigures(
            admitted_per_s=8.0,
            p95_queue_us=199_999,
            p95_below_since_us=START_US - 10 * MINUTE_US,
            telemetry_at_us=START_US - 4_999_999,
        ),
        jobs=(BatchJob(name="j", remaining_gpu_us=9 * SECOND_US, deadline_us=START_US + 10 * SECOND_US),),
        lends_this_week=4,
        last_recall_at_us=START_US - 5 * MINUTE_US,
        last_lend_at_us=START_US - 30 * SECOND_US,
    )


def made_ready(snapshot: FlexSnapshot) -> FlexSnapshot:
    """The generated slots under the figures above, so that loans do occur."""
    return replace(ready_to_lend(), slots=snapshot.slots)


def figures(**changes) -> dict:
    return {"interactive": replace(ready_to_lend().interactive, **changes)}


GUARDS = {
    "p95_queue_us": figures(p95_queue_us=200_000),
    "p95_below_for_us": figures(p95_below_since_us=START_US - 10 * MINUTE_US + 1),
    "safe_rate_valid_us": {"safe_rate": replace(TABLE, valid_until_us=START_US)},
    "load_with_one_slot_less": figures(admitted_per_s=11.2),
    "telemetry_age_us": figures(telemetry_at_us=START_US - 5_000_000),
    "slack": {"jobs": (BatchJob(name="j", remaining_gpu_us=15 * SECOND_US, deadline_us=START_US + 20 * SECOND_US),)},
    "frozen": {"frozen": True},
    "since_recall_us": {"last_recall_at_us": START_US - 5 * MINUTE_US + 1},
    "since_lend_us": {"last_lend_at_us": START_US - 30 * SECOND_US + 1},
    "lends_this_week": {"lends_this_week": 5},
    "slots_away": {"policy": replace(ready_to_lend().policy, max_lent=0)},
    "slot_at_home": {"manual_recalls": frozenset({"f1", "f2"})},
    "recall_in_this_tick": {"trips": frozenset({"f2"})},
}


def test_all_guards_together_lend():
    assert names(decide(ready_to_lend()), FlexActionKind.LEND) == {"f1"}


@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_alone_holds_back_a_loan(guard):
    decision = decide(replace(ready_to_lend(), **GUARDS[guard]))
    assert decision.lend_blocked_by == (guard,)
    assert not decision.of_kind(FlexActionKind.LEND)


@settings(max_examples=80, deadline=None)
@given(snapshots())
def test_what_is_not_known_never_lends_and_never_renews(snapshot):
    unknown = [
        replace(snapshot, safe_rate=None),
        replace(snapshot, interactive=replace(snapshot.interactive, telemetry_at_us=None)),
        replace(snapshot, interactive=replace(snapshot.interactive, telemetry_at_us=START_US + 1)),
        replace(snapshot, interactive=replace(snapshot.interactive, p95_queue_us=None)),
        replace(snapshot, interactive=replace(snapshot.interactive, admitted_per_s=None)),
    ]
    for blind in unknown:
        decision = decide(blind)
        assert not decision.of_kind(FlexActionKind.LEND)
        assert not decision.of_kind(FlexActionKind.RENEW)
    unsure = replace(snapshot, interactive=replace(snapshot.interactive, p95_below_since_us=None))
    assert not decide(unsure).of_kind(FlexActionKind.LEND)


@settings(max_examples=80, deadline=None)
@given(snapshots(), st.booleans(), st.integers(0, 9), policies())
def test_what_decides_new_loans_leaves_running_ones(snapshot, frozen, lends, other):
    kept = {"drain_bound_us", "cancel_bound_us", "load_limit", "return_slack", "return_hold_us", "min_hold_us"}
    changed = replace(
        snapshot,
        frozen=frozen,
        lends_this_week=lends,
        last_recall_at_us=START_US,
        last_lend_at_us=START_US,
        policy=replace(other, lend_slack=-9.0, **{name: getattr(snapshot.policy, name) for name in kept}),
    )

    def running(decision):
        return [action for action in decision.actions if action.kind is not FlexActionKind.LEND]

    assert running(decide(changed)) == running(decide(snapshot))


@settings(max_examples=80, deadline=None)
@given(snapshots(), st.randoms(use_true_random=False))
def test_the_same_snapshot_in_any_order_gives_the_same_decision(snapshot, shuffler):
    slots, jobs = list(snapshot.slots), list(snapshot.jobs)
    shuffler.shuffle(slots)
    shuffler.shuffle(jobs)
    again = decide(replace(snapshot, slots=tuple(slots)))
    assert again == decide(snapshot)
    assert decide(replace(snapshot, jobs=tuple(jobs))).actions == again.actions


@settings(max_examples=80, deadline=None)
@given(snapshots())
def test_an_interactive_reason_recalls_every_lent_slot_at_once(snapshot):
    breached = replace(snapshot, interactive=replace(snapshot.interactive, p95_queue_us=200_000))
    decision = decide(breached)
    lent = {slot.name for slot in snapshot.slots if slot.state is SlotState.LENT}
    assert names(decision, FlexActionKind.RECALL) == lent
    for action in decision.of_kind(FlexActionKind.RECALL):
        tripped = action.slot in snapshot.trips
        assert action.reason is (RecallReason.TRIPWIRE if tripped else RecallReason.INTERACTIVE_P95)


@settings(max_examples=120, deadline=None)
@given(snapshots())
def test_the_batch_reason_returns_one_and_leaves_no_reason_to_lend(snapshot):
    bored = replace(
        snapshot, manual_recalls=frozenset(), trips=frozenset(), slack_above_return_since_us=START_US - 3600 * SECOND_US
    )
    decision = decide(bored)
    returned = [a for a in decision.of_kind(FlexActionKind.RECALL) if a.reason is RecallReason.BATCH_SLACK]
    assert len(returned) <= 1
    if not returned:
        return
    gone = {action.slot for action in decision.of_kind(FlexActionKind.RECALL)}
    slots = tuple(replace(slot, state=SlotState.DRAINING) if slot.name in gone else slot for slot in bored.slots)
    after = decide(replace(bored, slots=slots)).demand
    assert after.slack_exact > snapshot.policy.return_slack > snapshot.policy.lend_slack
    chosen = next(slot for slot in bored.slots if slot.name == returned[0].slot)
    assert bored.now_us - chosen.lent_at_us >= bored.policy.min_hold_us


@settings(max_examples=120, deadline=None)
@given(snapshots())
def test_a_loan_does_not_by_itself_cause_its_recall(snapshot):
    snapshot = made_ready(snapshot)
    for lend in decide(snapshot).of_kind(FlexActionKind.LEND):
        slots = tuple(
            replace(slot, state=SlotState.LENT, grant_expires_at_us=lend.grant_expires_at_us, lent_at_us=START_US)
            if slot.name == lend.slot
            else slot
            for slot in snapshot.slots
        )
        assert lend.slot in names(decide(replace(snapshot, slots=slots)), FlexActionKind.RENEW)


TTL_S = 15


@pytest.mark.parametrize(
    ("left_s", "renewed"),
    [
        ((15, 15), False),  # renewed just now
        ((11, 11), False),
        ((10, 10), True),  # a third has passed
        ((1, 1), True),
        ((14, 15), True),  # the second was lent a second later: from now on both end together
        ((16, 16), True),  # the TTL was longer when they were renewed: it is obeyed at once
        ((12, None), False),  # the other has no end, so it is recalled
    ],
)
def test_loans_are_renewed_together_when_a_third_of_their_ttl_has_passed(left_s, renewed):
    slots = [slot for slot in ready_to_lend().slots if slot.band is not Band.FLEX]
    for name, left in zip(("f1", "f2"), left_s, strict=True):
        expires_us = None if left is None else START_US + left * SECOND_US
        slots.append(
            FlexSlot(
                name=name, band=Band.FLEX, state=SlotState.LENT, lent_at_us=START_US, grant_expires_at_us=expires_us
            )
        )
    snapshot = ready_to_lend()
    assert snapshot.policy.grant_ttl_us == TTL_S * SECOND_US
    going_on = decide(replace(snapshot, slots=tuple(slots))).of_kind(FlexActionKind.RENEW)
    ends = {action.grant_expires_at_us for action in going_on}
    assert ends == {START_US + (TTL_S if renewed else left_s[0]) * SECOND_US}


@settings(max_examples=200, deadline=None)
@given(snapshots())
def test_no_loan_ends_later_than_a_ttl_from_now_nor_sooner_than_two_thirds_of_it(snapshot):
    for action in decide(snapshot).of_kind(FlexActionKind.RENEW):
        left_us = action.grant_expires_at_us - snapshot.now_us
        assert 2 * snapshot.policy.grant_ttl_us < 3 * left_us <= 3 * snapshot.policy.grant_ttl_us


def test_marks_of_a_fresh_controller_start_now():
    marks, filled = observe(FlexMarks(), ready_to_lend())
    assert marks.p95_below_since_us == START_US
    assert filled.interactive.p95_below_since_us == START_US


def test_a_row_is_written_when_it_acts_when_a_check_flips_and_once_a_minute():
    calm = decide(replace(ready_to_lend(), frozen=True))
    assert worth_a_row(calm, None)
    assert not worth_a_row(replace(calm, at_us=calm.at_us + MINUTE_US - 1), calm)
    assert worth_a_row(replace(calm, at_us=calm.at_us + MINUTE_US), calm)
    assert worth_a_row(decide(ready_to_lend()), calm)
    flipped = decide(replace(ready_to_lend(), frozen=True, lends_this_week=5))
    assert worth_a_row(flipped, calm)
    lent = FlexSlot(
        name="f1", band=Band.FLEX, state=SlotState.LENT, lent_at_us=START_US, grant_expires_at_us=START_US + 1
    )
    others = tuple(slot for slot in ready_to_lend().slots if slot.name != "f1")
    renewal = decide(replace(ready_to_lend(), frozen=True, slots=(*others, lent)))
    assert names(renewal, FlexActionKind.RENEW) == {"f1"}
    assert not renewal.acts


@pytest.mark.parametrize(
    ("age_us", "reason"),
    [(20 * SECOND_US, RecallReason.TELEMETRY_STALE), (1, RecallReason.INTERACTIVE_LOAD)],
)
def test_lost_slots_are_missing_telemetry_and_not_load(age_us, reason):
    """Every interactive slot is lost: while nobody reports, the last rate says nothing about the load of now."""
    floor = [FlexSlot(name=f"i{n}", band=Band.INTERACTIVE, state=SlotState.LOST) for n in range(4)]
    lent = FlexSlot(
        name="f1", band=Band.FLEX, state=SlotState.LENT, fence=1, lent_at_us=0, grant_expires_at_us=START_US + 1
    )
    said = replace(ready_to_lend().interactive, telemetry_at_us=START_US - age_us)
    decision = decide(replace(ready_to_lend(), slots=(*floor, lent), interactive=said, jobs=()))
    (recall,) = decision.of_kind(FlexActionKind.RECALL)
    assert recall.reason is reason
    load = next(check for check in decision.checks if check.name == "interactive_load")
    assert (load.value is None) is (reason is RecallReason.TELEMETRY_STALE)
