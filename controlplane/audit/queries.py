"""Reading and checking the audit log."""

from dataclasses import dataclass

from controlplane.audit.actions import GENESIS, chained_hash
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
