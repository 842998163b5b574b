"""The page of rates with their history, and the forms that add the next version."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.core.money import format_nanos
from controlplane.fleet.edit_flow import Edit, run
from controlplane.fleet.models import Pool, ServedModel
from controlplane.ledger import rate_queries, rates
from controlplane.ledger.rate_forms import (
    CARD_LABELS,
    COST_LABELS,
    CostRateForm,
    RateCardForm,
    card_initial,
    card_shown,
    cost_initial,
)
from controlplane.tenants.access import may, requires
from controlplane.tenants.queries import installation
from controlplane.web.exports import CsvResponse, decimal_of_nanos

SORTS = (("attention", "Missing first"), ("name", "By name"), ("newest", "Newest version first"))
COST_ACTS = "Acts with the next attribution of each hour. Rates are added; what was in force stays as it was."
CARD_ACTS = (
    "Takes effect when you push, for requests that arrive from its start on. What was charged before stays charged."
)


@requires("rate.read")
def rate_list(request: HttpRequest) -> HttpResponseBase:
    now = timezone.now()
    text, sort = request.GET.get("q", "").strip()[:120], request.GET.get("sort", "")
    every_cost, every_card = rate_queries.cost_lines(now), rate_queries.card_lines(now)
    costs = rate_queries.chosen(every_cost, text=text, sort=sort)
    cards = rate_queries.chosen(every_card, text=text, sort=sort)
    wanted = request.GET.get("format", "")
    if wanted == "cost.csv":
        return _costs_csv(costs)
    if wanted == "cards.csv":
        return _cards_csv(cards)
    missing = sum(line.in_force is None for line in every_cost) + sum(line.in_force is None for line in every_card)
    book = installation()
    context = {
        "costs": costs,
        "cards": cards,
        "shown": len(costs) + len(cards),
        "total": len(every_cost) + len(every_card),
        "q": text,
        "sort": sort,
        "sorts": SORTS,
        "missing": missing,
        "missing_word": f"{missing} missing",
        "currency": book.currency,
        "billing_zone": book.billing_zone,
        "now": now,
        "may_write": may(request.user, "rate.write"),
    }
    return render(request, "ledger/rates.html", context)


def _costs_csv(lines: Sequence[rate_queries.CostLine]) -> CsvResponse:
    """Every version, not only the one in force: what an hour of the past was costed by stands here too."""
    header = ["pool", "gpu", "cost_per_slot_hour", "effective_from", "added_at", "added_by", "reason"]
    rows = (
        [
            line.pool.slug, line.pool.gpu_type, decimal_of_nanos(rate.nanos_per_slot_hour), rate.effective_from,
            rate.created_at, rate.created_by, rate.reason,
        ]
        for line in lines
        for rate in line.history
    )  # fmt: skip
    return CsvResponse("cost-rates.csv", header, rows)


def _cards_csv(lines: Sequence[rate_queries.CardLine]) -> CsvResponse:
    header = [
        "version", "class", "model", "prompt_per_mtok", "cached_per_mtok", "output_per_mtok", "gpu_per_slot_hour",
        "discount_percent", "effective_from", "added_at", "added_by", "reason",
    ]  # fmt: skip
    rows = (
        [
            card.pk, line.class_slug, line.model.name, decimal_of_nanos(card.prompt_nanos_per_mtok),
            decimal_of_nanos(card.cached_nanos_per_mtok), decimal_of_nanos(card.output_nanos_per_mtok),
            decimal_of_nanos(card.gpu_nanos_per_slot_hour), Decimal(card.discount_ppm).scaleb(-4),
            card.effective_from, card.created_at, card.created_by, card.reason,
        ]
        for line in lines
        for card in line.history
    )  # fmt: skip
    return CsvResponse("rate-cards.csv", header, rows)


@requires("rate.write")
def cost_rate_new(request: HttpRequest, slug: str) -> HttpResponseBase:
    pool = Pool.objects.filter(slug=slug).first()
    if pool is None:
        raise Http404("There is no such pool.")
    newest = rate_queries.newest_cost_rate(pool)
    currency = installation().currency

    def save(form: CostRateForm, *, reason: str) -> str:
        rates.add_cost_rate(
            pool_slug=slug,
            nanos_per_slot_hour=form.cleaned_data["nanos_per_slot_hour"],
            effective_from=form.cleaned_data["effective_from"],
            actor=actor_of(request),
            now=timezone.now(),
            reason=reason,
            previous_id=newest.pk if newest else None,
        )
        return reverse("rates")

    def shown(form: CostRateForm) -> dict[str, Any]:
        price = format_nanos(form.cleaned_data["nanos_per_slot_hour"])
        return {"nanos_per_slot_hour": f"{price} {currency}", "effective_from": _start(form)}

    stored = {"nanos_per_slot_hour": f"{format_nanos(newest.nanos_per_slot_hour)} {currency}"} if newest else {}
    return run(
        request,
        Edit(
            title=f"New cost rate of {slug}",
            verb="Add cost rate",
            back=reverse("rates"),
            back_label="Rates",
            labels=COST_LABELS,
            make_form=lambda data: CostRateForm(data, currency=currency, initial=cost_initial(newest)),
            stored=stored,
            shown=shown,
            save=save,
            saved=f"Added the cost rate of {slug}.",
            version=newest.pk if newest else 0,
            noun="cost_rate",
            object_id=slug,
            notes=lambda form: [COST_ACTS],
            context={"acts": COST_ACTS},
        ),
    )


@requires("rate.write")
def rate_card_new(request: HttpRequest, class_slug: str, model_id: int) -> HttpResponseBase:
    model = ServedModel.objects.filter(pk=model_id).first()
    if model is None:
        raise Http404("There is no such model.")
    newest = rate_queries.newest_rate_card(class_slug, model)
    if newest is None and (class_slug, model_id) not in set(rate_queries.served_pairs()):
        raise Http404("No pool serves this class and model.")
    currency = installation().currency

    def save(form: RateCardForm, *, reason: str) -> str:
        rates.add_rate_card(
            class_slug=class_slug,
            model=model.name,
            values=form.values(),
            effective_from=form.cleaned_data["effective_from"],
            actor=actor_of(request),
            now=timezone.now(),
            reason=reason,
            previous_id=newest.pk if newest else None,
        )
        return reverse("rates")

    return run(
        request,
        Edit(
            title=f"New rate card of {class_slug}, {model.name}",
            verb="Add rate card",
            back=reverse("rates"),
            back_label="Rates",
            labels=CARD_LABELS,
            make_form=lambda data: RateCardForm(data, currency=currency, initial=card_initial(newest)),
            stored=card_shown({name: getattr(newest, name) for name in rates.CARD_FIELDS}) if newest else {},
            shown=lambda form: {**card_shown(form.values()), "effective_from": _start(form)},
            save=save,
            saved=f"Added the rate card of {class_slug}, {model.name}. Takes effect when you push.",
            version=newest.pk if newest else 0,
            noun="rate_card",
            object_id=str(newest.pk) if newest else "",
            notes=lambda form: [f"Prices are in {currency}.", CARD_ACTS],
            context={"acts": CARD_ACTS},
        ),
    )


def _start(form: Any) -> str:
    at = form.cleaned_data["effective_from"]
    return f"{at:%-d %b %Y %H:%M} UTC" if at else ""
