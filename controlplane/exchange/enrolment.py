"""How an agent comes in: a single-use token becomes an agent with slots; a hello becomes an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Case, IntegerField, When

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.core.generations import epoch_after
from controlplane.exchange.problems import Refusal
from controlplane.fleet.models import Agent, EnrolmentToken, Pool, Slot
from controlplane.fleet.ownership import begin_tenure
from controlplane.tenants.models import Installation
from controlplane.usage.models import AgentCursor
from controlplane.wire.enrolment import Enrol, Hello
from controlplane.wire.public_keys import is_public_key
from controlplane.wire.signing import from_text

_BAND_ORDER = Case(
    When(band=Slot.Band.INTERACTIVE, then=0),
    When(band=Slot.Band.BATCH, then=1),
    default=2,
    output_field=IntegerField(),
)


@dataclass(frozen=True)
class Admitted:
    """An enrolled agent."""

    agent_id: int
    uuid: str
    pool: str
    installation: str
    approved: bool


def hash_token(token: str) -> str:
    """What is stored of an enrolment token."""
    return hashlib.sha256(token.encode()).hexdigest()


def enrol(message: Enrol, *, now: datetime) -> Admitted:
    """Makes the agent of a token and binds free slots of the token's pool to it.

    The same token with the same key answers the same, so a lost answer costs nothing. Raises Refusal: token_unknown,
    token_expired, token_used, unreadable, conflict.
    """
    key = _public_key(message)
    installation = str(Installation.objects.get(pk=1).uuid)
    with transaction.atomic():
        token = EnrolmentToken.objects.select_for_update().filter(token_hash=hash_token(message.token)).first()
        if token is None:
            raise Refusal("token_unknown", "Copy the token again, or make a new one on the Agents page.")
        if token.used_at is not None:
            agent = token.agent
            if agent is None or bytes(token.used_key or b"") != key:
                raise Refusal("token_used", "A token enrols one agent. Make a new one on the Agents page.")
        else:
            if token.expires_at <= now:
                raise Refusal("token_expired", "A token is good for one hour. Make a new one on the Agents page.")
            agent = _create_agent(message, key, token, now)
        pool = Pool.objects.get(pk=agent.pool_id)
    return Admitted(agent.pk, str(agent.uuid), pool.slug, installation, agent.state == Agent.State.ACTIVE)


def _public_key(message: Enrol) -> bytes:
    try:
        key = from_text(message.public_key)
    except ValueError:
        key = b""
    if not is_public_key(key):
        raise Refusal("unreadable", "public_key must be a sound Ed25519 public key: 32 bytes as base64url.")
    _refuse_unprintable(name=message.name, software=message.software, address=message.address)
    if not 1 <= len(message.name) <= 63 or not 0 <= message.slots <= 10_000:
        raise Refusal("unreadable", "name must have 1 to 63 characters and slots be 0 to 10,000.")
    return key


def _refuse_unprintable(**texts: str) -> None:
    for name, text in texts.items():
        if not text.isprintable():
            raise Refusal("unreadable", f"{name} must not have control characters: send plain text.")


def _create_agent(message: Enrol, key: bytes, token: EnrolmentToken, now: datetime) -> Agent:
    try:
        with transaction.atomic():
            agent = Agent.objects.create(
                name=message.name,
                pool_id=token.pool_id,
                state=Agent.State.PENDING if settings.AGENT_APPROVAL else Agent.State.ACTIVE,
                public_key=key,
                address=message.address[:200],
                software=message.software[:60],
                enrolled_at=now,
            )
    except IntegrityError:
        raise Refusal(
            "conflict",
            f"An agent called {message.name} is in use. Retire it first, or enrol this one under another name.",
        ) from None
    slots = bind_slots(agent, message.slots, now=now)
    EnrolmentToken.objects.filter(pk=token.pk).update(used_at=now, used_key=key, agent=agent)
    record(
        actor=Actor.system(f"agent {message.name}"),
        action="agent.enrol",
        noun="agent",
        object_id=agent.pk,
        after={"name": agent.name, "pool": token.pool_id, "state": agent.state, "slots": [slot.name for slot in slots]},
        reason=f"enrolment token {token.prefix}",
        now=now,
    )
    return agent


def bind_slots(agent: Agent, wanted: int, *, now: datetime) -> Sequence[Slot]:
    """Binds up to `wanted` free slots of the agent's pool to it, floors first, and opens their tenures."""
    pool = Pool.objects.get(pk=agent.pool_id)
    free = (
        Slot.objects.select_for_update(skip_locked=True)
        .filter(pool=pool, agent__isnull=True, removed_at__isnull=True)
        .order_by(_BAND_ORDER, "name")[:wanted]
    )
    slots = list(free)
    Slot.objects.filter(pk__in=[slot.pk for slot in slots]).update(agent=agent)
    for slot in slots:
        begin_tenure(slot, pool, now=now, reason="enrolled")
    return slots


@dataclass(frozen=True)
class Greeted:
    """What a hello gave: the new epoch, and how far the spooled ones were taken."""

    epoch: int
    pool: str
    pool_id: int
    installation: str
    accepted_through: dict[str, int]
    generation: int


def hello(agent_id: int, message: Hello, mark: bytes, *, now: datetime) -> Greeted:
    """Issues the next epoch of an agent and opens its cursor. Epochs the agent still has spooled stay open to it.

    `mark` (32 bytes) tells one hello from another. One that arrives again is answered with the epoch that it was given:
    a lost answer costs nothing, and who recorded a hello can fence no process with it. An epoch that was issued after
    the backup which this database was restored from is known by its agent alone: nothing of it is stored, so its cursor
    begins before the first report. Raises Refusal: unreadable; superseded for a hello from before the present epoch.
    """
    _refuse_unprintable(software=message.software, address=message.address)
    with transaction.atomic():
        agent = Agent.objects.select_for_update(no_key=True).select_related("pool").get(pk=agent_id)
        given = AgentCursor.objects.filter(agent_id=agent_id, hello_mark=mark).first()
        if given is not None and given.epoch != agent.epoch:
            raise Refusal("superseded", f"This hello was answered with epoch {given.epoch}: {agent.epoch} is in force.")
        installation = Installation.objects.get(pk=1)
        epoch = agent.epoch if given is not None else epoch_after(agent.epoch, installation.generation)
        if given is None:
            Agent.objects.filter(pk=agent_id).update(
                epoch=epoch, software=message.software[:60], address=message.address[:200] or agent.address
            )
            AgentCursor.objects.create(agent_id=agent_id, epoch=epoch, hello_mark=mark, updated_at=now)
        spooled = [spooled for spooled in message.spooled_epochs if 0 < spooled < epoch]
        if installation.generation > 1:
            AgentCursor.objects.bulk_create(
                [AgentCursor(agent_id=agent_id, epoch=lost, updated_at=now) for lost in sorted(set(spooled))],
                ignore_conflicts=True,
            )
        cursors = AgentCursor.objects.filter(agent_id=agent_id, epoch__in=spooled)
        cursors.update(claimed_by=epoch)
        through = {str(row.epoch): row.last_seq for row in cursors}
    return Greeted(epoch, agent.pool.slug, agent.pool_id, str(installation.uuid), through, installation.generation)
