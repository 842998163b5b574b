"""Checks, actions, states and reasons of a flex band in words, with the unit of each number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: name -> (label, unit, how the value has to stand to the limit for the check to hold)
CHECKS = {
    "p95_queue_us": ("Interactive p95 queue wait, 60 s", "ms", "under"),
    "p95_below_for_us": ("Under that limit at every tick for", "s", "at least"),
    "safe_rate_valid_us": ("Tested safe rate is valid for another", "s", "more than"),
    "load": ("Load: admitted over tested safe rate", "", "under"),
    "load_with_one_slot_less": ("Load with one interactive slot less", "", "under"),
    "telemetry_age_us": ("Age of the oldest report", "s", "under"),
    "slack": ("Batch slack", "", "under"),
    "frozen": ("Frozen", "", ""),
    "since_recall_us": ("Time since the last recall", "s", "at least"),
    "since_lend_us": ("Time since the last loan", "s", "at least"),
    "lends_this_week": ("Loans this week", "n", "under"),
    "slots_away": ("Flex slots away from home", "n", "under"),
    "slot_at_home": ("A flex slot at home", "", ""),
    "recall_in_this_tick": ("Something comes home in this tick", "", ""),
    "tripwire": ("An agent pulled its tripwire", "", ""),
    "interactive_p95": ("Interactive p95 queue wait, 60 s", "ms", "at least"),
    "interactive_load": ("Load: admitted over tested safe rate", "", "at least"),
    "telemetry_stale": ("Age of the oldest report", "s", "at least"),
    "grant_expired": ("The grant ends in", "s", "at most"),
    "manual": ("Somebody asked it back", "", ""),
    "slack_without_slot": ("Batch slack without this slot", "", "more than"),
    "slack_above_return_us": ("Above that limit at every tick for", "s", "at least"),
    "min_hold_us": ("Lent for", "s", "at least"),
    "drain_bound_us": ("Draining for", "s", "at least"),
    "cancel_bound_us": ("Cancelling for", "s", "at least"),
}
USES = {
    "lend": "A new loan: every one of these has to hold",
    "recall": "A recall: one that holds is enough; the last three count together",
    "drain": "A drain: past its bound, work is cancelled or the slot is overdue",
}
ACTIONS = {
    "lend": "Lent",
    "renew": "Renewed",
    "recall": "Recalled",
    "cancel": "Cancelled its work",
    "overdue": "Overdue",
}
REASONS = {
    "tripwire": "the agent's own tripwire",
    "interactive_p95": "interactive queue wait",
    "interactive_load": "interactive load",
    "telemetry_stale": "reports are missing",
    "grant_expired": "the grant ran out",
    "manual": "somebody asked for it",
    "batch_slack": "batch no longer needs it",
}
FINDINGS = {
    "lends_over_budget": "More loans than the weekly budget.",
    "queue_p99_rising": "Queue wait p99 rises: more than 20 % over the week before.",
    "slack_shrinking": "Batch slack shrinks against the week before.",
    "resize_partition": "A flex slot has settled with one class: resize the partition.",
}


@dataclass(frozen=True)
class CheckLine:
    """One comparison as a page shows it. `limit` says the relation too: "under 200"."""

    name: str
    label: str
    unit: str
    value: str
    limit: str
    held: bool
    slot: str


@dataclass(frozen=True)
class CheckGroup:
    use: str
    title: str
    lines: tuple[CheckLine, ...]


def check_groups(checks: Sequence[Mapping[str, Any]]) -> list[CheckGroup]:
    """A decision's stored checks by what they are used for."""
    groups = []
    for use, title in USES.items():
        lines = tuple(_line(check) for check in checks if check["used_for"] == use)
        if lines:
            groups.append(CheckGroup(use, title, lines))
    return groups


def _line(check: Mapping[str, Any]) -> CheckLine:
    label, unit, relation = CHECKS.get(check["name"], (check["name"], "", ""))
    limit = check["limit"]
    said = "" if limit is None or isinstance(limit, bool) else f"{relation} {number(limit, unit)}".strip()
    return CheckLine(
        name=check["name"],
        label=label,
        unit="" if unit == "n" else unit,
        value=number(check["value"], unit),
        limit=said,
        held=check["held"],
        slot=check.get("slot") or "",
    )


def number(value: Any, unit: str) -> str:
    """A check's value for people; not known is a dash."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return {"infinite": "∞", "-infinite": "−∞"}.get(value, value)
    text = {"ms": f"{value / 1_000:,.1f}", "s": f"{value / 1_000_000:,.1f}", "n": f"{value:,.0f}"}.get(
        unit, f"{value:.3f}"
    )
    return text.replace("-", "−")


def action_sentence(action: Mapping[str, Any]) -> str:
    """`Recalled f1 under fence 4: interactive queue wait, before its minimum hold was over`."""
    said = f"{ACTIONS.get(action['kind'], action['kind'])} {action['slot']} under fence {action['fence']}"
    if action.get("reason"):
        said += f": {REASONS.get(action['reason'], action['reason'])}"
    if action.get("overrides_min_hold"):
        said += ", before its minimum hold was over"
    return said
