"""The list of requests and refusals, and the page of one request."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from controlplane.contracts.models import WorkloadClass
from controlplane.core.reasons import BY_CODE, Outcome, Reason
from controlplane.fleet.models import Pool
from controlplane.ledger.queries import interval_at
from controlplane.live.refusal_lookup import refused_minute
from controlplane.live.request_story import visible_story
from controlplane.tenants.access import may, requires
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import sees_all_tenants, visible_tenants
from controlplane.tenants.tenant_field import tenant_input
from controlplane.usage.models import DecisionSample, RefusalMinute, UsageRecord
from controlplane.usage.retirement import ArchiveChanged
from controlplane.wire.report import FLAG_TOKENLESS

SHOWN = 50
LOOK_BACK = timedelta(hours=24)
FIRST_LOOK = timedelta(minutes=15)


@requires("request.read")
def request(request: HttpRequest, request_id: uuid.UUID) -> HttpResponse:
    """One request, or what was counted in its minute when no explanation of it was kept.

    Whoever may not see its tenant gets the same answer as for an id that never was.
    """
    now, tenants = timezone.now(), visible_tenants(request.user)
    try:
        story = visible_story(request_id, tenants, now)
    except ArchiveChanged as error:
        return _unreadable(request, request_id, error)
    if story is not None:
        hour = None
        if story.ended_at is not None and may(request.user, "finance.read"):
            hour = interval_at(story.pool, story.ended_at)
        return render(request, "live/request.html", {"story": story, "hour": hour, "nav_section": "requests"})
    found = refused_minute(request_id, tenants, now)
    if found is None:
        raise Http404("There is no such request.")
    return render(request, "live/refused_minute.html", {"found": found, "nav_section": "requests"})


def _unreadable(request: HttpRequest, request_id: uuid.UUID, error: ArchiveChanged) -> HttpResponse:
    """Its day is retired and the day's file cannot be read: whether there was such a request is not known."""
    context = {
        "request_id": request_id, "problem": str(error) if may(request.user, "finance.read") else "",
        "nav_section": "requests", "page_state": "unknown",
    }  # fmt: skip
    return render(request, "live/request_unreadable.html", context, status=503)


@dataclass(frozen=True, slots=True)
class Found:
    """One row of the list: a record or a refusal that was kept in full."""

    request_id: uuid.UUID
    at: datetime
    tenant: str
    klass: str
    pool: str
    reason: str
    chip: str
    status: int | None
    total_us: int | None
    queue_us: int | None
    tokens: str


@requires("request.read")
def requests(request: HttpRequest) -> HttpResponse:
    """Recent records and refusals, newest first; by id, tenant, class and reason."""
    asked = {name: request.GET.get(name, "").strip() for name in ("q", "tenant", "class", "reason", "pool")}
    if asked["q"]:
        try:
            return redirect("request", request_id=uuid.UUID(asked["q"]))
        except ValueError:
            pass
    now = timezone.now()
    seen = None if sees_all_tenants(request.user) else visible_tenants(request.user)
    names = _names(asked, seen)
    problems = _problems(asked, names)
    rows, since = ([], now - LOOK_BACK) if problems else _rows(asked, names, now)
    context = {
        "problems": problems,
        "rows": rows,
        "since": since,
        "asked": asked,
        "bad_id": bool(asked["q"]),
        "tenant_input": tenant_input("tenant", asked["tenant"], visible_tenants(request.user), placeholder="Any"),
        "classes": WorkloadClass.objects.order_by("slug").values_list("slug", flat=True),
        "pools": Pool.objects.filter(archived_at=None).order_by("slug").values_list("slug", flat=True),
        "reasons": [str(one) for one in (*Reason, *Outcome)],
        "refused": _refused(seen, now),
        "now": now,
        "nav_section": "requests",
    }
    return render(request, "live/requests.html", context, status=400 if problems else 200)


def _problems(asked: dict[str, str], names: _Names) -> list[str]:
    """What nothing can match. A tenant that one may not see reads like one that there is not."""
    found = []
    if asked["tenant"] and not names.tenants:
        found.append("Tenant: there is none of this name. Choose one of the list, or leave it empty for any.")
    for name, known in (("class", names.classes), ("pool", names.pools)):
        if asked[name] and asked[name] not in known.values():
            found.append(f"{name.capitalize()}: there is none of this name. Choose Any or leave it out.")
    if asked["reason"] and _code(asked["reason"]) is None:
        found.append("Outcome or reason: there is none of this name. Choose one of the list.")
    return found


def _code(reason: str) -> int | None:
    return next((number for number, one in BY_CODE.items() if str(one) == reason), None)


