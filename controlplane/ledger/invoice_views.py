"""Provider invoices in the browser: hand a file over, choose its columns, see what it says, take it, withdraw it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone

from controlplane.audit.actors import Actor, actor_of
from controlplane.core.reconcile import InvoiceCategory
from controlplane.ledger import period_queries
from controlplane.ledger.invoice_columns import (
    COLUMN_FIELDS,
    FORMATS,
    NEEDED,
    ColumnMap,
    UnknownColumns,
    guessed_columns,
)
from controlplane.ledger.invoice_mappings import TITLES, Columns, columns_of, save_mapping
from controlplane.ledger.invoice_preview import Preview, preview, raw_lines
from controlplane.ledger.invoice_reading import FileRefused, RefusedLine
from controlplane.ledger.invoice_uploads import (
    BYTES_MOST,
    KEPT,
    LINES_MOST,
    checked_month,
    find_upload,
    keep_upload,
    stream_of,
)
from controlplane.ledger.invoices import (
    ExchangeRate,
    Imported,
    LinesRefused,
    import_invoice,
    totals,
    withdraw_invoice,
)
from controlplane.ledger.late_invoices import landings, lands_in, late_month_of
from controlplane.ledger.models import Invoice, InvoiceLine, InvoiceMapping, InvoiceUpload
from controlplane.ledger.reconciliation import month_window
from controlplane.tenants.access import may, requires
from controlplane.tenants.models import Installation
from controlplane.tenants.queries import installation

INVOICES_SHOWN = 200
LINES_SHOWN = 100
REFUSED_SHOWN = 100
OWN = "mapped"
"""The choice of a format for columns that are chosen on the page."""
SAVED = "saved:"
FORMAT_TITLES = {"focus": "FOCUS", "azure": "Azure cost export", "aws": "AWS cost and usage report"}


def _errors(error: ValidationError) -> list[dict[str, str]]:
    fields = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
    return [{"field": name, "text": text} for name, texts in fields.items() for text in texts]


@requires("finance.read", write="finance.write")
def invoices_page(request: HttpRequest) -> HttpResponseBase:
    """What was taken, by month; a POST hands a file over to look through."""
    book, now = installation(), timezone.now()
    errors: list[dict[str, str]] = []
    if request.method == "POST":
        try:
            upload = keep_upload(
                request.FILES.get("file"), request.POST.get("period", ""), actor=actor_of(request), now=now
            )
        except ValidationError as error:
            errors = _errors(error)
        else:
            return redirect("invoice-upload", upload.pk)
    writes = may(request.user, "finance.write")
    months = period_queries.months(now)
    invoices = list(Invoice.objects.order_by("-period", "-id")[:INVOICES_SHOWN])
    context = {
        "now": now, "zone": book.billing_zone, "currency": book.currency, "errors": errors, "may_write": writes,
        "months": months, "chosen": request.POST.get("period") or _month_before(months), "nav_section": "finance",
        "invoices": invoices, "late": landings(invoices),
        "waiting": InvoiceUpload.objects.defer("content").order_by("-uploaded_at") if writes else [],
        "bytes_most": BYTES_MOST, "lines_most": LINES_MOST,
        "mappings": InvoiceMapping.objects.order_by("name")[:INVOICES_SHOWN],
    }  # fmt: skip
    return render(request, "ledger/invoices.html", context, status=400 if errors else 200)


def _month_before(months: list[Any]) -> str:
    return months[min(1, len(months) - 1)].name if months else ""


@dataclass(frozen=True)
class Choices:
    """What the form of a waiting file says; what it was handed over with until it says something."""

    period: str
    format: str = "auto"
    columns: Columns = field(default_factory=lambda: Columns({}))
    words: str = ""
    currency: str = ""
    rate: str = ""
    rate_day: str = ""
    save_as: str = ""

    @classmethod
    def of_form(cls, given: Mapping[str, str], period: str) -> "Choices":
        """Raises nothing: what is wrong is found when it is used."""

        def text(name: str) -> str:
            return given.get(name, "").replace("\x00", "").strip()

        chosen = {fact: (text(f"column_{fact}"),) for fact in COLUMN_FIELDS if text(f"column_{fact}")}
        columns = Columns(
            chosen, _words(text("categories")), text("provider_name"), text("fixed_currency").upper(),
            text("decimal_mark"), text("day_order"),
        )  # fmt: skip
        return cls(
            text("period") or period, text("format") or "auto", columns, text("categories"), text("currency"),
            text("rate"), text("rate_day"), text("save_as"),
        )  # fmt: skip

    def exchange(self) -> ExchangeRate | None:
        """Raises ValidationError on `rate`."""
        if not self.rate and not self.rate_day:
            return None
        try:
            return ExchangeRate.of_text(self.rate, self.rate_day)
        except ValueError as error:
            raise ValidationError({"rate": f"{error}."}) from None

    def reader(self) -> tuple[str, ColumnMap | None]:
        """Format and columns for reading. Raises ValidationError by field."""
        if self.format == OWN:
            return "auto", self.columns.as_map()
        if self.format.startswith(SAVED):
            return "auto", columns_of(self.saved()).as_map()
        if self.format not in ("auto", *FORMATS):
            raise ValidationError({"format": "Choose a format of the list."})
        return self.format, None

    def saved(self) -> InvoiceMapping:
        row = InvoiceMapping.objects.filter(name=self.format.removeprefix(SAVED)).first()
        if row is None:
            raise ValidationError({"format": "This mapping is not there any more. Choose another."})
        return row

    def mapping(self, actor: Actor, now: datetime) -> str:
        """Name of the mapping to import with; chosen columns are saved under theirs. Raises ValidationError."""
        if self.format == OWN:
            return save_mapping(self.save_as, self.columns, actor=actor, now=now).name
        return self.saved().name if self.format.startswith(SAVED) else ""


def _words(text: str) -> dict[str, str]:
    pairs = (line.rpartition("=") for line in text.splitlines() if line.strip())
    return {word.strip(): value.strip().lower() for word, _, value in pairs}


@requires("finance.write")
def upload_page(request: HttpRequest, upload_id: UUID) -> HttpResponseBase:
    """A file before it is taken. A POST looks again with other choices, takes it, or discards it."""
    now = timezone.now()
    upload = find_upload(upload_id, now)
    if upload is None:
        raise Http404("This file was imported, discarded, or waited for more than a day.")
    if "discard" in request.POST:
        upload.delete()
        messages.info(request, f"Discarded {upload.file_name}. Nothing of it was taken.")
        return redirect("invoices")
    choices = Choices.of_form(request.POST.dict(), upload.period)
    errors: list[dict[str, str]] = []
    refused: tuple[RefusedLine, ...] = ()
    if "import" in request.POST:
        try:
            done = _take(upload, choices, actor_of(request), now)
        except ValidationError as error:
            errors = _errors(error)
        except LinesRefused as error:
            errors, refused = [{"field": "", "text": f"{error}."}], tuple(error.refused)
        else:
            return _taken(request, upload, done)
    return _show(request, upload, choices, errors, refused)


def _take(upload: InvoiceUpload, choices: Choices, actor: Actor, now: datetime) -> Imported:
    period = checked_month(choices.period)
    exchange, (format, _) = choices.exchange(), choices.reader()
    mapping = choices.mapping(actor, now)
    try:
        return import_invoice(
            stream_of(upload), file_name=upload.file_name, period=period, actor=actor, now=now, format=format,
            mapping=mapping, currency=choices.currency, exchange=exchange,
        )  # fmt: skip
    except (FileRefused, UnknownColumns) as error:
        raise ValidationError(str(error)) from None


def _taken(request: HttpRequest, upload: InvoiceUpload, done: Imported) -> HttpResponseBase:
    upload.delete()
    if done.repeated:
        messages.info(request, "This file was imported before; nothing was added.")
    else:
        messages.success(request, f"Imported {done.invoice.lines_count:,} lines for {done.invoice.period}.")
        if month := lands_in(done.invoice):
            messages.warning(request, f"{done.invoice.period} is closed: book the variance in {month}.")
    if done.repeated_ids:
        messages.warning(request, f"Line ids that stand there twice, both kept: {', '.join(done.repeated_ids[:10])}.")
    return redirect("invoice", done.invoice.pk)


def _show(
    request: HttpRequest,
    upload: InvoiceUpload,
    choices: Choices,
    errors: list[dict[str, str]],
    refused: tuple[RefusedLine, ...],
) -> HttpResponse:
    book = installation()
    found: Preview | None = None
    problem = ""
    try:
        found = _preview(upload, choices, book)
    except ValidationError as error:
        errors = errors or _errors(error)
    except (FileRefused, UnknownColumns) as error:
        problem = str(error)
    header, raw = raw_lines(stream_of(upload))
    shown = _shown_columns(choices, found, header)
    foreign = sorted(found.currencies - {"", book.currency}) if found else []
    context = {
        "upload": upload, "kept_until": upload.uploaded_at + KEPT, "choices": choices,
        "errors": errors, "problem": problem, "found": found, "raw": raw,
        "header": header, "refused": (list(refused) or (found.reading.refused if found else []))[:REFUSED_SHOWN],
        "currency": book.currency, "zone": book.billing_zone, "months": period_queries.months(timezone.now()),
        "formats": _formats(), "own": OWN, "foreign": foreign,
        "facts": [_fact(name, shown) for name in COLUMN_FIELDS],
        "format_shown": OWN if problem and choices.format == "auto" else choices.format,
        "unnamed": bool(found and "" in found.currencies), "categories": [str(each) for each in InvoiceCategory],
        "ready": bool(found and found.lines and not found.refused_count), "nav_section": "finance",
        "lands_in": late_month_of(choices.period),
    }  # fmt: skip
    status = 400 if errors and request.method == "POST" else 200
    return render(request, "ledger/invoice_upload.html", context, status=status)


def _preview(upload: InvoiceUpload, choices: Choices, book: Installation) -> Preview:
    window = month_window(checked_month(choices.period), book.billing_zone)
    format, columns = choices.reader()
    return preview(stream_of(upload), window=window, zone=book.billing_zone, format=format, columns=columns)


def _formats() -> list[tuple[str, str]]:
    saved = InvoiceMapping.objects.order_by("name").values_list("name", flat=True)
    return [
        ("auto", "By its header"),
        *((name, FORMAT_TITLES.get(name, name)) for name in FORMATS),
        *((f"{SAVED}{name}", f"Mapping {name}") for name in saved),
        (OWN, "Columns chosen here"),
    ]


def _shown_columns(choices: Choices, found: Preview | None, header: list[str]) -> dict[str, str]:
    """Header of each fact's column: as chosen, as the format was understood, or by the names that formats use."""
    if choices.format == OWN:
        return {fact: names[0] for fact, names in choices.columns.columns.items() if names}
    if found is not None:
        return {fact: header[places[0]] for fact, places in found.reading.places.items() if places}
    return guessed_columns(header)


