"""What was reported and could not be counted, and what was counted twice."""

import json
from datetime import datetime, timedelta
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import redirect, render
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.fleet.models import Agent
from controlplane.tenants.access import may, requires
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import installation
from controlplane.usage.actions import decide_set_aside
from controlplane.usage.duplicates import GRACE, HOUR
from controlplane.usage.models import UsageRecord
from controlplane.usage.set_aside import Copies, aside_groups, aside_reasons, copies

RANGES = {"1": "Last day", "7": "Last 7 days", "30": "Last 30 days", "90": "Last 90 days"}
RANGE = "30"
AUDIT_LATE = timedelta(hours=1)


@requires("quarantine.read", write="quarantine.write")
def set_aside_page(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    if request.method == "POST":
        return _decide(request, now)
    days = request.GET.get("days", RANGE)
    days = days if days in RANGES else RANGE
    since = now - timedelta(days=int(days))
    agent = _agent(request.GET.get("agent", ""))
    reason = request.GET.get("reason", "")[:60]
    groups = aside_groups(since, agent_id=agent.pk if agent else None, reason=reason)
    found = copies(since)
    context: dict[str, Any] = {
        "ranges": RANGES.items(),
        "days": days,
        "range_title": RANGES[days],
        "agent": agent,
        "reason": reason,
        "reasons": aside_reasons(since),
        "rows": [
            {"group": group, "example": json.dumps(group.example, indent=1, ensure_ascii=False)} for group in groups
        ],
        "records": sum(group.records for group in groups),
        "copies": found,
        "copy_rows": _copy_rows(found),
        "audit_late": _is_late(found.audited_until, now),
        "audited_until": found.audited_until + HOUR if found.audited_until else None,
        "currency": installation().currency,
        "may_decide": may(request.user, "quarantine.write"),
        "may_open_agents": may(request.user, "agent.read"),
    }
    return render(request, "usage/set_aside.html", context)


def _decide(request: HttpRequest, now: datetime) -> HttpResponse:
    agent, through = request.POST.get("agent", ""), request.POST.get("through", "")
    if not through.isdigit() or len(through) > 18 or (agent and not (agent.isdigit() and len(agent) < 10)):
        return HttpResponseBadRequest("Send the agent and the entry as the page has them.")
    try:
        decided = decide_set_aside(
            reason=request.POST.get("aside", "")[:60],
            agent_id=int(agent) if agent else None,
            through_id=int(through),
            why=request.POST.get("reason", ""),
            actor=actor_of(request),
            now=now,
        )
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    else:
        messages.success(request, f"Decided: {decided:,} entries. No total has changed.")
    return redirect("set-aside")


def _agent(text: str) -> Agent | None:
    return Agent.objects.filter(pk=int(text)).first() if text.isdigit() and len(text) < 10 else None


def _copy_rows(found: Copies) -> list[dict[str, Any]]:
    rows = found.latest
    slugs = dict(Tenant.objects.filter(pk__in={row.tenant_id for row in rows}).values_list("pk", "slug"))
    ids = {agent_id for row in rows for agent_id in row.agent_ids}
    names = dict(Agent.objects.filter(pk__in=ids).values_list("pk", "name"))
    return [
        {
            "copy": row,
            "tenant": slugs.get(row.tenant_id, ""),
            "agents": [names.get(agent_id, str(agent_id)) for agent_id in dict.fromkeys(row.agent_ids)],
            "tokens": row.prompt_tokens + row.output_tokens,
            "nanos": row.charge_prompt_nanos + row.charge_cached_nanos + row.charge_output_nanos + row.charge_gpu_nanos,
        }
        for row in rows
    ]


def _is_late(audited: datetime | None, now: datetime) -> bool:
    """Whether an hour that should have been looked through was not: then nothing found says nothing."""
    if audited is None:
        return UsageRecord.objects.filter(received_at__lt=now - HOUR - GRACE - AUDIT_LATE).exists()
    return now > audited + 2 * HOUR + GRACE + AUDIT_LATE
