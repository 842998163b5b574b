"""Guards of one's own account. `@confirmed`: who changes how they get in has shown within five minutes who they are."""

import functools
from collections.abc import Callable
from typing import Any

from allauth.account.adapter import get_adapter
from allauth.account.internal.flows.reauthentication import is_reauthentication_required
from allauth.mfa.utils import is_mfa_enabled
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.http import urlencode

from controlplane.access.session_store import SECOND_FACTOR
from controlplane.tenants.access import requires

View = Callable[..., HttpResponseBase]
own_account = requires("own.read", before_second_factor=True)
"""For pages by which somebody who lacks a second factor gets one."""


def began_without_factor(request: HttpRequest) -> bool:
    """The session began before the factor was there: what a password alone opened must not take the factor away."""
    return is_mfa_enabled(request.user) and not request.session.get(SECOND_FACTOR)


def is_confirmed(request: HttpRequest) -> bool:
    """What `confirmed` asks for, where nobody can be sent to a page: REST refuses instead."""
    return not began_without_factor(request) and not is_reauthentication_required(request, app="allauth.mfa")


def confirmed(view: View) -> View:
    """Sends to the page that asks for password, code or passkey, and from there back. What was posted is not kept.

    Whoever has a second factor has to have signed in with it.
    """

    @functools.wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if began_without_factor(request):
            messages.info(request, "Nothing was changed. Sign out, then sign in with your second factor to do this.")
            return redirect("account")
        if not is_reauthentication_required(request, app="allauth.mfa"):
            return view(request, *args, **kwargs)
        methods = get_adapter().get_reauthentication_methods(request.user)
        if not methods:
            raise PermissionDenied("There is no way to confirm that it is you. Ask an administrator.")
        back = request.get_full_path() if request.method == "GET" else reverse("account")
        if request.method != "GET":
            messages.info(request, "Nothing was changed yet: it was too long ago that you confirmed that it is you.")
        return redirect(f"{methods[0]['url']}?{urlencode({'next': back})}")

    return guarded
