"""Each agent's part of its pool's tested interactive rate: table(slots that serve interactive now) x own / all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Cursor

from controlplane.core.flex_policy import SafeRate, safe_rate_share
from controlplane.wire.report import Share

# In a shared pool every slot serves; else the interactive floor, and flex slots that are home.
_SQL = """
SELECT a.id, c.id, p.safe_rate -> 'entries',
       count(*) FILTER (WHERE s.agent_id = a.id), count(*)
FROM fleet_agent a
JOIN fleet_pool p ON p.id = a.pool_id
JOIN contracts_workloadclass c ON c.slug = p.interactive_class
JOIN fleet_slot s ON s.pool_id = p.id AND s.agent_id IS NOT NULL
LEFT JOIN fleet_slotinterval i ON i.slot_id = s.id AND i.ended_at IS NULL
WHERE a.id = ANY(%s) AND p.safe_rate ? 'entries'
  AND (p.isolation = 'shared' OR s.band = 'interactive' OR (s.band = 'flex' AND coalesce(i.state, 'home') = 'home'))
GROUP BY a.id, c.id, p.safe_rate
"""


def safe_rate_shares(cursor: Cursor[Any], agent_ids: Sequence[int]) -> dict[int, Share]:
    """Agent id -> its share of the interactive class's safe rate; agents of pools without a table are missing."""
    cursor.execute(_SQL, (list(agent_ids),))
    return {
        agent_id: Share("class", class_id, None, safe_rate_share(table, pool_slots=all_slots, own_slots=own), None)
        for agent_id, class_id, entries, own, all_slots in cursor.fetchall()
        if (table := _table(entries)) is not None
    }


def _table(entries: Any) -> SafeRate | None:
    """The tested rates; a table that makes no sense counts as none, the pool's page says so."""
    if not isinstance(entries, dict):
        return None
    try:
        return SafeRate(entries=tuple((int(slots), float(rate)) for slots, rate in entries.items()))
    except ValueError:
        return None
