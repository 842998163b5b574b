"""What the controller remembers from tick to tick: since when conditions have held, and when it last acted.

A condition that must hold "at every tick" is only as good as the ticks were: a tick that could not see, or a gap
between ticks longer than telemetry may be old, starts it afresh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from controlplane.core.flex_decision import FlexActionKind, FlexDecision
from controlplane.core.flex_demand import Demand, demand_of
from controlplane.core.flex_policy import FlexPolicy, exact
from controlplane.core.flex_snapshot import FlexSnapshot
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


def observe(marks: FlexMarks, snapshot: FlexSnapshot, backlog: Demand | None = None) -> tuple[FlexMarks, FlexSnapshot]:
    """Bring the marks up to this tick, and the snapshot with the marks filled in, ready for ``decide``.

    ``backlog`` is the snapshot's demand where it is known already; the marks change nothing of it.
    """
    after = _seen(marks, snapshot, backlog)
    slots = tuple([slot.above_return_slack(after.slack_above_since_us.get(slot.name)) for slot in snapshot.slots])
    filled = snapshot.marked(
        slots,
        p95_below_since_us=after.p95_below_since_us,
        last_lend_at_us=marks.last_lend_at_us,
        last_recall_at_us=marks.last_recall_at_us,
    )
    return after, filled


def at_rest(
    marks: FlexMarks, policy: FlexPolicy, *, now_us: int, p95_queue_us: int | None, telemetry_at_us: int | None
) -> FlexMarks:
    """The marks after a tick in which every slot was home, nobody's wire was pulled and nothing was decided."""
    below = _p95_is_below(policy, p95_queue_us, telemetry_at_us, now_us)
    since_us = marks.p95_below_since_us if _is_gapless(marks, policy, now_us) else None
    return FlexMarks(
        ticked_at_us=now_us,
        p95_below_since_us=_kept(since_us, now_us, holds=below),
        last_lend_at_us=marks.last_lend_at_us,
        last_recall_at_us=marks.last_recall_at_us,
    )


def _is_gapless(marks: FlexMarks, policy: FlexPolicy, now_us: int) -> bool:
    return marks.ticked_at_us is not None and 0 <= now_us - marks.ticked_at_us < policy.telemetry_stale_us


def _seen(marks: FlexMarks, snapshot: FlexSnapshot, backlog: Demand | None) -> FlexMarks:
    """The marks brought up to this tick."""
    now_us, policy, figures = snapshot.now_us, snapshot.policy, snapshot.interactive
    gapless = _is_gapless(marks, policy, now_us)
    below = _p95_is_below(policy, figures.p95_queue_us, figures.telemetry_at_us, now_us)
    return FlexMarks(
        ticked_at_us=now_us,
        p95_below_since_us=_kept(marks.p95_below_since_us if gapless else None, now_us, holds=below),
        slack_above_since_us=MappingProxyType(
            {
                name: marks.slack_above_since_us.get(name, now_us) if gapless else now_us
                for name in _slots_batch_could_miss(snapshot, backlog)
            }
        ),
        last_lend_at_us=marks.last_lend_at_us,
        last_recall_at_us=now_us if snapshot.trips else marks.last_recall_at_us,
    )


def remember(marks: FlexMarks, decision: FlexDecision) -> FlexMarks:
    """The marks after a decision was applied: a loan starts the decision interval, a recall the cooldown."""
    lent, recalled = decision.of_kind(FlexActionKind.LEND), decision.of_kind(FlexActionKind.RECALL)
    if not lent and not recalled:
        return marks
    return replace(
        marks,
        last_lend_at_us=decision.at_us if lent else marks.last_lend_at_us,
        last_recall_at_us=decision.at_us if recalled else marks.last_recall_at_us,
    )


def _kept(since_us: int | None, now_us: int, *, holds: bool) -> int | None:
    if not holds:
        return None
    return now_us if since_us is None else since_us


def _p95_is_below(policy: FlexPolicy, p95_queue_us: int | None, telemetry_at_us: int | None, now_us: int) -> bool:
    """Stale or missing figures are not below anything."""
    if p95_queue_us is None or telemetry_at_us is None:
        return False
    fresh = 0 <= now_us - telemetry_at_us < policy.telemetry_stale_us
    return fresh and p95_queue_us < policy.lend_p95_us


def _slots_batch_could_miss(snapshot: FlexSnapshot, backlog: Demand | None) -> list[str]:
    policy, lent = snapshot.policy, [slot for slot in snapshot.slots if slot.state is SlotState.LENT]
    if not lent:
        return []
    if backlog is None:
        backlog = demand_of(snapshot)
    return [
        slot.name for slot in lent if backlog.slack_without(exact(slot.batch_efficiency)) > exact(policy.return_slack)
    ]
