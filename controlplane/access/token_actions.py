"""Personal tokens: made with what the person may do, shown once, used, revoked."""

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.access.models import PersonalToken
from controlplane.access.queries import hashed, is_live
from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.tenants.roles import PERMISSIONS

PREFIX = "fbp_"
PREFIX_CHARS = 12
DAYS_MAX = 366
EACH_MAX = 20
USED_EVERY = timedelta(minutes=1)


@dataclass(frozen=True)
class Issued:
    """A token with its secret, which is shown this once."""

    token: PersonalToken
    secret: str


def allowed_to(role: str) -> list[str]:
    """The permissions that a token of this role can have, in the table's order."""
    return [name for name, roles in PERMISSIONS.items() if role in roles]


def create_token(*, user_id: int, name: str, permissions: list[str], days: int, actor: Actor, now: datetime) -> Issued:
    """Raises ValidationError by field: for a permission that the person lacks, too many tokens, a wrong time."""
    held = allowed_to(actor.role)
    if not permissions or (beyond := sorted(set(permissions) - set(held))):
        told = f"Your role does not include {', '.join(beyond)}." if permissions else "Choose at least one."
        raise ValidationError({"permissions": told})
    if not 1 <= days <= DAYS_MAX:
        raise ValidationError({"days": f"Between 1 and {DAYS_MAX} days."})
    secret = PREFIX + secrets.token_urlsafe(32)
    with transaction.atomic():
        live = PersonalToken.objects.filter(user_id=user_id, revoked_at=None, expires_at__gt=now)
        if live.count() >= EACH_MAX:
            raise ValidationError({"name": f"You have {EACH_MAX} tokens: revoke one first."})
        row = PersonalToken.objects.create(
            user_id=user_id, name=name, prefix=secret[:PREFIX_CHARS], secret_hash=hashed(secret),
            permissions=[one for one in held if one in permissions], created_at=now,
            expires_at=now + timedelta(days=days),
        )  # fmt: skip
        after = {"name": name, "permissions": row.permissions, "expires_at": row.expires_at}
        record(actor=actor, action="token.create", noun="token", object_id=row.prefix, now=now, after=after)
    return Issued(row, secret)


def revoke_token(*, token: PersonalToken, actor: Actor, now: datetime) -> None:
    """The token's next call is refused. Revoking again changes nothing."""
    with transaction.atomic():
        changed = PersonalToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=now)
        if changed:
            record(
                actor=actor, action="token.revoke", noun="token", object_id=token.prefix, now=now,
                before={"name": token.name, "of": token.user.username},
            )  # fmt: skip


def token_behind(secret: str) -> PersonalToken | None:
    """The token that is in force, of a person who can still sign in; else None."""
    row = PersonalToken.objects.select_related("user__member__tenant").filter(secret_hash=hashed(secret)).first()
    return row if row is not None and is_live(row) and row.user.is_active else None


def used(token: PersonalToken) -> None:
    """Notes the time of a use, at most once a minute."""
    now = timezone.now()
    PersonalToken.objects.filter(
        Q(last_used_at=None) | Q(last_used_at__lt=now - USED_EVERY), pk=token.pk
    ).update(last_used_at=now)  # fmt: skip
