"""Each agent's part of the installation-wide limits on concurrency, rates and tokens.

Shares sum to the limit and follow the demand of the last 10 s; an agent that fell silent keeps its part for three
report intervals, so the others cannot take it while it may still be serving.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct
from psycopg import Cursor
from psycopg.types.json import Jsonb

from controlplane.core.leases import Division, divide_among, divide_places
from controlplane.wire.report import Demand, Share

SILENCE = timedelta(seconds=6)
"""Three of the longest report intervals that agents are told: for who reports more often a share is counted longer."""
TENANT, KEY, CLASS = "t", "k", "c"
Amount = TypeVar("Amount", int, float)
_SCOPE_NAMES = {TENANT: "tenant", KEY: "key", CLASS: "class"}


class DemandRow(Struct, frozen=True):
    """What one report says of the last 10 s."""

    agent_id: int
    pool_id: int
    demand: Sequence[Demand]


def note_demand(cursor: Cursor[Any], rows: Sequence[DemandRow], now: datetime) -> None:
    """Overwrites the demand of each agent, in agent order; its new report says that it took the shares it was told."""
    newest = {row.agent_id: row for row in rows}
    ordered = [newest[agent_id] for agent_id in sorted(newest)]
    if not ordered:
        return
    cursor.execute(
        """
        INSERT INTO budgets_agentdemand (agent_id, pool_id, at, demand, told, acked)
        SELECT r.agent_id, r.pool_id, %s, r.demand, 0, 0 FROM unnest(%s::int[], %s::int[], %s::jsonb[])
            AS r (agent_id, pool_id, demand)
        ON CONFLICT (agent_id) DO UPDATE SET pool_id = EXCLUDED.pool_id, at = EXCLUDED.at, demand = EXCLUDED.demand,
            acked = budgets_agentdemand.told
        """,
        (
            now,
            [row.agent_id for row in ordered],
            [row.pool_id for row in ordered],
            [
                Jsonb([[d.scope, d.id, d.requests, d.tokens, d.refused, d.present] for d in row.demand])
                for row in ordered
            ],
        ),
    )


def forget_demand(cursor: Cursor[Any], agent_ids: Sequence[int]) -> None:
    """Takes agents that ended in good order out of the division: they admit nothing any more."""
    if agent_ids:
        cursor.execute("DELETE FROM budgets_agentdemand WHERE agent_id = ANY(%s)", (sorted(agent_ids),))


@dataclass(frozen=True, slots=True)
class Limit:
    """An installation-wide limit of a tenant or key; None is no limit of that kind."""

    scope: str
    id: int
    concurrency: int | None
    requests_per_s: float | None
    tokens_per_minute: int | None


class Asked(NamedTuple):
    """What an agent was asked for in the last 10 s, and the requests that are there now."""

    requests: int
    tokens: int
    present: int = 0


@dataclass
class Snapshot:
    """Limits, and what every agent that was heard of lately was asked for: (scope, id) -> agent -> that."""

    limits: list[Limit] = field(default_factory=list)
    agents: list[int] = field(default_factory=list)
    demand: dict[tuple[str, int], dict[int, Asked]] = field(default_factory=dict)


_LIMITS_SQL = """
SELECT 't', id, max_concurrency, NULL::float8, NULL::int FROM tenants_tenant WHERE state = 'active'
UNION ALL
SELECT 'k', id, max_concurrency, requests_per_s, tokens_per_minute FROM tenants_apikey
WHERE state = 'active' AND (max_concurrency IS NOT NULL OR requests_per_s IS NOT NULL OR tokens_per_minute IS NOT NULL)
"""


def read_snapshot(cursor: Cursor[Any], now: datetime) -> Snapshot:
    """The limits and the demand of the agents that were heard of within SILENCE."""
    cursor.execute(_LIMITS_SQL)
    limits = [Limit(*row) for row in cursor.fetchall()]
    cursor.execute("SELECT agent_id, demand FROM budgets_agentdemand WHERE at > %s ORDER BY agent_id", (now - SILENCE,))
    snapshot = Snapshot(limits=limits)
    for agent_id, rows in cursor.fetchall():
        snapshot.agents.append(agent_id)
        for scope, subject, requests, tokens, _refused, *present in rows:
            snapshot.demand.setdefault((scope, subject), {})[agent_id] = Asked(requests, tokens, *present)
    return snapshot


@dataclass(frozen=True, slots=True)
class _Parts(Generic[Amount]):
    """One kind of one limit, divided: an amount for each agent that asks, and for the others one of two by place."""

    asking: Mapping[int, Amount]
    first: Amount | None
    rest: Amount | None
    until: int
    """Others at a place before this one get `first`."""

    def of(self, agent_id: int | None, place: int) -> Amount | None:
        """The amount of an agent that asks for it; of one that does not (None does not either) by its place."""
        if agent_id is not None and agent_id in self.asking:
            return self.asking[agent_id]
        return self.first if place < self.until else self.rest


_Kinds = tuple[_Parts[int], _Parts[float], _Parts[int]]
"""Concurrency, requests per second, tokens per minute."""

_UNLIMITED: _Parts[Any] = _Parts({}, None, None, 0)


class Divided:
    """The limits of a snapshot, divided once among `agents` (in order); each agent's shares are put together on demand.

    Agents that ask for nothing differ only by their place, so they share what was made for the first of them.
    """

    def __init__(self, snapshot: Snapshot, agents: Sequence[int]) -> None:
        self.snapshot = snapshot
        self.agents = agents
        self._places = {agent_id: place for place, agent_id in enumerate(agents)}
        self._own: dict[int, list[tuple[int, Share]]] = defaultdict(list)
        self._kinds = [self._divide(at, limit) for at, limit in enumerate(snapshot.limits)]
        self._at = {(limit.scope, limit.id): at for at, limit in enumerate(snapshot.limits)}
        self._moved: dict[int, list[int]] = {}
        self._bounds = sorted({parts.until for kinds in self._kinds for parts in kinds})
        self._common: dict[int, list[Share]] = {}

    def __contains__(self, agent_id: int) -> bool:
        return agent_id in self._places

    def shares(self, agent_id: int) -> list[Share]:
        """The shares of every limit, in the order of the limits."""
        place = self._places[agent_id]
        within = bisect_right(self._bounds, place)
        if within not in self._common:
            limits = zip(self.snapshot.limits, self._kinds, strict=True)
            self._common[within] = [_share(limit, kinds, None, place) for limit, kinds in limits]
        shares = self._common[within].copy()
        for at, share in self._own.get(agent_id, ()):
            shares[at] = share
        return shares

    def likeness(self, agent_id: int) -> int | None:
        """Agents that ask for nothing and have the same number have the same shares; None for one that asks.

        -1 is the number of those that were not there.
        """
        place = self._places.get(agent_id)
        if place is None:
            return -1
        return None if agent_id in self._own else bisect_right(self._bounds, place)

    def share_of(self, agent_id: int, limit: Limit) -> Share | None:
        """One share; nothing of a limit for an agent that was not there, None for a limit that was not there."""
        at = self._at.get((limit.scope, limit.id))
        if at is None:
            return None
        place = self._places.get(agent_id)
        if place is None:
            return no_share(self.snapshot.limits[at])
        return _share(self.snapshot.limits[at], self._kinds[at], agent_id, place)

    def moved_since(self, earlier: Divided) -> Sequence[int]:
        """Places of the limits that an earlier division may have divided otherwise."""
        if self.agents != earlier.agents:
            return range(len(self.snapshot.limits))
        moved = self._moved.get(id(earlier))
        if moved is None:
            was = earlier.snapshot
            moved = self._moved[id(earlier)] = [
                at
                for at, limit in enumerate(self.snapshot.limits)
                for key in ((limit.scope, limit.id),)
                for before in (earlier._at.get(key),)
                if before is not None
                if was.limits[before] != limit or was.demand.get(key) != self.snapshot.demand.get(key)
            ]
        return moved

    def _divide(self, at: int, limit: Limit) -> _Kinds:
        asked = self.snapshot.demand.get((limit.scope, limit.id), {})
        known = {agent_id: one for agent_id, one in asked.items() if agent_id in self._places}
        requests = {agent_id: one.requests for agent_id, one in known.items() if one.requests > 0}
        tokens = {agent_id: one.tokens for agent_id, one in known.items() if one.tokens > 0}
        present = {agent_id: one.present for agent_id, one in known.items() if one.present > 0}
        kinds = (
            self._concurrency(limit.concurrency, requests, present),
            self._rate(limit.requests_per_s, requests),
            self._tokens(limit.tokens_per_minute, tokens),
        )
        for agent_id in requests.keys() | tokens.keys() | present.keys():
            self._own[agent_id].append((at, _share(limit, kinds, agent_id, self._places[agent_id])))
        return kinds

    def _concurrency(self, limit: int | None, asked: Mapping[int, int], present: Mapping[int, int]) -> _Parts[int]:
        if limit is None:
            return _UNLIMITED
        return self._parts(divide_places(limit, asked, present, len(self.agents)), int)

    def _tokens(self, limit: int | None, asking: Mapping[int, int]) -> _Parts[int]:
        return _UNLIMITED if limit is None else self._parts(self._among(limit, asking), int)

    def _rate(self, limit: float | None, asking: Mapping[int, int]) -> _Parts[float]:
        """Thousandths of a request per second; whole requests where the limit allows one to each agent."""
        if limit is None:
            return _UNLIMITED
        each = 0 if limit < len(self.agents) else 1
        free = int((limit - each * len(self.agents)) * 1000)
        return self._parts(self._among(free, asking), lambda thousandths: each + thousandths / 1000)

    def _among(self, free: int, asking: Mapping[int, int]) -> Division[int]:
        return divide_among(free, asking, len(self.agents) - len(asking))

    def _parts(self, division: Division[int], amount: Callable[[int], Amount]) -> _Parts[Amount]:
        until = division.more
        if until:
            for place in sorted(self._places[agent_id] for agent_id in division.asking):
                until += place < until
        return _Parts(
            {agent_id: amount(part) for agent_id, part in division.asking.items()},
            amount(division.floor + 1),
            amount(division.floor),
            until,
        )


def _share(limit: Limit, kinds: _Kinds, agent_id: int | None, place: int) -> Share:
    concurrency, rate, tokens = kinds
    return Share(
        _SCOPE_NAMES[limit.scope],
        limit.id,
        concurrency.of(agent_id, place),
        rate.of(agent_id, place),
        tokens.of(agent_id, place),
    )


def no_share(limit: Limit) -> Share:
    """Nothing of a limit, for an agent whose part others may still have."""
    return Share(
        _SCOPE_NAMES[limit.scope],
        limit.id,
        None if limit.concurrency is None else 0,
        None if limit.requests_per_s is None else 0.0,
        None if limit.tokens_per_minute is None else 0,
    )


def divide(snapshot: Snapshot, wanted: Sequence[int]) -> dict[int, list[Share]]:
    """Agent id -> its shares of every limit. Agents that were not heard of yet are counted in with no demand."""
    divided = Divided(snapshot, sorted({*snapshot.agents, *wanted}))
    return {agent_id: divided.shares(agent_id) for agent_id in wanted}
