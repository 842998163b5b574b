"""What the controller remembers from tick to tick: since when conditions have held, and when it last acted.

A condition that must hold "at every tick" is only as good as the ticks were: a tick that could not see, or a gap
between ticks longer than telemetry may be old, starts it afresh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from controlplane.core.flex_decision import FlexActionKind, FlexDecision
from controlplane.core.flex_demand import demand
from controlplane.core.flex_policy import exact
from controlplane.core.flex_snapshot import FlexSlot, FlexSnapshot
from controlplane.core.slot_states import SlotState


@dataclass(frozen=True, kw_only=True)
class FlexMarks:
    """Memory of one pool; the default is a controller that has seen nothing yet. Instants in microseconds."""

    ticked_at_us: int | None = None
    p95_below_since_us: int | None = None
    #: Per lent slot: since when slack without it has stayed above return_slack.
    slack_above_since_us: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    last_lend_at_us: int | None = None
    last_recall_at_us: int | None = None


def observe(marks: FlexMarks, snapshot: FlexSnapshot) -> tuple[FlexMarks, FlexSnapshot]:
    """Bring the marks up to this tick, and the snapshot with the marks filled in, ready for ``decide``."""
    now_us, stale_us = snapshot.now_us, snapshot.policy.telemetry_stale_us
    gapless = marks.ticked_at_us is not None and 0 <= now_us - marks.ticked_at_us < stale_us
    seen = replace(
        marks,
        ticked_at_us=now_us,
        p95_below_since_us=_kept(marks.p95_below_since_us if gapless else None, now_us, holds=_p95_is_below(snapshot)),
        slack_above_since_us=MappingProxyType(
            {
                name: marks.slack_above_since_us.get(name, now_us) if gapless else now_us
                for name in _slots_batch_could_miss(snapshot)
            }
        ),
        last_recall_at_us=now_us if snapshot.trips else marks.last_recall_at_us,
    )
    slots = tuple(_marked(slot, seen.slack_above_since_us.get(slot.name)) for slot in snapshot.slots)
    filled = replace(
        snapshot,
        slots=slots,
        interactive=replace(snapshot.interactive, p95_below_since_us=seen.p95_below_since_us),
        slack_above_return_since_us=None,
        last_lend_at_us=marks.last_lend_at_us,
        last_recall_at_us=marks.last_recall_at_us,
    )
    return seen, filled


def remember(marks: FlexMarks, decision: FlexDecision) -> FlexMarks:
    """The marks after a decision was applied: a loan starts the decision interval, a recall the cooldown."""
    lent, recalled = decision.of_kind(FlexActionKind.LEND), decision.of_kind(FlexActionKind.RECALL)
    return replace(
        marks,
        last_lend_at_us=decision.at_us if lent else marks.last_lend_at_us,
        last_recall_at_us=decision.at_us if recalled else marks.last_recall_at_us,
    )


def _marked(slot: FlexSlot, since_us: int | None) -> FlexSlot:
    if slot.slack_above_return_since_us == since_us:
        return slot
    return replace(slot, slack_above_return_since_us=since_us)


def _kept(since_us: int | None, now_us: int, *, holds: bool) -> int | None:
    if not holds:
        return None
    return now_us if since_us is None else since_us


def _p95_is_below(snapshot: FlexSnapshot) -> bool:
    """Stale or missing figures are not below anything."""
    figures, policy = snapshot.interactive, snapshot.policy
    if figures.p95_queue_us is None or figures.telemetry_at_us is None:
        return False
    fresh = 0 <= snapshot.now_us - figures.telemetry_at_us < policy.telemetry_stale_us
    return fresh and figures.p95_queue_us < policy.lend_p95_us


def _slots_batch_could_miss(snapshot: FlexSnapshot) -> list[str]:
    policy, lent = snapshot.policy, [slot for slot in snapshot.slots if slot.state is SlotState.LENT]
    if not lent:
        return []
    backlog = demand(snapshot.jobs, snapshot.slots, now_us=snapshot.now_us, missed_grace_us=policy.missed_grace_us)
    return [
        slot.name for slot in lent if backlog.slack_without(exact(slot.batch_efficiency)) > exact(policy.return_slack)
    ]
