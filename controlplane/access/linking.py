"""Who it is that an OpenID provider sends: a member by link or verified e-mail, somebody invited, or nobody."""

from datetime import datetime
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from allauth.socialaccount.models import SocialAccount
from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.utils import timezone

from controlplane.access.invitation_actions import admit
from controlplane.access.models import Invitation
from controlplane.access.queries import open_invitations
from controlplane.audit.actions import record
from controlplane.audit.actors import actor_for
from controlplane.tenants.access import role_of

# Any fixed number, as the first half of the locks on addresses.
LINK_LOCK = 0x6F696463
PLAIN_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)


class NotAdmitted(Exception):
    """Nobody is signed in; the message says why and what to do."""


def person_behind(sociallogin: Any, request_id: str = "") -> User:
    """The member for a provider's answer; links, accepts an invitation or creates where that is allowed.

    Raises NotAdmitted.
    """
    now, account = timezone.now(), sociallogin.account
    if account.pk:
        return _member(account.user)
    verified = [one.email for one in sociallogin.email_addresses if one.verified]
    if not verified:
        raise NotAdmitted("The provider does not vouch for your e-mail address, so nobody here can be found by it.")
    try:
        with transaction.atomic():
            return _found(sociallogin, verified[0], now, request_id)
    except ValidationError as error:
        raise NotAdmitted(
            f"You cannot become a member under {verified[0]}: {' '.join(error.messages)} Ask an administrator."
        ) from error


def _found(sociallogin: Any, email: str, now: datetime, request_id: str) -> User:
    # Two answers about one address side by side would make two members of it: they take turns.
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", [LINK_LOCK, email.lower()])
    user = _by_email(email) or _invited(email, now, request_id) or _new(sociallogin, now, request_id)
    if user is None:
        raise NotAdmitted(f"No member has the e-mail address {email}. Ask an administrator to invite you under it.")
    _link(sociallogin.account, user, now, request_id)
    return user


def same_address(one: str, other: str) -> bool:
    """But for the case of plain letters. To the database a dotless i is a capital I, so its word is not enough."""
    return one.translate(PLAIN_LOWER) == other.translate(PLAIN_LOWER)


def _member(user: User) -> User:
    if not user.is_active or role_of(user) is None:
        raise NotAdmitted("You are no longer a member here. Ask an administrator.")
    return user


def _by_email(email: str) -> User | None:
    rows = get_user_model().objects.filter(email__iexact=email, is_active=True, member__isnull=False)
    found = [row for row in rows if same_address(row.email, email)]
    if len(found) > 1:
        raise NotAdmitted(f"Several members have the e-mail address {email}. Ask an administrator to tell them apart.")
    return found[0] if found else None


def _invited(email: str, now: datetime, request_id: str) -> User | None:
    # Whoever takes the link, or withdraws it, at the same time is waited for: the row is looked at again after that.
    rows = open_invitations(now).select_for_update().filter(email__iexact=email).order_by("-created_at")
    invitation = next((row for row in rows if same_address(row.email, email)), None)
    if invitation is None:
        return None
    return admit(invitation=invitation, username=email, password=None, now=now, request_id=request_id).user


def _new(sociallogin: Any, now: datetime, request_id: str) -> User | None:
    """A member nobody named: only where the provider's entry gives a role for them."""
    provider = next((one for one in settings.OPENID_PROVIDERS if one.id == sociallogin.account.provider), None)
    if provider is None or not provider.new_members:
        return None
    email = next(one.email for one in sociallogin.email_addresses if one.verified)
    invitation = Invitation(
        email=email, full_name=sociallogin.account.extra_data.get("name", "")[:150], role=provider.new_members,
        created_by=f"provider {provider.id}",
    )  # fmt: skip
    return admit(invitation=invitation, username=email, password=None, now=now, request_id=request_id).user


def _link(account: SocialAccount, user: User, now: datetime, request_id: str) -> None:
    account.user = user
    account.save()
    record(
        actor=actor_for(user, request_id), action="member.link", noun="member",
        object_id=user.username[:80], after={"provider": account.provider, "subject": account.uid}, now=now,
    )  # fmt: skip
