"""The only writer of the audit log."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, transaction

from controlplane.audit.actors import Actor
from controlplane.audit.chain import GENESIS, chained_hash
from controlplane.audit.models import AuditEntry, CarriedRevision

# Any fixed number: writers of the chain take turns until their transaction ends.
CHAIN_LOCK = 0x666C6578
SECRET_FIELDS = frozenset(
    {"secret", "secret_hash", "previous_hash", "token", "token_hash", "password", "private_key", "link"}
)


def record(
    *,
    actor: Actor,
    action: str,
    noun: str,
    object_id: Any,
    now: datetime,
    tenant_slug: str = "",
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str = "",
) -> AuditEntry:
    """Adds one entry, chained by hash to the one before; call it inside the transaction of the change.

    Secrets are left out by field name. Raises RuntimeError outside a transaction: the entry could outlive its change.
    """
    if not connection.in_atomic_block:
        raise RuntimeError("audit.record must run inside the transaction of the change it records")
    _take_turn()
    last = AuditEntry.objects.order_by("-id").values_list("hash", flat=True).first()
    entry = AuditEntry(
        at=now,
        actor_id=actor.id,
        actor_name=actor.name,
        actor_role=actor.role,
        action=action,
        noun=noun,
        object_id=str(object_id),
        tenant_slug=tenant_slug,
        before=_plain(before),
        after=_plain(after),
        reason=reason,
        request_id=actor.request_id,
        previous_hash=bytes(last) if last else GENESIS,
    )
    entry.hash = chained_hash(entry)
    entry.save(force_insert=True)
    return entry


@contextmanager
def none_recorded() -> Iterator[int]:
    """The id of the last entry, 0 for none, while no other transaction can add one: its change would not be visible.

    For reading only: what is written inside is undone, which is how the lock is given back before the transaction
    ends. Raises TransactionManagementError outside a transaction.
    """
    savepoint = transaction.savepoint()
    if savepoint is None:
        raise transaction.TransactionManagementError("the log can be held only inside a transaction")
    try:
        _take_turn()
        yield AuditEntry.objects.order_by("-id").values_list("id", flat=True).first() or 0
    finally:
        transaction.savepoint_rollback(savepoint)
        transaction.savepoint_commit(savepoint)


def note_carried(*, revision: int, through_id: int) -> None:
    """A pushed revision carries every change up to that entry."""
    CarriedRevision.objects.create(revision=revision, through_id=through_id)


def changes(before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that differ, as (before, after) for `record`."""
    names = [name for name in after if before.get(name) != after[name]]
    return {name: before.get(name) for name in names}, {name: after[name] for name in names}


def _plain(values: dict[str, Any] | None) -> dict[str, Any] | None:
    if values is None:
        return None
    encoder = DjangoJSONEncoder()
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if name in SECRET_FIELDS:
            continue
        plain[name] = value if isinstance(value, (str, int, bool, type(None), list, dict)) else _encoded(encoder, value)
    return plain


def _encoded(encoder: DjangoJSONEncoder, value: Any) -> Any:
    return value if isinstance(value, float) else encoder.default(value)


def _take_turn() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [CHAIN_LOCK])
