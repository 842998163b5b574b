"""Pages of alerts: what is open and what was, one alert's story, silences, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.alerts import actions, queries
from controlplane.alerts.forms import NoteForm, ReceiverForm, SilenceForm, silence_initial
from controlplane.alerts.messages import secret_text, state_of
from controlplane.alerts.models import Alert, Delivery, Receiver, Silence
from controlplane.alerts.runbooks import runbook_html
from controlplane.audit.actors import actor_of
from controlplane.audit.forms import ReasonForm, take_errors
from controlplane.tenants.access import may, requires
from controlplane.tenants.actions import Stale
from controlplane.web.pagination import BadCursor, keyset_page
from controlplane.web.views import bad_request

STATES = (("", "Open"), ("resolved", "Resolved"), ("all", "All"))
DELIVERIES_SHOWN = 25
SILENCES_SHOWN = 25


@dataclass(frozen=True)
class Act:
    """A form page that does one thing."""

    title: str
    text: str
    verb: str
    done: str
    back: str
    back_label: str
    button: str = "button-primary"


@requires("alert.read")
def alerts(request: HttpRequest) -> HttpResponse:
    """Alerts, the open ones first of all."""
    now, state, kind = timezone.now(), request.GET.get("state", ""), request.GET.get("kind", "")
    rows = Alert.objects.all()
    if state == "resolved":
        rows = rows.exclude(resolved_at=None)
    elif state != "all":
        rows = rows.filter(resolved_at=None)
    if kind in actions.KINDS:
        rows = rows.filter(kind=kind)
    try:
        page = keyset_page(rows, ("-raised_at", "-id"), cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return bad_request(request, error)
    silences = queries.silences_in_force(now)
    context = {
        "now": now,
        "page": page,
        "rows": [(row, state_of(row), queries.silence_of(row, silences)) for row in page.rows],
        "total": rows.count(),
        "state": state,
        "states": STATES,
        "kind": kind,
        "kinds": actions.KIND_WORDS.items(),
        "silences": len(silences),
        "receivers": queries.receivers().filter(enabled=True).count(),
        "may_act": may(request.user, "alert.act"),
        "nav_section": "live",
    }
    return render(request, "alerts/alerts.html", context)


@requires("alert.read")
def alert(request: HttpRequest, alert_id: int) -> HttpResponse:
    """One alert: what it says, its likeliest causes, what to do, who did what, and who was told."""
    row, now = queries.alert_or_404(alert_id), timezone.now()
    context = {
        "now": now,
        "alert": row,
        "alert_state": state_of(row),
        "kind_word": actions.KIND_WORDS.get(row.kind, row.kind),
        "silence": queries.silence_of(row, queries.silences_in_force(now)) if row.resolved_at is None else None,
        "history": row.history.order_by("at", "id"),
        "deliveries": row.deliveries.select_related("receiver").order_by("-created_at", "-id")[:DELIVERIES_SHOWN],
        "runbook": runbook_html(row.kind),
        "may_act": may(request.user, "alert.act") and row.resolved_at is None,
        "nav_section": "live",
    }
    return render(request, "alerts/alert.html", context)


@requires("alert.read", write="alert.act")
def acknowledge(request: HttpRequest, alert_id: int) -> HttpResponse:
    row = queries.alert_or_404(alert_id)
    act = Act(
        title="Acknowledge",
        text=f"{row.title}. You look after it: nobody is told again unless it gets worse.",
        verb="Acknowledge",
        done="Acknowledged. Everybody sees your note beside the alert.",
        **_back_to(row),
    )

    def do(form: forms.Form, now: datetime) -> None:
        actions.acknowledge(alert_id=row.pk, note=form.cleaned_data["reason"], actor=actor_of(request), now=now)

    return _act(request, act, NoteForm, do)


@requires("alert.read", write="alert.act")
def rearm(request: HttpRequest, alert_id: int) -> HttpResponse:
    row = queries.alert_or_404(alert_id)
    act = Act(
        title="Take the acknowledgement back",
        text=f"{row.title}. Nobody looks after it then, and receivers are told as of a new alert.",
        verb="Take it back",
        done="Taken back. Receivers are told within seconds.",
        **_back_to(row),
    )

    def do(form: forms.Form, now: datetime) -> None:
        actions.rearm(alert_id=row.pk, note=form.cleaned_data["reason"], actor=actor_of(request), now=now)

    return _act(request, act, NoteForm, do)


def _back_to(row: Alert) -> dict[str, str]:
    return {"back": reverse("alert", args=[row.pk]), "back_label": "Alert"}


# ---- silences ----


@requires("alert.read")
def silences(request: HttpRequest) -> HttpResponse:
    """Silences in force, planned ones, and the newest that are over."""
    now = timezone.now()
    context = {
        "now": now,
        "to_come": queries.silences_to_come(now),
        "over": queries.silences_over(now).order_by("-ends_at", "-id")[:SILENCES_SHOWN],
        "kind_words": actions.KIND_WORDS,
        "may_act": may(request.user, "alert.act"),
        "nav_section": "live",
    }
    return render(request, "alerts/silences.html", context)


@requires("alert.read", write="alert.act")
def silence_new(request: HttpRequest) -> HttpResponse:
    """A silence, for an alert (`?alert=`) or from nothing."""
    wanted = request.GET.get("alert", "")
    row = Alert.objects.filter(pk=int(wanted)).first() if wanted.isdecimal() and len(wanted) < 19 else None
    act = Act(
        title="New silence",
        text="Alerts that fit are raised and shown, but told to nobody. What is still open at its end is told then.",
        verb="Silence",
        done="Silenced. It ends by itself.",
        back=reverse("silences"),
        back_label="Silences",
    )

    def do(form: forms.Form, now: datetime) -> None:
        assert isinstance(form, SilenceForm)
        actions.create_silence(**form.values(now), reason=form.cleaned_data["reason"], actor=actor_of(request), now=now)

    return _act(request, act, SilenceForm, do, initial=silence_initial(row) if row else {})


@requires("alert.read", write="alert.act")
def silence_end(request: HttpRequest, silence_id: int) -> HttpResponse:
    row = Silence.objects.filter(pk=silence_id).first()
    if row is None:
        raise Http404("There is no such silence.")
    act = Act(
        title="End the silence",
        text="What is open and was never told is told within seconds.",
        verb="End it now",
        done="Ended.",
        back=reverse("silences"),
        back_label="Silences",
    )

    def do(form: forms.Form, now: datetime) -> None:
        actions.end_silence(silence_id=row.pk, reason=form.cleaned_data["reason"], actor=actor_of(request), now=now)

    return _act(request, act, ReasonForm, do)


# ---- receivers ----


@requires("alert.read")
def receivers(request: HttpRequest) -> HttpResponse:
    """Who is told, and how the last messages went."""
    found = list(queries.receivers())
    last = queries.last_deliveries(found)
    rows = [(row, queries.shown_target(row.target), last.get(row.pk)) for row in found]
    context = {"now": timezone.now(), "rows": rows, "nav_section": "live"}
    context["may_write"] = may(request.user, "alert.configure")
    return render(request, "alerts/receivers.html", context)


@requires("alert.read")
def receiver(request: HttpRequest, receiver_id: int) -> HttpResponse:
    """One receiver and its delivery log."""
    row = queries.receiver_or_404(receiver_id)
    try:
        page = keyset_page(
            queries.deliveries_of(row), ("-created_at", "-id"), cursor=request.GET.get("cursor"), limit=DELIVERIES_SHOWN
        )
    except BadCursor as error:
        return bad_request(request, error)
    context = {
        "now": timezone.now(),
        "receiver": row,
        "target": queries.shown_target(row.target),
        "page": page,
        "may_write": may(request.user, "alert.configure"),
        "nav_section": "live",
    }
    return render(request, "alerts/receiver.html", context)


@requires("alert.configure")
def receiver_new(request: HttpRequest) -> HttpResponse:
    act = Act(
        title="New receiver",
        text="A webhook gets signed JSON; an e-mail address the same in plain text.",
        verb="Add receiver",
        done="Added. Send a test message to see that it arrives.",
        back=reverse("receivers"),
        back_label="Receivers",
    )

    def do(form: forms.Form, now: datetime) -> str:
        assert isinstance(form, ReceiverForm)
        row = actions.create_receiver(
            values=form.values(), reason=form.cleaned_data["reason"], actor=actor_of(request), now=now
        )
        return _after_secret(row)

    return _act(request, act, ReceiverForm, do)


@requires("alert.configure")
def receiver_edit(request: HttpRequest, receiver_id: int) -> HttpResponse:
    row = queries.receiver_or_404(receiver_id)
    act = _receiver_act(row, "Edit", "Messages that wait go to the new address.", "Save", "Saved.")

    def do(form: forms.Form, now: datetime) -> None:
        assert isinstance(form, ReceiverForm)
        actions.edit_receiver(
            receiver_id=row.pk, values=form.values(), reason=form.cleaned_data["reason"], actor=actor_of(request),
            now=now, version=form.cleaned_data["version"],
        )  # fmt: skip

    initial = {name: getattr(row, name) for name in (*actions.RECEIVER_FIELDS, "version")}
    return _act(request, act, ReceiverForm, do, initial=initial, kind_fixed=row.kind)


@requires("alert.configure")
def receiver_rotate(request: HttpRequest, receiver_id: int) -> HttpResponse:
    row = queries.receiver_or_404(receiver_id)
    if row.kind != Receiver.Kind.WEBHOOK:
        raise Http404("An e-mail receiver has no secret.")
    act = _receiver_act(
        row, "New secret for", "For 24 h messages carry signatures of both secrets.", "Make a new secret",
        "A new secret was made.",
    )  # fmt: skip

    def do(form: forms.Form, now: datetime) -> str:
        return _after_secret(
            actions.rotate_secret(
                receiver_id=row.pk, reason=form.cleaned_data["reason"], actor=actor_of(request), now=now
            )
        )

    return _act(request, act, ReasonForm, do)


@requires("alert.configure")
def receiver_archive(request: HttpRequest, receiver_id: int) -> HttpResponse:
    row = queries.receiver_or_404(receiver_id)
    act = _receiver_act(
        row, "Remove", "It is told nothing more; what waits is given up. Its log stays.", "Remove receiver", "Removed.",
        back=reverse("receivers"), back_label="Receivers", button="button-danger",
    )  # fmt: skip

    def do(form: forms.Form, now: datetime) -> None:
        actions.archive_receiver(
            receiver_id=row.pk, reason=form.cleaned_data["reason"], actor=actor_of(request), now=now
        )

    return _act(request, act, ReasonForm, do)


@requires("alert.configure")
def receiver_secret(request: HttpRequest, receiver_id: int) -> HttpResponse:
    """The secret that verifies a webhook's signatures, for whoever may configure it."""
    row = queries.receiver_or_404(receiver_id)
    if row.kind != Receiver.Kind.WEBHOOK:
        raise Http404("An e-mail receiver has no secret.")
    context = {"receiver": row, "secret": secret_text(row.secret_id), "nav_section": "live"}
    response = render(request, "alerts/secret.html", context)
    response["Cache-Control"] = "no-store"
    return response


