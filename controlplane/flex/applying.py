"""Everything that one tick writes, as one statement that is void once the leader's term is over.

One statement means one commit: a tick is on disk whole or not at all, no transaction stays open while a process is
stopped, and between reading the term and writing there is no instant in which another could take over unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from django.db import connection
from psycopg import Cursor

from controlplane.core.period import from_us
from controlplane.flex.leadership import LED_SQL, Leadership, LeadershipLost
from controlplane.flex.reading import Grant


class Sample(NamedTuple):
    """A second of one pool, in the order of `PoolSample`'s columns."""

    pool_id: int
    p95_queue_us: int | None
    admitted_per_s: float | None
    safe_rate_per_s: float | None
    required: float | None
    available: float | None
    slack: float | None
    telemetry_age_us: int | None
    whole_at_us: int | None
    """Of the row that `figures` differs from; None where it is whole."""
    kept: bool
    figures: str
    """JSON text of `PoolSample.figures`."""


SampleRow = tuple[
    int, int | None, float | None, float | None, float | None, float | None, float | None, int | None, int | None, bool,
    str,
]  # fmt: skip
"""A `Sample`, or a bare tuple of the same: to name the fields of a thousand pools each second takes longer than to make
them.
"""


def sample_parameters(samples: Iterable[SampleRow]) -> dict[str, str]:
    """By column, the values as the text of an array: columns cost least to write. Of `figures` a document a line."""
    columns = [*zip(*samples, strict=True)] or [()] * len(Sample._fields)
    said = {name: _array(list(values)) for name, values in zip(Sample._fields[1:-1], columns[1:-1], strict=True)}
    return {"pool_ids": _array(list(columns[0])), **said, "figures": "\n".join(columns[-1])}


@dataclass(slots=True)
class Renewals:
    """Grants that go on under their fence for another TTL, and of which nothing else changes."""

    slot_id: list[int] = field(default_factory=list)
    fence: list[int] = field(default_factory=list)
    ttl_us: list[int] = field(default_factory=list)

    def add(self, slot_id: int, fence: int, ttl_us: int) -> None:
        """One slot's loan."""
        self.slot_id.append(slot_id)
        self.fence.append(fence)
        self.ttl_us.append(ttl_us)

    def parameters(self) -> dict[str, str]:
        """By column, its values as the text of an array."""
        return {
            "renewed_slots": _array(self.slot_id),
            "renewed_fences": _array(self.fence),
            "renewed_ttls": _array(self.ttl_us),
        }


def _array(values: list[Any]) -> str:
    """Numbers as PostgreSQL reads an array; the driver would take ten times as long."""
    return f"{{{repr(values)[1:-1].replace('None', 'NULL')}}}"


@dataclass
class Changes:
    """Rows of one tick. Rows in lists are dicts by column of the matching table in `_APPLY_SQL`; of decisions the
    documents are JSON text.
    """

    decisions: list[dict[str, Any]] = field(default_factory=list)
    grants: list[dict[str, Any]] = field(default_factory=list)
    moves: list[dict[str, Any]] = field(default_factory=list)
    lends: list[dict[str, Any]] = field(default_factory=list)
    loans: list[dict[str, Any]] = field(default_factory=list)
    """What happened to open loans: recalled, home, overdue, lost."""
    trips: list[int] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)
    renewals: Renewals = field(default_factory=Renewals)

    @property
    def events(self) -> int:
        """Rows that say that something happened to a slot."""
        return len(self.moves) + len(self.lends) + len(self.loans) + len(self.trips)


@dataclass(frozen=True)
class Applied:
    """How many rows were written; fewer grants than asked for mean that somebody else changed them."""

    decisions: int = 0
    grants: int = 0
    renewals: int = 0
    moves: int = 0

    def __add__(self, other: Applied) -> Applied:
        return Applied(
            self.decisions + other.decisions,
            self.grants + other.grants,
            self.renewals + other.renewals,
            self.moves + other.moves,
        )