def _rows(asked: dict[str, str], names: _Names, now: datetime) -> tuple[list[Found], datetime]:
    """The newest rows that match; looks back a quarter of an hour, and a day when that has too few."""
    if asked["q"] and not any(asked[name] for name in ("tenant", "class", "reason", "pool")):
        return _both(asked, names, now - LOOK_BACK, now), now - LOOK_BACK
    for back in (FIRST_LOOK, LOOK_BACK):
        rows = _both(asked, names, now - back, now)
        if len(rows) >= SHOWN:
            break
    return rows, now - back


@dataclass(frozen=True, slots=True)
class _Names:
    """`tenants` whose rows may be shown, None for those of all."""

    tenants: list[int] | None
    classes: dict[int, str]
    pools: dict[int, str]


def _names(asked: dict[str, str], tenants: QuerySet[Tenant] | None) -> _Names:
    if asked["tenant"]:
        tenants = (Tenant.objects.all() if tenants is None else tenants).filter(slug=asked["tenant"])
    return _Names(
        None if tenants is None else list(tenants.values_list("pk", flat=True)),
        dict(WorkloadClass.objects.values_list("pk", "slug")),
        dict(Pool.objects.values_list("pk", "slug")),
    )


def _both(asked: dict[str, str], names: _Names, since: datetime, now: datetime) -> list[Found]:
    wanted = Q() if names.tenants is None else Q(tenant_id__in=names.tenants)
    for name, known in (("class", names.classes), ("pool", names.pools)):
        if asked[name]:
            wanted &= Q(**{f"{name}_id__in": [pk for pk, slug in known.items() if slug == asked[name]]})
    code = _code(asked["reason"])
    records = UsageRecord.objects.filter(wanted, received_at__gte=since, received_at__lte=now)
    samples = DecisionSample.objects.filter(wanted, at__gte=since, at__lte=now, decision="reject")
    if asked["q"]:
        records = records.filter(client_request_id=asked["q"])
        samples = samples.none()
    if code is not None:
        records, samples = records.filter(outcome=code), samples.filter(reason=code)
    ended, refused = list(records.order_by("-received_at")[:SHOWN]), list(samples.order_by("-at")[:SHOWN])
    ids = {row.tenant_id for row in ended} | {row.tenant_id for row in refused}
    slugs = dict(Tenant.objects.filter(pk__in=ids).values_list("pk", "slug"))
    found = [_record(row, slugs, names) for row in ended]
    found += [_sample(row, slugs, names) for row in refused]
    return sorted(found, key=lambda row: row.at, reverse=True)[:SHOWN]


def _record(row: UsageRecord, slugs: dict[int, str], names: _Names) -> Found:
    outcome = str(BY_CODE.get(row.outcome, f"outcome {row.outcome}"))
    return Found(
        request_id=row.request_id,
        at=row.ended_at,
        tenant=slugs.get(row.tenant_id, ""),
        klass=names.classes.get(row.class_id, ""),
        pool=names.pools.get(row.pool_id, ""),
        reason=outcome,
        chip={"completed": "ok", "cancelled_by_client": "neutral"}.get(outcome, "bad"),
        status=row.status,
        total_us=round((row.ended_at - row.arrived_at).total_seconds() * 1_000_000),
        queue_us=row.queue_us if row.queue_us >= 0 else None,
        tokens="—" if row.flags & FLAG_TOKENLESS else f"{row.prompt_tokens:,} + {row.output_tokens:,}",
    )


def _sample(row: DecisionSample, slugs: dict[int, str], names: _Names) -> Found:
    return Found(
        request_id=row.request_id,
        at=row.at,
        tenant=slugs.get(row.tenant_id, ""),
        klass=names.classes.get(row.class_id, ""),
        pool=names.pools.get(row.pool_id, ""),
        reason=str(BY_CODE.get(row.reason, f"reason {row.reason}")),
        chip="bad",
        status=None,
        total_us=None,
        queue_us=None,
        tokens="",
    )


def _refused(tenants: QuerySet[Tenant] | None, now: datetime) -> list[tuple[str, int]]:
    """Refusals of the last 15 min by reason, counted exactly, also those that were not kept in full."""
    counts: dict[str, int] = {}
    rows = RefusalMinute.objects.filter(minute__gte=now - FIRST_LOOK)
    if tenants is not None:
        rows = rows.filter(tenant_id__in=tenants.values("pk"))
    for code, count in rows.values_list("reason", "count"):
        reason = str(BY_CODE.get(code, f"reason {code}"))
        counts[reason] = counts.get(reason, 0) + count
    return sorted(counts.items(), key=lambda pair: -pair[1])
