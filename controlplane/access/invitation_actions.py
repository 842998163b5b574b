"""Invitations: made by an administrator, handed over as a link, taken once."""

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import transaction

from controlplane.access.models import Invitation
from controlplane.access.queries import hashed, open_invitations
from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.tenants.member_actions import role_errors, snapshot
from controlplane.tenants.models import Member

DAYS_MAX = 30


@dataclass(frozen=True)
class Issued:
    """An invitation with the secret of its link, which is shown this once."""

    invitation: Invitation
    secret: str


def invite(
    *, email: str, role: str, tenant_id: int | None, days: int, actor: Actor, now: datetime, full_name: str = ""
) -> Issued:
    """Raises ValidationError by field. A second invitation of one address takes the place of the first."""
    secret = secrets.token_urlsafe(32)
    with transaction.atomic():
        if errors := role_errors(role, tenant_id):
            raise ValidationError(errors)
        if get_user_model().objects.filter(email__iexact=email, is_active=True).exists():
            raise ValidationError({"email": "A member has this address already."})
        open_invitations(now).filter(email__iexact=email).update(withdrawn_at=now)
        row = Invitation.objects.create(
            email=email, full_name=full_name, role=role, tenant_id=tenant_id, secret_hash=hashed(secret),
            created_at=now, created_by=actor.name, expires_at=now + timedelta(days=max(1, min(days, DAYS_MAX))),
        )  # fmt: skip
        _record(row, "invitation.create", actor, now, after={"role": role, "expires_at": row.expires_at})
    return Issued(row, secret)


def withdraw(*, invitation_id: int, actor: Actor, now: datetime) -> bool:
    """The link no longer works. False when it was used or ended before."""
    with transaction.atomic():
        row = open_invitations(now).select_for_update().filter(pk=invitation_id).first()
        if row is None:
            return False
        row.withdrawn_at = now
        row.save(update_fields=["withdrawn_at"])
        _record(row, "invitation.withdraw", actor, now, before={"role": row.role})
    return True


def accept(*, invitation_id: int, username: str, password: str, now: datetime, request_id: str = "") -> Member:
    """Makes the member of a link. Raises ValidationError: by field, or for all when the link was just used."""
    with transaction.atomic():
        row = open_invitations(now).select_for_update().filter(pk=invitation_id).first()
        if row is None:
            raise ValidationError("This invitation was used or ended. Ask for another one.")
        return admit(invitation=row, username=username, password=password, now=now, request_id=request_id)


def admit(
    *, invitation: Invitation, username: str, password: str | None, now: datetime, request_id: str = ""
) -> Member:
    """The member that an invitation names, inside the caller's transaction. Without a password the person comes by a
    provider only. Raises ValidationError.
    """
    users, username = get_user_model().objects, username.strip()[:150]
    user = get_user_model()(username=username, email=invitation.email, first_name=invitation.full_name)
    errors: dict[str, Any] = dict(role_errors(invitation.role, invitation.tenant_id))
    if users.filter(username__iexact=username).exists():
        errors["username"] = "Somebody has this name already: choose another one."
    if password is None:
        user.set_unusable_password()
    else:
        try:
            validate_password(password, user)
        except ValidationError as error:
            errors["password"] = error.messages
        user.set_password(password)
    if errors:
        raise ValidationError(errors)
    user.full_clean(exclude=["password"])
    user.save(force_insert=True)
    member = Member.objects.create(user=user, role=invitation.role, tenant_id=invitation.tenant_id)
    if invitation.pk:
        invitation.accepted_at = now
        invitation.save(update_fields=["accepted_at"])
    record(
        actor=Actor(user.pk, user.username, member.role, request_id), action="member.create", noun="member",
        object_id=user.username[:80], tenant_slug=invitation.tenant.slug if invitation.tenant else "",
        after={"username": user.username, "invited_by": invitation.created_by, **snapshot(member)}, now=now,
    )  # fmt: skip
    return member


def _record(row: Invitation, action: str, actor: Actor, now: datetime, **change: Any) -> None:
    record(
        actor=actor, action=action, noun="invitation", object_id=row.email[:80],
        tenant_slug=row.tenant.slug if row.tenant else "", now=now, **change,
    )  # fmt: skip
