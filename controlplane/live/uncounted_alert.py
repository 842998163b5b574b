"""The alert of usage that is in no total, or in it twice: work that nobody pays for without anybody seeing it."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final

from controlplane.live.attention import link
from controlplane.live.strip import iso
from controlplane.usage.uncounted import SHARE_MOST, AsideShare, Uncounted
from controlplane.web.numerals import percent

#: From so many times the share that is a ticket on, somebody is woken.
PAGE_TIMES: Final = 10
GROUPS_NAMED: Final = 5


def uncounted_alerts(found: Uncounted) -> Iterator[dict[str, Any]]:
    """One alert while more than 0.1 % of the records or of the spend is wrong, or nobody knows how much is."""
    over = found.worst > SHARE_MOST
    if not over and not found.unknown_reports:
        return
    page = found.worst > SHARE_MOST * PAGE_TIMES
    yield {
        "key": "uncounted",
        "kind": "uncounted",
        "pool": "",
        "contract": "",
        "causes": [_cause(group) for group in found.groups[:GROUPS_NAMED]],
        "grade": "bad" if page else "risk",
        "word": "Page" if page else "Ticket",
        "title": _title(found) if over else "Nobody knows how much usage of the last day was lost",
        "text": _text(found),
        "since": iso(found.since),
        "url": link("set-aside"),
    }


def _percent(share: Fraction) -> str:
    return f"{percent(float(share))} %"


def _title(found: Uncounted) -> str:
    least = "At least " if found.unknown_reports else ""
    if found.share >= found.spend_share:
        return f"{least}{_percent(found.share)} of the last day's records are in no total, or in it twice"
    return f"{least}{_percent(found.spend_share)} of the last day's spend is in no total, or in it twice"


def _text(found: Uncounted) -> str:
    said = [
        f"Set aside and not decided: {found.aside:,} records beside {found.counted:,} that count;"
        f" {_percent(found.share)} of the records, {_percent(found.spend_share)} of the spend."
    ]
    if found.copies:
        said.append(f"Counted twice: {found.copies:,}.")
    if found.unpriced:
        said.append(f"What {found.unpriced:,} of them cost is not known and not in that share.")
    if found.unknown_reports:
        said.append(f"{found.unknown_reports:,} lost reports held nobody knows how many records.")
    return " ".join(said)


def _cause(group: AsideShare) -> dict[str, str]:
    where = f" from {group.agent}" if group.agent else ""
    number = "unknown" if group.unknown_reports and not group.records else f"{group.records:,}"
    query = f"?days=1&reason={group.reason}" + (f"&agent={group.agent_id}" if group.agent_id else "")
    address = link("set-aside")
    return {
        "label": group.reason.replace("_", " ").capitalize(),
        "value": f"{number} records{where}",
        "url": address + query if address else "",
    }
