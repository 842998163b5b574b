"""From a file to rows: checked line by line and copied in chunks, each its own transaction with how far it came.

A process that is killed loses at most a chunk that was not committed; who comes next begins at the last commit. Two at
once do no harm: a chunk is taken only at the offset where the one before it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import connection, transaction

from controlplane.audit.actors import Actor
from controlplane.contracts.models import WorkloadClass
from controlplane.core.job_admission import IfLate
from controlplane.jobs import storage
from controlplane.jobs.actions import JobOrder, create_job
from controlplane.jobs.admitting import DEADLINE_CODE, MONEY_CODE, Bounds, NotAdmitted, admit
from controlplane.jobs.batch_lines import (
    BadLine,
    LineRules,
    Numbered,
    Request,
    doubled,
    doubled_lines,
    parse,
    split,
)
from controlplane.jobs.batch_turn import alone
from controlplane.jobs.item_partitions import analyse, create_day, day_of
from controlplane.jobs.models import Batch, Job

CHUNK_LINES: Final = 5_000
CHUNK_BYTES: Final = 4 * 1024 * 1024
ERRORS_MOST: Final = 100
IMPORTER: Final = Actor.system("batch import")


@dataclass
class Chunk:
    """Lines that were read together, split into what can be run and what cannot."""

    start: int
    end: int
    last_line: int
    requests: list[Request] = field(default_factory=list)
    errors: list[BadLine] = field(default_factory=list)


class _Elsewhere(Exception):
    """Another process took this batch further, or ended it."""


def import_batch(batch_id: int, now: datetime, *, chunks_most: int = 10_000) -> bool:
    """Imports a batch that is validating, from where it stands; True when there is more to do after `chunks_most`.

    At its end the batch is in progress, or failed with the errors of its lines. While another process imports it,
    nothing is done.
    """
    with alone(batch_id) as free:
        return free and _import_all(batch_id, now, chunks_most)


def _import_all(batch_id: int, now: datetime, chunks_most: int) -> bool:
    batch = Batch.objects.select_related("input_file", "tenant").filter(pk=batch_id).first()
    if batch is None or batch.state != Batch.State.VALIDATING:
        return False
    row = WorkloadClass.objects.get(slug=batch.class_slug)
    with connection.cursor() as cursor:
        create_day(cursor, day_of(now))
    try:
        more = _import(batch, row, now, chunks_most)
        if not more:
            _finish(batch, row, now)
    except _Elsewhere:
        return False
    except FileNotFoundError:
        fail(batch, [BadLine(0, "file_missing", "The input file is gone. Upload it again.")], now)
        return False
    return more


def _import(batch: Batch, row: WorkloadClass, now: datetime, chunks_most: int) -> bool:
    pieces = storage.read(batch.input_file.path, batch.imported_bytes)
    lines = split(pieces, number=batch.imported_lines, offset=batch.imported_bytes)
    model = batch.job.pool.model.name if batch.job else None
    rules = LineRules(batch.endpoint, model, row.max_output_tokens)
    chunk = Chunk(batch.imported_bytes, batch.imported_bytes, batch.imported_lines)
    size = chunks = 0
    for line in lines:
        _take(chunk, line, rules)
        size += len(line.text)
        if rules.model is None and chunk.requests:
            rules = LineRules(rules.endpoint, chunk.requests[0].model, rules.max_output_tokens)
        if len(chunk.requests) >= CHUNK_LINES or size >= CHUNK_BYTES or len(chunk.errors) >= ERRORS_MOST:
            _store(batch, row, chunk, now)
            chunks += 1
            if len(batch.errors) >= ERRORS_MOST:
                return False
            if chunks >= chunks_most:
                return True
            chunk, size = Chunk(chunk.end, chunk.end, chunk.last_line), 0
    if chunk.end > chunk.start:
        _store(batch, row, chunk, now)
    return False


def _take(chunk: Chunk, line: Numbered, rules: LineRules) -> None:
    found = parse(line.number, line.text, rules)
    if isinstance(found, BadLine):
        chunk.errors.append(found)
    else:
        chunk.requests.append(found)
    chunk.end, chunk.last_line = line.end, line.number


def _store(batch: Batch, row: WorkloadClass, chunk: Chunk, now: datetime) -> None:
    """Commits a chunk. Raises _Elsewhere when the batch does not stand where the chunk begins."""
    with transaction.atomic():
        held = Batch.objects.select_for_update(of=("self",)).get(pk=batch.pk)
        if held.state != Batch.State.VALIDATING or held.imported_bytes != chunk.start:
            raise _Elsewhere
        errors = [*held.errors, *map(asdict, chunk.errors)][:ERRORS_MOST]
        job = held.job
        if not errors and chunk.requests:
            try:
                job = job or _make_job(batch, row, chunk.requests[0], now)
                _copy(job, chunk.requests)
            except ValidationError as error:
                # nothing of this batch can run: what its first line asks for, nobody serves
                errors = [_refusal(error, chunk.requests[0].line)]
        asked = held.asked_output_tokens + sum(
            min(request.output_tokens or row.default_output_tokens, row.max_output_tokens) for request in chunk.requests
        )
        Batch.objects.filter(pk=batch.pk).update(
            job=job, imported_bytes=chunk.end, imported_lines=chunk.last_line, errors=errors,
            imported_items=held.imported_items + len(chunk.requests),
            prompt_tokens=held.prompt_tokens + sum(request.prompt_tokens for request in chunk.requests),
            asked_output_tokens=asked,
            prompt_bytes=held.prompt_bytes + sum(len(request.body) for request in chunk.requests),
            output_bound_tokens=held.output_bound_tokens + sum(_output_bound(each, row) for each in chunk.requests),
        )  # fmt: skip
    batch.refresh_from_db()


def _output_bound(request: Request, row: WorkloadClass) -> int:
    """The most output tokens that a line can be answered with, all its answers together."""
    if request.output_tokens is not None:
        return request.output_tokens
    return request.outputs * min(row.default_output_tokens, row.max_output_tokens)


def _refusal(error: ValidationError, line: int) -> dict[str, object]:
    messages = error.message_dict if hasattr(error, "error_dict") else {"batch": error.messages}
    param, texts = next(iter(messages.items()))
    param = {"model": "body.model"}.get(param, param)
    return asdict(BadLine(line, f"invalid_{param.rpartition('.')[2]}", " ".join(texts), param))


def _make_job(batch: Batch, row: WorkloadClass, first: Request, now: datetime) -> Job:
    order = JobOrder(
        class_slug=batch.class_slug,
        items=batch.input_file.lines,
        prompt_tokens=min(first.prompt_tokens, row.max_prompt_tokens),
        expected_output_tokens=min(first.output_tokens or row.default_output_tokens, row.max_output_tokens),
        name=str(batch.metadata.get("name", "")) or batch.input_file.filename[:120],
        pool=batch.pool_slug,
        model=first.model,
        deadline=batch.deadline,
        best_effort=batch.deadline is None,
    )
    return create_job(tenant=batch.tenant, order=order, actor=IMPORTER, now=now, batch=batch)


_ITEMS_SQL = "COPY jobs_item (day, job_id, line, prompt_tokens) FROM STDIN (FORMAT BINARY)"
_BODIES_SQL = "COPY jobs_itembody (day, job_id, line, custom_id, body) FROM STDIN (FORMAT BINARY)"


def _copy(job: Job, requests: Sequence[Request]) -> None:
    day, job_id = job.day, job.pk
    with connection.cursor() as cursor:
        with cursor.copy(_ITEMS_SQL) as copy:
            copy.set_types(["date", "int8", "int4", "int4"])
            for request in requests:
                copy.write_row((day, job_id, request.line, request.prompt_tokens))
        with cursor.copy(_BODIES_SQL) as copy:
            copy.set_types(["date", "int8", "int4", "text", "bytea"])
            for request in requests:
                copy.write_row((day, job_id, request.line, request.custom_id, request.body))


_DOUBLE_SQL = """
WITH doubled AS (
    SELECT custom_id, min(line) AS first FROM jobs_itembody WHERE day = %(day)s AND job_id = %(job)s
    GROUP BY custom_id HAVING count(*) > 1 ORDER BY 2 LIMIT %(most)s
)
SELECT b.line, d.custom_id, d.first FROM jobs_itembody b JOIN doubled d USING (custom_id)
WHERE b.day = %(day)s AND b.job_id = %(job)s AND b.line > d.first ORDER BY b.line LIMIT %(most)s
"""


def _finish(batch: Batch, row: WorkloadClass, now: datetime) -> None:
    errors, path = [BadLine(**error) for error in batch.errors], batch.input_file.path
    if not errors and batch.job is None:
        errors = [BadLine(0, "empty_file", "The file holds no request. Write one JSON object a line.")]
    if not errors and batch.job is not None:
        with connection.cursor() as cursor:
            assert batch.job.day is not None
            analyse(cursor, batch.job.day)
            cursor.execute(_DOUBLE_SQL, {"day": batch.job.day, "job": batch.job_id, "most": ERRORS_MOST})
            errors = [doubled(*row) for row in cursor.fetchall()]
    elif 0 < len(errors) < ERRORS_MOST and errors[0].line:
        # not all lines are rows once one of them is bad: what else is wrong stands in the file alone
        known = {error.line for error in errors}
        again = (line for line in doubled_lines(lambda: split(storage.read(path))) if line.line not in known)
        errors = sorted([*errors, *islice(again, ERRORS_MOST)], key=lambda error: error.line)
    if errors:
        fail(batch, errors, now)
        return
    try:
        with transaction.atomic():
            _begin(batch, now)
    except NotAdmitted as refused:
        fail(batch, [BadLine(0, refused.refusal, refused.words, _PARAMS[refused.refusal])], now, refused.arithmetic)


_PARAMS: Final = {DEADLINE_CODE: "metadata.deadline", MONEY_CODE: "input_file_id"}


def _begin(batch: Batch, now: datetime) -> None:
    """Admits the job of a batch whose lines are all in; it runs from now on. Raises NotAdmitted."""
    held = Batch.objects.select_for_update(of=("self",)).get(pk=batch.pk)
    if held.state != Batch.State.VALIDATING:
        return
    assert held.job_id is not None and held.imported_items > 0
    job = Job.objects.select_for_update(of=("self",)).select_related("pool", "workload_class").get(pk=held.job_id)
    if job.state == Job.State.IMPORTING:
        job.items = held.imported_items
        job.prompt_tokens = max(1, held.prompt_tokens // held.imported_items)
        job.expected_output_tokens = held.asked_output_tokens // held.imported_items
        admit(job, if_late=IfLate(held.if_late), bounds=Bounds(held.prompt_bytes, held.output_bound_tokens), now=now)
        job.state = Job.State.RUNNING
        job.save(update_fields=["state", "items", "prompt_tokens", "expected_output_tokens"])
    Batch.objects.filter(pk=batch.pk).update(state=Batch.State.IN_PROGRESS, in_progress_at=now)


def fail(batch: Batch, errors: Sequence[BadLine], now: datetime, arithmetic: dict[str, Any] | None = None) -> None:
    """Ends a batch whose file cannot be run, with what is wrong; the sweep removes the rows of its job.

    `arithmetic` is that of a job that was not admitted.
    """
    with transaction.atomic():
        held = Batch.objects.select_for_update(of=("self",)).get(pk=batch.pk)
        if held.state != Batch.State.VALIDATING:
            return
        Batch.objects.filter(pk=batch.pk).update(
            state=Batch.State.FAILED, failed_at=now, errors=[asdict(error) for error in errors[:ERRORS_MOST]]
        )
        if held.job_id is not None:
            Job.objects.filter(pk=held.job_id).update(state=Job.State.FAILED, finished_at=now, admission=arithmetic)
