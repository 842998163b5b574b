"""What may be done to people: their sign-in, their role and the tenant they act for."""

from datetime import datetime
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import connection, transaction

from controlplane.audit.actions import changes as changed_fields
from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.tenants.actions import Stale
from controlplane.tenants.models import Member, Tenant
from controlplane.tenants.roles import Role


def create_member(
    *,
    username: str,
    password: str,
    role: str,
    actor: Actor,
    now: datetime,
    tenant_id: int | None = None,
    full_name: str = "",
    email: str = "",
) -> Member:
    """A person who can sign in. Raises ValidationError with the fields that cannot be used."""
    username = username.strip()
    user = User(username=username, first_name=full_name.strip()[:150], email=email.strip())
    with transaction.atomic():
        errors = role_errors(role, tenant_id)
        if not username:
            errors["username"] = "Give a name to sign in with."
        elif get_user_model().objects.filter(username__iexact=username).exists():
            errors["username"] = "Somebody has this name already: choose another one."
        try:
            validate_password(password, user)
        except ValidationError as error:
            errors["password"] = " ".join(error.messages)
        if errors:
            raise ValidationError(errors)
        user.set_password(password)
        user.full_clean(exclude=["password"])
        user.save(force_insert=True)
        member = Member.objects.create(user=user, role=role, tenant_id=tenant_id)
        _record(member, "member.create", actor, now, after={"username": username, **snapshot(member)})
    return member


def edit_member(
    *, member_id: int, version: int, role: str, tenant_id: int | None, actor: Actor, now: datetime, reason: str = ""
) -> Member:
    """Changes role and tenant, from the person's next request on. Refused for the last administrator."""
    with transaction.atomic():
        member = _locked(member_id, version)
        if errors := role_errors(role, tenant_id):
            raise ValidationError(errors)
        if member.role == Role.ADMIN and role != Role.ADMIN:
            _keep_an_admin(member)
        before = snapshot(member)
        member.role, member.tenant_id = role, tenant_id
        old, new = changed_fields(before, snapshot(member))
        if not new:
            return member
        member.version += 1
        member.save(update_fields=["role", "tenant", "version"])
        _record(member, "member.edit", actor, now, before=old, after=new, reason=reason)
    return member


def remove_member(*, member_id: int, actor: Actor, now: datetime, reason: str = "", version: int | None = None) -> None:
    """The person can no longer sign in and open sessions end; the audit log keeps the name."""
    with transaction.atomic():
        member = _locked(member_id, version)
        if member.role == Role.ADMIN:
            _keep_an_admin(member)
        if member.user_id == actor.id:
            raise ValidationError("You cannot remove yourself: ask another administrator.")
        _record(member, "member.remove", actor, now, before=snapshot(member), reason=reason)
        get_user_model().objects.filter(pk=member.user_id).update(is_active=False)
        member.delete()


def set_password(*, user_id: int, password: str, actor: Actor, now: datetime) -> None:
    """Sets somebody's password; every other session of the person ends. Raises ValidationError for a weak one."""
    with transaction.atomic():
        user = get_user_model().objects.select_for_update().get(pk=user_id)
        try:
            validate_password(password, user)
        except ValidationError as error:
            raise ValidationError({"password": error.messages}) from error
        user.set_password(password)
        user.save(update_fields=["password"])
        record(
            actor=actor, action="member.password", noun="member", object_id=user.username, now=now, after={"set": True}
        )


def snapshot(member: Member) -> dict[str, Any]:
    return {"role": str(member.role), "tenant": member.tenant.slug if member.tenant is not None else None}


def _locked(member_id: int, version: int | None) -> Member:
    # Roles of all people are one set, of which an administrator must stay: changes to it take turns.
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('tenants.members'))")
    member = Member.objects.select_for_update().get(pk=member_id)
    if version is not None and member.version != version:
        raise Stale(member)
    return member


def role_errors(role: str, tenant_id: int | None) -> dict[str, str]:
    if role not in set(Role):
        return {"role": "Choose one of the roles."}
    if role == Role.TENANT and tenant_id is None:
        return {"tenant": "A tenant's member needs the tenant."}
    if role != Role.TENANT and tenant_id is not None:
        return {"tenant": "Only the role tenant belongs to one: leave it empty."}
    if tenant_id is not None and not Tenant.objects.filter(pk=tenant_id).exclude(state="archived").exists():
        return {"tenant": "Choose a tenant that is not archived."}
    return {}


def _keep_an_admin(leaving: Member) -> None:
    others = Member.objects.filter(role=Role.ADMIN, user__is_active=True).exclude(pk=leaving.pk)
    if not others.exists():
        raise ValidationError("This is the last administrator: make somebody else one first.")


def _record(
    member: Member,
    action: str,
    actor: Actor,
    now: datetime,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str = "",
) -> None:
    record(
        actor=actor,
        action=action,
        noun="member",
        object_id=member.user.username,
        tenant_slug=str((after or before or {}).get("tenant") or ""),
        before=before,
        after=after,
        reason=reason,
        now=now,
    )
