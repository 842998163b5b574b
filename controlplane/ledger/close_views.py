"""Pages of the month's end: the invoice bridge, periods with their checklist, proposals, exports."""

from collections.abc import Callable
from datetime import date, datetime
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.core.money import parse_nanos
from controlplane.core.period import Calendar, load_zone, window_at
from controlplane.fleet.models import Pool, Slot
from controlplane.ledger import period_queries, periods, proposals, skus
from controlplane.ledger.bridge_pages import axis_floor, figure, sku_lines, step_rows
from controlplane.ledger.bridging import STEP_TITLES, lines_of_sku, lines_of_step
from controlplane.ledger.checks_of_reports import slot_day_minutes
from controlplane.ledger.closing_checks import UNPRICED_MOST, checklist
from controlplane.ledger.export_files import CONTENT_TYPES, FORMATS, TooManyRows
from controlplane.ledger.exports import ask_export, export_file, is_long, kept_export, waiting_exports
from controlplane.ledger.late_invoices import landings, late_month_of
from controlplane.ledger.models import ExportJob, PlannedExchangeRate, PoolSku, Proposal
from controlplane.ledger.reconciliation import month_window, reconcile
from controlplane.tenants.access import may, requires
from controlplane.tenants.models import Installation
from controlplane.tenants.queries import class_slugs, installation, visible_tenants
from controlplane.tenants.tenant_field import tenant_input
from controlplane.wakeups.bells import ring

MINUTES_SHOWN = 200
WAITING_MOST = 10
UNMATCHED_SHOWN = 100


def _last_month(book: Installation, now: datetime) -> str:
    """The month that is to be closed next: the one before the present one."""
    zone = load_zone(book.billing_zone)
    this = window_at(zone, Calendar.MONTH, now)
    return window_at(zone, Calendar.MONTH, this.start - this.start.resolution).label


def _month(book: Installation, period: str) -> Any:
    try:
        return month_window(period, book.billing_zone)
    except ValueError as error:
        raise Http404(f"{error}.") from None


def _errors(error: ValidationError) -> list[dict[str, str]]:
    fields = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
    return [{"field": name, "text": text} for name, texts in fields.items() for text in texts]


def _base(request: HttpRequest, book: Installation, period: str, now: datetime) -> dict[str, Any]:
    months = period_queries.months(now)
    names = [month.name for month in months]
    return {
        "now": now, "period": period, "months": months, "zone": book.billing_zone, "currency": book.currency,
        "window": _month(book, period), "nav_section": "finance", "may_write": may(request.user, "finance.write"),
        "state": period_queries.state_of(period), "title": date.fromisoformat(f"{period}-01").strftime("%B %Y"),
        "older": next((name for name in names if name < period), ""),
        "newer": next((name for name in reversed(names) if name > period), ""),
    }  # fmt: skip


@requires("finance.read")
def bridge_page(request: HttpRequest) -> HttpResponse:
    """The bridge of a month with its three checks."""
    return _bridge(request, request.GET.get("period", ""))


