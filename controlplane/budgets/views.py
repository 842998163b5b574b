"""Pages of budgets: where each stands, and the form with its review."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.budgets import actions
from controlplane.budgets.forecasts import Outlook
from controlplane.budgets.forms import BudgetForm, IncreaseForm, budget_initial
from controlplane.budgets.increase_queries import increases_of, state_of
from controlplane.budgets.increases import add_increase, end_increase
from controlplane.budgets.kept_forecasts import forecasts_made_at
from controlplane.budgets.models import Budget
from controlplane.budgets.queries import STATES as IN_STATE
from controlplane.budgets.queries import (
    Standing,
    budget_for,
    by_attention,
    history,
    notices,
    standings,
    visible_budgets,
)
from controlplane.budgets.spend_states import budgets_in_state
from controlplane.tenants.access import may, requires
from controlplane.tenants.actions import Stale
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import installation
from controlplane.tenants.review import (
    confirmed,
    lines,
    overtaken,
    reason_of,
    renewed,
    review_page,
)
from controlplane.web.exports import CsvResponse, decimal_of_nanos, in_batches, in_present_order
from controlplane.web.numerals import money_exact
from controlplane.web.pagination import BadCursor, keyset_page
from controlplane.web.views import bad_request

LABELS = {
    "tenant": "Tenant",
    "name": "Name",
    "limit": "Limit",
    "stop": "When it is used up",
    "period": "Period",
    "anchor_day": "First day of the month",
    "zone": "Time zone",
    "thresholds": "Notify at (%)",
}
FIELD_OF = {"limit_nanos": "limit", "thresholds_percent": "thresholds"}
"""Column that an action names -> the form's own field for it."""
INCREASES_SHOWN = 20
STATES = (
    ("", "In force"), ("stopped", "Stopped or over limit"), ("near", "Near limit"), ("forecast", "Over forecast"),
    ("archived", "Archived"), ("all", "All"),
)  # fmt: skip
SORTS = (
    ("attention", "Needs attention first"), ("tenant", "By tenant"), ("limit", "Largest limit first"),
    ("newest", "Newest first"),
)  # fmt: skip
ORDERS = {
    "attention": ("attention", "tenant__slug", "id"), "tenant": ("tenant__slug", "id"), "limit": ("-limit_nanos", "id"),
    "newest": ("-id",),
}  # fmt: skip