_DECIDED = """
decided AS (
    INSERT INTO flex_decision
        (pool_id, at, term, snapshot, required, available, slack, missed, checks, actions)
    SELECT d.pool_id, %(now)s, led.term, d.snapshot::json, d.required, d.available, d.slack, d.missed,
        d.checks::json, d.actions::jsonb
    FROM led, unnest(%(decided_pools)s::int[], %(decided_required)s::float8[], %(decided_available)s::float8[],
            %(decided_slack)s::float8[], %(decided_missed)s::bool[], string_to_array(%(snapshots)s, E'\\n'),
            string_to_array(%(checks)s, E'\\n'), string_to_array(%(actions)s, E'\\n'))
        AS d (pool_id, required, available, slack, missed, snapshot, checks, actions)
    RETURNING id, pool_id
),
granted AS (
    UPDATE flex_grant g SET
        fence = n.fence, action = n.action, reason = n.reason, ttl_us = n.ttl_us, state = n.state,
        lent_at = n.lent_at, renewed_at = n.renewed_at, recalled_at = n.recalled_at, cancelled_at = n.cancelled_at,
        expires_at = n.expires_at, slack_above_return_since = n.slack_above_return_since,
        stop_admit_at = CASE WHEN n.lend THEN NULL ELSE g.stop_admit_at END,
        manual_recall = g.manual_recall AND NOT n.answered,
        manual_recall_by = CASE WHEN n.answered THEN '' ELSE g.manual_recall_by END
    FROM led, jsonb_to_recordset(%(grants)s) AS n
        (slot_id int, old_fence int8, old_state text, fence int8, action text, reason text, ttl_us int8, state text,
         lent_at timestamptz, renewed_at timestamptz, recalled_at timestamptz, cancelled_at timestamptz,
         expires_at timestamptz, slack_above_return_since timestamptz, lend bool, answered bool)
    WHERE g.slot_id = n.slot_id AND g.fence = n.old_fence AND g.state = n.old_state
    RETURNING g.slot_id
),
renewed AS (
    UPDATE flex_grant g SET
        renewed_at = %(now)s, expires_at = %(now)s + r.ttl_us * interval '1 microsecond', ttl_us = r.ttl_us
    FROM led, unnest(%(renewed_slots)s::int[], %(renewed_fences)s::bigint[], %(renewed_ttls)s::bigint[])
        AS r (slot_id, fence, ttl_us)
    WHERE g.slot_id = r.slot_id AND g.fence = r.fence AND g.state = 'lent'
    RETURNING g.slot_id
)
"""

_HAPPENED = """
moves AS (
    SELECT m.* FROM led, jsonb_to_recordset(%(moves)s) AS m
        (slot_id int, state text, owner_class text, fence int8, reason text, starts_at timestamptz, follows_grant bool)
    WHERE NOT m.follows_grant OR m.slot_id IN (SELECT slot_id FROM granted UNION ALL SELECT slot_id FROM renewed)
),
closed AS (
    UPDATE fleet_slotinterval i SET ended_at = %(now)s
    FROM moves m
    WHERE i.slot_id = m.slot_id AND i.ended_at IS NULL AND i.started_at < %(now)s AND m.starts_at IS NULL
    RETURNING i.slot_id
),
opened AS (
    INSERT INTO fleet_slotinterval (slot_id, state, owner_class, fence, started_at, reason)
    SELECT m.slot_id, m.state, m.owner_class, m.fence, %(now)s, m.reason FROM closed JOIN moves m USING (slot_id)
    RETURNING slot_id
),
begun AS (
    INSERT INTO fleet_slotinterval (slot_id, state, owner_class, fence, started_at, reason)
    SELECT m.slot_id, m.state, m.owner_class, m.fence, m.starts_at, m.reason FROM moves m WHERE m.starts_at IS NOT NULL
    ON CONFLICT DO NOTHING
),
lent AS (
    INSERT INTO flex_lend (pool_id, slot_id, fence, lent_at, lend_decision_id, recall_reason, overdue, lost)
    SELECT n.pool_id, n.slot_id, n.fence, %(now)s, decided.id, '', FALSE, FALSE
    FROM jsonb_to_recordset(%(lends)s) AS n (pool_id int, slot_id int, fence int8)
    JOIN decided USING (pool_id)
    WHERE n.slot_id IN (SELECT slot_id FROM granted)
),
loans AS (
    UPDATE flex_lend l SET
        recalled_at = CASE WHEN n.recalled THEN %(now)s ELSE l.recalled_at END,
        recall_reason = CASE WHEN n.recalled THEN n.reason ELSE l.recall_reason END,
        recall_decision_id = CASE WHEN n.recalled THEN decided.id ELSE l.recall_decision_id END,
        home_at = CASE WHEN n.home THEN %(now)s END,
        stop_admit_at = coalesce(n.stop_admit_at, l.stop_admit_at),
        last_token_at = coalesce(n.last_token_at, l.last_token_at),
        drained_at = coalesce(n.drained_at, l.drained_at),
        drain_us = coalesce(n.drain_us, l.drain_us),
        overdue = l.overdue OR n.overdue,
        lost = l.lost OR n.lost
    FROM jsonb_to_recordset(%(loans)s) AS n
        (pool_id int, slot_id int, recalled bool, reason text, home bool, stop_admit_at timestamptz,
         last_token_at timestamptz, drained_at timestamptz, drain_us int8, overdue bool, lost bool)
    LEFT JOIN decided USING (pool_id)
    WHERE l.slot_id = n.slot_id AND l.home_at IS NULL AND n.slot_id IN (SELECT slot_id FROM granted)
),
handled AS (
    UPDATE flex_trip SET handled_at = %(now)s FROM led WHERE id = ANY(%(trips)s::bigint[])
)
"""