def _bridge(request: HttpRequest, period: str, **more: Any) -> HttpResponse:
    book, now = installation(), timezone.now()
    period = period or _last_month(book, now)
    base = _base(request, book, period, now)
    found = reconcile(period, now=now)
    rows = step_rows(found)
    chart, text = figure(found, rows)
    cents = {row.name: row.cents for row in rows}
    step, sku, day = (request.GET.get(name, "") for name in ("step", "sku", "day"))
    context = {
        **base, "found": found, "bridge": found.bridge, "rows": rows, "lands_in": late_month_of(period),
        "late_here": landings(found.bridge.invoices),
        "bookable": any(row.left_nanos for row in rows), "figure": chart, "text": text,
        "floor": axis_floor(found, rows),
        "skus": sku_lines(found.bridge, cents["price_variance"], cents["quantity_variance"]),
        "opened": sku, "opened_day": day, "sku_lines": lines_of_sku(period, found.bridge, sku, day) if sku else [],
        "step": step, "step_title": STEP_TITLES.get(step, ""),
        "lines": lines_of_step(period, found.bridge, step) if step in STEP_TITLES else [],
        "unmatched_book": list(found.bridge.bridge.unmatched_book_nanos.items())[:UNMATCHED_SHOWN],
        "unmatched_invoice": list(found.bridge.bridge.unmatched_invoice_nanos.items())[:UNMATCHED_SHOWN],
        "proposals": Proposal.objects.filter(period=period, kind="variance").order_by("-id")[:50],
        "pools": _pool_skus(), "planned": PlannedExchangeRate.objects.order_by("currency", "-effective_from")[:20],
        "minutes": _minutes(request, found), "coverage": found.meters.coverage[:50],
        "page_state": "ok" if found.within_tolerance else "unknown" if not found.bridge.invoices else "risk", **more,
    }  # fmt: skip
    return render(request, "ledger/bridge.html", context, status=400 if more.get("errors") else 200)


def _pool_skus() -> list[dict[str, Any]]:
    known = {row.pool_id: row for row in PoolSku.objects.all()}
    return [
        {"pool": pool, "sku": known.get(pool.pk)} for pool in Pool.objects.filter(archived_at=None).order_by("slug")
    ]


def _minutes(request: HttpRequest, found: Any) -> dict[str, Any] | None:
    """The minutes of one slot and day that do not agree."""
    slot_id, day = request.GET.get("slot", ""), request.GET.get("day", "")
    for row in found.meters.slot_days:
        if str(row.slot_id) == slot_id and f"{row.day:%Y-%m-%d}" == day:
            since = max(row.day, found.window.start)
            until = min(row.day.replace(hour=23, minute=59, second=59, microsecond=999_999), found.window.end)
            checks = slot_day_minutes(Slot.objects.get(pk=row.slot_id), since, min(until, timezone.now()))
            return {"row": row, "checks": checks[:MINUTES_SHOWN], "count": len(checks)}
    return None


@requires("finance.write")
def propose_variance(request: HttpRequest, period: str) -> HttpResponseBase:
    """Proposes to book a step of the bridge."""
    if request.method != "POST":
        return redirect(f"{reverse('finance-bridge')}?period={period}")
    _month(installation(), period)
    given = request.POST
    try:
        proposals.propose_variance(
            period=period, step=given.get("step", ""), spread=given.get("spread", ""), actor=actor_of(request),
            now=timezone.now(), reason=given.get("reason", ""),
        )  # fmt: skip
    except ValidationError as error:
        return _bridge(request, period, errors=_errors(error), given=given)
    messages.success(request, "Proposed. Somebody else has to approve it before it is posted.")
    return redirect(f"{reverse('finance-bridge')}?period={period}#booked")


@requires("finance.write")
def pool_sku(request: HttpRequest, slug: str) -> HttpResponseBase:
    """What a pool is called on the invoice."""
    pool = get_object_or_404(Pool, slug=slug)
    back = f"{reverse('finance-bridge')}?period={request.POST.get('period', '')}"
    if request.method != "POST":
        return redirect(back)
    try:
        skus.set_pool_sku(
            pool=pool.slug, values=request.POST.dict(), actor=actor_of(request), now=timezone.now(),
            reason=request.POST.get("reason", ""),
        )  # fmt: skip
    except ValidationError as error:
        return _bridge(request, request.POST.get("period", ""), errors=_errors(error), given=request.POST)
    messages.success(request, f"Lines of the invoice are matched to {pool.slug} anew.")
    return redirect(f"{back}#skus")


