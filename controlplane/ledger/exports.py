"""Which file a month's export is: the kept bytes of a closing, or made now from an open month; long ones as jobs."""

import hashlib
import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.ledger.export_files import FORMATS, ExportFile, TooManyRows, build
from controlplane.ledger.export_rows import export_rows, row_count
from controlplane.ledger.focus_export import FocusFacts
from controlplane.ledger.models import ExportJob, Period, PeriodExport
from controlplane.ledger.reconciliation import month_window
from controlplane.tenants.models import Installation

log = logging.getLogger(__name__)

ROWS_AT_ONCE = 20_000
"""More rows than this are a job with progress, not an answer that somebody waits for."""
LOST_AFTER = timedelta(minutes=15)
KEPT = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class MonthFile:
    """A file of a month. `closed`: its bytes were kept at a closing."""

    name: str
    content: bytes
    rows: int
    closed: bool


class Damaged(RuntimeError):
    """Kept bytes have another digest than on the day they were made."""


def export_file(period: str, format: str, *, version: int = 0) -> MonthFile:
    """The file of a month in a format; `version` 0 is the last closing, or the present state of an open month.

    Raises ValueError for what is no month, format or closing, TooManyRows for a month that no file holds.
    """
    kept = kept_export(period, format, version)
    if kept is not None:
        return kept
    made = _build(period, format)
    return MonthFile(made.name, made.content, made.rows, closed=False)


def kept_export(period: str, format: str, version: int = 0) -> MonthFile | None:
    """The bytes of a closing; None for an open month. Raises ValueError for a closing that there is not."""
    _check(period, format)
    wanted = version
    if not wanted:
        row = Period.objects.filter(name=period, state=Period.State.CLOSED).first()
        if row is None:
            return None
        wanted = row.version
    found = PeriodExport.objects.filter(version__period_id=period, version__version=wanted, format=format).first()
    if found is None:
        raise ValueError(f"{period} has no closing {wanted}")
    content = bytes(found.content)
    if hashlib.sha256(content).hexdigest() != found.sha256:
        raise Damaged(f"{found.file_name} is not what was kept: restore it from a backup")
    return MonthFile(found.file_name, content, found.rows, closed=True)


def is_long(period: str) -> bool:
    """Whether an open month has so many rows that its export is a job."""
    return row_count(period) > ROWS_AT_ONCE


def _check(period: str, format: str) -> None:
    book = Installation.objects.get(pk=1)
    month_window(period, book.billing_zone)
    if format not in FORMATS:
        raise ValueError(f"{format[:20]!r} is not a format: choose {', '.join(FORMATS)}")


def _build(period: str, format: str, job: ExportJob | None = None) -> ExportFile:
    book = Installation.objects.get(pk=1)
    window = month_window(period, book.billing_zone)
    facts = FocusFacts(book.name, window, book.billing_zone, 0)
    rows = export_rows(period, window, book.billing_zone, book.currency)

    def progress(done: int) -> None:
        if job is not None:
            ExportJob.objects.filter(pk=job.pk).update(rows_done=done)

    return build(format, rows, facts, period, progress)


def ask_export(period: str, format: str, *, actor: Actor, now: datetime) -> ExportJob:
    """Writes down that an export is wanted; the caller rings after the commit. Raises ValueError as `export_file`."""
    _check(period, format)
    with transaction.atomic():
        job = ExportJob.objects.create(
            period=period, format=format, asked_at=now, asked_by=actor.name, rows_total=row_count(period)
        )
        record(
            actor=actor, action="export.ask", noun="export", object_id=job.pk, now=now,
            after={"period": period, "format": format},
        )  # fmt: skip
    return job


def run_export(job_id: int, *, now: datetime) -> bool:
    """Makes one export that is asked for, or was lost by a worker; False when there is nothing to do."""
    with transaction.atomic():
        free = Q(state=ExportJob.State.WAITING) | Q(state=ExportJob.State.RUNNING, started_at__lt=now - LOST_AFTER)
        job = ExportJob.objects.select_for_update(skip_locked=True).filter(free, pk=job_id).first()
        if job is None:
            return False
        job.state, job.started_at, job.rows_done = ExportJob.State.RUNNING, now, 0
        job.save(update_fields=["state", "started_at", "rows_done"])
    try:
        made = _build(job.period, job.format, job)
    except TooManyRows as error:
        _end(job, ExportJob.State.FAILED, now, problem=f"{error}."[:400])
    except Exception:
        log.exception("export %s failed", job.pk)
        _end(job, ExportJob.State.FAILED, now, problem="It could not be made. The log of the worker says why.")
        raise
    else:
        job.file_name, job.content, job.rows_done = made.name, made.content, made.rows
        job.sha256 = hashlib.sha256(made.content).hexdigest()
        _end(job, ExportJob.State.DONE, now)
    return True


def _end(job: ExportJob, state: ExportJob.State, now: datetime, problem: str = "") -> None:
    job.state, job.ended_at, job.problem = state, now, problem
    job.save(update_fields=["state", "ended_at", "problem", "file_name", "content", "rows_done", "sha256"])


def waiting_exports(now: datetime) -> list[int]:
    """Exports that nobody works on; old ones are removed on the way."""
    ExportJob.objects.filter(asked_at__lt=now - KEPT).delete()
    free = Q(state=ExportJob.State.WAITING) | Q(state=ExportJob.State.RUNNING, started_at__lt=now - LOST_AFTER)
    return list(ExportJob.objects.filter(free).order_by("id").values_list("id", flat=True)[:10])
