"""What can be done to many tenants, keys or people at once: the same actions as on one, with its version."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Count, Q

from controlplane.audit.actors import Actor
from controlplane.tenants import actions, key_actions, member_actions
from controlplane.tenants.bulk import Act, BulkAction, Noun
from controlplane.tenants.bulk_forms import (
    ClassForm,
    ConcurrencyForm,
    CostCentreForm,
    ExpiryForm,
    RoleForm,
    WeightForm,
)
from controlplane.tenants.models import ApiKey, Member, Tenant
from controlplane.tenants.queries import members, visible_keys, visible_tenants
from controlplane.tenants.review import words

AT_ONCE = "Acts on every agent within seconds."
WITH_PUSH = "Takes effect when you push."
NOT_POLICY = "Counts for reports from now on."

Values = Mapping[str, Any]


def _tenants(user: User | AnonymousUser, ids: Sequence[int]) -> list[Tenant]:
    return list(visible_tenants(user).filter(pk__in=ids).order_by("slug"))


def _keys(user: User | AnonymousUser, ids: Sequence[int]) -> list[ApiKey]:
    return list(visible_keys(user).filter(pk__in=ids).order_by("-id"))


def _members(user: User | AnonymousUser, ids: Sequence[int]) -> list[Member]:
    return list(members().filter(pk__in=ids).order_by("user__username", "id"))


# ---- tenants ----


def _moved(action: Callable[..., Tenant]) -> Act:
    """Suspend, resume and archive have one form."""

    def act(row: Tenant, *, version: int, values: Values, reason: str, actor: Actor, now: datetime) -> Tenant:
        return action(tenant_id=row.pk, version=version, reason=reason, actor=actor, now=now)

    return act


def _tenant_with(changes: Callable[[Tenant, Values], dict[str, Any]]) -> Act:
    def act(row: Tenant, *, version: int, values: Values, reason: str, actor: Actor, now: datetime) -> Tenant:
        return actions.edit_tenant(
            tenant_id=row.pk, version=version, changes=changes(row, values), reason=reason, actor=actor, now=now
        )

    return act


def _given(row: Tenant, values: Values) -> dict[str, Any]:
    return dict(values)


def _class_added(row: Tenant, values: Values) -> dict[str, Any]:
    slug = values["workload_class"]
    return {"classes": row.classes if slug in row.classes else [*row.classes, slug]}


def _class_taken(row: Tenant, values: Values) -> dict[str, Any]:
    return {"classes": [slug for slug in row.classes if slug != values["workload_class"]]}


def _shown(field: str) -> Callable[[Any], str]:
    return lambda row: words(getattr(row, field))


def children_first(rows: Sequence[Tenant]) -> list[Tenant]:
    """Tenants behind those of them that lie below: a parent is archived after its children."""
    chosen = {row.pk: row for row in rows}

    def depth(row: Tenant) -> int:
        found, at = 0, chosen.get(row.parent_id or 0)
        while at is not None and found < actions.DEPTH_MAX:
            found, at = found + 1, chosen.get(at.parent_id or 0)
        return found

    return sorted(rows, key=depth, reverse=True)


def _after_children(row: Tenant, ready: Collection[int]) -> str:
    below = set(row.children.exclude(state=Tenant.State.ARCHIVED).values_list("pk", flat=True))
    return "After its children, which are in this selection." if below and below <= set(ready) else ""


def _keys_revoked(rows: Sequence[Tenant]) -> dict[int, str]:
    """What archiving takes with it: the keys that still work."""
    counted = Tenant.objects.filter(pk__in=[row.pk for row in rows]).annotate(
        working=Count("keys", filter=Q(keys__state=ApiKey.State.ACTIVE))
    )
    return {
        pk: f"revokes {working} key{'' if working == 1 else 's'}"
        for pk, working in counted.values_list("pk", "working")
        if working
    }


TENANTS = Noun(
    name="tenant",
    plural="tenants",
    title="Tenants",
    list_name="tenants",
    address="tenants-bulk",
    rows=_tenants,
    named=lambda row: row.slug,
    audited_as=lambda row: row.slug,
    actions=(
        BulkAction(
            name="suspend", label="Suspend", verb="Suspend tenants", permission="tenant.suspend", field="State",
            shown=_shown("state"), act=_moved(actions.suspend_tenant), danger=True,
            acts=f"New requests are refused, what runs is finished. {AT_ONCE}",
        ),
        BulkAction(
            name="resume", label="Resume", verb="Resume tenants", permission="tenant.suspend", field="State",
            shown=_shown("state"), act=_moved(actions.resume_tenant), acts=AT_ONCE,
        ),
        BulkAction(
            name="weight", label="Set weight", verb="Set weight", permission="tenant.write", field="Weight",
            shown=_shown("weight"), act=_tenant_with(_given), form=WeightForm, acts=WITH_PUSH,
        ),
        BulkAction(
            name="concurrency", label="Set concurrent requests", verb="Set concurrent requests",
            permission="tenant.write", field="Concurrent requests", shown=_shown("max_concurrency"),
            act=_tenant_with(_given), form=ConcurrencyForm, acts=WITH_PUSH,
        ),
        BulkAction(
            name="cost-centre", label="Set cost centre", verb="Set cost centre", permission="tenant.write",
            field="Cost centre", shown=_shown("cost_centre"), act=_tenant_with(_given), form=CostCentreForm,
            acts=NOT_POLICY,
        ),
        BulkAction(
            name="class-add", label="Allow a class", verb="Allow the class", permission="tenant.write",
            field="Classes", shown=_shown("classes"), act=_tenant_with(_class_added), form=ClassForm, acts=WITH_PUSH,
        ),
        BulkAction(
            name="class-take", label="Take a class away", verb="Take the class away", permission="tenant.write",
            field="Classes", shown=_shown("classes"), act=_tenant_with(_class_taken), form=ClassForm, acts=WITH_PUSH,
            danger=True,
        ),
        BulkAction(
            name="archive", label="Archive", verb="Archive tenants", permission="tenant.write", field="State",
            shown=_shown("state"), act=_moved(actions.archive_tenant), danger=True, order=children_first,
            impact=_keys_revoked, excuse=_after_children,
            acts="Ends tenants and revokes their keys for ever. Usage, charges and audit stay.",
        ),
    ),
)  # fmt: skip


# ---- keys ----


def _revoke(row: ApiKey, *, version: int, values: Values, reason: str, actor: Actor, now: datetime) -> ApiKey:
    return key_actions.revoke_key(key_id=row.pk, version=version, reason=reason, actor=actor, now=now)


def _edit_key(row: ApiKey, *, version: int, values: Values, reason: str, actor: Actor, now: datetime) -> ApiKey:
    return key_actions.edit_key(key_id=row.pk, version=version, changes=values, reason=reason, actor=actor, now=now)


def _expiry(row: ApiKey) -> str:
    return f"{row.expires_at:%-d %b %Y %H:%M} UTC" if row.expires_at else "never"


KEYS = Noun(
    name="key",
    plural="keys",
    title="Keys",
    list_name="api-keys",
    address="keys-bulk",
    rows=_keys,
    named=lambda row: f"{row.name} of {row.tenant.slug}",
    audited_as=lambda row: row.public_id,
    actions=(
        BulkAction(
            name="revoke", label="Revoke", verb="Revoke keys", permission="key.write", field="State",
            shown=_shown("state"), act=_revoke, danger=True, acts=f"For ever, the secret before too. {AT_ONCE}",
        ),
        BulkAction(
            name="expiry", label="Set expiry", verb="Set expiry", permission="key.write", field="Expires",
            shown=_expiry, act=_edit_key, form=ExpiryForm, acts=AT_ONCE,
        ),
        BulkAction(
            name="concurrency", label="Set concurrent requests", verb="Set concurrent requests",
            permission="key.write", field="Concurrent requests", shown=_shown("max_concurrency"), act=_edit_key,
            form=ConcurrencyForm, acts=AT_ONCE,
        ),
    ),
)  # fmt: skip


# ---- people ----


def _role(row: Member, *, version: int, values: Values, reason: str, actor: Actor, now: datetime) -> Member:
    return member_actions.edit_member(
        member_id=row.pk, version=version, role=values["role"], tenant_id=None, reason=reason, actor=actor, now=now
    )


def _remove(row: Member, *, version: int, values: Values, reason: str, actor: Actor, now: datetime) -> None:
    member_actions.remove_member(member_id=row.pk, version=version, reason=reason, actor=actor, now=now)


MEMBERS = Noun(
    name="member",
    plural="members",
    title="Members and roles",
    list_name="members",
    address="members-bulk",
    rows=_members,
    named=lambda row: row.user.username,
    audited_as=lambda row: row.user.username,
    actions=(
        BulkAction(
            name="role", label="Set role", verb="Set role", permission="member.write", field="Role",
            shown=_shown("role"), act=_role, form=RoleForm, acts="Counts from each person's next request.",
        ),
        BulkAction(
            name="remove", label="Remove", verb="Remove members", permission="member.write", field="Role",
            shown=lambda row: row.role if row is not None else "removed", act=_remove, danger=True,
            acts="They can no longer sign in, open sessions end. The audit log keeps the names.",
        ),
    ),
)  # fmt: skip
