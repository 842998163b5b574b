"""Cancel, retry parked, extend deadline: each shows what it does to the pool's slack, takes a reason, is audited."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import ReasonForm, take_errors
from controlplane.jobs import actions, batch_actions, effects, queries
from controlplane.jobs.effects import Effect
from controlplane.jobs.forms import ExtendForm
from controlplane.jobs.models import Job
from controlplane.tenants.access import may, requires

CANCEL_ITEMS = (
    "What waits is not run, agents drop what runs with their next report, and what was done by then is in its files."
)
CANCEL_LOOP = "What runs is finished; what its client sends later runs as single requests."


@dataclass(frozen=True, slots=True)
class Act:
    """A form page that does one thing to a job."""

    title: str
    text: str
    verb: str
    button: str = "button-primary"


@requires("job.write")
def job_cancel(request: HttpRequest, job_uuid: uuid.UUID) -> HttpResponse:
    row, now = queries.job_for(request.user, job_uuid), timezone.now()
    act = Act(
        title="Cancel job",
        text=f"Its items count as backlog no longer. {CANCEL_ITEMS if row.has_items else CANCEL_LOOP}",
        verb="Cancel job",
        button="button-danger",
    )
    effect = effects.of_cancel(row, now)

    def do(form: ReasonForm) -> str:
        actions.cancel_job(
            job_uuid=row.uuid, actor=actor_of(request), now=now, reason=form.cleaned_data["reason"],
            noted=effect.noted(),
        )  # fmt: skip
        return "Cancelled: its items are backlog no longer."

    return _act(request, row, act, effect, ReasonForm, do, now)


@requires("job.write")
def job_retry(request: HttpRequest, job_uuid: uuid.UUID) -> HttpResponse:
    row, now = queries.job_for(request.user, job_uuid), timezone.now()
    effect = effects.of_retry(row, now)
    act = Act(
        title="Retry parked items",
        text=f"{effect.items:,} parked items become leasable again, each for as many attempts as a new one. "
        "A job that was completed runs again, and its files are written anew when it ends.",
        verb="Retry parked items",
    )

    def do(form: ReasonForm) -> str:
        retried = batch_actions.retry_parked(
            job_uuid=row.uuid, actor=actor_of(request), now=now, reason=form.cleaned_data["reason"],
            noted=effect.noted(),
        )  # fmt: skip
        return f"Accepted: {retried:,} items wait to be leased." if retried else "There was no parked item left."

    return _act(request, row, act, effect, ReasonForm, do, now)


@requires("job.write")
def job_extend(request: HttpRequest, job_uuid: uuid.UUID) -> HttpResponse:
    """Two steps: the deadline is read and its effect shown, then the same deadline is confirmed."""
    row, now = queries.job_for(request.user, job_uuid), timezone.now()
    act = Act(
        title="Extend deadline",
        text="The job may take longer: it asks for fewer slots, and later ones of the pool may come before it.",
        verb="Extend deadline",
    )
    asked = _asked_deadline(request, now)
    confirmed = asked is not None and request.POST.get("seen") == asked.isoformat()
    effect = effects.of_extension(row, asked, now) if asked else None

    def do(form: ReasonForm) -> str:
        assert asked is not None and effect is not None
        batch_actions.extend_deadline(
            job_uuid=row.uuid, deadline=asked, actor=actor_of(request), now=now, reason=form.cleaned_data["reason"],
            noted=effect.noted(),
        )  # fmt: skip
        return "Accepted: the deadline was moved."

    return _act(request, row, act, effect, ExtendForm, do, now, asked=asked, show_first=not confirmed)


def _asked_deadline(request: HttpRequest, now: datetime) -> datetime | None:
    try:
        return batch_actions.check_deadline(request.POST.get("deadline", ""), now, field="deadline")
    except ValidationError:
        return None


def _act(
    request: HttpRequest,
    row: Job,
    act: Act,
    effect: Effect | None,
    form_class: type[ReasonForm],
    do: Callable[[ReasonForm], str],
    now: datetime,
    *,
    asked: datetime | None = None,
    show_first: bool = False,
) -> HttpResponse:
    """GET shows the effect and asks for the reason, POST does it. `show_first`: POST only shows the effect."""
    form = form_class(request.POST) if request.method == "POST" else form_class()
    if isinstance(form, ExtendForm) and form.is_bound:
        _check_deadline(form, row, now)
    if show_first:
        # the reason is asked for with the effect in sight
        form.errors.pop("reason", None)
    elif form.is_bound and form.is_valid():
        try:
            said = do(form)
        except ValidationError as error:
            take_errors(form, error)
        else:
            messages.success(request, said)
            return redirect("job", job_uuid=row.uuid)
    context = {
        "job": row,
        "act": act,
        "effect": effect,
        "staff": may(request.user, "pool.read"),
        "form": _with_seen(form, asked),
        "asked": asked,
        "show_first": isinstance(form, ExtendForm) and (asked is None or "deadline" in form.errors),
        "now": now,
        "nav_section": "jobs",
    }
    failed = form.is_bound and bool(form.errors)
    return render(request, "jobs/act.html", context, status=422 if failed else 200)


def _check_deadline(form: ExtendForm, row: Job, now: datetime) -> None:
    """What is wrong with the deadline is said before its effect is shown."""
    text = form.data.get("deadline", "")
    if not text.strip():
        return
    try:
        at = batch_actions.check_deadline(text, now, field="deadline")
    except ValidationError as error:
        take_errors(form, error)
        return
    if row.deadline is not None and at <= row.deadline:
        form.add_error("deadline", "Choose an instant after the present deadline.")


def _with_seen(form: ReasonForm, asked: datetime | None) -> ReasonForm:
    if asked is not None and form.is_bound:
        form.data = {**form.data.dict(), "seen": asked.isoformat()}  # type: ignore[attr-defined]
    return form
