"""The form page of an act: its effect first, then the reason; afterwards the page that measures what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlencode

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme

from controlplane.audit.forms import ReasonForm, take_errors
from controlplane.audit.models import AuditEntry
from controlplane.flex.effects import Effect
from controlplane.flex.job_lines import JobLine
from controlplane.jobs.models import Job
from controlplane.jobs.queries import visible_jobs
from controlplane.tenants.access import may


@dataclass(frozen=True)
class Act:
    """What a page does. `noun`, `object_id` and `acts` find its audit entry; `back` is where who sends nothing goes."""

    title: str
    text: str
    verb: str
    done: str
    permission: str
    noun: str
    object_id: str
    acts: tuple[str, ...]
    back: str
    back_label: str
    nav_section: str
    button: str = "button-primary"


def act_page(
    request: HttpRequest,
    act: Act,
    effect: Callable[[datetime], Effect],
    do: Callable[[ReasonForm, Effect, datetime], None],
    form_class: type[ReasonForm] = ReasonForm,
) -> HttpResponse:
    """GET shows the effect and asks for the reason; POST does it, keeps the effect beside it and shows what came."""
    now = timezone.now()
    back = own_address(request) or act.back
    form = form_class(request.POST) if request.method == "POST" else form_class()
    found = effect(now)
    if form.is_bound and form.is_valid():
        try:
            do(form, found, now)
        except ValidationError as error:
            take_errors(form, error)
        else:
            messages.success(request, act.done)
            return redirect(_afterwards(act, back))
    context = {
        "act": act, "effect": found, "form": form, "back": back, "now": now, "nav_section": act.nav_section,
        "may_act": may(request.user, act.permission), "jobs": _named(request, found),
    }  # fmt: skip
    return render(request, "flex/act.html", context, status=422 if form.is_bound else 200)


def _named(request: HttpRequest, effect: Effect) -> list[tuple[JobLine, Job | None]]:
    """The effect's jobs with their rows: None for one whose tenant the person may not see."""
    rows = visible_jobs(request.user).filter(pk__in=[line.room.job.pk for line in effect.jobs])
    seen = {job.pk: job for job in rows}
    return [(line, seen.get(line.room.job.pk)) for line in effect.jobs]


def own_address(request: HttpRequest) -> str:
    """`next`, where the person came from, if it is one of our own addresses; else empty."""
    wanted = request.POST.get("next") or request.GET.get("next") or ""
    own = url_has_allowed_host_and_scheme(wanted, allowed_hosts={request.get_host()}, require_https=request.is_secure())
    return wanted if own else ""


def _afterwards(act: Act, back: str) -> str:
    """The page of the act that was just done; back where no app brings it or nothing had to be done."""
    rows = AuditEntry.objects.filter(noun=act.noun, object_id=act.object_id, action__in=act.acts)
    entry = rows.order_by("-id").first()
    try:
        return back if entry is None else f"{reverse('act', args=[entry.pk])}?{urlencode({'next': back})}"
    except NoReverseMatch:
        return back
