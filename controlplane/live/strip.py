"""The flex band for pages: slot cells now, the strip of the last hour slot by slot, its marks and what they say. Pure.

Instants leave as ISO text; the page places spans by the server's clock, so that a frame changes only when something
happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from controlplane.flex.wording import REASONS
from controlplane.web.numerals import fixed

WINDOW = timedelta(minutes=60)
MINUTE = timedelta(minutes=1)
# Meters of the running minute and the one before may still be on their way.
METERS_LATE = timedelta(minutes=2)
BANDS = ("interactive", "batch", "flex")
_KINDS = {"lent": "lent", "draining": "draining", "cancelling": "draining", "overdue": "overdue", "lost": "unobserved"}
STATE_WORDS = {
    "interactive": "interactive",
    "batch": "batch",
    "lent": "lent",
    "draining": "draining",
    "overdue": "overdue",
    "unobserved": "unobserved",
}
CHIPS = {"draining": "risk", "overdue": "bad", "unobserved": "unknown"}


@dataclass(frozen=True, slots=True)
class SlotNow:
    """One slot with its open interval and, where it is flex, its grant."""

    slot_id: int
    name: str
    band: str
    agent_id: int | None
    state: str
    since: datetime | None
    recalled_at: datetime | None = None
    lent_at: datetime | None = None
    expires_at: datetime | None = None
    reason: str = ""
    fence: int = 0
    agent_name: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """History of one slot: (state, from, to or None for now) in order, and the minutes its meter was seen in."""

    intervals: Sequence[tuple[str, datetime, datetime | None]]
    tenure_from: datetime | None
    observed: frozenset[datetime]


def kind_of(state: str, band: str) -> str:
    """The cell's look: where a home slot belongs, or how it is away."""
    return _KINDS.get(state, "batch" if band == "batch" else "interactive")


def iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def cell(slot: SlotNow, *, seen: bool, drain_bound_s: int, now: datetime) -> dict[str, Any]:
    """A slot cell; a slot of an agent that is silent or not there is unobserved whatever its rows say."""
    kind = kind_of(slot.state, slot.band) if seen else "unobserved"
    clock = kind == "draining" and slot.recalled_at is not None
    drained = max(0.0, (now - slot.recalled_at).total_seconds()) if clock and slot.recalled_at else None
    return {
        "key": slot.name,
        "name": slot.name,
        "band": slot.band,
        "kind": kind,
        "chip": CHIPS.get(kind, "plain"),
        "word": STATE_WORDS[kind],
        "since": iso(slot.since),
        "recalled_at": iso(slot.recalled_at) if clock else None,
        "bound_s": drain_bound_s if clock else None,
        "clock": "" if drained is None else f"{drained:.0f} s / {drain_bound_s} s",
        "share": None if drained is None else min(1.0, drained / max(1, drain_bound_s)),
    }


def cells(
    slots: Sequence[SlotNow], seen: Mapping[int, bool], drain_bound_s: int, now: datetime
) -> list[dict[str, Any]]:
    """Cells in the order of bands, then names."""
    ordered = sorted(slots, key=lambda slot: (BANDS.index(slot.band), slot.name))
    return [cell(slot, seen=seen.get(slot.slot_id, False), drain_bound_s=drain_bound_s, now=now) for slot in ordered]


def band_note(slots: Sequence[SlotNow], made: Sequence[Mapping[str, Any]]) -> str:
    """What the band does, in a sentence."""
    by_name = {slot.name: slot for slot in slots}
    flex = [row for row in made if row["band"] == "flex"]
    if not flex:
        return "No flex slots." if made else "No slots yet."
    said = []
    for row in flex:
        slot = by_name[row["name"]]
        if row["kind"] == "lent":
            said.append(f"{slot.name} lent")
        elif row["kind"] == "draining":
            said.append(f"{slot.name} recalled: {REASONS.get(slot.reason, slot.reason) or 'on its way home'}")
        elif row["kind"] == "overdue":
            said.append(f"{slot.name} is past its drain bound")
        elif row["kind"] == "unobserved":
            said.append(f"{slot.name} not seen: by its own lease it admits no batch once its grant has ended")
    return ". ".join(said) + "." if said else "Nothing lent."


