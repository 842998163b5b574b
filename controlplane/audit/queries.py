"""Reading and checking the audit log."""

from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet

from controlplane.audit.chain import GENESIS, chained_hash
from controlplane.audit.models import AuditEntry


@dataclass(frozen=True, slots=True)
class ChainCheck:
    """`broken_at` is the id of the first entry whose hash or link does not hold, None when all hold."""

    entries: int
    broken_at: int | None


def verify_chain() -> ChainCheck:
    previous, count = GENESIS, 0
    for entry in AuditEntry.objects.order_by("id").iterator(chunk_size=2_000):
        if bytes(entry.previous_hash) != previous or bytes(entry.hash) != chained_hash(entry):
            return ChainCheck(entries=count, broken_at=entry.pk)
        previous, count = bytes(entry.hash), count + 1
    return ChainCheck(entries=count, broken_at=None)


def last_entry_id() -> int:
    """The id of the latest entry that is committed, 0 for none; entries become visible in the order of their ids."""
    return AuditEntry.objects.order_by("-id").values_list("id", flat=True).first() or 0


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """What a reader looks for; empty fields do not narrow. `until` is exclusive."""

    noun: str = ""
    action: str = ""
    actor: str = ""
    tenant: str = ""
    object_id: str = ""
    since: datetime | None = None
    until: datetime | None = None


def entries(wanted: AuditFilter) -> QuerySet[AuditEntry]:
    """The entries that match, unordered."""
    rows = AuditEntry.objects.all()
    exact = {"noun": wanted.noun, "action": wanted.action, "tenant_slug": wanted.tenant, "object_id": wanted.object_id}
    rows = rows.filter(**{column: value for column, value in exact.items() if value})
    if wanted.actor:
        rows = rows.filter(actor_name__icontains=wanted.actor)
    if wanted.since is not None:
        rows = rows.filter(at__gte=wanted.since)
    if wanted.until is not None:
        rows = rows.filter(at__lt=wanted.until)
    return rows


def vocabulary() -> dict[str, list[str]]:
    """The nouns and actions that occur, for the filters."""
    pairs = AuditEntry.objects.order_by("noun", "action").values_list("noun", "action").distinct()
    return {"nouns": sorted({noun for noun, _ in pairs}), "actions": sorted({action for _, action in pairs})}
