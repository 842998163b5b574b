"""What a report is answered with: how far it was taken, and everything its agent should know now."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import msgspec
from psycopg import Connection, Cursor

from controlplane.budgets.divisions import shares_for
from controlplane.budgets.leases import acquire, open_leases, running_low
from controlplane.core.period import to_us
from controlplane.exchange.composition import Result
from controlplane.exchange.job_funds import fund_items
from controlplane.exchange.messages import Incoming
from controlplane.exchange.safe_rates import safe_rate_shares
from controlplane.flex.queries import grants_for
from controlplane.jobs.item_leases import Leased, lease_items
from controlplane.policy.live_list import delta
from controlplane.policy.queries import desired_for
from controlplane.usage.cursors import Verdict
from controlplane.wire.report import Answer, Exhausted, Grant, Lease, LiveDelta, Share
from controlplane.wire.signing import keys_digest

FLEX_INTERVAL_MS = 1_000
INTERVAL_MS = 2_000
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """Has its pool a flex band, shall it drain, shall it change its key?"""

    flex: bool = False
    drain: bool = False
    rotate_key: bool = False


@dataclass(frozen=True, slots=True)
class DueShares:
    """JSON of a list of `Share`, and a name of it: agents that are told the same share the bytes of it."""

    mark: str
    document: msgspec.Raw


NO_SHARES: Final = DueShares("", msgspec.Raw(b"[]"))


@dataclass
class Outlook:
    """What the control plane wants of some agents now, by agent id."""

    generation: int = 1
    live_number: int = 0
    signing_keys: str = ""
    facts: dict[int, AgentFacts] = field(default_factory=dict)
    desired: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    grants: Mapping[int, list[Grant]] = field(default_factory=dict)
    leases: Mapping[int, list[Lease]] = field(default_factory=dict)
    exhausted: Mapping[int, list[Exhausted]] = field(default_factory=dict)
    shares: Mapping[int, DueShares] = field(default_factory=dict)
    items: Mapping[int, Leased] = field(default_factory=dict)


_INSTALLATION_SQL = """
SELECT generation, coalesce((SELECT max(number) FROM policy_liveentry), 0),
       ARRAY(SELECT use || ':' || kid FROM policy_signingkey WHERE revoked_at IS NULL)
FROM tenants_installation
"""

_FACTS_SQL = """
SELECT a.id,
       EXISTS (SELECT 1 FROM fleet_slot s WHERE s.pool_id = a.pool_id AND s.band = 'flex'),
       a.drain_requested_at IS NOT NULL, a.key_rotation_asked_at IS NOT NULL
FROM fleet_agent a WHERE a.id = ANY(%s)
"""


def interval_ms(*, flex: bool) -> int:
    """How soon an agent shall report again."""
    return FLEX_INTERVAL_MS if flex else INTERVAL_MS


def look(connection: Connection[Any], agents: Sequence[tuple[int, int]], now: datetime) -> Outlook:
    """The outlook of (agent id, epoch) pairs, after topping up the leases that run low."""
    ids = sorted({agent_id for agent_id, _ in agents})
    outlook = Outlook()
    outlook.exhausted = _top_up(connection, agents, now)
    outlook.items = lease_items(connection, agents, now)
    fund_items(connection, agents, now)
    with connection.cursor() as cursor:
        row = cursor.execute(_INSTALLATION_SQL).fetchone()
        if row is not None:
            outlook.generation, outlook.live_number, names = row
            outlook.signing_keys = keys_digest(names)
        outlook.facts = {row[0]: AgentFacts(*row[1:]) for row in cursor.execute(_FACTS_SQL, (ids,)).fetchall()}
        outlook.desired = desired_for(cursor, ids)
        outlook.grants = grants_for(cursor, ids)
        outlook.leases = open_leases(cursor, agents)
        outlook.shares = _shares(cursor, ids, now)
    return outlook


def _shares(cursor: Cursor[Any], agent_ids: Sequence[int], now: datetime) -> dict[int, DueShares]:
    shares = shares_for(cursor, agent_ids, now)
    rates = safe_rate_shares(cursor, agent_ids, now)
    written: dict[int, DueShares] = {}
    found: dict[int, DueShares] = {}
    for agent_id, own in shares.items():
        common = written.get(id(own))
        if common is None:
            document = _encode(own)
            common = written[id(own)] = DueShares(_mark(document), msgspec.Raw(document))
        rate = rates.get(agent_id)
        found[agent_id] = common if rate is None else _with_last(common, rate)
    return found


def _mark(document: bytes) -> str:
    return hashlib.sha256(document).hexdigest()[:16]


def _with_last(shares: DueShares, last: Share) -> DueShares:
    """A JSON list with one more entry."""
    before, entry = bytes(shares.document)[:-1], _encode(last)
    document = msgspec.Raw(before + (b"" if before == b"[" else b",") + entry + b"]")
    return DueShares(_mark(shares.mark.encode() + entry), document)


def _top_up(
    connection: Connection[Any], agents: Sequence[tuple[int, int]], now: datetime
) -> dict[int, list[Exhausted]]:
    """More money for tenants whose leases run low, one short transaction each."""
    exhausted: dict[int, list[Exhausted]] = {}
    with connection.cursor() as cursor:
        for asking in running_low(cursor, agents, now):
            with connection.transaction():
                granted = acquire(cursor, asking, now)
            if granted.exhausted is not None:
                exhausted.setdefault(asking.agent_id, []).append(granted.exhausted)
    return exhausted


def compose(incoming: Incoming, result: Result, outlook: Outlook, now: datetime) -> Answer:
    """The answer to a report that was taken or repeated."""
    agent_id = incoming.envelope.agent_id
    revision, digest = outlook.desired.get(agent_id, (0, ""))
    facts = outlook.facts.get(agent_id, AgentFacts())
    leased = outlook.items.get(agent_id, Leased())
    due = outlook.shares.get(agent_id, NO_SHARES)
    return Answer(
        accepted_through=result.through,
        repeat=result.verdict is Verdict.REPEAT,
        revision=revision,
        digest=digest,
        interval_ms=interval_ms(flex=facts.flex),
        server_time_us=to_us(now),
        generation=outlook.generation,
        grants=outlook.grants.get(agent_id, []),
        leases=outlook.leases.get(agent_id, []),
        exhausted=outlook.exhausted.get(agent_id, []),
        shares=[] if due.mark == incoming.shares_mark else due.document,  # type: ignore[arg-type]  # JSON already
        live=_live(incoming.report.live_number, outlook.live_number),
        quarantined=result.set_aside,
        rotate_key=facts.rotate_key,
        drain=facts.drain,
        item_jobs=leased.jobs,
        items=leased.items,
        items_cancelled=leased.cancelled,
        items_give_back=leased.give_back,
        signing_keys=outlook.signing_keys,
        shares_mark=due.mark,
    )


def _live(has: int, last: int) -> LiveDelta | None:
    return None if has == last else delta(has)
