"""The link of an invitation, told where it was asked for and, with a mail server, sent to the person."""

from django.conf import settings
from django.core.mail import send_mail
from django.http import HttpRequest
from django.urls import reverse

from controlplane.access.invitation_actions import Issued
from controlplane.access.models import Invitation
from controlplane.tenants.queries import installation


def link_of(issued: Issued, request: HttpRequest) -> str:
    path = reverse("invitation", args=[issued.secret])
    return f"{settings.PUBLIC_URL}{path}" if settings.PUBLIC_URL else request.build_absolute_uri(path)


def mail(row: Invitation, link: str) -> bool | None:
    """True when the mail server took it, False when not, None without one."""
    if not settings.EMAIL_IS_SET:
        return None
    text = f"{row.created_by} invites you to {installation().name} as {row.role}.\n\n{link}\n\nThe link works once."
    try:
        send_mail(f"Invitation to {installation().name}", text, settings.DEFAULT_FROM_EMAIL, [row.email])
    except OSError:
        return False
    return True
