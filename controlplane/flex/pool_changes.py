"""Which pools changed since the leader took notice last; triggers note them in the transaction that changes them."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import connection

from controlplane.flex.leadership import LAZY_SQL, LED_SQL, Leadership, Shard

# Only the leader takes: what one that was stopped took away, the leader after it would never see.
_TAKE_SQL = f"""{LED_SQL}, taken AS (
    DELETE FROM flex_poolchange c USING led WHERE c.pool_id %% %(parts)s = %(part)s RETURNING c.pool_id, c.jobs_only
)
SELECT pool_id, bool_and(jobs_only) FROM taken CROSS JOIN {LAZY_SQL} GROUP BY pool_id
"""  # noqa: S608 - the text is constant


@dataclass(frozen=True, slots=True)
class Changed:
    """Pool ids: of those in `jobs` nothing but running jobs changed."""

    pools: frozenset[int]
    jobs: frozenset[int]


def take(leadership: Leadership, shard: Shard) -> Changed:
    """What changed since the last call, and forgets it. To be called before rows are read: what changes after, comes
    with the next call.
    """
    with connection.cursor() as cursor:
        cursor.execute(_TAKE_SQL, leadership.named() | {"parts": shard.parts, "part": shard.part})
        rows = cursor.fetchall()
    return Changed(
        pools=frozenset(pool_id for pool_id, jobs_only in rows if not jobs_only),
        jobs=frozenset(pool_id for pool_id, jobs_only in rows if jobs_only),
    )
