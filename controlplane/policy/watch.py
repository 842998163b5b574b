"""What contracts count in the agents of a rollout that is judged by burn: added with each report, by agent.

Counts of a contract are kept by pool; a wave is a part of a pool, so a bad revision in a tenth of its agents would be
hidden by the others. Nothing is added while no such rollout is under way: which agents are watched is asked once a
second in each process.
"""

import time
from collections.abc import Iterable
from datetime import timedelta

from psycopg import Cursor

from controlplane.core.period import to_us
from controlplane.wire.report import ObjectiveCount

ASK_EVERY_S = 1.0
MINUTE_US = 60_000_000
# Every process knows of a new agent to watch before the first minute that counts begins.
KNOWN_WITHIN = timedelta(seconds=5)

_WATCHED = """
SELECT delivery.agent_id, delivery.rollout_id, delivery.answered_at
  FROM policy_rollout AS rollout
  JOIN policy_delivery AS delivery ON delivery.rollout_id = rollout.id AND delivery.state = 'acked'
 WHERE rollout.state = 'running' AND rollout.gated AND rollout.burn_most IS NOT NULL
"""

_ADD = """
INSERT INTO policy_watchedcount AS w
    (rollout_id, agent_id, contract_version_id, offered, admitted, successful, good, neutral, bad)
SELECT * FROM unnest(%s::bigint[], %s::int[], %s::int[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
                     %s::bigint[], %s::bigint[])
ON CONFLICT (rollout_id, agent_id, contract_version_id) DO UPDATE SET
    offered = w.offered + EXCLUDED.offered,
    admitted = w.admitted + EXCLUDED.admitted,
    successful = w.successful + EXCLUDED.successful,
    good = w.good + EXCLUDED.good,
    neutral = w.neutral + EXCLUDED.neutral,
    bad = w.bad + EXCLUDED.bad
"""

Watched = dict[int, tuple[int, int]]
"""agent id -> (rollout id, Unix microseconds of the first minute that counts)"""

_known: tuple[float, Watched] = (0.0, {})


def note_counts(cursor: Cursor, rows: Iterable[tuple[int, ObjectiveCount]]) -> int:
    """Adds the counts of watched agents; rows are (agent id, count). Returns how many sums were written."""
    watched = _watched(cursor)
    if not watched:
        return 0
    sums: dict[tuple[int, int, int], list[int]] = {}
    for agent_id, row in rows:
        rollout_id, counts_from_us = watched.get(agent_id, (0, 0))
        if not rollout_id or row.minute_us < counts_from_us:
            continue
        counts = (row.offered, row.admitted, row.successful, row.good, row.neutral, sum(row.bad.values()))
        key = (rollout_id, agent_id, row.contract_version_id)
        sums[key] = [a + b for a, b in zip(sums.get(key, [0] * 6), counts, strict=True)]
    if sums:
        ordered = [(*key, *counts) for key, counts in sorted(sums.items())]
        cursor.execute(_ADD, [list(column) for column in zip(*ordered, strict=True)])
    return len(sums)


def first_minute_us(answered_us: int) -> int:
    """The first minute of arrival that counts for an agent that acknowledged at `answered_us`."""
    return -(-(answered_us + round(KNOWN_WITHIN.total_seconds() * 1e6)) // MINUTE_US) * MINUTE_US


def forget() -> None:
    """Asks again with the next report (tests; a process whose database was restored)."""
    global _known
    _known = (0.0, {})


def _watched(cursor: Cursor) -> Watched:
    global _known
    until, watched = _known
    if time.monotonic() < until:
        return watched
    cursor.execute(_WATCHED)
    watched = {agent: (rollout, first_minute_us(to_us(at))) for agent, rollout, at in cursor.fetchall()}
    _known = (time.monotonic() + ASK_EVERY_S, watched)
    return watched
