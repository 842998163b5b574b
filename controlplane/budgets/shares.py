"""Each agent's part of the installation-wide limits on concurrency, rates and tokens.

Shares sum to the limit and follow the demand of the last 10 s; an agent that fell silent keeps its part for three
report intervals, so the others cannot take it while it may still be serving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Lock
from typing import Any

from psycopg import Cursor
from psycopg.types.json import Jsonb

from controlplane.core.leases import divide_limit
from controlplane.wire.report import Demand, Share

SILENCE = timedelta(seconds=6)
_SNAPSHOT_AGE_S = 1.0
TENANT, KEY, CLASS = "t", "k", "c"
_SCOPE_NAMES = {TENANT: "tenant", KEY: "key", CLASS: "class"}


@dataclass(frozen=True, slots=True)
class DemandRow:
    """What one report says of the last 10 s."""

    agent_id: int
    pool_id: int
    demand: Sequence[Demand]


def note_demand(cursor: Cursor[Any], rows: Sequence[DemandRow], now: datetime) -> None:
    """Overwrites the demand of each agent, in agent order."""
    newest = {row.agent_id: row for row in rows}
    ordered = [newest[agent_id] for agent_id in sorted(newest)]
    if not ordered:
        return
    cursor.execute(
        """
        INSERT INTO budgets_agentdemand (agent_id, pool_id, at, demand)
        SELECT r.agent_id, r.pool_id, %s, r.demand FROM unnest(%s::int[], %s::int[], %s::jsonb[])
            AS r (agent_id, pool_id, demand)
        ON CONFLICT (agent_id) DO UPDATE SET pool_id = EXCLUDED.pool_id, at = EXCLUDED.at, demand = EXCLUDED.demand
        """,
        (
            now,
            [row.agent_id for row in ordered],
            [row.pool_id for row in ordered],
            [Jsonb([[d.scope, d.id, d.requests, d.tokens, d.refused] for d in row.demand]) for row in ordered],
        ),
    )


@dataclass(frozen=True, slots=True)
class Limit:
    """An installation-wide limit of a tenant or key; None is no limit of that kind."""

    scope: str
    id: int
    concurrency: int | None
    requests_per_s: float | None
    tokens_per_minute: int | None


@dataclass
class Snapshot:
    """Limits, and what every agent that was heard of lately asked for: (scope, id) -> agent -> (requests, tokens)."""

    limits: list[Limit] = field(default_factory=list)
    agents: list[int] = field(default_factory=list)
    demand: dict[tuple[str, int], dict[int, tuple[int, int]]] = field(default_factory=dict)


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
        for scope, subject, requests, tokens, _refused in rows:
            snapshot.demand.setdefault((scope, subject), {})[agent_id] = (requests, tokens)
    return snapshot


def divide(snapshot: Snapshot, wanted: Sequence[int]) -> dict[int, list[Share]]:
    """Agent id -> its shares of every limit. Agents that were not heard of yet are counted in with no demand."""
    agents = sorted({*snapshot.agents, *wanted})
    shares: dict[int, list[Share]] = {agent_id: [] for agent_id in wanted}
    even = _EvenParts(agents)
    for limit in snapshot.limits:
        asked = snapshot.demand.get((limit.scope, limit.id), {})
        requests = {agent_id: asked.get(agent_id, (0, 0))[0] for agent_id in agents} if asked else {}
        tokens = {agent_id: asked.get(agent_id, (0, 0))[1] for agent_id in agents} if asked else {}
        concurrency = even.whole(limit.concurrency) if not asked else _divide_whole(limit.concurrency, requests)
        rate = even.rate(limit.requests_per_s) if not asked else _divide_rate(limit.requests_per_s, requests)
        token_rate = (
            even.whole(limit.tokens_per_minute) if not asked else _divide_whole(limit.tokens_per_minute, tokens)
        )
        name = _SCOPE_NAMES[limit.scope]
        for agent_id in wanted:
            shares[agent_id].append(
                Share(name, limit.id, concurrency.get(agent_id), rate.get(agent_id), token_rate.get(agent_id))
            )
    return shares


class _EvenParts:
    """Parts of limits that nobody asks for: most limits are equal, so each amount is divided once."""

    def __init__(self, agents: Sequence[int]) -> None:
        self._nobody = dict.fromkeys(agents, 0)
        self._whole: dict[int | None, dict[int, int]] = {}
        self._rate: dict[float | None, dict[int, float]] = {}

    def whole(self, limit: int | None) -> dict[int, int]:
        if limit not in self._whole:
            self._whole[limit] = _divide_whole(limit, self._nobody)
        return self._whole[limit]

    def rate(self, limit: float | None) -> dict[int, float]:
        if limit not in self._rate:
            self._rate[limit] = _divide_rate(limit, self._nobody)
        return self._rate[limit]


def _divide_whole(limit: int | None, demand: Mapping[int, int]) -> dict[int, int]:
    if limit is None:
        return {}
    # names of equal length keep the order of numbers
    parts = divide_limit(limit, {f"{agent_id:010d}": asked for agent_id, asked in demand.items()})
    return {int(name): part for name, part in parts.items()}


def _divide_rate(limit: float | None, demand: Mapping[int, int]) -> dict[int, float]:
    """Thousandths of a request per second; whole requests where the limit allows one to each agent."""
    if limit is None:
        return {}
    if limit < len(demand):
        return {agent_id: part / 1000 for agent_id, part in _divide_whole(int(limit * 1000), demand).items()}
    rest = _divide_whole(int((limit - len(demand)) * 1000), demand)
    return {agent_id: 1 + rest[agent_id] / 1000 for agent_id in demand}


@dataclass
class _Divided:
    snapshot: Snapshot
    read_at: float
    shares: dict[int, list[Share]]


class Shares:
    """Shares from a snapshot that is at most a second old, divided once, for the answers of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._divided: dict[str, _Divided] = {}

    def shares_for(self, cursor: Cursor[Any], agent_ids: Sequence[int], now: datetime) -> dict[int, list[Share]]:
        """Agent id -> its shares."""
        name = cursor.connection.info.dbname
        with self._lock:
            divided = self._divided.get(name)
            if divided is None or self._clock() - divided.read_at > _SNAPSHOT_AGE_S:
                snapshot = read_snapshot(cursor, now)
                shares = divide(snapshot, sorted({*snapshot.agents, *agent_ids}))
                divided = self._divided[name] = _Divided(snapshot, self._clock(), shares)
            elif any(agent_id not in divided.shares for agent_id in agent_ids):
                divided.shares = divide(divided.snapshot, sorted({*divided.shares, *agent_ids}))
            return {agent_id: divided.shares[agent_id] for agent_id in agent_ids}


_shares = Shares()


def shares_for(cursor: Cursor[Any], agent_ids: Sequence[int], now: datetime) -> dict[int, list[Share]]:
    """Agent id -> its shares of tenants' and keys' limits, from a snapshot that is at most a second old."""
    return _shares.shares_for(cursor, agent_ids, now)
