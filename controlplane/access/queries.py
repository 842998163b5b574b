"""What pages of access read: sessions, invitations, factors and tokens."""

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from allauth.mfa.models import Authenticator
from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.access.models import Invitation, PersonalToken, Session
from controlplane.tenants.access import may


@dataclass(frozen=True)
class Factors:
    """The second factors of a person; `codes` are recovery codes that are left, None without any."""

    totp: Authenticator | None
    passkeys: tuple[Authenticator, ...]
    codes: int | None

    @property
    def any(self) -> bool:
        return self.totp is not None or bool(self.passkeys)


def hashed(secret: str) -> str:
    """SHA-256 in hexadecimal: secrets here are random, so a fast hash keeps them."""
    return hashlib.sha256(secret.encode()).hexdigest()


def sessions_of(user_id: int, now: datetime) -> QuerySet[Session]:
    """Sessions that are not over, the one used last first."""
    return Session.objects.filter(user_id=user_id, expire_date__gt=now).order_by("-last_used_at", "public_id")


def visible_sessions(user: User, now: datetime) -> QuerySet[Session]:
    """One's own sessions that are not over; everybody's for who may see how members get in."""
    rows = Session.objects.filter(expire_date__gt=now, user__member__isnull=False, public_id__isnull=False)
    return _visible(rows, user).select_related("user__member")


def visible_tokens(user: User) -> QuerySet[PersonalToken]:
    """One's own tokens; everybody's for who may see how members get in."""
    return _visible(PersonalToken.objects.filter(user__member__isnull=False), user).select_related("user__member")


def _visible(rows: QuerySet[Any], user: User) -> QuerySet[Any]:
    return rows if may(user, "member.read") else rows.filter(user_id=user.pk)


def open_invitations(now: datetime) -> QuerySet[Invitation]:
    return Invitation.objects.filter(accepted_at=None, withdrawn_at=None, expires_at__gt=now)


def invitation_by_secret(secret: str, now: datetime) -> Invitation | None:
    return open_invitations(now).filter(secret_hash=hashed(secret)).select_related("tenant").first()


def tokens_of(user_id: int) -> QuerySet[PersonalToken]:
    return PersonalToken.objects.filter(user_id=user_id).order_by("revoked_at", "-created_at")


def factors_of(user: User) -> Factors:
    rows = list(Authenticator.objects.filter(user=user).order_by("created_at"))
    codes = next((row for row in rows if row.type == Authenticator.Type.RECOVERY_CODES), None)
    return Factors(
        totp=next((row for row in rows if row.type == Authenticator.Type.TOTP), None),
        passkeys=tuple(row for row in rows if row.type == Authenticator.Type.WEBAUTHN),
        codes=len(codes.wrap().get_unused_codes()) if codes else None,
    )


def is_live(token: PersonalToken) -> bool:
    return token.revoked_at is None and token.expires_at > timezone.now()
