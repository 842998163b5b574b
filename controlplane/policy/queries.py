"""What policy is in force where: for agents (desired revision, bundles, keys) and for pages (drift, progress)."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec
from django.db import connection
from django.db.models import TextField
from django.db.models.functions import Cast

from controlplane.fleet.models import Agent
from controlplane.policy.configuration import Configuration
from controlplane.policy.models import Delivery, PolicyBundle, Revision, Rollout, SigningKey
from controlplane.wire.policy import ClassPolicy, PolicyDocument, PoolPolicy, SignedPolicy
from controlplane.wire.signing import to_text
from controlplane.wire.verification import Succession

# Reports come every second or two: an agent that has said nothing for this long is silent.
SILENT_AFTER = timedelta(seconds=10)

# Asked every second for every pool: the newest bundles come first, and a pool's first one that counts ends its search.
_DESIRED_OF_POOLS = """
SELECT asked.pool_id, latest.revision_id, latest.digest
  FROM unnest(%s::bigint[]) AS asked (pool_id)
 CROSS JOIN LATERAL (
       SELECT bundle.revision_id, bundle.digest
         FROM policy_policybundle AS bundle
         JOIN policy_rollout AS rollout ON rollout.revision_id = bundle.revision_id
        WHERE bundle.pool_id = asked.pool_id AND bundle.signature IS NOT NULL
          AND NOT EXISTS (SELECT FROM policy_wave AS wave WHERE wave.rollout_id = rollout.id AND wave.state = 'pending')
        ORDER BY bundle.revision_id DESC
        LIMIT 1) AS latest
"""

_DESIRED_OF_AGENTS = """
SELECT agent.id, latest.revision_id, latest.digest
  FROM fleet_agent AS agent
 CROSS JOIN LATERAL (
       SELECT bundle.revision_id, bundle.digest
         FROM policy_policybundle AS bundle
         JOIN policy_rollout AS rollout ON rollout.revision_id = bundle.revision_id
         LEFT JOIN policy_delivery AS delivery ON delivery.rollout_id = rollout.id AND delivery.agent_id = agent.id
        WHERE bundle.pool_id = agent.pool_id AND bundle.signature IS NOT NULL
          AND NOT EXISTS (
              SELECT FROM policy_wave AS wave
               WHERE wave.rollout_id = rollout.id AND wave.state = 'pending'
                 AND (delivery.id IS NULL OR wave.number = delivery.wave))
        ORDER BY bundle.revision_id DESC
        LIMIT 1) AS latest
 WHERE agent.id = ANY(%s)
"""

# What remains of the time to first token without the queue, as streamed requests of the last hour had it.
BUNDLES_KEPT = 64
BUNDLE_AGE_S = 5.0
_bundles: dict[tuple[int, str], tuple[float, bytes]] = {}

Desired = tuple[int, str]
"""(revision, digest)"""


def desired(pool_ids: Iterable[int]) -> dict[int, Desired]:
    """Pool id -> the newest signed revision of which every wave was sent; a pool without one is missing."""
    with connection.cursor() as cursor:
        cursor.execute(_DESIRED_OF_POOLS, [list(pool_ids)])
        return {pool_id: (revision, digest) for pool_id, revision, digest in cursor.fetchall()}


class PoolTerms(msgspec.Struct, frozen=True):
    """Of a policy document what concerns its pool's slots: tenants, contracts and rates are not parsed."""

    pool: PoolPolicy
    classes: list[ClassPolicy]


_terms_decoder = msgspec.json.Decoder(PoolTerms)


def pool_terms(digests: Sequence[str]) -> dict[str, PoolTerms]:
    """Digest -> what that bundle says of its pool. What a digest names never changes, so callers may keep it."""
    if not digests:
        return {}
    rows = PolicyBundle.objects.filter(digest__in=digests).values_list("digest", "body")
    return {digest: _terms_decoder.decode(bytes(body)) for digest, body in rows}


def document_in_force(pool_id: int) -> tuple[int, PolicyDocument] | None:
    """The revision that all agents of a pool should run, and what it says; None where nothing was pushed."""
    revision, digest = desired([pool_id]).get(pool_id, (0, ""))
    body = PolicyBundle.objects.filter(pool_id=pool_id, digest=digest).values_list("body", flat=True).first()
    return None if body is None else (revision, msgspec.json.decode(bytes(body), type=PolicyDocument))


