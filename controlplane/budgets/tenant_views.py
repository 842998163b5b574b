"""The list of tenants and a tenant's own page: they stand here because they show money beside the tenants."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.queries import AuditFilter, entries, waits_for_push, with_revision
from controlplane.budgets.kept_forecasts import forecasts_made_at
from controlplane.budgets.models import Budget
from controlplane.budgets.queries import ancestors, outstanding_leases, standings
from controlplane.budgets.tenant_queries import (
    SORTS,
    TenantRow,
    by_attention,
    charged_this_month,
    contracts_of,
    refusals_of,
    rows_of,
    searched,
)
from controlplane.tenants.access import may, requires
from controlplane.tenants.audit_views import changes_of
from controlplane.tenants.bulk_nouns import TENANTS
from controlplane.tenants.bulk_views import bulk_bar
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.tenants.queries import class_slugs, installation, tenant_for, visible_tenants
from controlplane.web.exports import CsvResponse, decimal_of_nanos, in_batches, in_present_order
from controlplane.web.pagination import BadCursor, keyset_page
from controlplane.web.views import bad_request

STATES = (("", "In use"), ("active", "Active"), ("suspended", "Suspended"), ("archived", "Archived"), ("all", "All"))
SORT_WORDS = (("attention", "Attention first"), ("name", "By name"), ("newest", "Newest first"))
REFUSALS_OVER = timedelta(hours=24)
KEYS_MAX = 200


@requires("tenant.read")
def tenants(request: HttpRequest) -> HttpResponseBase:
    """Tenants that the person may see; what needs attention first."""
    now = timezone.now()
    text, state = request.GET.get("q", "").strip()[:120], request.GET.get("state", "")
    chosen_class = request.GET.get("class", "")
    sort = request.GET.get("sort", "")
    sort = sort if sort in SORTS else "attention"
    order = SORTS[sort]
    visible = visible_tenants(request.user)
    found = searched(visible, text=text, state=state, workload_class=chosen_class)
    if sort == "attention":
        found = by_attention(found, now)
    if request.GET.get("format") == "csv":
        moves = sort == "attention"
        batches = in_present_order(found, order, visible) if moves else in_batches(found, order)
        return _csv(row for batch in batches for row in rows_of(batch, now))
    try:
        page = keyset_page(found, order, cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return bad_request(request, error)
    context = {
        "page": page,
        "rows": rows_of(page.rows, now),
        "total": found.count(),
        "all_total": visible.count(),
        "q": text,
        "state": state,
        "states": STATES,
        "sort": sort,
        "sorts": SORT_WORDS,
        "chosen_class": chosen_class,
        "classes": class_slugs(),
        "now": now,
        "forecasts_at": forecasts_made_at(now),
        "by_forecast": sort == "attention",
        "may_write": may(request.user, "tenant.write"),
        **bulk_bar(request, TENANTS, page.rows),
    }
    return render(request, "tenants/tenants.html", context)


@requires("tenant.read")
def tenant(request: HttpRequest, slug: str) -> HttpResponse:
    """One tenant; `?tab=` keys, budgets, contracts, members, audit."""
    row, now = tenant_for(request.user, slug), timezone.now()
    tabs = {"overview": "Overview", "keys": "Keys", "budgets": "Budgets", "contracts": "Contracts"}
    if may(request.user, "member.read"):
        tabs["members"] = "Members"
    if may(request.user, "audit.read"):
        tabs["audit"] = "Audit"
    chosen = request.GET.get("tab", "overview")
    chosen = chosen if chosen in tabs else "overview"
    counts = {
        "keys": row.keys.filter(state=ApiKey.State.ACTIVE).count(),
        "budgets": Budget.objects.filter(tenant=row, archived_at=None).count(),
    }
    address = reverse("tenant", args=[slug])
    summary = rows_of([row], now)[0]
    states = dict(visible_tenants(request.user).filter(parent=row).order_by("slug").values_list("slug", "state"))
    context: dict[str, Any] = {
        "tenant": row,
        "summary": summary,
        "archiving": _archiving(summary, [slug for slug, state in states.items() if state != Tenant.State.ARCHIVED]),
        "tab": chosen,
        "tabs": [
            {"label": label, "url": f"{address}?tab={key}", "current": key == chosen, "count": counts.get(key)}
            for key, label in tabs.items()
        ],
        "children": list(states),
        "parents": [parent for parent in ancestors(row) if _sees_staff_data(request)],
        "now": now,
        "may_write": may(request.user, "tenant.write"),
        "may_suspend": may(request.user, "tenant.suspend"),
        "may_write_keys": may(request.user, "key.write"),
        "may_write_budgets": may(request.user, "budget.write"),
        **_tab(chosen, request, row, now),
    }
    return render(request, "tenants/tenant.html", context)


def _archiving(row: TenantRow, children: Sequence[str]) -> str:
    """What archiving takes with it."""
    plural = "" if row.keys == 1 else "s"
    keys = f"Revokes its {row.keys} working key{plural} for ever." if row.keys else "No key works."
    at = row.last_used_at
    used = " It sent nothing." if at is None else f" Its last request came {at:%-d %b %Y %H:%M} UTC."
    first = f" Archive its children first: {', '.join(children)}." if children else ""
    return f"{keys}{used} Usage, charges and audit stay.{first}"


def _tab(chosen: str, request: HttpRequest, row: Tenant, now: datetime) -> dict[str, Any]:
    """What the chosen tab alone needs."""
    if chosen == "keys":
        return {"keys": list(row.keys.order_by("state", "-id")[:KEYS_MAX])}
    if chosen == "budgets":
        levels = [row, *ancestors(row)] if _sees_staff_data(request) else [row]
        budgets = Budget.objects.filter(tenant__in=levels, archived_at=None).select_related("tenant")
        return {
            "standings": standings(budgets.order_by("tenant__slug", "id"), now),
            "leases": outstanding_leases([row]),
            "archived_budgets": Budget.objects.filter(tenant=row).exclude(archived_at=None).count(),
        }
    if chosen == "contracts":
        return {"contracts": contracts_of(row)}
    if chosen == "members":
        return {"members": list(row.members.select_related("user").filter(user__is_active=True).order_by("pk"))}
    if chosen == "audit":
        latest = with_revision(entries(AuditFilter(tenant=row.slug))).order_by("-id")[:50]
        return {"lines": [(entry, changes_of(entry), waits_for_push(entry)) for entry in latest]}
    own = Budget.objects.filter(tenant=row, archived_at=None).select_related("tenant").order_by("id")
    return {
        "standings": standings(own, now),
        "refusals": refusals_of(row, now - REFUSALS_OVER),
        "charged_nanos": charged_this_month(row, installation().billing_zone, now),
    }


def _sees_staff_data(request: HttpRequest) -> bool:
    """A tenant's member never sees its parent's money."""
    return may(request.user, "live.read")


def _csv(rows: Iterable[TenantRow]) -> CsvResponse:
    header = [
        "tenant", "name", "parent", "state", "status", "classes", "weight", "active_keys", "expiring_keys", "budget",
        "settled", "leased", "forecast", "limit", "hard", "last_request_at",
    ]  # fmt: skip

    def line(row: TenantRow) -> list[Any]:
        money = row.standing
        return [
            row.tenant.slug, row.tenant.name, row.parent_slug, row.tenant.state, row.word,
            " ".join(row.tenant.classes), row.tenant.weight, row.keys, row.expiring_keys,
            money.budget.name if money else None,
            decimal_of_nanos(money.settled_nanos) if money else None,
            decimal_of_nanos(money.leased_nanos) if money else None,
            decimal_of_nanos(money.forecast_nanos) if money else None,
            decimal_of_nanos(money.budget.limit_nanos) if money else None,
            money.budget.hard if money else None,
            row.last_used_at,
        ]  # fmt: skip

    return CsvResponse("tenants.csv", header, (line(row) for row in rows))
