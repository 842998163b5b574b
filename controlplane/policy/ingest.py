"""What reports say about revisions, many agents in one statement."""

from collections.abc import Iterable
from datetime import datetime

from psycopg import Cursor

RevisionRow = tuple[int, int, int | None, str]
"""(agent id, applied revision, refused revision or None, why it was refused)"""

REASON_LIMIT = 500

_ACK = """
UPDATE policy_delivery AS delivery
   SET state = 'acked', answered_at = %(now)s, reason = ''
  FROM unnest(%(agents)s::int[], %(revisions)s::int[]) AS report(agent_id, revision)
  JOIN policy_rollout AS rollout ON rollout.revision_id = report.revision
 WHERE delivery.rollout_id = rollout.id
   AND delivery.agent_id = report.agent_id
   AND delivery.state <> 'acked'
"""

_NACK = """
UPDATE policy_delivery AS delivery
   SET state = 'nacked', answered_at = %(now)s, reason = report.reason
  FROM unnest(%(agents)s::int[], %(revisions)s::int[], %(reasons)s::text[]) AS report(agent_id, revision, reason)
  JOIN policy_rollout AS rollout ON rollout.revision_id = report.revision
 WHERE delivery.rollout_id = rollout.id
   AND delivery.agent_id = report.agent_id
   AND delivery.state IN ('pending', 'sent', 'timed_out')
"""


def note_revisions(cursor: Cursor, rows: Iterable[RevisionRow], now: datetime) -> tuple[int, int]:
    """Marks deliveries acknowledged or refused; returns (acked, nacked). Repeats change nothing."""
    applied: dict[int, int] = {}
    refused: dict[int, tuple[int, str]] = {}
    for agent_id, revision, refused_revision, reason in rows:
        applied[agent_id] = max(revision, applied.get(agent_id, 0))
        if refused_revision is not None:
            refused[agent_id] = (refused_revision, (reason.replace("\x00", "") or "no reason given")[:REASON_LIMIT])
    acked = nacked = 0
    if applied:
        cursor.execute(_ACK, {"agents": list(applied), "revisions": list(applied.values()), "now": now})
        acked = cursor.rowcount
    if refused:
        revisions = [revision for revision, _ in refused.values()]
        reasons = [reason for _, reason in refused.values()]
        cursor.execute(_NACK, {"agents": list(refused), "revisions": revisions, "reasons": reasons, "now": now})
        nacked = cursor.rowcount
    return acked, nacked
