"""Pages of jobs; a tenant's member sees the own tenant's only."""

import logging
import uuid
from typing import Any

from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache

from controlplane.audit.actors import actor_of
from controlplane.core.batch_items import ItemState
from controlplane.fleet.models import Pool
from controlplane.jobs import downloads, effects, item_queries, listing, queries, storage
from controlplane.jobs.job_money import shortage_of
from controlplane.jobs.job_page import facts_of
from controlplane.jobs.models import Job
from controlplane.tenants.access import may, requires
from controlplane.web.pagination import BadCursor, keyset_page

log = logging.getLogger(__name__)

STATES = ("open", "missed", "parked", "running", "importing", "completed", "cancelled", "expired", "failed")
SORTS = ("attention", "newest")
PARKED_PER_PAGE = 25


@requires("job.read")
@never_cache
def jobs(request: HttpRequest) -> HttpResponseBase:
    """The list; what its page asks for every few seconds are the rows alone."""
    now = timezone.now()
    wanted = {name: request.GET.get(name, "") for name in ("state", "pool", "tenant", "class", "sort")}
    staff = may(request.user, "pool.read")
    rows = listing.by_attention(_chosen(queries.visible_jobs(request.user), wanted, now), now)
    order = ("-id",) if wanted["sort"] == "newest" else listing.ORDER
    try:
        page = keyset_page(rows, order, cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return HttpResponseBadRequest(str(error))
    renewing = bool(request.headers.get("HX-Request"))
    context = {
        "page": page,
        "rows": listing.listed(page.rows, now, with_slack=staff),
        "now": now,
        "staff": staff,
        "wanted": wanted,
        "filtered": any(value for name, value in wanted.items() if name != "sort"),
    }
    if not renewing:
        context |= {
            "states": STATES,
            "uploads": listing.uploads(request.user, now),
            "pools": list(Pool.objects.filter(archived_at=None).order_by("slug").values_list("slug", flat=True)),
            "may_submit": may(request.user, "job.submit"),
            "address": request.build_absolute_uri("/api/v1/jobs"),
        }
    return render(request, "jobs/_rows.html" if renewing else "jobs/jobs.html", context)


def _chosen(rows: QuerySet[Job], wanted: dict[str, str], now: Any) -> QuerySet[Job]:
    columns = {"pool": "pool__slug", "tenant": "tenant__slug", "class": "workload_class__slug"}
    # a zero character cannot be compared, and names no pool, tenant or class
    rows = rows.filter(**{columns[name]: wanted[name].replace("\x00", "?") for name in columns if wanted[name]})
    state = wanted["state"]
    if state in Job.State.values:
        return rows.filter(state=state)
    if state == "open":
        return rows.filter(state__in=listing.OPEN)
    if state == "parked":
        return rows.filter(items_parked__gt=0)
    return queries.missed(rows, now) if state == "missed" else rows


@requires("job.read")
@never_cache
def job(request: HttpRequest, job_uuid: uuid.UUID) -> HttpResponseBase:
    """One job; what its page asks for every few seconds is its progress alone."""
    row = queries.job_for(request.user, job_uuid)
    now = timezone.now()
    staff = may(request.user, "pool.read")
    facts = facts_of(row, now, staff=staff)
    context: dict[str, Any] = {
        "job": row, "facts": facts, "status": facts.status, "now": now, "staff": staff,
        "shortage": (shortage := shortage_of(row, now)),
        "shortage_known": shortage is not None
        and (shortage.window.level == row.tenant.slug or may(request.user, "live.read")),
    }  # fmt: skip
    if request.headers.get("HX-Request"):
        return render(request, "jobs/_progress.html", context)
    try:
        after = item_queries.line_of(request.GET.get("after", "0"))
    except ValueError as error:
        return HttpResponseBadRequest(f"after: {error}")
    writes = may(request.user, "job.write")
    context |= {
        # other tenants' work is behind these numbers: for staff only
        "slack": queries.pool_slack(row.pool, now) if staff and row.state == Job.State.RUNNING else None,
        "acts": effects.acts_on(row) if staff else [],
        "files": downloads.files_of(row, now),
        "may_cancel": writes and row.state in listing.OPEN,
        "may_retry": writes and facts.may_retry,
        "may_extend": writes and row.state == Job.State.RUNNING and row.deadline is not None,
        "page_state": "bad" if facts.status.standing == "missed" else "",
        **_parked(row, after),
    }
    return render(request, "jobs/job.html", context)


def _parked(row: Job, after: int) -> dict[str, Any]:
    """A page of parked items by line, and the line to go on after."""
    if not row.has_items or not row.items_parked or row.rows_purged_at is not None:
        return {"parked": [], "parked_next": None, "parked_after": after}
    found = item_queries.items_page(row, after=after, limit=PARKED_PER_PAGE + 1, state=ItemState.PARKED)
    shown = found[:PARKED_PER_PAGE]
    more = shown[-1].line if len(found) > len(shown) else None
    return {"parked": shown, "parked_next": more, "parked_after": after}


@requires("job.read")
def job_file(request: HttpRequest, job_uuid: uuid.UUID, which: str) -> HttpResponseBase:
    """The bytes of a job's results or errors. Who else than its tenant takes them stands in the audit log."""
    row = queries.job_for(request.user, job_uuid)
    now = timezone.now()
    found = next((file for file in downloads.files_of(row, now) if file.which == which and file.row), None)
    if found is None or found.row is None:
        raise Http404("There is no such file.")
    try:
        storage.look_for(found.row.path)
    except FileNotFoundError as error:
        log.error("a file of job %s is lost: %s", row.uuid, error)
        return HttpResponse(storage.LOST, status=404, content_type="text/plain; charset=utf-8")
    except storage.StorageError as error:
        log.error("a file of job %s was not sent: %s", row.uuid, error)
        text = "The file store does not answer; the file is not lost. Try again later, or ask your operator."
        return HttpResponse(text, status=503, content_type="text/plain; charset=utf-8")
    if may(request.user, "pool.read"):
        downloads.note(found.row, row, actor_of(request), now)
    response = StreamingHttpResponse(storage.stream(found.row.path), content_type="application/x-ndjson")
    response["Content-Length"] = str(found.row.size_bytes)
    response["Content-Disposition"] = f'attachment; filename="{found.row.uuid.hex}-{which}.jsonl"'
    response["Cache-Control"] = "private, no-store"
    return response
