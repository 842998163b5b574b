"""Finance pages: where the fleet's cost went, an hour with its lines and postings, the book, statements."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone

from controlplane.core.money import cents_of, distribute_cents
from controlplane.core.period import load_zone
from controlplane.fleet.models import Pool
from controlplane.ledger.models import AttributionInterval
from controlplane.ledger.named_costs import named_costs
from controlplane.ledger.pages import (
    LINE_TITLES,
    cents_text,
    headline,
    idle_rows,
    leading,
    pivot,
    statement,
    time_table,
    unfold,
)
from controlplane.ledger.posting import charged_through, trial_balance
from controlplane.ledger.queries import (
    FINDINGS_SHOWN,
    REQUESTS_SHOWN,
    CostRow,
    charges,
    checks,
    cost_rows,
    day_costs,
    hour_requests,
    hour_rows,
    interval_events,
    line_rows,
    periods,
    rate_cards,
    retired_days_of,
)
from controlplane.ledger.ranges import FinanceRange, around, menu, read_range
from controlplane.ledger.statement_pages import billed, corrections, issued
from controlplane.tenants.access import may, requires
from controlplane.tenants.models import Installation
from controlplane.tenants.queries import installation, slug_or_name_holds, tenant_for, visible_tenants
from controlplane.usage.retirement import ArchiveChanged
from controlplane.web.exports import CsvResponse, decimal_of_nanos
from controlplane.web.pagination import BadCursor, sorted_page
from controlplane.web.views import bad_request

HOURLY_UP_TO_DAYS = 2
CSV_HEADER = (
    "interval_start", "interval_end", "local_day", "pool", "tenant", "class", "line", "slot_microseconds", "cost",
    "currency",
)  # fmt: skip


def _range(request: HttpRequest, book: Installation, now: datetime) -> tuple[FinanceRange, str]:
    """The span of the page and, when the address names none that can be used, a sentence why."""
    try:
        return read_range(request.GET.dict(), book.billing_zone, now), ""
    except ValueError as error:
        return read_range({}, book.billing_zone, now), f"{error}."


def _span_context(shown: FinanceRange, book: Installation, now: datetime) -> dict[str, Any]:
    before, after = around(shown)
    zone = load_zone(book.billing_zone)
    days = shown.days
    return {
        "now": now,
        "range": shown,
        "before": before,
        "after": after,
        "choices": menu(shown, now),
        "zone": book.billing_zone,
        "currency": book.currency,
        "span_text": f"{_clock(shown.window.start, zone)} to {_clock(shown.window.end, zone)}",
        "first_day": days[0].label if days else "",
        "last_day": days[-1].label if days else "",
    }


def _clock(at: datetime, zone: ZoneInfo) -> str:
    local = at.astimezone(zone)
    return f"{local.day} {local:%b %H:%M}"


@requires("finance.read")
def finance_page(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    book = installation()
    shown, problem = _range(request, book, now)
    found = checks(shown.window)
    costs = named_costs(shown.days, request.GET.get("tenant", ""), with_charges=found.intervals > 0)
    rows, charged = costs.rows, costs.charged
    top = headline(rows, costs.hidden_used)
    lines_nanos = sum(row.nanos or 0 for row in rows)
    charged_nanos = sum(one.nanos for one in charged)
    charged_cents, cost_cents = cents_of(charged_nanos), cents_of(lines_nanos)
    selected = _selected(request, shown)
    table = pivot(rows, charged, request.GET.get("tenant", ""), costs.hidden) if found.intervals else None
    if table is not None:
        unfold(table, selected["key"] if selected else "")
    context = {
        **_span_context(shown, book, now),
        "problem": problem,
        "top": top,
        "checks": found,
        "findings": found.findings[:FINDINGS_SHOWN],
        "agrees": lines_nanos == found.intervals_nanos == found.ledger_nanos,
        "owned_h": found.owned_us / 3_600_000_000,
        "unpriced_h": found.unpriced_us / 3_600_000_000,
        "idle": idle_rows(costs.idle, top, lines_nanos),
        "pivot": table,
        "models": dict(Pool.objects.values_list("slug", "model__name")),
        "all_rows": request.GET.get("rows") == "all",
        "table": _time_table(shown, rows, book) if rows else None,
        "table_title": "Cost by tenant per day" if len(shown.days) > HOURLY_UP_TO_DAYS else "Cost by tenant per hour",
        "step_title": "Day" if len(shown.days) > HOURLY_UP_TO_DAYS else "Hour",
        "charged": cents_text(charged_cents),
        "minus_cost": cents_text(-cost_cents),
        "margin": cents_text(charged_cents - cost_cents, signed=True),
        "selected": selected,
        "page_state": "unknown" if found.unpriced_us else "ok",
    }
    return render(request, "ledger/finance.html", context)


def _time_table(shown: FinanceRange, rows: list[CostRow], book: Installation) -> Any:
    first = leading(rows)
    days = shown.days
    if len(days) > HOURLY_UP_TO_DAYS:
        cells = day_costs(days, first)
        seen = {label for label, *_ in cells}
        shown_days = [day.label for day in days if min(seen) <= day.label <= max(seen)]
        return time_table(shown_days, cells, first, unit=book.currency, step="day")
    zone = load_zone(book.billing_zone)
    form = "%H:%M" if len(days) == 1 else "%a %H:%M"
    hourly = hour_rows(shown.window)
    plain = {at: at.astimezone(zone).strftime(form) for at, *_ in hourly}
    twice = {label for label, count in Counter(plain.values()).items() if count > 1}
    # an hour that the clocks show twice is told apart by its offset
    labels = {
        at: at.astimezone(zone).strftime(f"{form} %Z") if label in twice else label for at, label in plain.items()
    }
    cells = [(labels[at], tenant, line, nanos or 0) for at, tenant, line, _, nanos in hourly]
    return time_table(list(labels.values()), cells, first, unit=book.currency, step="hour")


def _selected(request: HttpRequest, shown: FinanceRange) -> dict[str, Any] | None:
    """The days of one leaf of the pivot, and on a single day its hours as links."""
    tenant, class_, pool = (request.GET.get(name, "") for name in ("tenant", "class", "pool"))
    mine = [row for row in cost_rows(shown.days, tenant) if (row.class_, row.pool) == (class_, pool)] if tenant else []
    if not mine:
        return None
    days = sorted({row.day for row in mine})
    amounts = {(row.day, row.line): row for row in mine}
    lines = sorted({row.line for row in mine}, key=list(LINE_TITLES).index)
    cents = distribute_cents({f"{row.day}/{row.line}": row.nanos or 0 for row in mine})
    table = [
        {
            "day": day,
            "cells": [cents_text(cents.get(f"{day}/{line}", 0) if (day, line) in amounts else None) for line in lines],
            "total": cents_text(sum(cents.get(f"{day}/{line}", 0) for line in lines)),
        }
        for day in days
    ]
    return {
        "title": " › ".join(part for part in (tenant, class_ or "no class", pool) if part),
        "key": f"{tenant}/{class_}/{pool}",
        "lines": [LINE_TITLES[line] for line in lines],
        "rows": table,
        "total": cents_text(sum(cents.values())),
        "hours": _hours(shown, pool) if len(shown.days) == 1 else [],
    }


def _hours(shown: FinanceRange, pool: str) -> list[AttributionInterval]:
    inside = AttributionInterval.objects.filter(
        pool__slug=pool, starts_at__gte=shown.window.start, starts_at__lt=shown.window.end
    )
    return list(inside.order_by("starts_at"))


@requires("finance.read")
def costs_csv(request: HttpRequest) -> HttpResponseBase:
    """Every line of the span; the column `cost` adds up to the fleet's cost exactly. An unknown cost is empty."""
    book = installation()
    try:
        shown = read_range(request.GET.dict(), book.billing_zone, timezone.now())
    except ValueError as error:
        return HttpResponseBadRequest(f"{error}.", content_type="text/plain; charset=utf-8")
    name = f"costs-{shown.query.replace('period=', '').replace('from=', '').replace('&to=', '-to-')}.csv"
    return CsvResponse(name, CSV_HEADER, _csv_rows(shown, book))


