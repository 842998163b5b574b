"""What agents say about their flex slots, inside the transaction that takes their reports."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from psycopg import Cursor

from controlplane.core.period import EPOCH
from controlplane.wire.report import SlotLive, Trip

_LATEST = datetime(9999, 1, 1, tzinfo=UTC)
_EARLIEST = EPOCH

# The controller writes grants too: a row that it holds is left to the next report, which repeats the instant.
_STOP_ADMIT_SQL = """
WITH said AS (
    SELECT * FROM unnest(%s::int[], %s::int[], %s::bigint[], %s::timestamptz[]) AS r (agent_id, slot_id, fence, at)
), held AS (
    SELECT g.slot_id, said.at FROM flex_grant g
    JOIN said ON said.slot_id = g.slot_id
    JOIN fleet_slot s ON s.id = g.slot_id AND s.agent_id = said.agent_id
    WHERE g.state IN ('lent', 'draining', 'cancelling', 'overdue')
      AND said.fence BETWEEN g.fence - 1 AND g.fence
      AND said.at >= coalesce(g.lent_at, said.at)
      AND g.stop_admit_at IS DISTINCT FROM said.at
    ORDER BY g.slot_id
    FOR UPDATE OF g SKIP LOCKED
)
UPDATE flex_grant g SET stop_admit_at = held.at FROM held WHERE g.slot_id = held.slot_id
"""

_TRIPS_SQL = """
INSERT INTO flex_trip (slot_id, fence, at, reason, value)
SELECT s.id, r.fence, r.at, r.reason, r.value
FROM unnest(%s::int[], %s::int[], %s::bigint[], %s::timestamptz[], %s::text[], %s::float8[])
     AS r (agent_id, slot_id, fence, at, reason, value)
JOIN fleet_slot s ON s.id = r.slot_id AND s.agent_id = r.agent_id
ORDER BY s.id, r.fence
ON CONFLICT DO NOTHING
"""


def note_slots(cursor: Cursor, rows: Sequence[tuple[int, Sequence[SlotLive]]], now: datetime) -> None:
    """Keeps the instant at which a slot stopped admitting batch; `rows` are (agent id, its slots).

    States are read by the controller from the agent's last report, which the same transaction writes.
    """
    stopped = [
        (agent_id, slot.slot_id, slot.fence, _instant(slot.stop_admit_us))
        for agent_id, slots in rows
        for slot in slots
        if slot.stop_admit_us is not None
    ]
    if stopped:
        cursor.execute(_STOP_ADMIT_SQL, tuple(list(column) for column in zip(*stopped, strict=True)))


def note_trips(cursor: Cursor, rows: Sequence[tuple[int, Sequence[Trip]]], now: datetime) -> None:
    """Keeps each pulled tripwire once per slot and fence; a slot of another agent is left out."""
    trips = [
        (agent_id, trip.slot_id, trip.fence, _instant(trip.at_us), trip.reason[:40].replace("\x00", ""), trip.value)
        for agent_id, said in rows
        for trip in said
    ]
    if trips:
        cursor.execute(_TRIPS_SQL, tuple(list(column) for column in zip(*trips, strict=True)))


def _instant(at_us: int) -> datetime:
    """An agent's clock may say anything; PostgreSQL's instants have bounds."""
    try:
        at = EPOCH + timedelta(microseconds=at_us)
    except OverflowError:
        return _LATEST if at_us > 0 else _EARLIEST
    return min(max(at, _EARLIEST), _LATEST)
