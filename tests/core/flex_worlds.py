"""Generated flex-band snapshots, and a small world that applies decisions tick by tick."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from controlplane.core.flex import decide
from controlplane.core.flex_decision import EVENT_OF_ACTION, FlexActionKind, FlexDecision
from controlplane.core.flex_marks import FlexMarks, observe, remember
from controlplane.core.flex_policy import SECOND_US, FlexPolicy, SafeRate, SpilloverAction
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.slot_states import Band, SlotEvent, SlotState, apply_event

START_US = 1_800_000_000 * SECOND_US
HOUR_US = 3600 * SECOND_US
TABLE = SafeRate(entries=((2, 8.0), (4, 16.0), (8, 32.0)))


def load_cases() -> list[dict[str, Any]]:
    """The data file's cases as whole questions: base, changes by key, slots by the name of a state."""
    document = json.loads((Path(__file__).parent / "data" / "flex_cases.json").read_text())
    return [_whole(case, document["base"], document["states"]) for case in document["cases"]]


def _whole(case: dict[str, Any], base: dict[str, Any], states: dict[str, Any]) -> dict[str, Any]:
    question = {}
    for key, value in base.items():
        change = case.get(key, {} if isinstance(value, dict) else value)
        if key == "slots":
            slots = {name: {"slot": name, **slot} for name, slot in value.items()}
            for name, state in change.items():
                slots[name] |= states[state]
            question[key] = list(slots.values())
        else:
            question[key] = {**value, **change} if isinstance(value, dict) and isinstance(change, dict) else change
    return {"name": case["name"], "input": question, "expect": case["expect"]}


@st.composite
def policies(draw: st.DrawFn) -> FlexPolicy:
    lend_slack = draw(st.sampled_from([-0.5, 0.0, 0.25, 0.5]))
    seconds = st.sampled_from([0, 0, 1, 5, 20]).map(lambda s: s * SECOND_US)
    return FlexPolicy(
        lend_hold_us=draw(seconds),
        load_limit=draw(st.sampled_from([0.5, 0.7, 1.0])),
        lend_slack=lend_slack,
        return_slack=lend_slack + draw(st.sampled_from([0.05, 0.1, 0.4])),
        return_hold_us=draw(seconds),
        min_hold_us=draw(seconds),
        drain_bound_us=draw(st.integers(1, 40)) * SECOND_US,
        cooldown_us=draw(seconds),
        decision_interval_us=draw(seconds),
        max_lent=draw(st.sampled_from([None, None, 0, 1, 2])),
        spillover_per_week=draw(st.sampled_from([None, None, 0, 3])),
        spillover_action=draw(st.sampled_from(SpilloverAction)),
    )


@st.composite
def flex_slots(draw: st.DrawFn, name: str) -> FlexSlot:
    ago = st.integers(0, 120).map(lambda s: START_US - s * SECOND_US)
    return FlexSlot(
        name=name,
        band=Band.FLEX,
        state=draw(st.sampled_from([SlotState.HOME, SlotState.LENT, *SlotState])),
        batch_efficiency=draw(st.sampled_from([0.5, 1.0, 1.5])),
        fence=draw(st.integers(0, 9)),
        lent_at_us=draw(ago),
        grant_expires_at_us=START_US + draw(st.sampled_from([-1, 0, 1, 9, 10, 15])) * SECOND_US,
        recalled_at_us=draw(ago),
        cancelled_at_us=draw(st.none() | ago),
        running_batch_gpu_us=draw(st.integers(0, 3)) * SECOND_US,
        cancellable=draw(st.booleans()),
    )


def floors(interactive: int, batch: int) -> tuple[FlexSlot, ...]:
    return tuple(FlexSlot(name=f"i{n}", band=Band.INTERACTIVE) for n in range(interactive)) + tuple(
        FlexSlot(name=f"b{n}", band=Band.BATCH) for n in range(batch)
    )


@st.composite
def jobs(draw: st.DrawFn, now_us: int) -> tuple[BatchJob, ...]:
    return tuple(
        BatchJob(
            name=f"j{n}",
            remaining_gpu_us=draw(st.sampled_from([0, 2_000, 50_000])) * SECOND_US,
            deadline_us=draw(st.none() | st.integers(-3600, 8 * 3600).map(lambda s: now_us + s * SECOND_US)),
        )
        for n in range(draw(st.integers(0, 3)))
    )


@st.composite
def snapshots(draw: st.DrawFn) -> FlexSnapshot:
    names = [f"f{n}" for n in range(draw(st.integers(0, 4)))]
    ago = st.integers(0, 120).map(lambda s: START_US - s * SECOND_US)
    nobody = st.just(frozenset[str]())
    some = st.one_of(nobody, nobody, nobody, st.frozensets(st.sampled_from(names), max_size=2)) if names else nobody
    return FlexSnapshot(
        now_us=START_US,
        policy=draw(policies()),
        safe_rate=TABLE,
        slots=floors(draw(st.sampled_from([0, 2, 4])), draw(st.integers(0, 2)))
        + tuple(draw(flex_slots(name)) for name in names),
        interactive=InteractiveFigures(
            admitted_per_s=draw(st.sampled_from([0.0, 1.0, 1.0, 2.5, 2.5, 5.6, 8.0, 11.2])),
            p95_queue_us=draw(st.sampled_from([0, 80_000, 80_000, 199_999, 200_000])),
            p95_below_since_us=draw(st.none() | ago),
            telemetry_at_us=START_US - draw(st.sampled_from([0, SECOND_US, SECOND_US, SECOND_US, 5 * SECOND_US])),
        ),
        jobs=draw(jobs(START_US)),
        lends_this_week=draw(st.integers(0, 6)),
        frozen=draw(st.sampled_from([False, False, True])),
        last_recall_at_us=draw(st.none() | ago),
        last_lend_at_us=draw(st.none() | ago),
        slack_above_return_since_us=draw(st.none() | ago),
        manual_recalls=draw(some),
        trips=draw(some),
    )


