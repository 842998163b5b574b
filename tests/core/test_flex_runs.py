"""The flex band tick by tick: what holds for every run, through the slot states and the marks of the controller."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings

from controlplane.core.flex_decision import FlexActionKind, FlexNote
from controlplane.core.flex_policy import (
    MINUTE_US,
    SECOND_US,
    FlexPolicy,
)
from controlplane.core.slot_states import Band, SlotState, admits_batch
from tests.core.flex_worlds import TickInput, World, policies, runs

QUIET = TickInput(SECOND_US, 0.5, 50_000, 0, 90_000 * SECOND_US)
BREACH = replace(QUIET, p95_queue_us=400_000)
NO_BACKLOG = replace(QUIET, backlog_gpu_us=0)
#: No pause of any kind: whatever keeps the band calm under this policy is the rule under test.
EAGER = FlexPolicy(lend_hold_us=0, cooldown_us=0, decision_interval_us=0, return_hold_us=0, min_hold_us=0)


@settings(max_examples=50, deadline=None)
@given(policies(), runs())
def test_every_run_keeps_the_floors_the_limits_and_the_pauses(policy, inputs):
    world = World(policy)
    last_lend_us = last_recall_us = None
    for given_input in inputs:
        tick = world.tick(given_input)
        admitting = sum(admits_batch(slot.band, slot.state) for slot in tick.after)
        lent = sum(slot.state is SlotState.LENT for slot in tick.after)
        assert admitting <= 2 + lent
        assert all(slot.state is SlotState.HOME for slot in tick.after if slot.band is not Band.FLEX)
        lends = tick.decision.of_kind(FlexActionKind.LEND)
        if lends:
            away = sum(slot.state is not SlotState.HOME for slot in tick.after)
            assert policy.max_lent is None or away <= policy.max_lent
            assert last_lend_us is None or world.now_us - last_lend_us >= policy.decision_interval_us
            assert last_recall_us is None or world.now_us - last_recall_us >= policy.cooldown_us
            assert not given_input.frozen and given_input.telemetry_age_us < policy.telemetry_stale_us
            last_lend_us = world.now_us
        if tick.decision.of_kind(FlexActionKind.RECALL):
            assert not lends
            last_recall_us = world.now_us
        for slot in tick.after:
            if slot.state is SlotState.LENT:
                assert world.now_us < slot.grant_expires_at_us <= world.now_us + policy.grant_ttl_us


def test_a_breach_that_lasts_recalls_each_slot_once():
    world = World(EAGER)
    for _ in range(3):
        world.tick(QUIET)
    lent = sum(slot.state is SlotState.LENT for slot in world.slots)
    assert lent == 3
    stuck = replace(BREACH, drained=False)
    recalls = [len(world.tick(stuck).decision.of_kind(FlexActionKind.RECALL)) for _ in range(50)]
    assert recalls == [3] + [0] * 49


def test_a_drain_that_does_not_end_is_overdue_once_and_comes_home_in_the_end():
    world = World(EAGER)
    world.tick(QUIET)
    ticks = [world.tick(replace(BREACH, drained=False)) for _ in range(60)]
    overdue = [tick.before.now_us for tick in ticks if tick.decision.of_kind(FlexActionKind.OVERDUE)]
    recalled = [tick.before.now_us for tick in ticks if tick.decision.of_kind(FlexActionKind.RECALL)]
    assert len(recalled) == 1 and overdue == [recalled[0] + EAGER.drain_bound_us]
    world.tick(BREACH)
    assert all(slot.state is SlotState.HOME for slot in world.slots)


def oscillate(world: World, low: TickInput, *, minutes: int) -> list[int]:
    """Ten seconds of backlog and quiet, ten seconds of something else; the instants of loans."""
    lends = []
    for second in range(60 * minutes):
        tick = world.tick(QUIET if second % 20 < 10 else low)
        lends += [world.now_us] * len(tick.decision.of_kind(FlexActionKind.LEND))
    return lends


def test_an_oscillating_backlog_lends_a_slot_at_most_once_per_min_hold():
    world = World(replace(EAGER, min_hold_us=MINUTE_US), flex=1)
    lends = oscillate(world, NO_BACKLOG, minutes=10)
    assert len(lends) >= 2
    assert all(later - earlier >= MINUTE_US for earlier, later in itertools.pairwise(lends))


def test_without_min_hold_the_same_backlog_thrashes():
    """The control of the test above: it is min_hold that keeps the band calm."""
    lends = oscillate(World(EAGER, flex=1), NO_BACKLOG, minutes=10)
    assert len(lends) > 20


def test_an_oscillating_breach_overrides_min_hold_says_so_and_waits_for_quiet():
    policy = replace(EAGER, lend_hold_us=0, cooldown_us=MINUTE_US, min_hold_us=MINUTE_US)
    world = World(policy, flex=1)
    world.tick(QUIET)
    breach = world.tick(BREACH).decision
    assert [action.overrides_min_hold for action in breach.actions] == [True]
    assert FlexNote.MIN_HOLD_OVERRIDDEN in breach.notes
    lends = oscillate(world, BREACH, minutes=10)
    assert lends and all(later - earlier >= MINUTE_US for earlier, later in itertools.pairwise(lends))


def test_returned_slots_stay_home_while_the_backlog_stays():
    """The default hysteresis: a steady backlog reaches a fixed point and is left there."""
    world = World(EAGER)
    steady = replace(QUIET, backlog_gpu_us=36_000 * SECOND_US)
    acts = [tick.decision.acts for tick in (world.tick(steady) for _ in range(200))]
    assert any(acts[:5]) and not any(acts[5:])


def test_a_gap_between_ticks_or_a_blind_tick_starts_the_quiet_time_afresh():
    world = World(replace(EAGER, lend_hold_us=10 * SECOND_US))
    for _ in range(10):
        assert not world.tick(QUIET).decision.acts
    assert not world.tick(replace(QUIET, step_us=5 * SECOND_US)).decision.acts
    for _ in range(5):
        assert not world.tick(QUIET).decision.acts
    assert not world.tick(replace(QUIET, telemetry_age_us=6 * SECOND_US)).decision.acts
    held = [world.tick(QUIET).decision.acts for _ in range(11)]
    assert held == [False] * 10 + [True]
