"""What was set aside, for people: by reason and agent, with a sentence and one example that gives no secret away."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db import connection

from controlplane.fleet.models import Agent
from controlplane.usage.models import AuditedHour, DuplicateRecord, Quarantine

GROUPS_MAX: Final = 200
DUPLICATES_MAX: Final = 100
ITEMS_SHOWN, TEXT_SHOWN, DEPTH_SHOWN = 3, 120, 8
CUT: Final = "(cut)"

MEANINGS: Final[Mapping[str, str]] = {
    "unreadable": "Numbers or ids that no column can hold. Update the agent; if it stays, report it.",
    "negative_number": "A count or a duration below zero. Look at the clock of the agent's machine.",
    "absurd_number": "A number larger than anything that can be true. Update the agent; if it stays, report it.",
    "impossible_number": "A number beside the records that cannot be true. The rest of the report was taken.",
    "impossible_item": "Its batch item's result cannot be true. Neither counts, the item runs again. Update the agent.",
    "impossible_times": "It ended before it began. Look at the clock of the agent's machine (NTP).",
    "in_the_future": "It ended more than 5 minutes from now. Set the clock of the agent's machine (NTP).",
    "too_old": "It ended longer ago than spools are kept. Book it by hand if it is due.",
    "unknown_tenant": "No such tenant in the pool's revision. Give the tenant a class of the pool and push.",
    "unknown_class": "No such class in the pool's revision. Add the class to the pool and push.",
    "unknown_model": "No such model. Was its pool made in another installation?",
    "unknown_slot": "A slot that is not this pool's. Was the agent moved to another pool?",
    "unknown_rate": "Charged by a rate card that does not exist for this class and model. Push the policy again.",
    "wrong_charge": "The charge is not what the rate card gives. Update the agent; if it stays, report it.",
    "duplicate_in_report": "The same attempt twice in one report. It was counted once.",
    "conflict": "It contradicts a report that was taken, which was kept. Do two processes share a state directory?",
    "refused_by_database": "The database refused the whole report. Its log has the cause; report it.",
    "reports_lost": "The agent lost these reports for good. What was in them is in no total.",
    "lease_overspent": "More was spent than the lease allowed. The spend counts; look at the tenant's budget.",
    "unknown_contract": "Counts for a contract version that does not exist.",
    "unsound_objective": "Counts of an objective that contradict each other or lie outside the spool's age.",
    "unsound_refusal": "Counts of refusals that cannot be true.",
    "unsound_sample": "A decision that cannot be kept as it was sent. Totals are not touched.",
    "slot_minute_unknown_slot": "Slot time of a slot that does not exist.",
    "slot_minute_foreign_slot": "Slot time of a slot of another pool.",
    "slot_minute_over_a_minute": "More than 60 s of one slot in one minute. Do two agents run the same slot?",
    "slot_minute_negative_number": "Slot time below zero. Look at the clock of the agent's machine.",
    "slot_minute_unknown_tenant": "Slot time of a tenant or class that does not exist.",
}  # fmt: skip
OTHER: Final = "Set aside for a reason that this page has no sentence for. The example says what came."

_SECRET_NAMES = re.compile(
    r"secret|token$|password|passwd|authorization|credential|signature|api_?key|private|cookie", re.I
)
_CONTENT_NAMES = frozenset({"response", "body", "prompt", "messages", "input", "output", "content"})
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.I)
_BEARER = re.compile(r"(bearer|basic)\s+\S+", re.I)
_WORDS = re.compile(r"[a-z_.]{1,40}")
_KEY_LIKE = re.compile(r"[A-Za-z0-9_\-+/=.]{20,}")


def shown(document: Any, depth: int = 0) -> Any:
    """A payload as it may be shown: secrets and contents of requests cut, long lists and texts shortened."""
    if depth >= DEPTH_SHOWN:
        return CUT
    if isinstance(document, dict):
        return {str(name)[:60]: _shown_field(str(name), value, depth) for name, value in list(document.items())[:60]}
    if isinstance(document, list):
        # a record is one long row of numbers; it is shown whole
        flat = not any(isinstance(item, list | dict) for item in document)
        most = 40 if flat else ITEMS_SHOWN
        more = [f"({len(document) - most:,} more)"] if len(document) > most else []
        return [shown(item, depth + 1) for item in document[:most]] + more
    return _shown_text(document) if isinstance(document, str) else document


def _shown_field(name: str, value: Any, depth: int) -> Any:
    if _SECRET_NAMES.search(name) or name.lower() in _CONTENT_NAMES:
        return CUT if value not in (None, "", [], {}) else value
    return shown(value, depth + 1)


def _shown_text(text: str) -> str:
    clean = _BEARER.sub(rf"\1 {CUT}", text)
    clean = _KEY_LIKE.sub(lambda found: found[0] if _is_harmless(found[0]) else CUT, clean)
    return clean if len(clean) <= TEXT_SHOWN else clean[:TEXT_SHOWN] + "…"


def _is_harmless(word: str) -> bool:
    # ids and numbers are needed to find what is meant; names of reasons are words
    return bool(_UUID.fullmatch(word)) or word.isdigit() or bool(_WORDS.fullmatch(word))


@dataclass(frozen=True)
class AsideGroup:
    """One reason of one agent; `records` counts usage records, `entries` what was set aside in all.

    `undecided` of the entries wait for a decision; `newest` is the id of the latest one.
    """

    reason: str
    agent_id: int | None
    agent: str
    entries: int
    records: int
    first: datetime
    last: datetime
    example: Any
    undecided: int
    newest: int

    @property
    def meaning(self) -> str:
        return MEANINGS.get(self.reason, OTHER)


_GROUPS_SQL = """
SELECT reason, agent_id, count(*), coalesce(sum(records), 0), min(at), max(at), max(id),
    count(*) FILTER (WHERE resolved_at IS NULL) FROM usage_quarantine
