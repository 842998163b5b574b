"""Drain, suspend and their opposites with their effect first, and the page that measures what came of any act."""

from __future__ import annotations

from datetime import datetime

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import ReasonForm
from controlplane.audit.models import AuditEntry
from controlplane.fleet import actions as fleet_actions
from controlplane.fleet.queries import agent_for
from controlplane.flex.act_page import Act, act_page, own_address
from controlplane.flex.effects import Effect
from controlplane.live import act_jobs, acts, effects
from controlplane.live.act_kinds import ACTS
from controlplane.tenants import actions as tenant_actions
from controlplane.tenants.access import requires
from controlplane.tenants.queries import tenant_for


@requires("live.read", write="agent.drain")
def drain(request: HttpRequest, agent_id: int) -> HttpResponse:
    return _agent(request, agent_id, drains=True)


@requires("live.read", write="agent.drain")
def undrain(request: HttpRequest, agent_id: int) -> HttpResponse:
    return _agent(request, agent_id, drains=False)


def _agent(request: HttpRequest, agent_id: int, *, drains: bool) -> HttpResponse:
    row = agent_for(agent_id)
    act = Act(
        title=f"Drain {row.name}" if drains else f"Serve again: {row.name}",
        text="It finishes what it has; its slots stay part of the pool." if drains else "It takes requests again.",
        verb=f"Drain {row.name}" if drains else "Serve again",
        done="Requested: it takes nothing new from its next report on."
        if drains
        else "Requested: it serves again from its next report on.",
        permission="agent.drain",
        noun="agent",
        object_id=str(row.pk),
        acts=("agent.drain", "agent.undrain"),
        back=reverse("agent", args=[row.pk]),
        back_label=row.name,
        nav_section="pools",
        button="button-danger" if drains else "button-primary",
    )

    def do(form: ReasonForm, effect: Effect, now: datetime) -> None:
        change = fleet_actions.request_drain if drains else fleet_actions.cancel_drain
        change(
            agent_id=row.pk, actor=actor_of(request), now=now, reason=form.cleaned_data["reason"], noted=effect.noted
        )

    return act_page(request, act, lambda now: (effects.of_drain if drains else effects.of_undrain)(row, now), do)


@requires("live.read", write="tenant.suspend")
def suspend(request: HttpRequest, slug: str) -> HttpResponse:
    return _tenant(request, slug, suspends=True)


@requires("live.read", write="tenant.suspend")
def resume(request: HttpRequest, slug: str) -> HttpResponse:
    return _tenant(request, slug, suspends=False)


def _tenant(request: HttpRequest, slug: str, *, suspends: bool) -> HttpResponse:
    row = tenant_for(request.user, slug)
    verb = "Suspend" if suspends else "Resume"
    act = Act(
        title=f"{verb} {row.slug}",
        text="Its new requests are refused; you can resume it at any time."
        if suspends
        else "Its requests are taken again.",
        verb=f"{verb} {row.slug}",
        done=f"Requested: {row.slug} is {'suspended' if suspends else 'resumed'} on every agent within 2 s.",
        permission="tenant.suspend",
        noun="tenant",
        object_id=row.slug,
        acts=("tenant.suspend", "tenant.resume"),
        back=reverse("tenant", args=[row.slug]),
        back_label=row.slug,
        nav_section="tenants",
        button="button-danger" if suspends else "button-primary",
    )

    def do(form: ReasonForm, effect: Effect, now: datetime) -> None:
        change = tenant_actions.suspend_tenant if suspends else tenant_actions.resume_tenant
        change(
            tenant_id=row.pk, actor=actor_of(request), now=now, reason=form.cleaned_data["reason"], noted=effect.noted
        )

    return act_page(request, act, lambda now: (effects.of_suspend if suspends else effects.of_resume)(row, now), do)


@requires("live.read")
def act(request: HttpRequest, entry_id: int) -> HttpResponse:
    """What was expected of an act and what was measured; htmx asks for the moving part while more is to come."""
    now = timezone.now()
    entry = AuditEntry.objects.filter(pk=entry_id, action__in=ACTS).first()
    story = None if entry is None else acts.story(entry, now)
    if entry is None or story is None:
        raise Http404("There is no such act.")
    jobs = act_jobs.jobs_of(entry, request.user, now)
    context = {"story": story, "jobs": jobs, "now": now, "next": own_address(request), "nav_section": "live"}
    template = "live/act_panel.html" if request.headers.get("HX-Request") else "live/act.html"
    return render(request, template, context)
