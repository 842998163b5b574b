"""The life of a flex slot as one transition table.

Every pair of state and event is either in ``TRANSITIONS`` or in ``FORBIDDEN`` with the reason; diagram and table in
``docs/slot-states.md`` are made from the same two.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType


class Band(StrEnum):
    """A slot's permanent home."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    FLEX = "flex"


class SlotState(StrEnum):
    """Where a slot is between its home and the borrower."""

    HOME = "home"
    LENT = "lent"
    DRAINING = "draining"
    CANCELLING = "cancelling"
    OVERDUE = "overdue"
    LOST = "lost"


class SlotEvent(StrEnum):
    """What can happen to a slot."""

    LEND = "lend"
    RECALL = "recall"
    CANCEL = "cancel"
    OVERDUE = "overdue"
    DRAINED = "drained"
    VANISH = "vanish"
    RETURN_IDLE = "return_idle"
    RETURN_BUSY = "return_busy"


class SlotOwner(StrEnum):
    """Which side a slot's time belongs to; ``UNOBSERVED`` while nobody can say."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    UNOBSERVED = "unobserved"


class IllegalTransition(ValueError):
    """The caller applied an event that the slot's state does not allow."""


_S, _E = SlotState, SlotEvent

TRANSITIONS = MappingProxyType(
    {
        (_S.HOME, _E.LEND): _S.LENT,
        (_S.HOME, _E.VANISH): _S.LOST,
        (_S.LENT, _E.RECALL): _S.DRAINING,
        (_S.LENT, _E.VANISH): _S.LOST,
        (_S.DRAINING, _E.DRAINED): _S.HOME,
        (_S.DRAINING, _E.CANCEL): _S.CANCELLING,
        (_S.DRAINING, _E.OVERDUE): _S.OVERDUE,
        (_S.DRAINING, _E.VANISH): _S.LOST,
        (_S.CANCELLING, _E.DRAINED): _S.HOME,
        (_S.CANCELLING, _E.OVERDUE): _S.OVERDUE,
        (_S.CANCELLING, _E.VANISH): _S.LOST,
        (_S.OVERDUE, _E.DRAINED): _S.HOME,
        (_S.OVERDUE, _E.VANISH): _S.LOST,
        (_S.LOST, _E.RETURN_IDLE): _S.HOME,
        # A slot that comes back with batch on it is never lent again by that: it drains first.
        (_S.LOST, _E.RETURN_BUSY): _S.DRAINING,
    }
)

_NOT_LOST = "the slot is observed, it has not been away"
_AWAY = "the slot is lost: what it runs is unknown until its agent reports"
_AT_HOME = "the slot is at home, there is no loan to end"
_ON_ITS_WAY = "the slot is on its way home already"

FORBIDDEN = MappingProxyType(
    {
        (_S.HOME, _E.RECALL): _AT_HOME,
        (_S.HOME, _E.CANCEL): _AT_HOME,
        (_S.HOME, _E.OVERDUE): _AT_HOME,
        (_S.HOME, _E.DRAINED): _AT_HOME,
        (_S.HOME, _E.RETURN_IDLE): _NOT_LOST,
        (_S.HOME, _E.RETURN_BUSY): _NOT_LOST,
        (_S.LENT, _E.LEND): "the slot is lent already; a loan goes on by renewal",
        (_S.LENT, _E.CANCEL): "a loan is recalled and drained before its work is cancelled",
        (_S.LENT, _E.OVERDUE): "only a drain has a bound; recall first",
        (_S.LENT, _E.DRAINED): "a lent slot goes home by a recall, never by being idle",
        (_S.LENT, _E.RETURN_IDLE): _NOT_LOST,
        (_S.LENT, _E.RETURN_BUSY): _NOT_LOST,
        (_S.DRAINING, _E.LEND): "the slot has to be home before it is lent again",
        (_S.DRAINING, _E.RECALL): _ON_ITS_WAY,
        (_S.DRAINING, _E.RETURN_IDLE): _NOT_LOST,
        (_S.DRAINING, _E.RETURN_BUSY): _NOT_LOST,
        (_S.CANCELLING, _E.LEND): "the slot has to be home before it is lent again",
        (_S.CANCELLING, _E.RECALL): _ON_ITS_WAY,
        (_S.CANCELLING, _E.CANCEL): "the cancellation was sent already",
        (_S.CANCELLING, _E.RETURN_IDLE): _NOT_LOST,
        (_S.CANCELLING, _E.RETURN_BUSY): _NOT_LOST,
        (_S.OVERDUE, _E.LEND): "the slot has to be home before it is lent again",
        (_S.OVERDUE, _E.RECALL): _ON_ITS_WAY,
        (_S.OVERDUE, _E.CANCEL): "the slot is overdue because its work cannot be cancelled or did not obey",
        (_S.OVERDUE, _E.OVERDUE): "the alert was raised already",
        (_S.OVERDUE, _E.RETURN_IDLE): _NOT_LOST,
        (_S.OVERDUE, _E.RETURN_BUSY): _NOT_LOST,
        (_S.LOST, _E.LEND): _AWAY,
        (_S.LOST, _E.RECALL): _AWAY,
        (_S.LOST, _E.CANCEL): _AWAY,
        (_S.LOST, _E.OVERDUE): _AWAY,
        (_S.LOST, _E.DRAINED): _AWAY,
        (_S.LOST, _E.VANISH): "the slot is lost already",
    }
)

