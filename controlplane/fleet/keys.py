"""The signing key of an agent, and its rotation: asked for, posted by the agent, in force with its next report.

Both keys are good from the instant the new one was posted until a report is signed by it, at most for `KEY_OVERLAP`;
then the old one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.core.exceptions import ValidationError
from django.db import transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.fleet.models import Agent
from controlplane.wire.signing import key_id

KEY_OVERLAP = timedelta(hours=24)

_ROTATION_FIELDS = ["next_public_key", "next_key_at", "key_rotation_asked_at"]


class KeyRefused(Exception):
    """The agent posted a key that is not taken; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class KeyState:
    """An agent's key as pages show it; ids are the first 16 hex digits of a key's SHA-256."""

    key_id: str
    since: datetime
    asked_at: datetime | None
    next_key_id: str | None
    posted_at: datetime | None
    old_until: datetime | None


def key_state(agent: Agent) -> KeyState:
    """Which key an agent has, since when, and how far a rotation is."""
    next_key = agent.next_public_key
    return KeyState(
        key_id=key_id(bytes(agent.public_key)),
        since=agent.key_changed_at or agent.enrolled_at,
        asked_at=agent.key_rotation_asked_at,
        next_key_id=None if next_key is None else key_id(bytes(next_key)),
        posted_at=agent.next_key_at,
        old_until=None if agent.next_key_at is None else agent.next_key_at + KEY_OVERLAP,
    )


def ask_for_new_key(*, agent_id: int, actor: Actor, now: datetime, reason: str) -> Agent:
    """The agent makes a new key with its next report. Asking twice changes nothing.

    A key that was posted and has signed no report yet is withdrawn: the agent posts it again, and nobody else's stays.
    Raises ValidationError when the reason is missing or the agent was retired.
    """
    reason = checked_reason(reason)
    with transaction.atomic():
        agent = _locked(agent_id)
        if agent.state == Agent.State.RETIRED:
            raise ValidationError("The agent was retired: its key is refused already.", code="retired")
        if agent.key_rotation_asked_at is not None and agent.next_public_key is None:
            return agent
        before = _as_recorded(agent)
        agent.key_rotation_asked_at, agent.next_public_key, agent.next_key_at = now, None, None
        agent.save(update_fields=_ROTATION_FIELDS)
        _record(agent, "agent.rotate_key", before, actor, now, reason)
    return agent


def take_new_key(*, agent_id: int, public_key: bytes, now: datetime) -> datetime:
    """Keeps the key that an agent posted beside its present one; until when that one is good.

    The same key again is answered the same, also after it has become the only one. Raises KeyRefused when none was
    asked for, or when another was posted before.
    """
    with transaction.atomic():
        agent = _locked(agent_id)
        if bytes(agent.public_key) == public_key:
            return agent.key_changed_at or now
        if agent.next_public_key is None:
            if agent.key_rotation_asked_at is None:
                raise KeyRefused("No new key was asked for. An admin does so on the agent's page.")
            before = _as_recorded(agent)
            agent.next_public_key, agent.next_key_at = public_key, now
            agent.save(update_fields=_ROTATION_FIELDS)
            _record(agent, "agent.key_posted", before, _itself(agent), now, "a new key was asked for")
        elif bytes(agent.next_public_key) != public_key:
            raise KeyRefused(
                "Another key was posted for this agent. If that was not this agent, retire it and enrol it again;"
                " if it was, ask for a new key once more on its page."
            )
        assert agent.next_key_at is not None
        return agent.next_key_at + KEY_OVERLAP


def complete_rotation(*, agent_id: int, public_key: bytes, now: datetime) -> bool:
    """A report was signed by the new key: it is the only one from now on. False when that was so already."""
    with transaction.atomic():
        agent = _locked(agent_id)
        if agent.next_public_key is None or bytes(agent.next_public_key) != public_key:
            return False
        before = _as_recorded(agent)
        agent.public_key, agent.key_changed_at = public_key, now
        agent.next_public_key = agent.next_key_at = agent.key_rotation_asked_at = None
        agent.save(update_fields=["public_key", "key_changed_at", *_ROTATION_FIELDS])
        _record(agent, "agent.key_changed", before, _itself(agent), now, "the first report signed by the new key")
    return True


def has_key(agent_id: int, public_key: bytes) -> bool:
    """Whether that is the agent's key now."""
    return Agent.objects.filter(pk=agent_id, public_key=public_key).exists()


def _locked(agent_id: int) -> Agent:
    return Agent.objects.select_for_update(of=("self",), no_key=True).select_related("pool").get(pk=agent_id)


def _itself(agent: Agent) -> Actor:
    return Actor.system(f"agent {agent.name}")


def _as_recorded(agent: Agent) -> dict[str, object]:
    state = key_state(agent)
    return {"key": state.key_id, "next_key": state.next_key_id, "asked_at": state.asked_at}


def _record(agent: Agent, action: str, before: dict[str, object], actor: Actor, now: datetime, reason: str) -> None:
    record(
        actor=actor, action=action, noun="agent", object_id=agent.pk, now=now, before={"agent": agent.name, **before},
        after={"agent": agent.name, **_as_recorded(agent)}, reason=reason,
    )  # fmt: skip
