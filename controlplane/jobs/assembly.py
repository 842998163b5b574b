"""When a job is done: its results in the order of its input, in a file of answers and a file of failures.

Written under names that its finalising instant gives, published whole, entered in one transaction: a process that is
killed leaves nothing that anyone sees, and the next one writes the same files again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.db import connection, transaction

from controlplane.core.batch_items import ItemState
from controlplane.jobs.batch_turn import alone
from controlplane.jobs.models import Batch, Job, StoredFile
from controlplane.jobs.storage import Writing, Written
from controlplane.jobs.uploads import file_expiry

PAGE_LINES: Final = 2_000
FIRST_PAGE_LINES: Final = 50
PAGE_BYTES: Final = 8 * 1024 * 1024

ENDS: Final = {
    Job.State.COMPLETED: (Batch.State.COMPLETED, "completed_at"),
    Job.State.CANCELLED: (Batch.State.CANCELLED, "cancelled_at"),
    Job.State.EXPIRED: (Batch.State.EXPIRED, "expired_at"),
}
"""State of a job that ended -> that of its batch once its files are there, and the column of that instant."""
_UNDONE: Final = {
    Job.State.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request ended."),
    Job.State.EXPIRED: ("batch_expired", "This request could not be run before the batch expired."),
}


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    state: int
    reason: str
    custom_id: str
    request_id: uuid.UUID | None
    status: int | None
    response: bytes | None


def begin(batch_id: int, now: datetime) -> bool:
    """Marks a batch whose job ended, and of which nobody runs an item, as being assembled."""
    with transaction.atomic():
        batch = Batch.objects.select_for_update(of=("self",)).select_related("job").get(pk=batch_id)
        if batch.state not in (Batch.State.IN_PROGRESS, Batch.State.CANCELLING) or batch.job is None:
            return False
        if batch.job.state not in ENDS or _is_open(batch.job):
            return False
        state = Batch.State.FINALIZING if batch.job.state != Job.State.CANCELLED else batch.state
        Batch.objects.filter(pk=batch_id).update(state=state, finalizing_at=now)
    return True


def _is_open(job: Job) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT 1 FROM jobs_item WHERE day = %s AND job_id = %s AND state IN (0, 1))",
            (job.day, job.pk),
        )
        return bool(cursor.fetchone()[0])


def assemble(batch_id: int, now: datetime) -> bool:
    """Writes and publishes the files of a batch that is being assembled, and ends it. False: nothing to do, or another
    process is at it.
    """
    with alone(batch_id) as free:
        return free and _assemble(batch_id, now)


def _assemble(batch_id: int, now: datetime) -> bool:
    batch = Batch.objects.select_related("job", "tenant", "input_file").filter(pk=batch_id).first()
    if batch is None or batch.finalizing_at is None or batch.job is None or batch.state not in _ASSEMBLED:
        return False
    stem = f"{batch.tenant_id}/{batch.uuid}/{batch.finalizing_at:%Y%m%dT%H%M%S%f}"
    undone = _UNDONE.get(Job.State(batch.job.state))
    paths = f"{stem}-output.jsonl", f"{stem}-errors.jsonl"
    with Writing(paths[0]) as output, Writing(paths[1]) as errors:
        for page in _pages(batch.job):
            output.write(b"".join(_answer(batch, row) for row in page if row.state == ItemState.DONE))
            errors.write(b"".join(_failure(batch, row, undone) for row in page if row.state != ItemState.DONE))
        written = output.finish(), errors.finish()
    _enter(batch, paths, written, now)
    return True


_ASSEMBLED: Final = (Batch.State.FINALIZING, Batch.State.CANCELLING)
# LATERAL with OFFSET 0: each line looks up its own body and result, so that no plan joins whole tables for a page.
_PAGE_SQL = """
SELECT i.line, i.state, i.reason, b.custom_id, r.request_id, r.status, r.response
FROM (SELECT * FROM jobs_item WHERE day = %(day)s AND job_id = %(job)s AND line > %(after)s
      ORDER BY line LIMIT %(limit)s) i