def desired_for(cursor: Any, agent_ids: Iterable[int]) -> dict[int, Desired]:
    """Agent id -> the newest signed revision whose wave reached it; one without any is missing. One statement."""
    cursor.execute(_DESIRED_OF_AGENTS, [list(agent_ids)])
    return {agent_id: (revision, digest) for agent_id, revision, digest in cursor.fetchall()}


def desired_revisions(agent_ids: Iterable[int]) -> dict[int, int]:
    """Agent id -> the revision of `desired_for`, for pages."""
    with connection.cursor() as cursor:
        return {agent_id: revision for agent_id, (revision, _) in desired_for(cursor, agent_ids).items()}


def bundle(pool_id: int, digest: str) -> bytes | None:
    """What an agent pulls: msgspec JSON of SignedPolicy; None for a digest that is not this pool's or not signed.

    A body never changes under its digest, so a process keeps what it read: a thousand agents pull at once. The
    signature can change (a revoked key), so it is read again after BUNDLE_AGE_S.
    """
    kept = kept_bundle(pool_id, digest)
    if kept is not None:
        return kept
    found = _read_bundle(pool_id, digest)
    if found is not None:
        if len(_bundles) >= BUNDLES_KEPT:
            _bundles.clear()
        _bundles[pool_id, digest] = (time.monotonic() + BUNDLE_AGE_S, found)
    return found


def kept_bundle(pool_id: int, digest: str) -> bytes | None:
    """The same when this process has it at hand: no query, so an event loop may ask."""
    kept = _bundles.get((pool_id, digest))
    return kept[1] if kept is not None and time.monotonic() < kept[0] else None


def _read_bundle(pool_id: int, digest: str) -> bytes | None:
    row = (
        PolicyBundle.objects.filter(pool_id=pool_id, digest=digest, signature__isnull=False)
        .values_list("kid", "signature", "body")
        .first()
    )
    if row is None:
        return None
    kid, signature, body = row
    assert signature is not None
    return msgspec.json.encode(SignedPolicy(kid=kid, signature=to_text(bytes(signature)), body=to_text(bytes(body))))


def signing_keys() -> dict[str, str]:
    """`policy:<kid>`, `live:<kid>`, `nudge:<kid>` -> base64 of the public key, for keys that are not revoked."""
    rows = SigningKey.objects.filter(revoked_at__isnull=True).order_by("use", "kid")
    return {f"{row.use}:{row.kid}": to_text(bytes(row.public_key)) for row in rows}


@dataclass(frozen=True)
class PublicKey:
    """The public half of a signing key, as base64url; `predecessor` is the key id that signed it, "" for none."""

    use: str
    kid: str
    public_key: str
    created_at: datetime
    revoked_at: datetime | None
    predecessor: str


def public_keys() -> list[PublicKey]:
    """Of all signing keys, by use, oldest first."""
    return [
        PublicKey(row.use, row.kid, to_text(bytes(row.public_key)), row.created_at, row.revoked_at, row.predecessor)
        for row in SigningKey.objects.order_by("use", "created_at")
    ]


def successions() -> list[Succession]:
    """Every key that was signed by the one before it, oldest first: public, for whoever checks bundles offline."""
    rows = SigningKey.objects.filter(predecessor_signature__isnull=False).order_by("use", "created_at")
    return [
        Succession(
            row.use, row.predecessor, row.kid, to_text(bytes(row.public_key)), to_text(bytes(row.predecessor_signature))
        )
        for row in rows
        if row.predecessor_signature is not None
    ]


def latest_revision() -> Revision | None:
    """Its configuration is read when it is asked for: of ten thousand tenants that is twenty megabytes."""
    return Revision.objects.defer("configuration").order_by("-number").first()


def revision_before(number: int) -> Revision | None:
    """The newest one that is older; as `latest_revision`."""
    return Revision.objects.defer("configuration").filter(number__lt=number).order_by("-number").first()


def configuration_of(number: int) -> Configuration | None:
    """What a revision says; None for one that is not there. Read as text, since its documents are parsed from that."""
    rows = Revision.objects.filter(number=number).annotate(text=Cast("configuration", TextField()))
    text = rows.values_list("text", flat=True).first()
    return None if text is None else Configuration.from_text(text)


@dataclass(frozen=True)
class Progress:
    """How far a revision came: agents by state of their delivery."""

    agents: int
    acked: int
    sent: int
    pending: int
    nacked: int
    timed_out: int

    @property
    def complete(self) -> bool:
        return self.acked == self.agents