_SAMPLED = """
sampled AS (
    INSERT INTO flex_poolsample
        (pool_id, at, p95_queue_us, admitted_per_s, safe_rate_per_s, required, available, slack, telemetry_age_us,
         whole_at, kept, figures)
    SELECT s.pool_id, %(now)s, s.p95_queue_us, s.admitted_per_s, s.safe_rate_per_s, s.required, s.available, s.slack,
        s.telemetry_age_us, timestamptz 'epoch' + s.whole_at_us * interval '1 microsecond', s.kept, s.figures::json
    FROM led, unnest(%(pool_ids)s::int[], %(p95_queue_us)s::bigint[], %(admitted_per_s)s::float8[],
            %(safe_rate_per_s)s::float8[], %(required)s::float8[], %(available)s::float8[], %(slack)s::float8[],
            %(telemetry_age_us)s::bigint[], %(whole_at_us)s::bigint[], %(kept)s::bool[],
            string_to_array(%(figures)s, E'\\n'))
        AS s (pool_id, p95_queue_us, admitted_per_s, safe_rate_per_s, required, available, slack, telemetry_age_us,
            whole_at_us, kept, figures)
)
"""

_QUIET_SQL = f"""{LED_SQL},{_DECIDED},{_SAMPLED}
SELECT (SELECT count(*) FROM led), (SELECT count(*) FROM decided), (SELECT count(*) FROM granted),
    (SELECT count(*) FROM renewed), 0
"""  # noqa: S608 - the text is constant

# Most ticks have no use for most of it, and half of their time would go into planning it.
_APPLY_SQL = f"""{LED_SQL},{_DECIDED},{_HAPPENED},{_SAMPLED}
SELECT (SELECT count(*) FROM led), (SELECT count(*) FROM decided), (SELECT count(*) FROM granted),
    (SELECT count(*) FROM renewed), (SELECT count(*) FROM opened)
"""  # noqa: S608 - the text is constant

_ENSURE_SQL = f"""{LED_SQL}
INSERT INTO flex_grant (slot_id, fence, action, reason, ttl_us, state, manual_recall, manual_recall_by)
SELECT s.id, coalesce((SELECT max(i.fence) FROM fleet_slotinterval i WHERE i.slot_id = s.id), 0),
    'recall', '', 0, 'home', FALSE, ''
FROM led, fleet_slot s
WHERE s.id = ANY(%(slots)s) AND NOT EXISTS (SELECT 1 FROM flex_grant g WHERE g.slot_id = s.id)
ON CONFLICT DO NOTHING
"""  # noqa: S608 - the text is constant


_ROWS = ("grants", "moves", "lends", "loans")


def apply(changes: Changes, leadership: Leadership, now: datetime) -> Applied:
    """Writes a tick. Raises LeadershipLost when the term is over; then nothing was written."""
    parameters = {
        **leadership.named(),
        "now": now,
        "trips": changes.trips,
        **{name: _json(getattr(changes, name)) for name in _ROWS},
        **_decided(changes.decisions),
        **sample_parameters(changes.samples),
        **changes.renewals.parameters(),
    }
    connection.ensure_connection()
    # Megabytes go beside the statement: as a part of its text they would have to be quoted, and parsed again.
    with connection.wrap_database_errors, Cursor(connection.connection) as cursor:
        row = cursor.execute(_APPLY_SQL if changes.events else _QUIET_SQL, parameters).fetchone()
    assert row is not None
    led, decisions, grants, renewals, moves = row
    if not led:
        raise LeadershipLost
    return Applied(decisions, grants, renewals, moves)


def ensure_grants(leadership: Leadership, slot_ids: Sequence[int]) -> None:
    """A grant row, at home, for those of the slots that have none; its fence goes on from the slot's intervals."""
    with connection.cursor() as cursor:
        cursor.execute(_ENSURE_SQL, leadership.named() | {"slots": list(slot_ids)})


def _decided(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By column, as `Samples.parameters`: documents that stand in a list of documents would be read twice."""

    def column(name: str) -> list[Any]:
        return [row[name] for row in rows]

    return {
        "decided_pools": _array(column("pool_id")),
        **{f"decided_{name}": _array(column(name)) for name in ("required", "available", "slack", "missed")},
        "snapshots": "\n".join(column("snapshot")),
        "checks": "\n".join(column("checks")),
        "actions": "\n".join(column("actions")),
    }


def _json(rows: list[dict[str, Any]]) -> str:
    return msgspec.json.encode(rows).decode()


def grant_row(
    slot_id: int, before: Grant, after: Grant, *, lend: bool, answered: bool, slack_since_us: int | None
) -> dict[str, Any]:
    """A row of `Changes.grants`: taken only if the stored fence and state are still those of `before`."""
    return {
        "slot_id": slot_id,
        "old_fence": before.fence,
        "old_state": before.state.value,
        "fence": after.fence,
        "action": after.action,
        "reason": after.reason,
        "ttl_us": after.ttl_us,
        "state": after.state.value,
        "lent_at": _at(after.lent_at_us),
        "renewed_at": _at(after.renewed_at_us),
        "recalled_at": _at(after.recalled_at_us),
        "cancelled_at": _at(after.cancelled_at_us),
        "expires_at": _at(after.expires_at_us),
        "slack_above_return_since": _at(slack_since_us),
        "lend": lend,
        "answered": answered,
    }


def _at(at_us: int | None) -> datetime | None:
    return None if at_us is None else from_us(at_us)