@dataclass(frozen=True)
class TickInput:
    """What the outside does between two ticks."""

    step_us: int
    admitted_per_s: float
    p95_queue_us: int | None
    telemetry_age_us: int
    backlog_gpu_us: int
    frozen: bool = False
    drained: bool = True
    trip: bool = False
    manual: bool = False


def tick_inputs() -> st.SearchStrategy[TickInput]:
    return st.builds(
        TickInput,
        step_us=st.sampled_from([1, 1, 1, 1, 4, 20]).map(lambda s: s * SECOND_US),
        admitted_per_s=st.sampled_from([0.5, 0.5, 0.5, 0.5, 8.0, 20.0]),
        p95_queue_us=st.sampled_from([50_000, 50_000, 50_000, 50_000, 400_000, None]),
        telemetry_age_us=st.sampled_from([0, 0, 0, 0, SECOND_US, 6 * SECOND_US]),
        backlog_gpu_us=st.sampled_from([0, 9_600, 36_000, 90_000, 90_000]).map(lambda s: s * SECOND_US),
        frozen=st.sampled_from([False, False, False, True]),
        drained=st.booleans(),
        trip=st.sampled_from([False] * 4 + [True]),
        manual=st.sampled_from([False] * 4 + [True]),
    )


def runs() -> st.SearchStrategy[list[TickInput]]:
    """Phases that each last some ticks, for hold times never pass where every tick is another world."""
    quiet = st.integers(0, 90_000).map(lambda gpu_s: TickInput(SECOND_US, 0.5, 50_000, 0, gpu_s * SECOND_US))
    phase = st.tuples(st.one_of(quiet, tick_inputs()), st.integers(1, 25))
    return st.lists(phase, min_size=1, max_size=8).map(
        lambda phases: [given for given, ticks in phases for _ in range(ticks)]
    )


@dataclass(frozen=True)
class Tick:
    before: FlexSnapshot
    decision: FlexDecision
    after: tuple[FlexSlot, ...]


class World:
    """One pool whose slots do what the decisions say, through the transition table."""

    def __init__(self, policy: FlexPolicy, *, interactive: int = 4, batch: int = 2, flex: int = 3) -> None:
        self.policy = policy
        self.now_us = START_US
        self.marks = FlexMarks()
        self.lends = 0
        self.slots = floors(interactive, batch) + tuple(FlexSlot(name=f"f{n}", band=Band.FLEX) for n in range(flex))

    def tick(self, given: TickInput) -> Tick:
        self.now_us += given.step_us
        if given.drained:
            self.slots = tuple(map(self._drain, self.slots))
        lent = frozenset(slot.name for slot in self.slots if slot.state is SlotState.LENT)
        snapshot = FlexSnapshot(
            now_us=self.now_us,
            policy=self.policy,
            safe_rate=TABLE,
            slots=self.slots,
            interactive=InteractiveFigures(
                admitted_per_s=given.admitted_per_s,
                p95_queue_us=given.p95_queue_us,
                p95_below_since_us=None,
                telemetry_at_us=self.now_us - given.telemetry_age_us,
            ),
            jobs=(BatchJob(name="j", remaining_gpu_us=given.backlog_gpu_us, deadline_us=self.now_us + 4 * HOUR_US),),
            lends_this_week=self.lends,
            frozen=given.frozen,
            manual_recalls=lent if given.manual else frozenset(),
            trips=lent if given.trip else frozenset(),
        )
        self.marks, snapshot = observe(self.marks, snapshot)
        decision = decide(snapshot)
        self.marks = remember(self.marks, decision)
        self.lends += len(decision.of_kind(FlexActionKind.LEND))
        by_slot = {action.slot: action for action in decision.actions}
        self.slots = tuple(self._applied(slot, by_slot.get(slot.name)) for slot in self.slots)
        return Tick(snapshot, decision, self.slots)

    def _drain(self, slot: FlexSlot) -> FlexSlot:
        if slot.state in (SlotState.DRAINING, SlotState.CANCELLING, SlotState.OVERDUE):
            return replace(slot, state=apply_event(slot.state, SlotEvent.DRAINED))
        return slot

    def _applied(self, slot: FlexSlot, action: Any) -> FlexSlot:
        if action is None:
            return slot
        if action.kind is FlexActionKind.RENEW:
            return replace(slot, grant_expires_at_us=action.grant_expires_at_us)
        changed: dict[str, Any] = {
            "state": apply_event(slot.state, EVENT_OF_ACTION[action.kind]),
            "fence": action.fence,
        }
        if action.kind is FlexActionKind.LEND:
            changed |= {"lent_at_us": self.now_us, "grant_expires_at_us": action.grant_expires_at_us}
        elif action.kind is FlexActionKind.RECALL:
            changed |= {"recalled_at_us": self.now_us}
        elif action.kind is FlexActionKind.CANCEL:
            changed |= {"cancelled_at_us": self.now_us}
        return replace(slot, **changed)
