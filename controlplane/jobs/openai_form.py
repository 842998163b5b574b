"""Files and batches as the OpenAI client reads them; times are Unix seconds, ids carry their kind."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from controlplane.jobs.models import Batch, Job, StoredFile


def file_form(row: StoredFile) -> dict[str, Any]:
    return {
        "id": file_id(row),
        "object": "file",
        "bytes": row.size_bytes,
        "created_at": _seconds(row.created_at),
        "expires_at": _seconds(row.expires_at),
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
    }


def file_id(row: StoredFile) -> str:
    return f"file-{row.uuid.hex}"


def batch_form(batch: Batch) -> dict[str, Any]:
    """`request_counts` are those of the job: parked items are its failed ones, unknown until the file was read.

    `admission` is not in OpenAI's form: whether the job has its deadline or runs as best effort, with the arithmetic.
    """
    return {
        "id": f"batch_{batch.uuid.hex}",
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": None if batch.job is None else batch.job.pool.model.name,
        "errors": _errors(batch),
        "input_file_id": file_id(batch.input_file),
        "completion_window": batch.completion_window,
        "status": batch.state,
        "output_file_id": None if batch.output_file is None else file_id(batch.output_file),
        "error_file_id": None if batch.error_file is None else file_id(batch.error_file),
        "created_at": _seconds(batch.created_at),
        "in_progress_at": _seconds(batch.in_progress_at),
        "expires_at": _seconds(batch.expires_at),
        "finalizing_at": _seconds(batch.finalizing_at),
        "completed_at": _seconds(batch.completed_at),
        "failed_at": _seconds(batch.failed_at),
        "expired_at": _seconds(batch.expired_at),
        "cancelling_at": _seconds(batch.cancelling_at),
        "cancelled_at": _seconds(batch.cancelled_at),
        "request_counts": _counts(batch.job if batch.in_progress_at else None),
        "metadata": batch.metadata or None,
        "admission": None if batch.job is None else batch.job.admission,
    }


def _counts(job: Job | None) -> dict[str, int]:
    if job is None:
        return {"total": 0, "completed": 0, "failed": 0}
    return {"total": job.items, "completed": job.items_completed, "failed": job.items_parked}


def _errors(batch: Batch) -> dict[str, Any] | None:
    if not batch.errors or batch.state != Batch.State.FAILED:
        return None
    data = [{**error, "line": error["line"] or None} for error in batch.errors]
    return {"object": "list", "data": data}


def page_form(rows: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": rows,
        "first_id": rows[0]["id"] if rows else None,
        "last_id": rows[-1]["id"] if rows else None,
        "has_more": more,
    }


def error_form(message: str, *, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}


def _seconds(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp())