WHERE at >= %s AND (%s::int IS NULL OR agent_id = %s) AND (%s = '' OR reason = %s)
GROUP BY reason, agent_id ORDER BY max(at) DESC, reason, agent_id LIMIT %s
"""


def aside_groups(since: datetime, *, agent_id: int | None = None, reason: str = "") -> list[AsideGroup]:
    """What was set aside since an instant, the latest first, at most GROUPS_MAX groups."""
    with connection.cursor() as cursor:
        cursor.execute(_GROUPS_SQL, [since, agent_id, agent_id, reason, reason, GROUPS_MAX])
        rows = cursor.fetchall()
    examples = dict(Quarantine.objects.filter(pk__in=[row[6] for row in rows]).values_list("pk", "payload"))
    names = dict(Agent.objects.filter(pk__in=[row[1] for row in rows if row[1]]).values_list("pk", "name"))
    return [
        AsideGroup(
            reason,
            agent,
            names.get(agent, ""),
            entries,
            records,
            first,
            last,
            shown(examples.get(newest)),
            undecided,
            newest,
        )
        for reason, agent, entries, records, first, last, newest, undecided in rows
    ]


def aside_reasons(since: datetime) -> list[str]:
    """Reasons that occur since an instant, for a filter."""
    found = Quarantine.objects.filter(at__gte=since).order_by("reason")
    return list(found.values_list("reason", flat=True).distinct()[:60])


@dataclass(frozen=True)
class Copies:
    """Attempts that came more than once since an instant, and how far the audit has come.

    `nanos` is what their copies added to charges; `audited_until` None: no hour was looked through yet.
    """

    count: int
    nanos: int
    latest: Sequence[DuplicateRecord]
    audited_until: datetime | None


_CHARGES = ("charge_prompt_nanos", "charge_cached_nanos", "charge_output_nanos", "charge_gpu_nanos")


def copies(since: datetime) -> Copies:
    """What the hourly audit found."""
    found = DuplicateRecord.objects.filter(found_at__gte=since)
    sums = found.values_list(*_CHARGES)
    last = AuditedHour.objects.order_by("-hour").values_list("hour", flat=True).first()
    nanos = sum(sum(row) for row in sums.iterator())
    return Copies(found.count(), nanos, list(found.order_by("-found_at", "-pk")[:DUPLICATES_MAX]), last)
