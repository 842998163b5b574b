"""What reports say about agents and their slots now, many agents in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from psycopg import Cursor

from controlplane.fleet import band_report
from controlplane.wire.report import LiveFigures


class LiveRow(msgspec.Struct, frozen=True):
    """The last word of one agent. `figures` None leaves those of the report before."""

    agent_id: int
    epoch: int
    seq: int
    revision: int
    live_number: int
    refused_revision: int | None
    refused_reason: str
    clock_offset_us: int
    figures: LiveFigures | None


_SQL = """
INSERT INTO fleet_agentlive AS live
    (agent_id, epoch, seq, reported_at, revision, live_number, refused_revision, refused, clock_offset_us, figures,
     band, band_epoch, band_seq)
SELECT r.agent_id, r.epoch, r.seq, %s, r.revision, r.live_number, r.refused_revision, r.refused, r.clock_offset_us,
       coalesce(r.figures::jsonb, '{}'::jsonb), r.band, r.epoch, r.seq
FROM unnest(%s::int[], %s::int[], %s::bigint[], %s::int[], %s::bigint[], %s::int[], %s::text[], %s::bigint[],
            %s::text[], %s::bytea[])
     AS r (agent_id, epoch, seq, revision, live_number, refused_revision, refused, clock_offset_us, figures, band)
ON CONFLICT (agent_id) DO UPDATE SET
    epoch = EXCLUDED.epoch, seq = EXCLUDED.seq, reported_at = EXCLUDED.reported_at, revision = EXCLUDED.revision,
    live_number = EXCLUDED.live_number, refused_revision = EXCLUDED.refused_revision, refused = EXCLUDED.refused,
    clock_offset_us = EXCLUDED.clock_offset_us,
    figures = CASE WHEN EXCLUDED.figures = '{}'::jsonb THEN live.figures ELSE EXCLUDED.figures END,
    band = CASE WHEN EXCLUDED.figures <> '{}'::jsonb THEN EXCLUDED.band
                WHEN (live.band_epoch, live.band_seq) = (live.epoch, live.seq) THEN live.band END,
    band_epoch = EXCLUDED.band_epoch, band_seq = EXCLUDED.band_seq
WHERE (EXCLUDED.epoch, EXCLUDED.seq) > (live.epoch, live.seq)
"""


def note_live(cursor: Cursor[Any], rows: Sequence[LiveRow], now: datetime) -> None:
    """Overwrites the live row of each agent, unless a later report of it was noted before."""
    newest: dict[int, LiveRow] = {}
    for row in rows:
        known = newest.get(row.agent_id)
        if known is None or (row.epoch, row.seq) > (known.epoch, known.seq):
            newest[row.agent_id] = row
    ordered = [newest[agent_id] for agent_id in sorted(newest)]
    if not ordered:
        return
    cursor.execute(
        _SQL,
        (
            now,
            [row.agent_id for row in ordered],
            [row.epoch for row in ordered],
            [row.seq for row in ordered],
            [row.revision for row in ordered],
            [row.live_number for row in ordered],
            [row.refused_revision for row in ordered],
            [row.refused_reason[:500].replace("\x00", "") for row in ordered],
            [row.clock_offset_us for row in ordered],
            [_figures(row.figures) for row in ordered],
            [None if row.figures is None else band_report.pack(row.figures) for row in ordered],
        ),
    )


def _figures(figures: LiveFigures | None) -> str | None:
    # PostgreSQL has no zero character in JSON
    return None if figures is None else msgspec.json.encode(figures).decode().replace("\\u0000", "\\ufffd")
