"""Any order of grants, recalls, late answers, clock jumps, trips and kills: what must be true at every instant is."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.core.slot_states import TRANSITIONS, SlotState
from tests.agent.flex_worlds import BANDS, DRAIN_US, FLEX, LEND_P95_US, TTL_US, World

SECOND_US = 1_000_000
EDGES = {(before, after) for (before, _), after in TRANSITIONS.items()}
slots = st.sampled_from(sorted(FLEX))


class FlexBandMachine(RuleBasedStateMachine):
    """The agent's band under a control plane that keeps the rules and a network and a machine that keep none."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.world = World(self.folder)
        self.fences = dict.fromkeys(FLEX, 0)
        self.stopped_at: dict[str, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule(lend=st.sets(slots), recall=st.sets(slots))
    def the_control_plane_decides(self, lend, recall):
        for name in recall:
            self.world.recall(name)
        for name in lend:
            self.world.lend(name)

    @rule(lend=st.sets(slots))
    def a_report_is_answered_at_once(self, lend):
        """The common way, so that loans do run and are renewed."""
        self.the_control_plane_decides(lend, set())
        self.world.report()
        self.world.deliver(self.world.answers.pop())

    @rule()
    def a_report_is_sent(self):
        self.world.report()

    @precondition(lambda self: self.world.answers)
    @rule(data=st.data(), again=st.booleans())
    def an_answer_arrives_late(self, data, again):
        """Any answer that is under way, in any order, perhaps once more."""
        at = data.draw(st.integers(0, len(self.world.answers) - 1))
        answer = self.world.answers[at] if again else self.world.answers.pop(at)
        self.world.deliver(answer)

    @rule(name=slots)
    def nudge(self, name):
        """A recall that a nudge carries, ahead of the next answer."""
        word = self.world.words[name]
        if word.fence and not word.lent:
            self.world.band.recall(FLEX[name], word.fence)

    @rule(us=st.sampled_from([1, 50_000, SECOND_US, SECOND_US, 5 * SECOND_US, 10 * SECOND_US, TTL_US - 1, TTL_US]))
    def time_passes(self, us):
        self.world.boot_us += us
        self.world.pump()

    @rule(us=st.sampled_from([DRAIN_US - 1, DRAIN_US, 3600 * SECOND_US]))
    def the_machine_sleeps(self, us):
        """Much time at once, as after a suspended machine or an event loop that stood still."""
        self.world.boot_us += us
        self.world.pump()

    @rule(us=st.integers(-(10**13), 10**13))
    def wall_clock_jumps(self, us):
        self.world.wall_shift_us += us
        self.world.pump()

    @rule(us=st.sampled_from([LEND_P95_US - 1, LEND_P95_US, 5 * SECOND_US]))
    def interactive_waits(self, us):
        lent = [name for name, slot in self.world.band.slots.items() if slot.state is SlotState.LENT]
        ends_us = {name: self.world.band.slots[name].grant.expires_at_us for name in lent}
        self.world.interactive_waits(us)
        for name in lent:
            ran_out = self.world.boot_us >= ends_us[name]
            assert (self.world.band.slots[name].state is SlotState.LENT) is (us < LEND_P95_US and not ran_out)

    @rule(name=st.sampled_from(sorted(BANDS)))
    def work_ends(self, name):
        self.world.finish(name)

    @rule(reason=st.sampled_from(["rate_limit", "queue_full", "wait_too_long", "budget_exhausted"]))
    def interactive_is_refused(self, reason):
        lent = [name for name, slot in self.world.band.slots.items() if slot.state is SlotState.LENT]
        self.world.refuse(reason)
        if reason != "budget_exhausted":
            assert all(self.world.band.slots[name].state is not SlotState.LENT for name in lent)

    @rule(reboot=st.booleans())
    def killed(self, reboot):
        self.world.kill(reboot=reboot)
        self.stopped_at.clear()
        assert not self.world.borrowed(), "no loan outlives its process"

    @invariant()
    def batch_starts_only_under_a_live_grant_that_nothing_ended(self):
        world = self.world
        for name, fence, at_us, was_over in world.started:
            if name in FLEX:
                assert not was_over, "a trip or a restart ends a fence for good"
                assert at_us < world.granted_until[name, fence], "batch started after the grant's end"
                assert fence <= world.words[name].fence
            else:
                assert name == "b1", "a floor slot of interactive ran batch"
        world.started.clear()

    @invariant()
    def at_most_floor_plus_lent_slots_admit_batch(self):
        admitting = set(self.world.admitting_batch())
        lent = {name for name, slot in self.world.band.slots.items() if slot.state is SlotState.LENT}
        assert admitting == {"b1"} | lent
        assert "i1" not in admitting

    @invariant()
    def a_slot_has_one_owner(self):
        for slot in self.world.scheduler.slots:
            name = slot.spec.name
            kinds = {request.class_slug for request in slot.running.values()}
            if name in self.world.borrowed():
                continue  # what interactive had running when it was lent ends there
            assert "bulk" not in kinds or name == "b1", f"batch on {name}, which is home"

    @invariant()
    def fences_never_go_back(self):
        for name, slot in self.world.band.slots.items():
            assert slot.grant.fence >= self.fences[name]
            self.fences[name] = slot.grant.fence

    @invariant()
    def every_change_of_state_is_an_edge_of_the_table_and_is_told(self):
        last: dict[str, SlotState] = {}
        for name, state in self.world.log:
            before = last.get(name, SlotState.HOME)
            assert before is state or (before, state) in EDGES
            last[name] = state
        for name, slot in self.world.band.slots.items():
            assert last[name] is slot.state, "a state that nobody was told of"

    @invariant()
    def what_can_be_cancelled_is_home_within_the_bound(self):
        """Only work that may not be cancelled keeps a slot longer, and then it says so: overdue."""
        world = self.world
        for name, slot in world.band.slots.items():
            if slot.state in (SlotState.HOME, SlotState.LENT):
                self.stopped_at.pop(name, None)
                continue
            since_us = self.stopped_at.setdefault(name, world.boot_us)
            if world.boot_us - since_us >= DRAIN_US:
                running = world.host.slot(name).running.values()
                assert slot.state is SlotState.OVERDUE
                assert any(request.class_slug == "bulk" and not request.preemptible for request in running)


FlexBandMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order_keeps_what_must_be_true = FlexBandMachine.TestCase