def _fact(name: str, shown: Mapping[str, str]) -> dict[str, Any]:
    return {"name": name, "title": TITLES[name], "needed": name in NEEDED, "chosen": shown.get(name, "")}


@requires("finance.read", write="finance.write")
def invoice_page(request: HttpRequest, pk: int) -> HttpResponseBase:
    """One invoice with its sums and largest lines; a POST withdraws it."""
    invoice = get_object_or_404(Invoice.objects.select_related("mapping"), pk=pk)
    errors: list[dict[str, str]] = []
    if request.method == "POST":
        try:
            withdraw_invoice(pk, actor=actor_of(request), now=timezone.now(), reason=request.POST.get("reason", ""))
        except ValidationError as error:
            errors = _errors(error)
        else:
            messages.success(request, "Withdrawn: it counts nowhere. Its lines stay readable here.")
            return redirect("invoice", pk)
    book = installation()
    context = {
        "invoice": invoice, "sums": totals(invoice), "errors": errors, "given": request.POST,
        "zone": book.billing_zone, "book_currency": book.currency, "state": period_queries.state_of(invoice.period),
        "lands_in": lands_in(invoice) if invoice.state == Invoice.State.CURRENT else "",
        "lines": InvoiceLine.objects.filter(invoice=invoice).order_by("-billed", "id")[:LINES_SHOWN],
        "may_write": may(request.user, "finance.write"), "nav_section": "finance",
        "format_title": FORMAT_TITLES.get(invoice.format, "Mapped CSV"),
    }  # fmt: skip
    return render(request, "ledger/invoice.html", context, status=400 if errors else 200)
