"""Files that wait in the browser between upload and import: bounded in size, lines and number, gone after a day."""

from datetime import datetime, timedelta
from io import BytesIO
from typing import BinaryIO
from uuid import UUID

from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import UploadedFile
from django.db import transaction

from controlplane.audit.actors import Actor
from controlplane.ledger.invoice_reading import FileRefused, open_text, sample
from controlplane.ledger.invoices import NAME_MOST
from controlplane.ledger.models import InvoiceUpload
from controlplane.ledger.reconciliation import month_window
from controlplane.tenants.models import Installation

KEPT = timedelta(days=1)
UPLOADS_MOST = 20
BYTES_MOST = 32 * 1024 * 1024
LINES_MOST = 200_000
"""A page reads the whole file each time it is looked at; what is larger is taken by the command."""
COMMAND = "Import it with manage.py import_invoice."


def check_size(sent: UploadedFile) -> None:
    """Raises ValidationError on `file` for more bytes than a form or REST takes."""
    if (sent.size or 0) > BYTES_MOST:
        raise ValidationError({"file": f"The file has {sent.size:,} bytes; the most here is {BYTES_MOST:,}. {COMMAND}"})


def check_content(content: bytes) -> None:
    """Raises ValidationError on `file` for what is no CSV, or has more lines than a page reads."""
    lines = content.count(b"\n")
    if lines > LINES_MOST:
        raise ValidationError({"file": f"The file has {lines:,} lines; the most here is {LINES_MOST:,}. {COMMAND}"})
    try:
        text = open_text(BytesIO(content))
        header, _ = sample(text, 1)
        text.detach()
    except FileRefused as error:
        raise ValidationError({"file": f"{error}"}) from None
    if len(header) < 2:
        raise ValidationError(
            {"file": "Its first line is no header of a CSV: columns are separated by commas, semicolons or tabs."}
        )


def checked_month(period: str) -> str:
    """A month's name. Raises ValidationError on `period`."""
    zone = Installation.objects.values_list("billing_zone", flat=True).get(pk=1)
    try:
        return month_window(period, zone).label
    except ValueError as error:
        raise ValidationError({"period": f"{error}."}) from None


def keep_upload(sent: UploadedFile | None, period: str, *, actor: Actor, now: datetime) -> InvoiceUpload:
    """Keeps a file to look through. Raises ValidationError by field: no CSV, too large, too many waiting."""
    period = checked_month(period)
    if sent is None or not sent.size:
        raise ValidationError({"file": "Choose a file with at least a header and one line."})
    check_size(sent)
    content = sent.read()
    check_content(content)
    with transaction.atomic():
        drop_old_uploads(now)
        if InvoiceUpload.objects.count() >= UPLOADS_MOST:
            raise ValidationError({"file": f"{UPLOADS_MOST} files wait to be imported: import or discard some first."})
        name = (sent.name or "invoice.csv").replace("\x00", "")[-NAME_MOST:]
        return InvoiceUpload.objects.create(
            period=period, file_name=name, size_bytes=len(content), content=content, uploaded_at=now,
            uploaded_by=actor.name,
        )  # fmt: skip


def drop_old_uploads(now: datetime) -> int:
    """Removes files that nobody imported within a day; how many."""
    return InvoiceUpload.objects.filter(uploaded_at__lt=now - KEPT).delete()[0]


def stream_of(upload: InvoiceUpload) -> BinaryIO:
    return BytesIO(bytes(upload.content))


def find_upload(upload_id: UUID, now: datetime) -> InvoiceUpload | None:
    """A file that still waits; None for one that was taken, discarded or is too old."""
    return InvoiceUpload.objects.filter(pk=upload_id, uploaded_at__gte=now - KEPT).first()
