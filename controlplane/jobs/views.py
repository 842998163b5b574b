"""Pages of jobs; a tenant's member sees the own tenant's only."""

import uuid

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.audit.actors import actor_of
from controlplane.fleet.models import Pool
from controlplane.jobs import actions, queries
from controlplane.jobs.models import Job
from controlplane.tenants.access import may, requires
from controlplane.tenants.review import reason_of
from controlplane.web.numerals import fixed
from controlplane.web.pagination import BadCursor, keyset_page

STATES = ("running", "missed", "completed", "cancelled")


@requires("job.read")
def jobs(request: HttpRequest) -> HttpResponseBase:
    now = timezone.now()
    state, pool = request.GET.get("state", ""), request.GET.get("pool", "")
    rows = queries.visible_jobs(request.user)
    if pool:
        rows = rows.filter(pool__slug=pool)
    if state in Job.State.values:
        rows = rows.filter(state=state)
    elif state == "missed":
        rows = queries.missed(rows, now)
    try:
        page = keyset_page(rows, ("-id",), cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return HttpResponseBadRequest(str(error))
    context = {
        "page": page,
        "rows": [queries.status_of(job, now) for job in page.rows],
        "now": now,
        "states": STATES,
        "pools": list(Pool.objects.filter(archived_at=None).order_by("slug").values_list("slug", flat=True)),
        "wanted": {"state": state, "pool": pool},
        "address": request.build_absolute_uri("/api/v1/jobs"),
    }
    return render(request, "jobs/jobs.html", context)


@requires("job.read")
def job(request: HttpRequest, job_uuid: uuid.UUID) -> HttpResponse:
    row = queries.job_for(request.user, job_uuid)
    now = timezone.now()
    status = queries.status_of(row, now)
    staff = may(request.user, "pool.read")
    context = {
        "job": row,
        "status": status,
        "completed": fixed(row.items_completed),
        "failed": fixed(row.items_failed),
        "left": fixed(status.unfinished),
        # other tenants' work is behind these numbers: for staff only
        "slack": queries.pool_slack(row.pool, now) if staff and row.state == Job.State.RUNNING else None,
        "may_write": may(request.user, "job.write"),
        "now": now,
        "page_state": "bad" if status.standing == "missed" else "",
    }
    return render(request, "jobs/job.html", context)


@require_POST
@requires("job.write")
def job_cancel(request: HttpRequest, job_uuid: uuid.UUID) -> HttpResponse:
    row = queries.job_for(request.user, job_uuid)
    actions.cancel_job(job_uuid=row.uuid, actor=actor_of(request), now=timezone.now(), reason=reason_of(request))
    messages.success(request, "Cancelled: its items are backlog no longer. What runs is finished.")
    return redirect("job", job_uuid=row.uuid)
