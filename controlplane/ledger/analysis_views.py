"""Pages that explain a month and change nothing: comparison with the month before, prices that might have been."""

from typing import Any

from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from controlplane.core.money import cents_of, format_nanos, parse_nanos, share_cents
from controlplane.core.pricing import RateCard
from controlplane.ledger import period_queries, rate_queries
from controlplane.ledger.pages import cents_text
from controlplane.ledger.reconciliation import month_window
from controlplane.ledger.what_if import DriverRow, WhatIfRow, compare_with_month_before, rerate
from controlplane.tenants.access import requires
from controlplane.tenants.queries import installation
from controlplane.web.figures import Step, waterfall

NANOS_PER_PPM = 100_000
"""Per cent are read like money, exactly: 1 % is 10,000 ppm."""
DRIVERS = ("volume", "mix", "price", "idle")
PRICES = {"prompt": "Prompt", "cached": "Cached prompt", "output": "Output", "gpu": "GPU time"}


def _base(request: HttpRequest) -> dict[str, Any]:
    book, now = installation(), timezone.now()
    months = period_queries.months(now)
    period = request.GET.get("period", "") or months[0].name
    try:
        window = month_window(period, book.billing_zone)
    except ValueError as error:
        raise Http404(f"{error}.") from None
    names = [month.name for month in months]
    return {
        "now": now, "period": period, "title": window.label, "window": window, "months": months,
        "zone": book.billing_zone, "currency": book.currency, "nav_section": "finance",
        "older": next((name for name in names if name < period), ""),
        "newer": next((name for name in reversed(names) if name > period), ""),
    }  # fmt: skip


@requires("finance.read")
def compare_page(request: HttpRequest) -> HttpResponse:
    """What moved the cost since the month before."""
    base = _base(request)
    found = compare_with_month_before(base["window"], base["zone"])
    cents = driver_cents(found.total)
    total = _cells(found.total)
    # the chart's bars are the cents of the table's last row
    steps = [
        Step(found.before.label, cents["before"] / 100, total=True),
        *(Step(name.title(), cents[name] / 100) for name in DRIVERS),
        Step(found.after.label, cents["after"] / 100, total=True),
    ]
    text = f"Cost {total['before']} in {found.before.label}, {total['after']} in {found.after.label}: " + ", ".join(
        f"{name} {value}" for name, value in zip(DRIVERS, total["drivers"], strict=True)
    )
    context = {
        **base, "found": found, "rows": [_cells(row) for row in found.rows], "total": total,
        "figure": waterfall(steps, unit=base["currency"]), "text": f"{text}.", "empty": not found.rows,
        "page_state": "unknown" if found.unknown else "ok",
    }  # fmt: skip
    return render(request, "ledger/compare.html", context)


def driver_cents(row: DriverRow) -> dict[str, int]:
    """A row in cents that add up along it: before, the four drivers, after."""
    before, after = cents_of(row.before_nanos), cents_of(row.after_nanos)
    drivers = share_cents(after - before, {name: getattr(row.drivers, f"{name}_nanos") for name in DRIVERS})
    return {"before": before, **drivers, "after": after}


def _cells(row: DriverRow) -> dict[str, Any]:
    cents = driver_cents(row)
    return {
        "tenant": row.tenant, "before": cents_text(cents["before"]), "after": cents_text(cents["after"]),
        "drivers": [cents_text(cents[name], signed=True) for name in DRIVERS],
        "change": cents_text(cents["after"] - cents["before"], signed=True),
    }  # fmt: skip


@requires("finance.read")
def what_if_page(request: HttpRequest) -> HttpResponse:
    """A month's charges under other prices: asked by GET, since nothing is written."""
    base = _base(request)
    given = request.GET
    lines = {f"{line.class_slug}/{line.model.name}": line for line in rate_queries.card_lines(base["now"])}
    errors: list[dict[str, str]] = []
    rows: list[WhatIfRow] = []
    chosen = lines.get(given.get("card", next(iter(lines), "")))
    now = {} if chosen is None else _in_force(chosen)
    if "card" in given:
        try:
            if chosen is None:
                raise ValidationError({"card": "Choose a class and model of the list."})
            card = _card({name: given.get(name, "").strip() or text for name, text in now.items()})
            rows = rerate(base["window"], chosen.class_slug, chosen.model.name, card)
        except ValidationError as error:
            errors = [{"field": name, "text": text} for name, texts in error.message_dict.items() for text in texts]
    charged, would = sum(row.charged_nanos for row in rows), sum(row.would_nanos for row in rows)
    context = {
        **base, "pairs": list(lines), "given": given, "errors": errors,
        "asked": "card" in given and not errors, "rows": rows, "charged": charged, "would": would,
        "difference": would - charged, "now": now,
        "prices": [(name, label, given.get(name, ""), now.get(name, "")) for name, label in PRICES.items()],
    }  # fmt: skip
    return render(request, "ledger/what_if.html", context, status=400 if errors else 200)


def _in_force(line: rate_queries.CardLine) -> dict[str, str]:
    """What each field means when it is left blank; empty texts without a card in force."""
    card = line.in_force
    if card is None:
        return dict.fromkeys((*PRICES, "discount"), "")
    prices = (
        card.prompt_nanos_per_mtok, card.cached_nanos_per_mtok, card.output_nanos_per_mtok,
        card.gpu_nanos_per_slot_hour,
    )  # fmt: skip
    found = dict(zip(PRICES, map(format_nanos, prices), strict=True))
    return {**found, "discount": format_nanos(card.discount_ppm * NANOS_PER_PPM)}


def _card(given: dict[str, str]) -> RateCard:
    nanos: dict[str, int] = {}
    for name, label in PRICES.items():
        if not given[name]:
            raise ValidationError({name: f"{label}: enter a price, 0 for none: no card is in force."})
        try:
            nanos[name] = parse_nanos(given[name])
        except ValueError as error:
            raise ValidationError({name: f"{label}: {error}."}) from None
        if nanos[name] < 0:
            raise ValidationError({name: f"{label}: a price is 0 or more."})
    try:
        discount = parse_nanos(given["discount"] or "0") // NANOS_PER_PPM
        return RateCard(nanos["prompt"], nanos["cached"], nanos["output"], nanos["gpu"] or None, discount)
    except ValueError:
        raise ValidationError({"discount": "Enter a discount from 0 to 100 %."}) from None
