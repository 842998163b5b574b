"""Why a slot is lent, draining or home: every check with its value now, its limit, its value at the loan, its use.

The checks of now are computed by the controller's own decision function from the newest sample of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from controlplane.core.flex import decide
from controlplane.flex.evidence import checks_as_json, read_snapshot
from controlplane.flex.wording import CHECKS
from controlplane.web.numerals import DASH, fixed

US = 1_000_000
_SIGNS = {"under": "<", "at least": "≥", "more than": ">", "at most": "≤", "": ""}
_USES = {"lend": "lend", "recall": "recall", "drain": "drain"}


def checks_now(sample_figures: Mapping[str, Any], limits: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The checks of the newest sample; None when the sample cannot be read with these limits."""
    seen = sample_figures.get("seen")
    if not seen:
        return None
    try:
        return checks_as_json(decide(read_snapshot(seen, limits)))
    except (KeyError, TypeError, ValueError):
        return None


def show(value: Any, unit: str) -> str:
    """A check's value for people; None is a dash."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return {"infinite": "∞", "-infinite": "missed"}.get(value, value)
    if unit == "ms":
        return fixed(value / 1_000, 0)
    if unit == "s":
        return fixed(value / US, 1 if abs(value) < 10 * US else 0)
    return fixed(value, 0 if unit == "n" else 2)


def table(
    checks: Sequence[Mapping[str, Any]], slot: str, at_lend: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Rows of the table for one slot: checks of the pool and its own, not those of other slots."""
    before = {(c["used_for"], c["name"], c.get("slot")): c for c in at_lend or ()}
    rows = []
    for check in checks:
        if check.get("slot") not in (None, slot):
            continue
        label, unit, relation = CHECKS.get(check["name"], (check["name"], "", ""))
        held = check["held"]
        lent = before.get((check["used_for"], check["name"], check.get("slot")))
        limit = check["limit"]
        rows.append(
            {
                "key": f"{check['used_for']}-{check['name']}",
                "name": label + (f" ({unit})" if unit in ("ms", "s") else ""),
                "now": show(check["value"], unit),
                "limit": ""
                if limit is None or isinstance(limit, bool)
                else f"{_SIGNS[relation]} {show(limit, unit)}".strip(),
                "held": _held(check["used_for"], held),
                "held_word": "Held" if held else "Not held",
                "at_lend": "" if lent is None else show(lent["value"], unit),
                "use": _USES.get(check["used_for"], check["used_for"]),
            }
        )
    return rows


def _held(use: str, held: bool) -> str:
    """A lend check that fails is information; a recall check that holds is what brings the slot home."""
    if use == "lend":
        return "ok" if held else "neutral"
    return "risk" if held else "ok"


def closest(checks: Sequence[Mapping[str, Any]]) -> str:
    """The recall reason with the least room, in a sentence; empty when none has a number."""
    best: tuple[float, str] | None = None
    for check in checks:
        value, limit = check["value"], check["limit"]
        if (
            check["used_for"] != "recall"
            or check["held"]
            or check["name"] not in ("interactive_p95", "interactive_load")
        ):
            continue
        if not isinstance(value, (int, float)) or not limit:
            continue
        label, unit, _ = CHECKS[check["name"]]
        room = (limit - value) / limit
        text = f"Closest to a recall: {label[0].lower()}{label[1:]} is {show(limit - value, unit)} {unit}".rstrip()
        if best is None or room < best[0]:
            best = (room, f"{text} under its limit.")
    return "" if best is None or best[0] > 0.5 else best[1]


def say(slot: Any, kind: str, borrower: str, reason_words: str, now: datetime) -> str:
    """What a flex slot does now and why, in a sentence."""
    if kind == "lent":
        to = f" to {borrower}" if borrower else ""
        return f"{slot.name} is lent{to}: every check held when it was lent, and no reason to recall it holds now."
    if kind == "draining":
        return f"{slot.name} is on its way home: {reason_words or 'it was recalled'}."
    if kind == "overdue":
        return f"{slot.name} is past its drain bound: batch work on it has not ended. It admits no more."
    if kind == "unobserved":
        return (
            f"{slot.name} is not seen. By its own lease it admits no batch once its grant has ended,"
            " whether or not anybody reaches it."
        )
    return f"{slot.name} is home and serves interactive work."
