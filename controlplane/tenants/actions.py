"""What may be done to tenants: lock, load, decide, apply, audit, in one transaction.

Keys and people have their own modules, `key_actions` and `member_actions`, with the same shape.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import connection, transaction

from controlplane.audit.actions import changes as changed_fields
from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.wakeups.bells import ring

DEPTH_MAX = 8
RESERVED_SLUGS = frozenset({"new", "keys", "platform"})
EDITABLE = (
    "name",
    "parent_id",
    "weight",
    "max_concurrency",
    "classes",
    "model_names",
    "outage_posture",
    "cost_centre",
)


_UPWARDS = """
WITH RECURSIVE up (id, slug, state, parent_id, depth) AS (
    SELECT id, slug, state, parent_id, 1 FROM tenants_tenant WHERE id = %(tenant)s
    UNION ALL
    SELECT t.id, t.slug, t.state, t.parent_id, up.depth + 1 FROM up JOIN tenants_tenant t ON t.id = up.parent_id
     WHERE up.depth < %(most)s
)
SELECT id, slug, state FROM up ORDER BY depth
"""


class Stale(Exception):
    """Somebody changed the row since it was read; `current` is the row as it is now."""

    def __init__(self, current: object) -> None:
        super().__init__("Somebody changed this since you read it.")
        self.current = current


def next_live_number() -> int:
    """The number of a change that acts at once. Holds the installation's row until the transaction ends, so that
    numbers become visible in the order in which they were given.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE tenants_installation SET live_number = live_number + 1 WHERE id = 1 RETURNING live_number"
        )
        row = cursor.fetchone()
    if row is None:
        raise RuntimeError("the installation is not set up: run `manage.py demo` or create its row first")
    return int(row[0])


def create_tenant(*, slug: str, name: str, actor: Actor, now: datetime, reason: str = "", **values: Any) -> Tenant:
    """A new tenant. `values` are fields of EDITABLE. Raises ValidationError with the fields that cannot be used."""
    only(values, EDITABLE)
    tenant = Tenant(slug=slug.strip(), name=name.strip(), created_at=now, updated_at=now, **values)
    with transaction.atomic():
        _check(tenant)
        if tenant.slug in RESERVED_SLUGS:
            raise ValidationError({"slug": f"{tenant.slug} is an address of the product: choose another name."})
        tenant.save(force_insert=True)
        record(
            actor=actor,
            action="tenant.create",
            noun="tenant",
            object_id=tenant.slug,
            tenant_slug=tenant.slug,
            after={"slug": tenant.slug, **snapshot(tenant)},
            reason=reason,
            now=now,
        )
    return tenant


def edit_tenant(
    *, tenant_id: int, version: int, changes: Mapping[str, Any], actor: Actor, now: datetime, reason: str = ""
) -> Tenant:
    """Changes fields of EDITABLE; the slug never changes, and state has its own actions.

    Raises Stale when `version` is not the row's, ValidationError for values that cannot be used.
    """
    only(changes, EDITABLE)
    with transaction.atomic():
        # Parents of all tenants are one graph: whoever changes it takes turns, so that two edits cannot close a ring.
        if "parent_id" in changes:
            _take_turns()
        tenant = locked(tenant_id, version)
        if tenant.state == Tenant.State.ARCHIVED:
            raise ValidationError("An archived tenant cannot be changed.")
        before = snapshot(tenant)
        for field, value in changes.items():
            setattr(tenant, field, value)
        _check(tenant)
        old, new = changed_fields(before, snapshot(tenant))
        if not new:
            return tenant
        _check_keys_within(tenant, new)
        tenant.version += 1
        tenant.updated_at = now
        tenant.save(update_fields=[*changes, "version", "updated_at"])
        record(
            actor=actor,
            action="tenant.edit",
            noun="tenant",
            object_id=tenant.slug,
            tenant_slug=tenant.slug,
            before=old,
            after=new,
            reason=reason,
            now=now,
        )
    return tenant


def suspend_tenant(
    *, tenant_id: int, reason: str, actor: Actor, now: datetime, version: int | None = None,
    noted: Mapping[str, Any] | None = None,
) -> Tenant:  # fmt: skip
    """Refuses the tenant's new requests at once. Suspending a suspended tenant changes nothing.

    `noted`, here and below, is kept in the audit entry: what the person was told to expect.
    """
    return _set_state(
        tenant_id, version, Tenant.State.SUSPENDED, "tenant.suspend", reason=checked_reason(reason), actor=actor,
        now=now, noted=noted,
    )  # fmt: skip


def resume_tenant(
    *, tenant_id: int, reason: str, actor: Actor, now: datetime, version: int | None = None,
    noted: Mapping[str, Any] | None = None,
) -> Tenant:  # fmt: skip
    """Takes the tenant's requests again. Resuming an active tenant changes nothing."""
    return _set_state(
        tenant_id, version, Tenant.State.ACTIVE, "tenant.resume", reason=checked_reason(reason), actor=actor, now=now,
        noted=noted,
    )  # fmt: skip


