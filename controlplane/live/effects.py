"""What draining an agent, or suspending a tenant, would do: shown before it is done and kept beside the act."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from controlplane.core.reasons import Reason
from controlplane.fleet.models import Agent, AgentLive, Slot
from controlplane.flex import band_now
from controlplane.flex.band_now import FRESH
from controlplane.flex.effects import Effect, Figure, band_lines, slack_noted
from controlplane.flex.job_lines import job_lines, jobs_noted, said_of_jobs
from controlplane.jobs.models import Job
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.usage.models import RefusalMinute
from controlplane.web.numerals import DASH, duration, fixed

REFUSED_OVER: Final = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Present:
    """Requests on agents by their last reports; `heard` of `agents` are fresh. None where none is."""

    running: int | None
    waiting: int | None
    arrivals_per_s: float | None
    longest_mean_us: int | None
    heard: int
    agents: int


def present_on(agent: Agent, now: datetime) -> Present:
    """All classes of one agent."""
    live = AgentLive.objects.filter(agent=agent)
    return _present(live, "classes", None, 1, now)


def present_of(tenant: Tenant, now: datetime) -> Present:
    """One tenant on all agents in use."""
    live = AgentLive.objects.filter(agent__state=Agent.State.ACTIVE)
    return _present(live, "tenants", tenant.pk, Agent.objects.filter(state=Agent.State.ACTIVE).count(), now)


def _present(live: Iterable[AgentLive], part: str, tenant_id: int | None, agents: int, now: datetime) -> Present:
    fresh = [row for row in live if timedelta(0) <= now - row.reported_at <= FRESH and part in row.figures]
    if not fresh:
        return Present(None, None, None, None, 0, agents)
    rows: list[dict[str, Any]] = [
        said
        for row in fresh
        for said in row.figures.get(part, ())
        if tenant_id is None or said["tenant_id"] == tenant_id
    ]
    means = [said["residence_mean_us"] for said in rows if said.get("residence_mean_us") is not None]
    return Present(
        running=sum(said["running"] for said in rows),
        waiting=sum(said["depth"] for said in rows),
        arrivals_per_s=sum(said["arrivals_per_s"] for said in rows),
        longest_mean_us=max(means, default=None),
        heard=len(fresh),
        agents=agents,
    )


def of_drain(agent: Agent, now: datetime) -> Effect:
    """An agent takes nothing new: what its pool can still serve, against its load, floor and deadlines."""
    band = band_now.read(agent.pool, now)
    own = set(Slot.objects.filter(agent=agent, removed_at=None).values_list("pk", flat=True))
    before, after = band.figures(), band.figures(without=list(own))
    present = present_on(agent, now)
    floor = [slot for slot in band.slots if slot.band == Slot.Band.INTERACTIVE]
    left = [slot for slot in floor if slot.slot_id not in own]
    said = ["It takes nothing new from its next report on, hands leased batch items back and finishes what it runs."]
    if present.longest_mean_us:
        said.append(f"Requests stayed {duration(present.longest_mean_us)} on average in the last 5 min.")
    if not present.heard:
        said.append(
            "It has not reported for 10 s: what it runs is not known, and it learns of the drain when it reports."
        )
    lent = [slot.name for slot in band.lent() if slot.slot_id in own]
    if lent:
        said.append(f"Its lent slots are recalled: {', '.join(lent)}.")
    said.append(_who_is_left(agent, now))
    said += said_of_jobs([before, after], band.best_effort)
    jobs = job_lines([before, after])
    return Effect(
        columns=("Now", "Drained"),
        said=tuple(said),
        figures=(
            Figure("Requests that run on it", (fixed(present.running), "0")),
            Figure("Requests that wait on it", (fixed(present.waiting), "0")),
            Figure("Interactive floor, slots", (fixed(len(floor)), fixed(len(left))), "" if left else "bad"),
            *band_lines(band, [before, after]),
        ),
        **jobs,
        noted={"running": present.running, "waiting": present.waiting, "load_before": before.load,
               "load_expected": after.load, **slack_noted(before, after), **jobs_noted(jobs["jobs"])},
    )  # fmt: skip


def _who_is_left(agent: Agent, now: datetime) -> str:
    others = Agent.objects.filter(
        pool=agent.pool, state=Agent.State.ACTIVE, drain_requested_at=None, live__reported_at__gte=now - FRESH
    ).exclude(pk=agent.pk)
    names = list(others.order_by("name").values_list("name", flat=True)[:4])
    if not names:
        return f"No other agent of {agent.pool.slug} serves: its requests find nobody."
    more = others.count() - len(names)
    return f"Left in {agent.pool.slug}: {', '.join(names)}{f' and {more} more' if more > 0 else ''}."


def of_undrain(agent: Agent, now: datetime) -> Effect:
    """An agent takes requests again."""
    band = band_now.read(agent.pool, now)
    own = list(Slot.objects.filter(agent=agent, removed_at=None).values_list("pk", flat=True))
    before, after = band.figures(without=own), band.figures()
    return Effect(
        columns=("Drained", "Serving"),
        said=("It takes requests from its next report on.",),
        figures=band_lines(band, [before, after]),
        **job_lines([before, after]),
        noted={"load_before": before.load, "load_expected": after.load, **slack_noted(before, after)},
    )


def of_suspend(tenant: Tenant, now: datetime) -> Effect:
    """A tenant's new requests are refused: how much that is, and what of it runs, waits and is due."""
    present = present_of(tenant, now)
    jobs, items = _open_jobs(tenant)
    rate = fixed(present.arrivals_per_s, 1)
    return Effect(
        columns=("Now", "Suspended"),
        said=(
            "Agents refuse its new requests with tenant_suspended within 2 s. What runs and what waits is finished.",
            _heard(present),
            "Its batch items are not leased meanwhile; deadlines of its jobs go on." if jobs else "It has no open job.",
        ),
        figures=(
            Figure("Requests that run", (fixed(present.running), "finished")),
            Figure("Requests that wait", (fixed(present.waiting), "finished")),
            Figure("Arriving, requests/s over 5 min", (rate, "refused")),
            Figure("Open jobs", (fixed(jobs), f"{jobs:,} held"), "risk" if jobs else ""),
            Figure("Their unfinished items", (fixed(items), f"{items:,} held"), "risk" if items else ""),
            Figure("Keys in use", (fixed(_keys(tenant, now)), "kept, refused")),
        ),
        jobs=(),
        jobs_more=0,
        noted={"running": present.running, "waiting": present.waiting, "arrivals_per_s": present.arrivals_per_s,
               "open_jobs": jobs},
    )  # fmt: skip


