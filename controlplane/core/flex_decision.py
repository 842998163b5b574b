"""What a flex-band decision says: actions, the checks behind them, and when it is worth a row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from controlplane.core.flex_demand import Demand
from controlplane.core.flex_policy import MINUTE_US
from controlplane.core.slot_states import SlotEvent


class FlexActionKind(StrEnum):
    LEND = "lend"
    RENEW = "renew"
    RECALL = "recall"
    CANCEL = "cancel"
    OVERDUE = "overdue"


#: What an action does to the slot's state; a renewal leaves it.
EVENT_OF_ACTION = {
    FlexActionKind.LEND: SlotEvent.LEND,
    FlexActionKind.RECALL: SlotEvent.RECALL,
    FlexActionKind.CANCEL: SlotEvent.CANCEL,
    FlexActionKind.OVERDUE: SlotEvent.OVERDUE,
}


class RecallReason(StrEnum):
    """Why a slot comes home; where several hold, the first in this order is named."""

    TRIPWIRE = "tripwire"
    INTERACTIVE_P95 = "interactive_p95"
    INTERACTIVE_LOAD = "interactive_load"
    TELEMETRY_STALE = "telemetry_stale"
    GRANT_EXPIRED = "grant_expired"
    MANUAL = "manual"
    BATCH_SLACK = "batch_slack"


class CheckUse(StrEnum):
    """What a check decides: ``held`` speaks for it. A lend check that held allows, a recall check that held recalls."""

    LEND = "lend"
    RECALL = "recall"
    DRAIN = "drain"


class FlexNote(StrEnum):
    """Things that an operator should be told beside the actions."""

    SPILLOVER_BUDGET_USED = "spillover_budget_used"
    SAFE_RATE_EXPIRED = "safe_rate_expired"
    SAFE_RATE_MISSING = "safe_rate_missing"
    MIN_HOLD_OVERRIDDEN = "min_hold_overridden"
    JOBS_MISSED = "jobs_missed"


class Check(NamedTuple):
    """One comparison. ``None`` as a value means not known; a name that ends in ``_us`` is in microseconds."""

    name: str
    value: float | str | None
    limit: float | str | None
    held: bool
    used_for: CheckUse
    slot: str | None = None


@dataclass(frozen=True, kw_only=True)
class FlexAction:
    """One thing to do to one slot; at most one per slot and decision."""

    kind: FlexActionKind
    slot: str
    reason: RecallReason | None = None
    #: The slot's fencing number once the action is applied.
    fence: int
    #: For a loan and a renewal: when the grant ends unless it is renewed.
    grant_expires_at_us: int | None = None
    #: The slot comes home before min_hold was over, which only the batch reason respects.
    overrides_min_hold: bool = False


@dataclass(frozen=True, kw_only=True)
class FlexDecision:
    """The answer for one tick; ``actions`` are in the order of slot names."""

    at_us: int
    actions: tuple[FlexAction, ...]
    demand: Demand
    checks: tuple[Check, ...]
    notes: tuple[FlexNote, ...]

    @property
    def required(self) -> float:
        return self.demand.required

    @property
    def available(self) -> float:
        return self.demand.available

    @property
    def slack(self) -> float:
        return self.demand.slack

    @property
    def missed(self) -> bool:
        return self.demand.missed

    @property
    def acts(self) -> bool:
        """True when it changes a slot's state; a renewal is the continuation of an act."""
        return any(action.kind is not FlexActionKind.RENEW for action in self.actions)

    @property
    def lend_blocked_by(self) -> tuple[str, ...]:
        """Names of the checks that speak against a new loan, in order."""
        return tuple(check.name for check in self.checks if check.used_for is CheckUse.LEND and not check.held)

    @cached_property
    def verdicts(self) -> tuple[tuple[str, str, str | None, bool], ...]:
        """(use, name, slot, whether it held) of each check; the same slots have the same checks in the same order."""
        return tuple([(check.used_for, check.name, check.slot, check.held) for check in self.checks])

    def of_kind(self, kind: FlexActionKind) -> tuple[FlexAction, ...]:
        """The actions of one kind."""
        return tuple(action for action in self.actions if action.kind is kind)


def next_turn_us(after_us: int, turn_us: int) -> int:
    """The first instant after another that lies ``turn_us`` past a full minute; all in microseconds."""
    return (after_us - turn_us) // MINUTE_US * MINUTE_US + MINUTE_US + turn_us


def worth_a_row(current: FlexDecision, recorded: FlexDecision | None, *, turn_us: int = 0) -> bool:
    """Is a decision written down? When it acts, when any check flipped since the row before, and once a minute.

    Once a minute is at the pool's own turn, ``turn_us`` past the full minute: pools that began together would else be
    written down together ever after. The ticks between are recomputed by ``decide`` from the pool's samples.
    """
    if recorded is None or current.acts or current.at_us >= next_turn_us(recorded.at_us, turn_us):
        return True
    return current.verdicts != recorded.verdicts