def lanes(
    slots: Sequence[SlotNow], history: Mapping[int, Lane], cells: Sequence[Mapping[str, Any]], now: datetime
) -> list[dict[str, Any]]:
    """One lane a slot over the last hour: spans by state, and over them what no meter saw; `cells` say what is now."""
    start = now - WINDOW
    present = {row["key"]: row for row in cells}
    rows = []
    band = ""
    for slot in sorted(slots, key=lambda row: (BANDS.index(row.band), row.name)):
        lane = history.get(slot.slot_id, Lane((), None, frozenset()))
        spans = [
            {"kind": kind_of(state, slot.band), "from": iso(begins), "to": iso(ends)}
            for state, begins, ends in lane.intervals
            if ends is None or ends > start
        ]
        spans += [
            {"kind": "unobserved", "from": iso(begins), "to": iso(ends)} for begins, ends in _unseen(lane, start, now)
        ]
        for number, span in enumerate(spans):
            span["key"] = f"{slot.name}-{number}"
        rows.append(
            {
                "key": slot.name,
                "name": slot.name,
                "css": "gap" if band and band != slot.band else "",
                "chip": present[slot.name]["chip"],
                "word": present[slot.name]["word"],
                "spans": spans,
            }
        )
        band = slot.band
    return rows


def _unseen(lane: Lane, start: datetime, now: datetime) -> list[tuple[datetime, datetime]]:
    """Runs of whole minutes inside the tenure that no meter covered."""
    if lane.tenure_from is None:
        return []
    at = max(start, lane.tenure_from).replace(second=0, microsecond=0) + MINUTE
    until = (now - METERS_LATE).replace(second=0, microsecond=0)
    runs: list[tuple[datetime, datetime]] = []
    while at < until:
        if at not in lane.observed:
            if runs and runs[-1][1] == at:
                runs[-1] = (runs[-1][0], at + MINUTE)
            else:
                runs.append((at, at + MINUTE))
        at += MINUTE
    return runs


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One row of the controller's decisions, as far as the strip needs it."""

    decision_id: int
    at: datetime
    checks: Sequence[Mapping[str, Any]]
    actions: Sequence[Mapping[str, Any]]


_VERBS = {"lend": "Lend", "recall": "Recall", "cancel": "Cancel batch on", "overdue": "Past its bound:"}


def marks(decisions: Iterable[DecisionRow]) -> list[dict[str, Any]]:
    """Numbered acts of the last hour, oldest first; their list is the strip's text alternative."""
    rows: list[dict[str, Any]] = []
    for decision in sorted(decisions, key=lambda row: row.at):
        acts = [action for action in decision.actions if action["kind"] in _VERBS]
        groups: dict[tuple[str, str], list[str]] = {}
        for action in acts:
            groups.setdefault((action["kind"], action.get("reason", "")), []).append(action["slot"])
        for (kind, reason), names in groups.items():
            rows.append(
                {
                    "key": f"{decision.decision_id}-{kind}-{reason}",
                    "number": len(rows) + 1,
                    "kind": "overdue" if kind in ("overdue", "cancel") else kind,
                    "at": iso(decision.at),
                    "what": f"{_VERBS[kind]} {', '.join(names)}",
                    "code": reason or kind,
                    "why": why(kind, reason, decision.checks, names),
                }
            )
    return rows


def why(kind: str, reason: str, checks: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """The numbers behind an act, in words."""
    found = {(c["used_for"], c["name"], c.get("slot")): c for c in checks}

    def value(use: str, name: str, slot: str | None = None) -> Any:
        row = found.get((use, name, slot))
        return None if row is None else row["value"]

    if kind == "lend":
        return (
            f"slack {number(value('lend', 'slack'))}, p95 {ms(value('lend', 'p95_queue_us'))} for"
            f" {seconds(value('lend', 'p95_below_for_us'))}, load {number(value('lend', 'load'))},"
            f" with one slot less {number(value('lend', 'load_with_one_slot_less'))}"
        )
    if kind in ("overdue", "cancel"):
        bound = seconds(found.get(("drain", "drain_bound_us", names[0]), {}).get("limit"))
        return f"{bound} are over and batch still runs on it"
    if reason == "batch_slack":
        row = found.get(("recall", "slack_without_slot", names[0]))
        limit = number(row["limit"]) if row else number(None)
        return f"slack without it {number(row['value'] if row else None)}, over {limit} for long enough"
    row = found.get(("recall", reason, None)) or found.get(("recall", reason, names[0]))
    text = REASONS.get(reason, reason)
    if row is None or isinstance(row["value"], (bool, str)) or row["value"] is None:
        return text
    shown = ms if reason == "interactive_p95" else seconds if row["name"] in _IN_US else number
    return f"{text}: {shown(row['value'])}, limit {shown(row['limit'])}"


_IN_US = frozenset({"telemetry_stale", "grant_expired"})


def number(value: Any) -> str:
    """A ratio for a sentence; infinite words stay words."""
    if value is None:
        return "not known"
    if isinstance(value, str):
        return {"infinite": "without end", "-infinite": "missed"}.get(value, value)
    return fixed(value, 2)


def ms(value: Any) -> str:
    return "not known" if value is None else f"{value / 1000:,.0f} ms"


def seconds(value: Any) -> str:
    return "not known" if value is None else f"{value / 1_000_000:,.0f} s"
