"""Invitations: making, withdrawing, and the page that a link opens."""

import math

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.core.mail import send_mail
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.access.forms import AcceptForm, InvitationForm
from controlplane.access.invitation_actions import accept, invite, withdraw
from controlplane.access.models import Invitation
from controlplane.access.queries import invitation_by_secret, open_invitations
from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.tenants import throttle
from controlplane.tenants.access import public, requires
from controlplane.tenants.queries import installation
from controlplane.web.views import error_response, too_many_requests

NO_LINK = "This invitation was used, ended, or never was. Ask whoever sent it for another one."


def _open() -> "QuerySet[Invitation]":
    return open_invitations(timezone.now()).select_related("tenant").order_by("-created_at")


@requires("member.read", write="member.write")
def invitations(request: HttpRequest) -> HttpResponse:
    """Who was invited and has not come yet."""
    return render(request, "access/invitations.html", {"invitations": _open()[:200]})


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
            path = reverse("invitation", args=[issued.secret])
            link = f"{settings.PUBLIC_URL}{path}" if settings.PUBLIC_URL else request.build_absolute_uri(path)
            mailed = _mail(issued.invitation, link)
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


def _mail(row: Invitation, link: str) -> bool | None:
    """True when the mail server took it, False when not, None without one."""
    if not settings.EMAIL_IS_SET:
        return None
    text = f"{row.created_by} invites you to {installation().name} as {row.role}.\n\n{link}\n\nThe link works once."
    try:
        send_mail(f"Invitation to {installation().name}", text, settings.DEFAULT_FROM_EMAIL, [row.email])
    except OSError:
        return False
    return True
