"""The slot state machine: every pair is decided, and what the states mean."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from controlplane.core.slot_states import (
    BORROWED,
    FORBIDDEN,
    TRANSITIONS,
    Band,
    IllegalTransition,
    SlotEvent,
    SlotOwner,
    SlotState,
    admits_batch,
    admits_interactive,
    apply_event,
    diagram,
    fence_after,
    owner_of,
    table,
)

PAIRS = set(product(SlotState, SlotEvent))


def test_allowed_and_forbidden_cover_every_pair_once():
    assert set(TRANSITIONS) | set(FORBIDDEN) == PAIRS
    assert not set(TRANSITIONS) & set(FORBIDDEN)


@pytest.mark.parametrize(("state", "event"), sorted(PAIRS))
def test_each_pair_does_what_its_table_says(state, event):
    if (state, event) in TRANSITIONS:
        assert apply_event(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition) as refusal:
            apply_event(state, event)
        assert FORBIDDEN[state, event] in str(refusal.value)


@pytest.mark.parametrize(
    ("events", "end"),
    [
        (["lend", "recall", "drained"], "home"),
        (["lend", "recall", "cancel", "drained"], "home"),
        (["lend", "recall", "overdue", "drained"], "home"),
        (["lend", "recall", "cancel", "overdue", "drained"], "home"),
        (["lend", "vanish", "return_busy", "drained"], "home"),
        (["vanish", "return_idle", "lend"], "lent"),
    ],
)
def test_ways_home(events, end):
    state = SlotState.HOME
    for event in events:
        state = apply_event(state, SlotEvent(event))
    assert state is SlotState(end)


@pytest.mark.parametrize("start", SlotState)
def test_home_is_reachable_from_every_state(start):
    reached = {start}
    for _ in SlotState:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    assert SlotState.HOME in reached


def test_only_a_lend_leads_to_lent():
    assert {event for (_, event), after in TRANSITIONS.items() if after is SlotState.LENT} == {SlotEvent.LEND}


def test_every_observed_state_can_be_lost():
    assert all((state, SlotEvent.VANISH) in TRANSITIONS for state in SlotState if state is not SlotState.LOST)


@pytest.mark.parametrize("event", SlotEvent)
def test_the_fence_grows_at_lend_and_recall_only(event):
    assert fence_after(7, event) == (8 if event in (SlotEvent.LEND, SlotEvent.RECALL) else 7)


@pytest.mark.parametrize(("band", "state"), list(product(Band, SlotState)))
def test_a_slot_admits_at_most_one_class_and_only_its_owners(band, state):
    batch, interactive = admits_batch(band, state), admits_interactive(band, state)
    assert not (batch and interactive)
    owner = owner_of(band, state)
    if batch:
        assert owner is SlotOwner.BATCH
    if interactive:
        assert owner is SlotOwner.INTERACTIVE
    if band is Band.INTERACTIVE:
        assert not batch


@pytest.mark.parametrize("state", SlotState)
def test_the_borrower_owns_a_flex_slot_until_it_is_home(state):
    owner = owner_of(Band.FLEX, state)
    if state in BORROWED:
        assert owner is SlotOwner.BATCH
    else:
        assert owner is {SlotState.HOME: SlotOwner.INTERACTIVE, SlotState.LOST: SlotOwner.UNOBSERVED}[state]


def test_the_diagram_draws_the_whole_table():
    lines = diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert len(lines) == 2 + len(TRANSITIONS)
    assert "    lent --> draining: recall" in lines


DOC = Path(__file__).parents[2] / "docs" / "slot-states.md"


def generated(text: str) -> str:
    """The page with its diagram and table made anew."""
    for name, made in (("diagram", f"```mermaid\n{diagram()}```\n"), ("table", table())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, rest = text.split(begin)
        text = head + begin + made + end + rest.split(end, 1)[1]
    return text


def test_the_page_shows_the_table_as_it_is():
    text = DOC.read_text()
    assert generated(text) == text, "run: python -m tests.core.test_slot_states"
    for state in SlotState:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {state} | ")]
        assert line.endswith(f"| {OWNER_WORDS[owner_of(Band.FLEX, state)]}" + MORE.get(state, "") + " |")
        _, _, batch, interactive, _ = (cell.strip() for cell in line.split("|", 4))
        assert batch.startswith("yes") is admits_batch(Band.FLEX, state)
        assert interactive.startswith("yes") is admits_interactive(Band.FLEX, state)


OWNER_WORDS = {
    SlotOwner.INTERACTIVE: "interactive",
    SlotOwner.BATCH: "batch",
    SlotOwner.UNOBSERVED: "nobody's: unobserved, and an alert is open",
}
MORE = {SlotState.OVERDUE: "; an alert is open"}


def test_the_table_has_every_pair():
    text = table()
    rows = text.split("\n\n")[0].splitlines()[2:]
    assert [len(row.strip("|").split("|")) - 1 for row in rows] == [len(SlotEvent)] * len(SlotState)
    assert text.count("—") == len(FORBIDDEN)


if __name__ == "__main__":
    DOC.write_text(generated(DOC.read_text()))
