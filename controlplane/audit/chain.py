"""The chain of the audit log: each entry's hash covers the entry and the hash before it."""

import hashlib

from controlplane.audit.models import AuditEntry
from controlplane.wire.signing import canonical

GENESIS = b"\0" * 32


def chained_hash(entry: AuditEntry) -> bytes:
    """SHA-256 over the previous hash and the canonical form of the entry's other columns."""
    content = {
        "at": entry.at.isoformat(),
        "actor": [entry.actor_id, entry.actor_name, entry.actor_role],
        "action": entry.action,
        "noun": entry.noun,
        "object": entry.object_id,
        "tenant": entry.tenant_slug,
        "before": entry.before,
        "after": entry.after,
        "reason": entry.reason,
        "request": entry.request_id,
    }
    return hashlib.sha256(bytes(entry.previous_hash) + canonical(content)).digest()