def _csv_rows(shown: FinanceRange, book: Installation) -> Iterator[tuple[Any, ...]]:
    days = iter(shown.days)
    day = next(days, None)
    for start, end, pool, tenant, class_, line, slot_us, nanos in line_rows(shown.window):
        while day is not None and start >= day.end:
            day = next(days, None)
        label = day.label if day is not None else ""
        yield start, end, label, pool, tenant, class_, line, slot_us, decimal_of_nanos(nanos), book.currency


@requires("finance.read")
def interval_page(request: HttpRequest, pk: int) -> HttpResponse:
    book = installation()
    interval = get_object_or_404(AttributionInterval.objects.select_related("pool"), pk=pk)
    lines = list(interval.lines.order_by("tenant_slug", "class_slug", "line"))
    known = {str(line.pk): line.amount_nanos for line in lines if line.amount_nanos is not None}
    cents = distribute_cents(known)
    tenant, class_ = request.GET.get("tenant", ""), request.GET.get("class", "")
    requests, unreadable = [], ""
    if tenant:
        try:
            requests = hour_requests(interval, tenant, class_)
        except ArchiveChanged as error:
            unreadable = str(error)
    same_pool = AttributionInterval.objects.filter(pool=interval.pool)
    context = {
        "now": timezone.now(),
        "interval": interval,
        "lines": [
            {"row": line, "title": LINE_TITLES.get(line.line, line.line), "value": cents_text(cents.get(str(line.pk)))}
            for line in lines
        ],
        "total": cents_text(sum(cents.values()) if known else None),
        "sum_nanos": sum(known.values()) if known else None,
        "slot_us": sum(line.gpu_us for line in lines),
        "events": list(interval_events(interval)),
        "tenant": tenant,
        "class_": class_,
        "requests": requests,
        "unreadable": unreadable,
        "retired": retired_days_of(interval) if tenant else [],
        "requests_shown": REQUESTS_SHOWN,
        "before": same_pool.filter(starts_at__lt=interval.starts_at).order_by("-starts_at").first(),
        "after": same_pool.filter(starts_at__gt=interval.starts_at).order_by("starts_at").first(),
        "zone": book.billing_zone,
        "currency": book.currency,
        "lend_percent": interval.policy.get("lend_price_share_ppm", 0) / 10_000,
        "page_state": "ok" if interval.state == AttributionInterval.State.PRICED else "unknown",
    }
    return render(request, "ledger/interval.html", context)