CROSS JOIN LATERAL (SELECT custom_id FROM jobs_itembody
                    WHERE day = %(day)s AND job_id = %(job)s AND line = i.line OFFSET 0) b
LEFT JOIN LATERAL (SELECT request_id, status, response FROM jobs_itemresult
                   WHERE day = %(day)s AND job_id = %(job)s AND line = i.line OFFSET 0) r ON true
ORDER BY i.line
"""


def _pages(job: Job) -> Iterator[list[_Row]]:
    """Pages of about PAGE_BYTES: each is as long as the answers of the page before it let it be."""
    after, limit = -1, FIRST_PAGE_LINES
    while True:
        with connection.cursor() as cursor:
            cursor.execute(_PAGE_SQL, {"day": job.day, "job": job.pk, "after": after, "limit": limit})
            rows = [_Row(*row) for row in cursor.fetchall()]
        if not rows:
            return
        yield rows
        after = rows[-1].line
        size = sum(len(row.response or b"") for row in rows)
        limit = max(1, min(PAGE_LINES, 4 * limit, PAGE_BYTES * len(rows) // max(1, size)))


def _answer(batch: Batch, row: _Row) -> bytes:
    return _line(batch, row, _response(row), b"null")


def _failure(batch: Batch, row: _Row, undone: tuple[str, str] | None) -> bytes:
    if row.state == ItemState.PARKED:
        code, message = "request_failed", row.reason or "Every attempt failed."
    else:
        code, message = undone or ("not_run", "This request was not run.")
    error = json.dumps({"code": code, "message": message}).encode()
    has_answer = row.status and row.response not in (None, b"null")
    return _line(batch, row, _response(row) if has_answer else b"null", error)


def _response(row: _Row) -> bytes:
    # the body is the engine's own document: it goes through unread
    return b'{"status_code":%d,"request_id":"%s","body":%s}' % (
        row.status or 0,
        str(row.request_id).encode(),
        bytes(row.response or b"null"),
    )


def _line(batch: Batch, row: _Row, response: bytes, error: bytes) -> bytes:
    # what was never run has no request: its line of the batch names it, the same each time its files are written
    name = (row.request_id or uuid.uuid5(batch.uuid, str(row.line))).hex
    return b'{"id":"batch_req_%s","custom_id":%s,"response":%s,"error":%s}\n' % (
        name.encode(),
        json.dumps(row.custom_id).encode(),
        response,
        error,
    )


def _enter(batch: Batch, paths: tuple[str, str], written: tuple[Written, Written], now: datetime) -> None:
    assert batch.job is not None
    state, column = ENDS[Job.State(batch.job.state)]
    with transaction.atomic():
        held = Batch.objects.select_for_update(of=("self",)).get(pk=batch.pk)
        if held.finalizing_at != batch.finalizing_at or held.state not in _ASSEMBLED:
            return
        output = _file(batch, paths[0], written[0], "output", now)
        errors = _file(batch, paths[1], written[1], "errors", now)
        Batch.objects.filter(pk=batch.pk).update(state=state, output_file=output, error_file=errors, **{column: now})


def _file(batch: Batch, path: str, written: Written, name: str, now: datetime) -> StoredFile | None:
    """The row of a file that was written; an empty one has none, as OpenAI's form has it."""
    if not written.size_bytes:
        return None
    row, _ = StoredFile.objects.update_or_create(
        path=path,
        defaults={
            "tenant": batch.tenant, "purpose": StoredFile.Purpose.BATCH_OUTPUT,
            "filename": f"batch_{batch.uuid.hex}_{name}.jsonl", "size_bytes": written.size_bytes,
            "lines": written.lines, "digest": written.digest, "created_by": batch.created_by, "created_at": now,
            "ready_at": now, "expires_at": file_expiry(now),
        },
    )  # fmt: skip
    return row
