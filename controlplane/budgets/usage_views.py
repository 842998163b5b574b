"""A tenant's own usage to the minute: what ended in each of the last minutes, by class, and what it was charged."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils import timezone

from controlplane.contracts.models import WorkloadClass
from controlplane.tenants.access import requires
from controlplane.tenants.queries import tenant_for
from controlplane.usage.queries import Scope, Totals, series
from controlplane.web.exports import CsvResponse, decimal_of_nanos

MINUTE = timedelta(minutes=1)
SPANS = {"60": "60 min", "360": "6 h", "1440": "24 h"}


@dataclass(frozen=True, slots=True)
class MinuteRow:
    """One minute of one class; minutes in which nothing ended have no row."""

    at: datetime
    workload_class: str
    totals: Totals


@requires("usage.read")
def tenant_usage(request: HttpRequest, slug: str) -> HttpResponseBase:
    """`?minutes=` 60, 360 or 1440; `?format=csv` for the same rows as a file."""
    tenant, now = tenant_for(request.user, slug), timezone.now()
    span = request.GET.get("minutes", "60")
    span = span if span in SPANS else "60"
    rows = minutes_of(tenant.pk, now, timedelta(minutes=int(span)))
    if request.GET.get("format") == "csv":
        header = ["minute", "class", "requests", "prompt_tokens", "cached_tokens", "output_tokens", "charge"]
        return CsvResponse(f"usage-{slug}.csv", header, [_cells(row) for row in rows])
    context = {
        "tenant": tenant,
        "rows": rows,
        "span": span,
        "spans": SPANS,
        "now": now,
        "requests": sum(row.totals.requests for row in rows),
        "charged_nanos": sum(row.totals.charge_nanos for row in rows),
    }
    return render(request, "budgets/tenant_usage.html", context)


def minutes_of(tenant_id: int, now: datetime, span: timedelta) -> list[MinuteRow]:
    """The latest minute first; the one that runs is there with what ended in it so far."""
    until = now.replace(second=0, microsecond=0) + MINUTE
    found = series(Scope(since=until - span, until=until, tenant_ids=[tenant_id]), MINUTE, ["class_id"])
    names = dict(WorkloadClass.objects.values_list("pk", "slug"))
    rows = [MinuteRow(row.key["at"], names.get(row.key["class_id"], "—"), row) for row in found]
    return sorted(rows, key=lambda row: (row.at, row.workload_class), reverse=True)


def _cells(row: MinuteRow) -> list[object]:
    sums = row.totals
    counts = [sums.requests, sums.prompt_tokens, sums.cached_tokens, sums.output_tokens]
    return [row.at.isoformat(), row.workload_class, *counts, decimal_of_nanos(sums.charge_nanos)]