@requires("budget.read")
def budgets(request: HttpRequest) -> HttpResponseBase:
    """Budgets that the person may see, each in its present window."""
    now = timezone.now()
    text, state = request.GET.get("q", "").strip()[:120], request.GET.get("state", "")
    sort = request.GET.get("sort", "attention")
    sort = sort if sort in ORDERS else "attention"
    order = ORDERS[sort]
    rows = visible = visible_budgets(request.user)
    if text:
        rows = rows.filter(tenant__slug__icontains=text) | rows.filter(name__icontains=text)
    if state == "archived":
        rows = rows.exclude(archived_at=None)
    elif state != "all":
        rows = rows.filter(archived_at=None)
    if state in IN_STATE:
        rows = rows.filter(pk__in=budgets_in_state(*IN_STATE[state], now=now))
    if sort == "attention":
        rows = by_attention(rows, now)
    if request.GET.get("format") == "csv":
        batches = in_present_order(rows, order, visible) if sort == "attention" else in_batches(rows, order)
        return _csv(row for batch in batches for row in standings(batch, now))
    try:
        page = keyset_page(rows, order, cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return bad_request(request, error)
    context = {
        "page": page,
        "standings": standings(page.rows, now),
        "total": rows.count(),
        "q": text,
        "sort": sort,
        "sorts": SORTS,
        "state": state,
        "states": STATES,
        "now": now,
        "forecasts_at": forecasts_made_at(now),
        "by_forecast": sort == "attention" or state == "forecast",
        "may_write": may(request.user, "budget.write"),
    }
    return render(request, "budgets/budgets.html", context)


@requires("budget.read")
def budget(request: HttpRequest, budget_id: int) -> HttpResponse:
    """One budget: present window, the windows before, and what to do about it."""
    row, now = budget_for(request.user, budget_id), timezone.now()
    return _budget_page(request, row, now)


def _budget_page(request: HttpRequest, row: Budget, now: datetime, **more: Any) -> HttpResponse:
    context = {
        "budget": row,
        "standing": standings([row], now)[0],
        "windows": history(row),
        "increases": [(increase, state_of(increase, now)) for increase in increases_of(row)[:INCREASES_SHOWN]],
        "notices": notices([row]),
        "now": now,
        "may_write": may(request.user, "budget.write"),
        "may_see_makers": may(request.user, "audit.read"),
        "form": IncreaseForm(zone=row.zone),
        **more,
    }
    return render(request, "budgets/budget.html", context, status=400 if more else 200)


@requires("budget.write")
def budget_increase(request: HttpRequest, budget_id: int) -> HttpResponse:
    """Raises a limit for a time; what was given wrong comes back with the page."""
    row, now = budget_for(request.user, budget_id), timezone.now()
    if request.method != "POST":
        return redirect("budget", budget_id=row.pk)
    form = IncreaseForm(request.POST, zone=row.zone)
    if form.is_valid():
        try:
            made = add_increase(budget_id=row.pk, **form.values(), actor=actor_of(request), now=now)
        except ValidationError as error:
            take_errors(form, error)
        else:
            messages.success(request, f"Raised {row.name} by {money_exact(made.amount_nanos)}: it ends by itself.")
            return redirect("budget", budget_id=row.pk)
    return _budget_page(request, row, now, form=form)


@require_POST
@requires("budget.write")
def budget_increase_end(request: HttpRequest, budget_id: int, increase_id: int) -> HttpResponse:
    """Ends an increase before its time."""
    row = budget_for(request.user, budget_id)
    increase = get_object_or_404(increases_of(row), pk=increase_id)
    try:
        end_increase(increase_id=increase.pk, reason=reason_of(request), actor=actor_of(request), now=timezone.now())
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    else:
        messages.success(request, f"{row.name} is back at its own limit as soon as what was leased has ended.")
    return redirect("budget", budget_id=row.pk)


@requires("budget.write")
def budget_new(request: HttpRequest) -> HttpResponse:
    place = installation()
    tenant = Tenant.objects.filter(slug=request.GET.get("tenant", "")).first()
    form = BudgetForm(request.POST or None, zone=place.billing_zone, initial={"tenant": tenant})
    page = {"title": "New budget", "back": reverse("budgets"), "back_label": "Budgets"}
    if request.method != "POST" or not form.is_valid() or "edit" in request.POST:
        return _form_page(request, form, page)
    if not confirmed(request) or not reason_of(request):
        return review_page(
            request,
            form=form,
            title="New budget",
            verb="Create budget",
            changes=lines(LABELS, {}, _sent(form)),
            notes=["It counts from now on: what was spent in the present window before is not in it."],
            error="Say why." if confirmed(request) else "",
            back=page["back"],
            back_label=page["back_label"],
        )
    try:
        row = actions.create_budget(
            tenant_id=form.cleaned_data["tenant"].pk,
            **form.values(),
            reason=reason_of(request),
            actor=actor_of(request),
            now=timezone.now(),
        )
    except ValidationError as error:
        take_errors(form, error, FIELD_OF)
        return _form_page(request, form, page)
    messages.success(request, f"Created budget {row.name} of {row.tenant.slug}.")
    return redirect("budget", budget_id=row.pk)


@requires("budget.write")
def budget_edit(request: HttpRequest, budget_id: int) -> HttpResponse:
    row = budget_for(request.user, budget_id)
    back = reverse("budget", args=[budget_id])
    page: dict[str, Any] = {"title": f"Edit {row.name}", "back": back, "back_label": row.name, "budget": row}
    if request.method != "POST":
        return _form_page(request, BudgetForm(budget=row, zone=row.zone, initial=budget_initial(row)), page)
    form = BudgetForm(request.POST, budget=row, zone=row.zone)
    if not form.is_valid() or "edit" in request.POST:
        return _form_page(request, form, page)
    if form.cleaned_data["version"] != row.version:
        return _overtaken_page(request, row, page)
    changes = lines(LABELS, _stored(row), _sent(form))
    if not changes:
        messages.info(request, "Nothing was changed.")
        return redirect(back)
    if not confirmed(request) or not reason_of(request):
        return review_page(
            request,
            form=form,
            title=f"Change {row.name} of {row.tenant.slug}",
            verb="Save changes",
            changes=changes,
            notes=_when_in_force(row, form),
            error="Say why." if confirmed(request) else "",
            back=back,
            back_label=row.name,
        )
    try:
        actions.edit_budget(
            budget_id=row.pk,
            version=form.cleaned_data["version"],
            changes=form.values(),
            reason=reason_of(request),
            actor=actor_of(request),
            now=timezone.now(),
        )
    except Stale:
        return _overtaken_page(request, budget_for(request.user, budget_id), page)
    except ValidationError as error:
        take_errors(form, error, FIELD_OF)
        return _form_page(request, form, page)
    messages.success(request, f"Saved {row.name}.")
    return redirect(back)


@require_POST
@requires("budget.write")
def budget_archive(request: HttpRequest, budget_id: int) -> HttpResponse:
    row = budget_for(request.user, budget_id)
    try:
        actions.archive_budget(
            budget_id=row.pk,
            version=row.version,
            reason=reason_of(request),
            actor=actor_of(request),
            now=timezone.now(),
        )
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    except Stale:
        messages.error(request, "Somebody changed this budget at the same moment: look at it and decide again.")
    else:
        messages.success(request, f"Archived {row.name}: it limits nothing any more.")
    return redirect("budget", budget_id=row.pk)


def _when_in_force(row: Budget, form: BudgetForm) -> list[str]:
    """What the review says about the instant from which a new limit holds."""
    standing = standings([row], timezone.now())[0]
    new, used = form.cleaned_data["limit"], standing.settled_nanos + standing.leased_nanos
    notes = []
    if form.cleaned_data["hard"] and used > new and standing.leased_nanos:
        notes.append(
            f"{money_exact(standing.settled_nanos)} is settled and {money_exact(standing.leased_nanos)} is leased to "
            f"agents, together more than the new limit. It is in force once the leases are back, at the latest when "
            f"they end; until then at most {money_exact(max(row.limit_nanos, new))} can be spent."
        )
    elif standing.settled_nanos >= new and new < row.limit_nanos:
        notes.append(
            f"{money_exact(standing.settled_nanos)} is settled in this window already: "
            + ("requests are refused at once." if form.cleaned_data["hard"] else "it is over from the start.")
        )
    elif new != row.limit_nanos:
        notes.append("The new limit is in force at once.")
    if form.cleaned_data["hard"] != row.hard:
        notes.append("What was settled in this window stays; only what happens at the limit changes.")
    return notes


def _sent(form: BudgetForm) -> dict[str, Any]:
    data = form.cleaned_data
    shown = {name: data[name] for name in ("name", "period", "anchor_day", "zone", "thresholds")}
    if data.get("tenant") is not None:
        shown["tenant"] = data["tenant"].slug
    return {**shown, "limit": money_exact(data["limit"]), "stop": _stop(data["hard"])}


def _stored(row: Budget) -> dict[str, Any]:
    shown = {name: getattr(row, name) for name in ("name", "period", "anchor_day", "zone")}
    return {
        **shown,
        "thresholds": row.thresholds_percent,
        "limit": money_exact(row.limit_nanos),
        "stop": _stop(row.hard),
    }


def _stop(hard: bool) -> str:
    return "stop" if hard else "notify only"


def _form_page(request: HttpRequest, form: BudgetForm, page: dict[str, Any]) -> HttpResponse:
    context = {"form": form, "currency": installation().currency, **page}
    status = 400 if form.is_bound and form.errors else 200
    return render(request, "budgets/budget_form.html", context, status=status)


def _overtaken_page(request: HttpRequest, row: Budget, page: dict[str, Any]) -> HttpResponse:
    form = renewed(BudgetForm, request, row.version, budget=row, zone=row.zone)
    form.is_valid()
    differences = lines(LABELS, _stored(row), _sent(form))
    context = {"form": form, "overtaken": overtaken("budget", row.pk, differences), **page}
    return render(request, "budgets/budget_form.html", context, status=409)


def _csv(rows: Iterable[Standing]) -> CsvResponse:
    header = [
        "budget_id", "tenant", "name", "period", "zone", "window_start", "window_end", "settled", "leased", "left",
        "forecast", "forecast_low", "forecast_high", "reached_at", "reached_earliest", "reached_latest", "limit",
        "increase", "hard", "status",
    ]  # fmt: skip
    return CsvResponse(
        "budgets.csv",
        header,
        (
            [
                row.budget.pk, row.budget.tenant.slug, row.budget.name, row.budget.period, row.budget.zone,
                row.starts_at, row.ends_at, decimal_of_nanos(row.settled_nanos), decimal_of_nanos(row.leased_nanos),
                decimal_of_nanos(row.left_nanos), *_forecast_cells(row.outlook),
                decimal_of_nanos(row.budget.limit_nanos), decimal_of_nanos(row.increase_nanos), row.budget.hard,
                row.word,
            ]
            for row in rows
        ),
    )  # fmt: skip


def _forecast_cells(outlook: Outlook) -> list[object]:
    found = outlook.forecast
    amounts = (found.point_nanos, found.low_nanos, found.high_nanos) if found else (None, None, None)
    return [*map(decimal_of_nanos, amounts), outlook.reached_at, outlook.earliest_at, outlook.latest_at]
