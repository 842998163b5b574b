"""What reports say about batch jobs: which job a request belongs to, and how many of its items are done."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Cursor


@dataclass(frozen=True, slots=True)
class JobRef:
    """A job as records refer to it."""

    id: int
    tenant_id: int
    has_items: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """What a transaction adds to one job; `first_attempt_at` is the earliest start of an attempt it saw.

    `failed` counts requests, not items: a client that retries one may still complete the item. `parked` and
    `cancelled` are items that are rows; for others their client alone knows.
    """

    job_id: int
    completed: int
    failed: int
    gpu_us: int
    first_attempt_at: datetime | None
    parked: int = 0
    cancelled: int = 0
    charge_nanos: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


def resolve(cursor: Cursor[Any], texts: Iterable[str]) -> Mapping[str, JobRef]:
    """The jobs of the UUIDs that records carry; text that is no UUID or no job is missing in the answer."""
    wanted: dict[uuid.UUID, list[str]] = {}
    for text in texts:
        if text and len(text) <= 45:
            try:
                wanted.setdefault(uuid.UUID(text), []).append(text)
            except ValueError:
                continue
    if not wanted:
        return {}
    cursor.execute("SELECT uuid, id, tenant_id, has_items FROM jobs_job WHERE uuid = ANY(%s)", (list(wanted),))
    return {text: JobRef(*row) for key, *row in cursor.fetchall() for text in wanted[key]}


_LOCK_SQL = "SELECT id FROM jobs_job WHERE id = ANY(%s) ORDER BY id FOR UPDATE"
_SQL = """
UPDATE jobs_job j SET
    items_completed = least(j.items, j.items_completed + r.completed),
    items_failed = least(2147483647, j.items_failed::bigint + r.failed)::int,
    gpu_us_done = j.gpu_us_done + r.gpu_us,
    charge_nanos = j.charge_nanos + r.charge_nanos,
    prompt_tokens_done = j.prompt_tokens_done + r.prompt_tokens,
    output_tokens_done = j.output_tokens_done + r.output_tokens,
    items_parked = j.items_parked + r.parked,
    items_cancelled = j.items_cancelled + r.cancelled,
    first_attempt_at = least(j.first_attempt_at, r.first_attempt_at),
    state = CASE WHEN j.state = 'running' AND j.items_completed + r.completed + j.items_parked + r.parked >= j.items
                 THEN 'completed' ELSE j.state END,
    finished_at = CASE WHEN j.finished_at IS NULL
                            AND j.items_completed + r.completed + j.items_parked + r.parked >= j.items
                       THEN %s ELSE j.finished_at END,
    version = j.version + 1
FROM unnest(%s::bigint[], %s::int[], %s::int[], %s::bigint[], %s::timestamptz[], %s::int[], %s::int[], %s::bigint[],
            %s::bigint[], %s::bigint[])
     AS r (id, completed, failed, gpu_us, first_attempt_at, parked, cancelled, charge_nanos, prompt_tokens,
           output_tokens)
WHERE j.id = r.id
"""


def note_progress(cursor: Cursor[Any], rows: Sequence[Progress], now: datetime) -> None:
    """Adds progress to jobs, in id order; a job is finished when every item has completed or was parked.

    Failed requests are counted and finish nothing: whether an item is given up, its client knows alone.
    """
    ordered = sorted(rows, key=lambda row: row.job_id)
    if not ordered:
        return
    cursor.execute(_LOCK_SQL, ([row.job_id for row in ordered],))
    cursor.execute(
        _SQL,
        (
            now,
            [row.job_id for row in ordered],
            [row.completed for row in ordered],
            [row.failed for row in ordered],
            [row.gpu_us for row in ordered],
            [row.first_attempt_at for row in ordered],
            [row.parked for row in ordered],
            [row.cancelled for row in ordered],
            [row.charge_nanos for row in ordered],
            [row.prompt_tokens for row in ordered],
            [row.output_tokens for row in ordered],
        ),
    )