@requires("finance.read")
def ledger_page(request: HttpRequest) -> HttpResponse:
    book = installation()
    known = periods()
    period = request.GET.get("period", "")
    if period and period not in known:
        raise Http404("Nothing was posted in this period.")
    trial = trial_balance(period or None)
    context = {
        "now": timezone.now(),
        "trial": trial,
        "balance_nanos": trial.debit_nanos - trial.credit_nanos,
        "charged_through": charged_through(),
        "period": period,
        "periods": known,
        "currency": book.currency,
        "zone": book.billing_zone,
        "page_state": "ok" if trial.balanced else "bad",
    }
    return render(request, "ledger/book.html", context)


@requires("finance.read")
def statements_page(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    book = installation()
    shown, problem = _range(request, book, now)
    rows = billed(shown)
    cents = distribute_cents({row.slug: row.charge_nanos for row in rows})
    cost_cents = distribute_cents({row.slug: row.cost_nanos for row in rows})
    text = request.GET.get("q", "").strip()[:120]
    chosen = rows
    if text:
        held = set(visible_tenants(request.user).filter(slug_or_name_holds(text)).values_list("pk", flat=True))
        chosen = [row for row in rows if row.tenant_id in held]
    try:
        page = sorted_page(chosen, lambda row: row.place, cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return bad_request(request, error)
    tenants = visible_tenants(request.user).in_bulk([row.tenant_id for row in page.rows])
    context = {
        **_span_context(shown, book, now),
        "problem": problem,
        "page": page,
        "q": text,
        "found": len(chosen),
        "rows": [
            {
                "tenant": tenants[row.tenant_id],
                "requests": row.requests,
                "charges": cents_text(cents[row.slug]),
                "cost": cents_text(cost_cents[row.slug]),
            }
            for row in page.rows
            if row.tenant_id in tenants
        ],
        "tenants": len(rows),
        "total": cents_text(sum(cents.values())),
        "total_cost": cents_text(sum(cost_cents.values())),
        "total_requests": sum(row.requests for row in rows),
    }
    return render(request, "ledger/statements.html", context)


@requires("own.read")
def statement_page(request: HttpRequest, slug: str) -> HttpResponse:
    """A tenant's charges; its members may open it too, and nobody else's."""
    tenant = tenant_for(request.user, slug)
    now = timezone.now()
    book = installation()
    shown, problem = _range(request, book, now)
    made = statement(charges(shown.window.start, shown.window.end, [tenant.pk]))
    cards = rate_cards([row.charge.rate_version for row in made.rows])
    month = shown.window.label if shown.kind == "month" else ""
    corrected = corrections(tenant.slug, month) if month else []
    due_nanos = made.total_nanos + sum(row.nanos for row in corrected)
    context = {
        **_span_context(shown, book, now),
        "problem": problem,
        "tenant": tenant,
        "statement": made,
        "issued": issued(tenant.slug, month) if month else None,
        "corrections": corrected,
        "due": cents_text(cents_of(due_nanos)),
        "cards": [cards[version] for version in sorted(cards)],
        "staff": may(request.user, "finance.read"),
        "made_at": now,
        "nav_section": "finance",
    }
    return render(request, "ledger/statement.html", context)