def of_resume(tenant: Tenant, now: datetime) -> Effect:
    """A tenant's requests are taken again: how many are refused meanwhile, and what waits to go on."""
    refused = refused_as_suspended(tenant, now - REFUSED_OVER, now)
    jobs, items = _open_jobs(tenant)
    present = present_of(tenant, now)
    return Effect(
        columns=("Now", "Resumed"),
        said=("Agents take its requests again within 2 s.", _heard(present)),
        figures=(
            Figure("Refused as suspended, last 15 min", (fixed(refused), DASH)),
            Figure("Open jobs", (f"{jobs:,} held", fixed(jobs))),
            Figure("Their unfinished items", (f"{items:,} held", fixed(items))),
            Figure("Keys in use", (fixed(_keys(tenant, now)), fixed(_keys(tenant, now)))),
        ),
        jobs=(),
        jobs_more=0,
        noted={"refused_15min": refused, "open_jobs": jobs},
    )


def refused_as_suspended(tenant: Tenant, since: datetime, until: datetime) -> int:
    """Requests refused with tenant_suspended, by minute of arrival."""
    rows = RefusalMinute.objects.filter(
        tenant_id=tenant.pk, reason=Reason.TENANT_SUSPENDED.code, minute__lte=until,
        minute__gte=since.replace(second=0, microsecond=0),
    )  # fmt: skip
    return sum(rows.values_list("count", flat=True))


def _heard(present: Present) -> str:
    if present.heard == present.agents:
        return f"All {present.agents:,} agents were heard within 10 s."
    return f"{present.heard:,} of {present.agents:,} agents were heard within 10 s; the others are not counted here."


def _open_jobs(tenant: Tenant) -> tuple[int, int]:
    rows = Job.objects.filter(tenant=tenant, state=Job.State.RUNNING).values_list(
        "items", "items_completed", "items_parked", "items_cancelled"
    )
    left = [max(0, items - done - parked - cancelled) for items, done, parked, cancelled in rows]
    return len(left), sum(left)


def _keys(tenant: Tenant, now: datetime) -> int:
    return ApiKey.objects.filter(tenant=tenant, state=ApiKey.State.ACTIVE).exclude(expires_at__lte=now).count()