@requires("finance.write")
def planned_rate(request: HttpRequest) -> HttpResponseBase:
    """Adds an exchange rate that the book plans with."""
    given = request.POST
    back = f"{reverse('finance-bridge')}?period={given.get('period', '')}"
    if request.method != "POST":
        return redirect(reverse("finance-bridge"))
    try:
        try:
            day = date.fromisoformat(given.get("effective_from", ""))
        except ValueError:
            raise ValidationError({"effective_from": "Enter a day, such as 2026-10-01."}) from None
        skus.add_planned_rate(
            currency=given.get("currency", ""), rate=given.get("rate", ""), effective_from=day,
            actor=actor_of(request), now=timezone.now(), reason=given.get("reason", ""),
        )  # fmt: skip
    except ValidationError as error:
        return _bridge(request, given.get("period", ""), errors=_errors(error), planned_given=given)
    messages.success(request, "Added the planned rate.")
    return redirect(f"{back}#planned")


@requires("finance.read")
def periods_page(request: HttpRequest) -> HttpResponse:
    book, now = installation(), timezone.now()
    context = {"now": now, "months": period_queries.months(now), "zone": book.billing_zone, "currency": book.currency}
    return render(request, "ledger/periods.html", {**context, "last": _last_month(book, now), "nav_section": "finance"})


@requires("finance.read", write="finance.write")
def period_page(request: HttpRequest, period: str) -> HttpResponseBase:
    """The checklist and the versions of a month; a POST closes it or opens it again."""
    book, now = installation(), timezone.now()
    base = _base(request, book, period, now)
    if request.method == "POST":
        answer = _close_or_reopen(request, period, now)
        if not isinstance(answer, ValidationError):
            return answer
        base["errors"], base["given"] = _errors(answer), request.POST
    found = checklist(period, now=now)
    context = {
        **base, "checks": found.checks, "open": found.open, "versions": period_queries.versions(period),
        "formats": FORMATS, "ended": now >= base["window"].end,
        "begun": period_queries.had_begun(base["window"]), "found": found.reconciliation,
        "unpriced_most": UNPRICED_MOST,
        "page_state": "ok" if base["state"] == "closed" or not found.open else "risk",
    }  # fmt: skip
    return render(request, "ledger/period.html", context, status=400 if base.get("errors") else 200)


def _close_or_reopen(request: HttpRequest, period: str, now: datetime) -> HttpResponseBase | ValidationError:
    reason, actor = request.POST.get("reason", ""), actor_of(request)
    try:
        if "reopen" in request.POST:
            periods.reopen_period(period, actor=actor, now=now, reason=reason)
            messages.success(request, f"{period} is open again. It is closed again as a new version.")
        else:
            done = periods.close_period(period, actor=actor, now=now, reason=reason)
            messages.success(request, f"{period} is closed, version {done.version.version}.")
    except ValidationError as error:
        return error
    return redirect("period", period)


@requires("finance.read")
def period_export(request: HttpRequest, period: str, format: str) -> HttpResponseBase:
    """A file: kept bytes of a closing, or made now; an open month with many rows becomes a job."""
    _month(installation(), period)
    if format not in FORMATS:
        raise Http404("There is no such format.")
    version = request.GET.get("version", "0")
    try:
        kept = kept_export(period, format, int(version) if version.isdigit() else 0)
        if kept is None and is_long(period):
            messages.info(request, "This month has many rows: a worker makes the file.")
            return redirect(f"{reverse('exports')}?period={period}&format={format}")
        made = kept or export_file(period, format)
    except TooManyRows as error:
        return HttpResponse(f"{error}.", status=400, content_type="text/plain; charset=utf-8")
    except ValueError as error:
        raise Http404(f"{error}.") from None
    return _download(made.name, made.content, format)


def _download(name: str, content: bytes, format: str) -> HttpResponse:
    answer = HttpResponse(content, content_type=CONTENT_TYPES[format])
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer


