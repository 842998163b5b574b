"""Invitations: making, withdrawing, and the page that a link opens."""

import math
from collections.abc import Iterable
from datetime import datetime

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.access.forms import AcceptForm, InvitationForm
from controlplane.access.invitation_actions import accept, invite, withdraw
from controlplane.access.invitation_links import link_of, mail
from controlplane.access.models import Invitation
from controlplane.access.queries import invitation_by_secret, open_invitations
from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.tenants import throttle
from controlplane.tenants.access import public, requires
from controlplane.web.exports import CsvResponse, in_batches
from controlplane.web.pagination import BadCursor, keyset_page
from controlplane.web.views import bad_request, error_response, too_many_requests

STATES = (("", "Not yet accepted"), ("all", "All"))
NO_LINK = "This invitation was used, ended, or never was. Ask whoever sent it for another one."


@requires("member.read", write="member.write")
def invitations(request: HttpRequest) -> HttpResponseBase:
    """Who was invited: those who have not come yet, or all, newest first."""
    text, state = request.GET.get("q", "").strip()[:120], request.GET.get("state", "")
    now = timezone.now()
    rows = Invitation.objects.all() if state == "all" else open_invitations(now)
    rows = rows.select_related("tenant")
    if text:
        rows = rows.filter(Q(email__icontains=text) | Q(full_name__icontains=text) | Q(tenant__slug__icontains=text))
    if request.GET.get("format") == "csv":
        return _csv((row for batch in in_batches(rows, ("-id",)) for row in batch), now)
    try:
        page = keyset_page(rows, ("-id",), cursor=request.GET.get("cursor"))
    except BadCursor as error:
        return bad_request(request, error)
    context = {
        "page": page, "invitations": [(row, _state(row, now)) for row in page.rows], "total": rows.count(), "q": text,
        "state": state, "states": STATES,
    }  # fmt: skip
    return render(request, "access/invitations.html", context)


def _state(row: Invitation, now: datetime) -> str:
    if row.accepted_at is not None:
        return "accepted"
    if row.withdrawn_at is not None:
        return "withdrawn"
    return "over" if row.expires_at <= now else "open"


def _csv(rows: Iterable[Invitation], now: datetime) -> CsvResponse:
    header = ["email", "full_name", "role", "tenant", "invited_by", "invited_at", "works_until", "state"]
    lines = (
        [
            row.email, row.full_name, row.role, row.tenant.slug if row.tenant else None, row.created_by,
            row.created_at, row.expires_at, _state(row, now),
        ]
        for row in rows
    )  # fmt: skip
    return CsvResponse("invitations.csv", header, lines)


@requires("member.read", write="member.write")
def invitation_new(request: HttpRequest) -> HttpResponse:
    """Makes a link and shows it this once; with a mail server the person gets it too."""
    form = InvitationForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        data = dict(form.cleaned_data)
        tenant = data.pop("tenant")
        try:
            issued = invite(
                **data, tenant_id=tenant.pk if tenant else None, actor=actor_of(request), now=timezone.now()
            )
        except ValidationError as error:
            take_errors(form, error)
        else:
            link = link_of(issued, request)
            mailed = mail(issued.invitation, link)
            context = {"invitation": issued.invitation, "link": link, "mailed": mailed}
            return render(request, "access/invitation_link.html", context)
    return render(request, "access/invitation_form.html", {"form": form}, status=400 if form.errors else 200)


@require_POST
@requires("member.write")
def invitation_withdraw(request: HttpRequest, invitation_id: int) -> HttpResponse:
    if withdraw(invitation_id=invitation_id, actor=actor_of(request), now=timezone.now()):
        messages.success(request, "Withdrawn: the link no longer works.")
    else:
        messages.error(request, "This invitation was used or ended already.")
    return redirect("invitations")


@public
def invitation(request: HttpRequest, secret: str) -> HttpResponse:
    """What the link opens: a name and a password, or the way to a provider."""
    now = timezone.now()
    gate = throttle.enter("invitation", request.META.get("REMOTE_ADDR", ""), now, limits=throttle.PAGE_LIMITS)
    if gate.try_again_at is not None:
        return too_many_requests(request, retry_after=math.ceil((gate.try_again_at - now).total_seconds()))
    row = invitation_by_secret(secret, now)
    if row is None:
        return error_response(request, 404, detail=NO_LINK)
    form = AcceptForm(request.POST or None, initial={"username": row.email.partition("@")[0]})
    if request.method == "POST" and form.is_valid():
        try:
            member = accept(
                invitation_id=row.pk, username=form.cleaned_data["username"], password=form.cleaned_data["password"],
                now=now, request_id=getattr(request, "request_id", ""),
            )  # fmt: skip
        except ValidationError as error:
            take_errors(form, error)
        else:
            messages.success(request, f"You are a member. Sign in as {member.user.username}.")
            return redirect("login")
    context = {"form": form, "invitation": row, "providers": settings.OPENID_PROVIDERS}
    return render(request, "access/invitation.html", context, status=400 if form.errors else 200)