@require_POST
@requires("alert.configure")
def receiver_test(request: HttpRequest, receiver_id: int) -> HttpResponse:
    row = queries.receiver_or_404(receiver_id)
    actions.send_test(receiver_id=row.pk, actor=actor_of(request), now=timezone.now())
    messages.success(request, "A test message is on its way: reload to see whether it was taken.")
    return redirect("receiver", receiver_id=row.pk)


@require_POST
@requires("alert.configure")
def delivery_resend(request: HttpRequest, delivery_id: int) -> HttpResponse:
    row = Delivery.objects.filter(pk=delivery_id).first()
    if row is None:
        raise Http404("There is no such message.")
    actions.resend(delivery_id=row.pk, actor=actor_of(request), now=timezone.now())
    messages.success(request, "It is sent again, under the same id.")
    return redirect("receiver", receiver_id=row.receiver_id)


def _receiver_act(row: Receiver, verb: str, text: str, button_text: str, done: str, **more: str) -> Act:
    values = {"back": reverse("receiver", args=[row.pk]), "back_label": row.name, **more}
    return Act(title=f"{verb} {row.name}", text=text, verb=button_text, done=done, **values)


def _after_secret(row: Receiver) -> str:
    """Where a new secret is shown; a receiver without one has its page."""
    return reverse("receiver-secret" if row.kind == Receiver.Kind.WEBHOOK else "receiver", args=[row.pk])


def _act(
    request: HttpRequest,
    act: Act,
    form_class: type[forms.Form],
    do: Callable[[forms.Form, datetime], str | None],
    *,
    initial: dict[str, Any] | None = None,
    **options: Any,
) -> HttpResponse:
    """GET asks, POST does it and goes to where `do` says, or back."""
    form = form_class(request.POST if request.method == "POST" else None, initial=initial, **options)
    if form.is_bound and form.is_valid():
        try:
            target = do(form, timezone.now())
        except ValidationError as error:
            take_errors(form, error, {"ends_at": "hours"})
        except actions.AlreadyEnded as error:
            form.add_error(None, str(error))
        except Stale:
            form.add_error(None, "Somebody changed this since you opened it: open it again and repeat your change.")
        else:
            messages.success(request, act.done)
            return redirect(target or act.back)
    context = {"act": act, "form": form, "may_act": may(request.user, "alert.act"), "nav_section": "live"}
    return render(request, "alerts/act.html", context, status=422 if form.is_bound else 200)
