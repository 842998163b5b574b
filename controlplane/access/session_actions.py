"""Ending sessions and taking factors away: pages refuse at once, open sockets within seconds."""

from datetime import datetime

from allauth.mfa.models import Authenticator
from django.contrib.auth.models import User
from django.db import transaction

from controlplane.access.models import Session
from controlplane.audit.actions import record
from controlplane.audit.actors import Actor


def end_sessions(
    *, user: User, actor: Actor, now: datetime, public_id: str | None = None, but_key: str | None = None
) -> int:
    """Ends one session of a person, or all (but the one with the key `but_key`). Returns how many there were."""
    with transaction.atomic():
        rows = Session.objects.select_for_update().filter(user=user)
        if public_id is not None:
            rows = rows.filter(public_id=public_id)
        if but_key is not None:
            rows = rows.exclude(session_key=but_key)
        ended = [{"address": row.address, "agent": row.agent, "method": row.method} for row in rows]
        if ended:
            rows.delete()
            record(
                actor=actor, action="session.end", noun="member", object_id=user.username[:80], now=now,
                before={"sessions": ended},
            )  # fmt: skip
    return len(ended)


def remove_factors(*, user: User, actor: Actor, now: datetime, reason: str) -> int:
    """For a person whose phone is lost: all factors go, and all sessions, and the next sign-in is by password."""
    with transaction.atomic():
        rows = Authenticator.objects.select_for_update().filter(user=user)
        kinds = sorted(row.type for row in rows)
        if kinds:
            Authenticator.objects.filter(user=user).delete()
            record(
                actor=actor, action="factor.reset", noun="member", object_id=user.username[:80], now=now,
                before={"kinds": kinds}, reason=reason,
            )  # fmt: skip
            end_sessions(user=user, actor=actor, now=now)
    return len(kinds)