def archive_tenant(*, tenant_id: int, version: int, reason: str, actor: Actor, now: datetime) -> Tenant:
    """Ends a tenant: its keys are revoked, nothing is deleted. Refused while it has children that are not archived."""
    reason = checked_reason(reason)
    with transaction.atomic():
        _take_turns()
        tenant = locked(tenant_id, version)
        children = tenant.children.exclude(state=Tenant.State.ARCHIVED).order_by("slug").values_list("slug", flat=True)
        if children:
            raise ValidationError(f"Archive its children first: {', '.join(children)}.")
        for key in ApiKey.objects.select_for_update().filter(tenant=tenant, state=ApiKey.State.ACTIVE).order_by("pk"):
            ApiKey.objects.filter(pk=key.pk).update(
                state=ApiKey.State.REVOKED, revoked_at=now, live_number=next_live_number(), version=key.version + 1
            )
            record(
                actor=actor,
                action="key.revoke",
                noun="key",
                object_id=key.public_id,
                tenant_slug=tenant.slug,
                before={"state": key.state},
                after={"state": ApiKey.State.REVOKED.value},
                reason=reason,
                now=now,
            )
        return _set_state(
            tenant_id, version, Tenant.State.ARCHIVED, "tenant.archive", reason=reason, actor=actor, now=now
        )


def locked(tenant_id: int, version: int | None) -> Tenant:
    """The row, locked. Raises Stale when a version is given and is not the row's."""
    tenant = Tenant.objects.select_for_update().get(pk=tenant_id)
    if version is not None and tenant.version != version:
        raise Stale(tenant)
    return tenant


def snapshot(tenant: Tenant) -> dict[str, Any]:
    """The fields that the audit log compares; the parent by its slug."""
    parent = Tenant.objects.filter(pk=tenant.parent_id or 0).values_list("slug", flat=True).first()
    values = {field: getattr(tenant, field) for field in EDITABLE if field != "parent_id"}
    return {**values, "classes": list(tenant.classes), "model_names": list(tenant.model_names), "parent": parent}


def _set_state(
    tenant_id: int, version: int | None, state: Tenant.State, action: str, *, reason: str, actor: Actor, now: datetime,
    noted: Mapping[str, Any] | None = None,
) -> Tenant:  # fmt: skip
    with transaction.atomic():
        tenant = locked(tenant_id, version)
        if tenant.state == state:
            return tenant
        if tenant.state == Tenant.State.ARCHIVED:
            raise ValidationError("An archived tenant stays archived: create a new one.")
        before = tenant.state
        tenant.state = state
        tenant.suspend_reason = reason.strip() if state == Tenant.State.SUSPENDED else ""
        tenant.live_number = next_live_number()
        tenant.version += 1
        tenant.updated_at = now
        tenant.save(update_fields=["state", "suspend_reason", "live_number", "version", "updated_at"])
        record(
            actor=actor,
            action=action,
            noun="tenant",
            object_id=tenant.slug,
            tenant_slug=tenant.slug,
            before={"state": before},
            after={"state": state.value, **(noted or {})},
            reason=reason,
            now=now,
        )
        ring("policy.sign_live")
    return tenant


def only(names: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuses names outside `allowed` with a ValidationError by field."""
    unknown = sorted(set(names) - set(allowed))
    if unknown:
        raise ValidationError(dict.fromkeys(unknown, "This cannot be changed here."))


def _take_turns() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('tenants.tree'))")


def _check(tenant: Tenant) -> None:
    tenant.name = tenant.name.strip()
    tenant.full_clean(exclude=["parent"], validate_constraints=False)
    errors: dict[str, str] = {}
    if not tenant.name:
        errors["name"] = "Give the tenant a name."
    if tenant.slug == "platform":
        errors["slug"] = "platform is the book's own name: choose another one."
    if tenant.weight < 1:
        errors["weight"] = "The weight is at least 1."
    if tenant.max_concurrency < 1:
        errors["max_concurrency"] = "Concurrency is at least 1; suspend the tenant to stop it."
    if problem := _parent_problem(tenant):
        errors["parent"] = problem
    if errors:
        raise ValidationError(errors)


def _parent_problem(tenant: Tenant) -> str:
    """Why the parent cannot be used: it is not there, archived, too deep, or a descendant of the tenant itself."""
    if tenant.parent_id is None:
        return ""
    chain = _upwards(tenant.parent_id)
    if not chain:
        return "There is no such tenant: choose another parent."
    _, wanted, state = chain[0]
    if state == Tenant.State.ARCHIVED:
        return "An archived tenant cannot be a parent."
    if tenant.pk is not None and any(pk == tenant.pk for pk, _, _ in chain):
        return f"{wanted} lies below {tenant.slug}: choose a parent outside it."
    return f"Tenants nest at most {DEPTH_MAX} deep." if len(chain) >= DEPTH_MAX else ""


def _upwards(tenant_id: int) -> list[tuple[int, str, str]]:
    """(id, slug, state) of a tenant and its ancestors, the nearest first; at most one over the bound."""
    with connection.cursor() as cursor:
        cursor.execute(_UPWARDS, {"tenant": tenant_id, "most": DEPTH_MAX + 1})
        return [(pk, slug, state) for pk, slug, state in cursor.fetchall()]


def _check_keys_within(tenant: Tenant, new: Mapping[str, Any]) -> None:
    """A key never has a class that its tenant lacks."""
    if "classes" not in new:
        return
    keys = ApiKey.objects.select_for_update().filter(tenant=tenant, state=ApiKey.State.ACTIVE).order_by("pk")
    for key in keys:
        outside = sorted(set(key.classes) - set(tenant.classes))
        if outside:
            raise ValidationError(
                {"classes": f"Key {key.name} still has {', '.join(outside)}: take it from the key first."}
            )
