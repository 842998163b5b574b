"""Divisions of limits, one row about every second, so that every process answers from the same ones.

Shares move with demand, and agents learn of it one after the other: one that gets more must not have it before those
that get less have taken theirs. So an agent is told, for each limit, the least of its parts in every division that some
agent may still go by: from the oldest one that an agent has acknowledged last to the newest. Whichever agent asks when,
one division is in all of these, and its parts sum to the limit: the shares in force never sum to more, at any instant.

A division acknowledges itself: a new report of an agent says that it got the answer to the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from threading import Lock
from typing import Any, Final, TypeVar

from psycopg import Cursor
from psycopg.types.json import Jsonb

from controlplane.budgets.shares import SILENCE, Asked, Divided, Limit, Snapshot, no_share, read_snapshot
from controlplane.wire.report import Share

FRESH: Final = timedelta(seconds=1)
AGAIN: Final = timedelta(milliseconds=250)
"""Sooner than this no agent that just came gets a division of its own."""
KEEP: Final = timedelta(seconds=15)
_TURN: Final = 7_203_119
"""The advisory lock of those who tell shares."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """One division as every process knows it."""

    number: int
    at: datetime
    divided: Divided


class Divisions:
    """The divisions of the last seconds of one database, as far as this process has read them."""

    def __init__(self) -> None:
        self._known: deque[Numbered] = deque()

    def shares(self, cursor: Cursor[Any], agent_ids: Sequence[int], now: datetime) -> dict[int, list[Share]]:
        """Agent id -> its shares, and a note of the division that they are told from; in a transaction.

        One process answers at a time: whom another one tells of a share meanwhile could not be seen.
        """
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_TURN,))
        self._follow(cursor)
        if self._wants_another(agent_ids, now):
            _divide(cursor, now)
            self._follow(cursor)
        window = self._window(cursor, now)
        cursor.execute(
            # the first shares an agent is told of may be in force before any report says so
            "UPDATE budgets_agentdemand SET told = greatest(told, %s),"
            " acked = CASE WHEN acked = 0 THEN %s ELSE acked END"
            " WHERE agent_id = ANY(%s) AND (told < %s OR acked = 0)",
            (window[-1].number, window[-1].number, sorted(agent_ids), window[-1].number),
        )
        return _of_each([one.divided for one in window], agent_ids)

    def _follow(self, cursor: Cursor[Any]) -> None:
        last = self._known[-1].number if self._known else 0
        cursor.execute("SELECT coalesce(max(number), 0) FROM budgets_sharedivision")
        row = cursor.fetchone()
        newest = 0 if row is None else row[0]
        if newest < last:
            # another database under the same name, or one that crashed: its divisions are gone, and so are the shares
            self._known.clear()
            last = 0
        if newest == last:
            return
        cursor.execute("SELECT number, at, body FROM budgets_sharedivision WHERE number > %s ORDER BY number", (last,))
        for number, at, body in cursor.fetchall():
            snapshot = _read(body)
            self._known.append(Numbered(number, at, Divided(snapshot, snapshot.agents)))
        while self._known and self._known[0].at < self._known[-1].at - KEEP:
            self._known.popleft()

    def _wants_another(self, agent_ids: Iterable[int], now: datetime) -> bool:
        if not self._known:
            return True
        age = now - self._known[-1].at
        return age > FRESH or (age > AGAIN and any(agent_id not in self._known[-1].divided for agent_id in agent_ids))

    def _window(self, cursor: Cursor[Any], now: datetime) -> list[Numbered]:
        """From the oldest division that an agent may still go by to the newest; never empty."""
        cursor.execute("SELECT min(acked) FROM budgets_agentdemand WHERE at > %s AND acked > 0", (now - SILENCE,))
        row = cursor.fetchone()
        since = None if row is None else row[0]
        if since is None:
            return [self._known[-1]]
        return [one for one in self._known if one.number >= since] or [self._known[-1]]


def _divide(cursor: Cursor[Any], now: datetime) -> None:
    """Writes the next division. Two processes may both: everybody follows both, in order."""
    snapshot = read_snapshot(cursor, now)
    cursor.execute("INSERT INTO budgets_sharedivision (at, body) VALUES (%s, %s)", (now, Jsonb(_body(snapshot))))
    cursor.execute("DELETE FROM budgets_sharedivision WHERE at < %s", (now - KEEP,))


def _body(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "limits": [
            [one.scope, one.id, one.concurrency, one.requests_per_s, one.tokens_per_minute] for one in snapshot.limits
        ],
        "agents": list(snapshot.agents),
        "demand": [
            [scope, subject, agent_id, *one]
            for (scope, subject), asked in snapshot.demand.items()
            for agent_id, one in asked.items()
        ],
    }


def _read(body: dict[str, Any]) -> Snapshot:
    snapshot = Snapshot([Limit(*row) for row in body["limits"]], list(body["agents"]))
    for scope, subject, agent_id, *one in body["demand"]:
        snapshot.demand.setdefault((scope, subject), {})[agent_id] = Asked(*one)
    return snapshot


def _of_each(window: Sequence[Divided], agent_ids: Iterable[int]) -> dict[int, list[Share]]:
    """`least_shares` of each agent; those that are alike in every division get one and the same list."""
    alike: dict[tuple[int | None, ...], list[Share]] = {}
    found: dict[int, list[Share]] = {}
    for agent_id in agent_ids:
        likeness = tuple([divided.likeness(agent_id) for divided in window])
        shares = None if None in likeness else alike.get(likeness)
        if shares is None:
            shares = alike[likeness] = least_shares(window, agent_id)
        found[agent_id] = shares
    return found


def least_shares(window: Sequence[Divided], agent_id: int) -> list[Share]:
    """The least of an agent's parts of each limit over some divisions, oldest first; the newest says which limits.

    An agent that a division did not know had no part of its limits. A limit that a division did not know bounded
    nobody then.
    """
    newest = window[-1]
    limits = newest.snapshot.limits
    if agent_id not in newest:
        return [no_share(limit) for limit in limits]
    shares = newest.shares(agent_id)
    for earlier in window[:-1]:
        for at in newest.moved_since(earlier):
            part = earlier.share_of(agent_id, limits[at])
            if part is not None:
                shares[at] = _least(shares[at], part)
    return shares


def _least(now: Share, then: Share) -> Share:
    return Share(
        now.scope,
        now.id,
        _lesser(now.concurrency, then.concurrency),
        _lesser(now.requests_per_s, then.requests_per_s),
        _lesser(now.tokens_per_minute, then.tokens_per_minute),
    )


Amount = TypeVar("Amount", int, float)


def _lesser(now: Amount | None, then: Amount | None) -> Amount | None:
    """None is no limit: what was not limited then is limited by what holds now."""
    return now if now is None or then is None else min(now, then)


class Shares:
    """Shares for the answers of one process, by database."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._divisions: dict[str, Divisions] = {}

    def shares_for(self, cursor: Cursor[Any], agent_ids: Sequence[int], now: datetime) -> dict[int, list[Share]]:
        """Agent id -> its shares."""
        connection = cursor.connection
        with self._lock, connection.transaction():
            divisions = self._divisions.setdefault(connection.info.dbname, Divisions())
            return divisions.shares(cursor, agent_ids, now)


_shares = Shares()


def shares_for(cursor: Cursor[Any], agent_ids: Sequence[int], now: datetime) -> dict[int, list[Share]]:
    """Agent id -> its shares of tenants' and keys' limits; notes the agents that asked as told of them.

    A list may stand for several agents: leave it as it is.
    """
    return _shares.shares_for(cursor, agent_ids, now)