@requires("finance.read")
def exports_page(request: HttpRequest) -> HttpResponseBase:
    """Files of months; a POST asks a worker for one of an open month."""
    book, now = installation(), timezone.now()
    problem = ""
    if request.method == "POST":
        try:
            if len(waiting_exports(now)) >= WAITING_MOST:
                raise ValueError("other exports are waiting: ask again when they are done")
            job = ask_export(
                request.POST.get("period", ""), request.POST.get("format", ""), actor=actor_of(request), now=now
            )
        except ValueError as error:
            problem = f"{error}."
        else:
            ring("ledger.export", job_id=job.pk)
            return redirect("export-job", job.pk)
    context = {
        "now": now, "problem": problem, "chosen": request.GET.get("period", ""),
        "format": request.GET.get("format", ""), "months": period_queries.months(now), "zone": book.billing_zone,
        "formats": FORMATS, "jobs": ExportJob.objects.defer("content").order_by("-id")[:50], "nav_section": "finance",
    }  # fmt: skip
    return render(request, "ledger/exports.html", context, status=400 if problem else 200)


@requires("finance.read")
def export_job(request: HttpRequest, pk: int) -> HttpResponse:
    """Progress of an export, and the file once it is there."""
    job = get_object_or_404(ExportJob, pk=pk)
    if "download" in request.GET and job.content is not None:
        return _download(job.file_name, bytes(job.content), job.format)
    share = job.rows_done / job.rows_total if job.rows_total else None
    moving = job.state in (ExportJob.State.WAITING, ExportJob.State.RUNNING)
    context = {
        "now": timezone.now(),
        "job": job,
        "share": min(share or 0, 1),
        "moving": moving,
        "nav_section": "finance",
    }
    return render(request, "ledger/export_job.html", context)


@requires("finance.read", write="finance.write")
def proposals_page(request: HttpRequest) -> HttpResponseBase:
    """Adjustments, credit notes and variances: what waits for a second person, and the form for a new one."""
    book, now = installation(), timezone.now()
    errors: list[dict[str, str]] = []
    if request.method == "POST":
        try:
            _propose(request, now)
        except ValidationError as error:
            errors = _errors(error)
        else:
            messages.success(request, "Proposed. Somebody else has to approve it before it is posted.")
            return redirect("proposals")
    context = {
        "now": now, "waiting": Proposal.objects.filter(state="proposed").order_by("id"),
        "decided": Proposal.objects.exclude(state="proposed").select_related("event").order_by("-id")[:100],
        "currency": book.currency, "zone": book.billing_zone,
        "tenant_input": tenant_input(
            "tenant", request.POST.get("tenant", ""), visible_tenants(request.user), required=True
        ),
        "classes": class_slugs(), "months": period_queries.months(now), "errors": errors, "given": request.POST,
        "may_write": may(request.user, "finance.write"), "nav_section": "finance",
    }  # fmt: skip
    return render(request, "ledger/proposals.html", context, status=400 if errors else 200)


def _propose(request: HttpRequest, now: datetime) -> None:
    given = request.POST
    kinds: dict[str, Callable[..., Proposal]] = {
        "adjustment": proposals.propose_adjustment, "credit_note": proposals.propose_credit_note
    }  # fmt: skip
    make = kinds.get(given.get("kind", ""))
    if make is None:
        raise ValidationError({"kind": "Choose adjustment or credit note."})
    try:
        nanos = parse_nanos(given.get("amount", ""))
    except ValueError as error:
        raise ValidationError({"amount": f"{error}."}) from None
    make(
        period=given.get("period", ""), tenant=given.get("tenant", ""), class_=given.get("class", ""),
        amount_nanos=nanos, actor=actor_of(request), now=now, reason=given.get("reason", ""),
    )  # fmt: skip


@requires("finance.write")
def decide(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Approves or rejects a proposal."""
    row = get_object_or_404(Proposal, pk=pk)
    if request.method == "POST":
        act = proposals.approve if "approve" in request.POST else proposals.reject
        try:
            done = act(row.pk, actor=actor_of(request), now=timezone.now(), reason=request.POST.get("reason", ""))
        except ValidationError as error:
            messages.error(request, " ".join(error.messages))
        else:
            messages.success(request, "Posted." if done.state == Proposal.State.POSTED else "Rejected.")
    return redirect("proposals")
