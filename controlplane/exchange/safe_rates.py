"""Each agent's part of its pool's tested interactive rate: table(slots that serve interactive now) x own / all.

Table, isolation and bands are those of the revision in force, or as saved before the first push. A slot serves when its
agent was heard of lately and does not drain; a flex slot also has to be home.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import Lock
from typing import Any, Final

import msgspec
from psycopg import Cursor

from controlplane.budgets.shares import SILENCE
from controlplane.core.flex_policy import SafeRate, safe_rate_share
from controlplane.core.slot_states import Band, SlotState, admits_interactive
from controlplane.core.slots import Isolation
from controlplane.flex.reading import Terms
from controlplane.flex.terms import safe_rate_of, terms_in_force
from controlplane.wire.report import Share

log = logging.getLogger(__name__)

TERMS_AGE_S: Final = 1.0

_POOLS_SQL = """
SELECT p.id, p.isolation, p.interactive_class, p.safe_rate
FROM fleet_pool p WHERE p.id IN (SELECT pool_id FROM fleet_agent WHERE id = ANY(%s))
"""
_SLOTS_SQL = """
SELECT s.pool_id, s.id, s.agent_id, s.band, coalesce(i.state, 'home')
FROM fleet_slot s
JOIN fleet_agent a ON a.id = s.agent_id
LEFT JOIN fleet_agentlive l ON l.agent_id = a.id
LEFT JOIN fleet_slotinterval i ON i.slot_id = s.id AND i.ended_at IS NULL
WHERE s.pool_id = ANY(%s) AND s.removed_at IS NULL
  AND (a.id = ANY(%s) OR (l.reported_at > %s AND a.drain_requested_at IS NULL))
"""


class TermsOfPools:
    """The terms of all pools that were asked for, at most a second old, for the answers of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._read: dict[str, tuple[float, dict[int, Terms | None]]] = {}

    def of(self, database: str, pool_ids: Iterable[int]) -> dict[int, Terms | None]:
        """Pool id -> its terms by revision, None where nothing was pushed to all its agents yet."""
        with self._lock:
            at, found = self._read.get(database, (float("-inf"), {}))
            wanted = set(pool_ids)
            if self._clock() - at > TERMS_AGE_S or not wanted <= found.keys():
                wanted |= found.keys()
                pushed = _readable(sorted(wanted))
                found = {pool_id: pushed.get(pool_id) for pool_id in wanted}
                self._read[database] = (self._clock(), found)
            return found


def _readable(pool_ids: list[int]) -> dict[int, Terms]:
    """Terms by pool; a revision that an older release wrote and this one cannot read must not stop reports."""
    try:
        return terms_in_force(pool_ids)
    except msgspec.DecodeError:
        # one of them: which one is found by asking for each alone
        return _of_each(pool_ids)


def _of_each(pool_ids: list[int]) -> dict[int, Terms]:
    found: dict[int, Terms] = {}
    for pool_id in pool_ids:
        try:
            found |= terms_in_force([pool_id])
        except msgspec.DecodeError as error:
            log.error("the revision of pool %d cannot be read, its safe rate is the saved one: %s", pool_id, error)
    return found


_terms = TermsOfPools()


@dataclass(frozen=True, slots=True)
class _Tested:
    """A pool with a table; `terms` None: as saved."""

    class_slug: str
    isolation: str
    table: SafeRate
    terms: Terms | None


def safe_rate_shares(cursor: Cursor[Any], agent_ids: Sequence[int], now: datetime) -> dict[int, Share]:
    """Agent id -> its share of the interactive class's safe rate; agents of pools without a table are missing.

    An agent that asks counts as heard of; one of whose slots none serves now gets a share of 0.
    """
    pools = _tested(cursor, agent_ids)
    if not pools:
        return {}
    classes = _class_ids(cursor, {pool.class_slug for pool in pools.values()})
    serving, present = _slots(cursor, pools, agent_ids, now)
    everyone: dict[int, int] = defaultdict(int)
    for agent_id, pool_id in present.items():
        everyone[pool_id] += serving[agent_id]
    shares = {}
    for agent_id in agent_ids:
        if agent_id not in present or pools[present[agent_id]].class_slug not in classes:
            continue
        pool = pools[present[agent_id]]
        rate = safe_rate_share(pool.table, pool_slots=everyone[present[agent_id]], own_slots=serving[agent_id])
        shares[agent_id] = Share("class", classes[pool.class_slug], None, rate, None)
    return shares


def _tested(cursor: Cursor[Any], agent_ids: Sequence[int]) -> dict[int, _Tested]:
    rows = cursor.execute(_POOLS_SQL, (list(agent_ids),)).fetchall()
    in_force = _terms.of(cursor.connection.info.dbname, [row[0] for row in rows])
    found = {}
    for pool_id, isolation, class_slug, saved in rows:
        terms = in_force.get(pool_id)
        table = safe_rate_of(saved) if terms is None else terms.safe_rate
        if table is None:
            continue
        if terms is not None:
            isolation, class_slug = terms.isolation, terms.interactive_class
        found[pool_id] = _Tested(class_slug, isolation, table, terms)
    return found


def _class_ids(cursor: Cursor[Any], slugs: Iterable[str]) -> dict[str, int]:
    cursor.execute("SELECT slug, id FROM contracts_workloadclass WHERE slug = ANY(%s)", (sorted(slugs),))
    return dict(cursor.fetchall())


def _slots(
    cursor: Cursor[Any], pools: dict[int, _Tested], agent_ids: Sequence[int], now: datetime
) -> tuple[dict[int, int], dict[int, int]]:
    """Agent id -> its slots that serve interactive now, and agent id -> its pool, of agents with slots."""
    serving: dict[int, int] = defaultdict(int)
    present: dict[int, int] = {}
    rows = cursor.execute(_SLOTS_SQL, (sorted(pools), list(agent_ids), now - SILENCE)).fetchall()
    for pool_id, slot_id, agent_id, band, state in rows:
        present[agent_id] = pool_id
        if _serves(pools[pool_id], slot_id, band, state):
            serving[agent_id] += 1
    return serving, present


def _serves(pool: _Tested, slot_id: int, band: str, state: str) -> bool:
    if pool.terms is not None and not pool.terms.has(slot_id):
        return False
    if pool.isolation == Isolation.SHARED:
        return True
    home = Band(band) if pool.terms is None else pool.terms.band_of(slot_id, band)
    return admits_interactive(home, SlotState(state))
