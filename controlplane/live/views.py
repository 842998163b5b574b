"""Live pages: rendered from the same states that frames carry, then kept up by the socket."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from controlplane.fleet.models import Pool
from controlplane.live import engines, frames, history, readings, topics
from controlplane.live.attention import link
from controlplane.live.stages import PERCENTILES
from controlplane.tenants.access import may, member_of, requires
from controlplane.tenants.roles import Role
from controlplane.web.exports import CsvResponse

LEGEND_MINUTES = (55, 45, 35, 25, 15, 5)


@requires("home.read")
def home(request: HttpRequest) -> HttpResponse:
    """On-call's first page; a tenant's member sees the own tenant's contracts and queues instead."""
    member = member_of(request.user)
    now = timezone.now()
    if member is not None and member.role == Role.TENANT and member.tenant is not None:
        state = topics.tenant_state(readings.read(now, with_lanes=False), member.tenant)
        return render(request, "live/tenant.html", _context(state, now, tenant=member.tenant))
    past = history.past(request, "fleet")
    if past is not None and past.state is None:
        return history.no_past(request, past)
    state = topics.fleet(readings.read(now, with_lanes=False)) if past is None or past.state is None else past.state
    now = now if past is None else past.at
    context = _context(
        state,
        now,
        past=past,
        hot=state["state"] == "bad",
        may_act=past is None and may(request.user, "flex.act"),
        contracts_url=link("contracts"),
        alerts_url=link("alerts"),
        contract_new_url=link("contract-new") if may(request.user, "contract.write") else "",
        pool_new_url=link("pool-new") if may(request.user, "pool.write") else "",
        agents_url=link("agents"),
    )
    return render(request, "live/home.html", context)


def _context(state: topics.State, now: Any, **more: Any) -> dict[str, Any]:
    return {"state": state, "now": now, "page_state": state["state"], "page_tally": state["title"], **more}


def _pool_now(row: Pool, now: datetime) -> topics.State:
    reading = readings.read(now)
    (points,) = engines.told_before(frames.connect(), [f"{frames.LAST_PREFIX}pool:{row.slug}"])
    reading.engine_points[row.slug] = points
    return topics.pool_state(reading, row)


def _pool_or_404(slug: str) -> Pool:
    pool = Pool.objects.filter(slug=slug, archived_at=None).select_related("model").first()
    if pool is None:
        raise Http404("There is no such pool.")
    return pool


@requires("pool.read")
def pool(request: HttpRequest, slug: str) -> HttpResponse:
    """One pool: its queues, where time goes, its band slot by slot and why, its contracts, and what to do about it."""
    row, now = _pool_or_404(slug), timezone.now()
    past = history.past(request, f"pool:{slug}")
    if past is not None and past.state is None:
        return history.no_past(request, past)
    state = _pool_now(row, now) if past is None or past.state is None else past.state
    now = now if past is None else past.at
    figures = {f"stack_{name}": state[f"stack_{name}"] for name, _ in PERCENTILES}
    context = _context(
        state,
        now,
        past=past,
        pool=row,
        hot=state["state"] == "bad",
        nav_section="pools",
        percentiles=[name for name, _ in PERCENTILES],
        stage_figures=figures,
        axis_minutes=LEGEND_MINUTES,
        may_act=past is None and may(request.user, "flex.act"),
        flex_url=link("flex-pool", slug),
        edit_url=link("pool-edit", slug) if may(request.user, "pool.write") else "",
        pools_url=link("pools"),
    )
    return render(request, "live/pool.html", context)


@requires("pool.read")
def queue_csv(request: HttpRequest, slug: str) -> CsvResponse:
    """The queue panel as CSV."""
    row = _pool_or_404(slug)
    state = topics.pool_state(readings.read(timezone.now()), row)
    names = (
        "name", "kind", "depth", "oldest_us", "arrivals", "departures", "present", "expected", "light_word", "refused",
    )  # fmt: skip
    rows = ([one.get(name) for name in names] for one in state["queue"])
    return CsvResponse(f"queue-{slug}.csv", names, rows)


@requires("pool.read")
def stages_csv(request: HttpRequest, slug: str) -> CsvResponse:
    """The breakdown by stage as CSV, in microseconds."""
    row = _pool_or_404(slug)
    state = topics.pool_state(readings.read(timezone.now()), row)
    names = ["key", *(f"{kind}_{name}" for name, _ in PERCENTILES for kind in ("own", "mean", "share"))]
    return CsvResponse(f"stages-{slug}.csv", names, ([one[name] for name in names] for one in state["stages_rows"]))