def progress(rollouts: Iterable[Rollout]) -> dict[int, Progress]:
    """Rollout id -> its progress, in one query."""
    ids = [rollout.pk for rollout in rollouts]
    counts: dict[int, Counter[str]] = {pk: Counter() for pk in ids}
    for rollout_id, state in Delivery.objects.filter(rollout_id__in=ids).values_list("rollout_id", "state"):
        counts[rollout_id][state] += 1
    return {pk: _progress(count) for pk, count in counts.items()}


def _progress(count: Counter[str]) -> Progress:
    return Progress(
        agents=count.total(),
        acked=count["acked"],
        sent=count["sent"],
        pending=count["pending"],
        nacked=count["nacked"],
        timed_out=count["timed_out"],
    )


@dataclass(frozen=True)
class AgentDrift:
    """One agent: what it is to apply, what it said it applies, and how old that word is.

    `state` is in_force, behind, refused, must_upgrade, silent or never (it has not reported yet); `since` is the
    instant from which it should have had the desired revision, for a silent one its last word.
    """

    agent_id: int
    name: str
    pool: str
    software: str
    state: str
    desired: int | None
    applied: int | None
    reported_at: datetime | None
    since: datetime | None
    reason: str
    draining_since: datetime | None = None

    @property
    def needs_attention(self) -> bool:
        return self.state != "in_force"


DRIFT_ORDER = ("refused", "must_upgrade", "silent", "never", "behind", "in_force")


class _Row(NamedTuple):
    """Of an agent and its last report what drift is made of: models of thousands take longer than all the rest."""

    id: int
    name: str
    software: str
    enrolled_at: datetime | None
    pool__slug: str
    drain_requested_at: datetime | None
    live__reported_at: datetime | None
    live__revision: int | None
    live__refused_revision: int | None
    live__refused: str | None


def drift(now: datetime) -> list[AgentDrift]:
    """All active agents, those that need attention first. Three queries, whatever their number."""
    active = Agent.objects.filter(state=Agent.State.ACTIVE).order_by("pool__slug", "name")
    agents = [_Row._make(row) for row in active.values_list(*_Row._fields)]
    with connection.cursor() as cursor:
        wanted = desired_for(cursor, [agent.id for agent in agents])
    sent = _sent_at(wanted)
    rows = [_drift_of(agent, wanted.get(agent.id), sent.get(agent.id), now) for agent in agents]
    return sorted(rows, key=lambda row: (DRIFT_ORDER.index(row.state), row.pool, row.name))


def _sent_at(wanted: dict[int, Desired]) -> dict[int, datetime]:
    revisions = {revision for revision, _ in wanted.values()}
    rows = Delivery.objects.filter(rollout__revision_id__in=revisions, sent_at__isnull=False)
    # Not asked for agent by agent: naming thousands takes longer than passing over those that were retired.
    return {
        agent_id: sent_at
        for agent_id, revision, sent_at in rows.values_list("agent_id", "rollout__revision_id", "sent_at")
        if sent_at is not None and agent_id in wanted and wanted[agent_id][0] == revision
    }


def _drift_of(agent: _Row, wanted: Desired | None, sent_at: datetime | None, now: datetime) -> AgentDrift:
    revision = wanted[0] if wanted else None
    state, reason = _state_of(agent, revision, now)
    return AgentDrift(
        agent_id=agent.id,
        name=agent.name,
        pool=agent.pool__slug,
        software=agent.software,
        state=state,
        desired=revision,
        applied=agent.live__revision or None,
        reported_at=agent.live__reported_at,
        since=agent.live__reported_at if state == "silent" else sent_at or agent.enrolled_at,
        reason=reason,
        draining_since=agent.drain_requested_at,
    )


def _state_of(agent: _Row, revision: int | None, now: datetime) -> tuple[str, str]:
    reported_at, applied, refused = agent.live__reported_at, agent.live__revision or 0, agent.live__refused or ""
    if reported_at is None:
        return "never", "It has not reported since it was enrolled."
    if now - reported_at > SILENT_AFTER:
        return "silent", "No report: what it applies now is not known."
    if revision is None or applied >= revision:
        return "in_force", ""
    if agent.live__refused_revision is not None and agent.live__refused_revision >= revision:
        state = "must_upgrade" if refused.startswith(("must_upgrade", "schema")) else "refused"
        return state, refused or "It gave no reason."
    return "behind", f"It applies revision {applied}." if applied else "It has not applied any revision."


def rollouts_by_revision(revisions: Sequence[Revision]) -> dict[int, Rollout]:
    rows = Rollout.objects.filter(revision__in=revisions).prefetch_related("waves")
    return {row.revision_id: row for row in rows}