#: Events that give the slot's grant a new fencing number.
FENCING_EVENTS = frozenset({SlotEvent.LEND, SlotEvent.RECALL})

#: States in which the borrower holds the slot, whether or not it still admits.
BORROWED = frozenset({SlotState.LENT, SlotState.DRAINING, SlotState.CANCELLING, SlotState.OVERDUE})


def apply_event(state: SlotState, event: SlotEvent) -> SlotState:
    """The state after an event. Raises ``IllegalTransition`` with the reason when the pair is forbidden."""
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise IllegalTransition(f"{event} does not apply to a slot that is {state}: {FORBIDDEN[state, event]}")
    return after


def fence_after(fence: int, event: SlotEvent) -> int:
    """The slot's fencing number after an event: it grows by one at each lend and each recall."""
    return fence + 1 if event in FENCING_EVENTS else fence


def admits_batch(band: Band, state: SlotState) -> bool:
    """May batch start on a slot, as the control plane sees it (floors plus loans)?"""
    if band is Band.BATCH:
        return state is SlotState.HOME
    return band is Band.FLEX and state is SlotState.LENT


def admits_interactive(band: Band, state: SlotState) -> bool:
    """May interactive start on a slot? A borrowed slot serves it again only when it is home."""
    return band is not Band.BATCH and state is SlotState.HOME


def owner_of(band: Band, state: SlotState) -> SlotOwner:
    """Whose time it is: the borrower's from the loan until the slot is home, drain included."""
    if state is SlotState.LOST:
        return SlotOwner.UNOBSERVED
    if band is Band.BATCH or state in BORROWED:
        return SlotOwner.BATCH
    return SlotOwner.INTERACTIVE


def diagram() -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {SlotState.HOME}"]
    lines += [f"    {state} --> {after}: {event}" for (state, event), after in TRANSITIONS.items()]
    return "\n".join(lines) + "\n"


def table() -> str:
    """Every pair as a Markdown table: the state after the event, or a dash; below it why each dash is one."""
    lines = ["| | " + " | ".join(f"`{event}`" for event in SlotEvent) + " |", "|---" * (len(SlotEvent) + 1) + "|"]
    for state in SlotState:
        after = [TRANSITIONS.get((state, event)) for event in SlotEvent]
        lines.append(f"| **{state}** | " + " | ".join("—" if one is None else str(one) for one in after) + " |")
    why: dict[str, list[str]] = {}
    for (state, event), reason in FORBIDDEN.items():
        why.setdefault(reason, []).append(f"{state} `{event}`")
    lines += ["", "| refused | because |", "|---|---|"]
    lines += [f"| {', '.join(pairs)} | {reason} |" for reason, pairs in why.items()]
    return "\n".join(lines) + "\n"
