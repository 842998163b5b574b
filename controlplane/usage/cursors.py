"""Exactly once: one cursor per agent and epoch, moved in the transaction that stores what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Any

from msgspec import Struct
from psycopg import Cursor

from controlplane.usage.ingest import SetAside
from controlplane.usage.ingest import quarantine as put_aside


class Verdict(Enum):
    """What becomes of a report."""

    TAKEN = "taken"
    REPEAT = "repeat"
    CONFLICT = "conflict"
    EXPECTED = "expected"
    SEALED = "sealed"
    SUPERSEDED = "superseded"
    UNKNOWN = "unknown"


class Position(Struct, frozen=True):
    """How far an epoch was taken. `own_epoch` is the agent's present one."""

    last_seq: int
    last_digest: bytes
    sealed: bool
    own_epoch: int


class Envelope(Struct, frozen=True):
    """What identifies a report: `digest` is the SHA-256 of its bytes, `sender_epoch` the epoch it was signed with.

    `lost_from`, unless 0, is the first of the reports before this one that its agent has lost.
    """

    agent_id: int
    epoch: int
    seq: int
    digest: bytes
    sender_epoch: int
    lost_from: int = 0


def judge(position: Position | None, envelope: Envelope) -> Verdict:
    """What becomes of a report, given how far its epoch was taken. A repeat is answered even after the seal.

    Only the process that holds the agent's present epoch speaks for it, for earlier epochs' spools too: one that was
    replaced may still run, and what it sends would be sent a second time by its successor.
    A report may follow a gap that it names, from the number that is expected on.
    """
    if position is None:
        return Verdict.UNKNOWN
    if envelope.sender_epoch > position.own_epoch or envelope.epoch > position.own_epoch:
        return Verdict.UNKNOWN
    if envelope.sender_epoch != position.own_epoch:
        return Verdict.SUPERSEDED
    if envelope.seq < position.last_seq:
        return Verdict.REPEAT
    if envelope.seq == position.last_seq:
        return Verdict.REPEAT if envelope.digest == position.last_digest else Verdict.CONFLICT
    if position.sealed:
        return Verdict.SEALED
    expected = position.last_seq + 1
    follows = envelope.seq == expected or envelope.lost_from == expected
    return Verdict.TAKEN if follows else Verdict.EXPECTED


def lock_positions(cursor: Cursor[Any], keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Position]:
    """Locks the cursors of (agent id, epoch) pairs in order, and reads them."""
    cursor.execute(
        """
        SELECT c.agent_id, c.epoch, c.last_seq, c.last_digest, c.sealed_at IS NOT NULL, a.epoch
        FROM usage_agentcursor c
        JOIN unnest(%s::int[], %s::int[]) AS r (agent_id, epoch) ON c.agent_id = r.agent_id AND c.epoch = r.epoch
        JOIN fleet_agent a ON a.id = c.agent_id
        ORDER BY c.agent_id, c.epoch
        FOR UPDATE OF c
        """,
        ([agent for agent, _ in keys], [epoch for _, epoch in keys]),
    )
    return {(row[0], row[1]): Position(row[2], bytes(row[3]), *row[4:]) for row in cursor.fetchall()}


class Step(Struct, frozen=True):
    """One report that was taken: moves its cursor from `follows`, and closes the epoch when `seal` is set."""

    agent_id: int
    epoch: int
    seq: int
    digest: bytes
    records: int
    seal: bool
    follows: int


class CursorMoved(Exception):
    """A cursor was not where it was when it was locked: the transaction must not commit."""


def advance(cursor: Cursor[Any], steps: Sequence[Step], now: datetime) -> None:
    """Moves the cursors of taken reports. Raises CursorMoved when one is not where it was judged."""
    cursor.execute(
        """
        UPDATE usage_agentcursor c
        SET last_seq = r.seq, last_digest = r.digest, records = c.records + r.records, updated_at = %s,
            sealed_at = CASE WHEN r.seal THEN %s ELSE c.sealed_at END,
            sealed_by = CASE WHEN r.seal THEN 'agent' ELSE c.sealed_by END
        FROM unnest(%s::int[], %s::int[], %s::bigint[], %s::bytea[], %s::bigint[], %s::bool[], %s::bigint[])
             AS r (agent_id, epoch, seq, digest, records, seal, follows)
        WHERE c.agent_id = r.agent_id AND c.epoch = r.epoch AND c.last_seq = r.follows AND c.sealed_at IS NULL
        """,
        (
            now,
            now,
            [step.agent_id for step in steps],
            [step.epoch for step in steps],
            [step.seq for step in steps],
            [step.digest for step in steps],
            [step.records for step in steps],
            [step.seal for step in steps],
            [step.follows for step in steps],
        ),
    )
    if cursor.rowcount != len(steps):
        raise CursorMoved(f"{len(steps) - cursor.rowcount} cursors moved under their lock")


def count_repeats(cursor: Cursor[Any], keys: Sequence[tuple[int, int]]) -> None:
    """Counts reports that were sent again."""
    cursor.execute(
        """
        UPDATE usage_agentcursor c SET repeats = c.repeats + 1
        FROM unnest(%s::int[], %s::int[]) AS r (agent_id, epoch)
        WHERE c.agent_id = r.agent_id AND c.epoch = r.epoch
        """,
        ([agent for agent, _ in keys], [epoch for _, epoch in keys]),
    )


def keep_conflict(cursor: Cursor[Any], row: SetAside, digest: str, now: datetime) -> None:
    """Keeps a report that contradicts one that was taken, once per content."""
    cursor.execute(
        "SELECT 1 FROM usage_quarantine WHERE agent_id = %s AND epoch = %s AND seq = %s AND reason = %s"
        " AND payload ->> 'digest' = %s",
        (row.agent_id, row.epoch, row.seq, row.reason, digest),
    )
    if cursor.fetchone() is None:
        put_aside(cursor, [row], now)
