"""Signing in with an OpenID provider: away with a nonce and a state, back with a code."""

from typing import Any

import requests
from allauth.core import ratelimit
from allauth.socialaccount.adapter import get_adapter
from allauth.socialaccount.models import SocialApp
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView
from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_GET, require_POST

from controlplane.access.provider import NONCE, CheckedAdapter, Provider
from controlplane.access.refusals import openid_failed
from controlplane.tenants.access import public
from controlplane.web.views import too_many_requests

# What a provider that is down, half there or not one at all makes of the library's calls.
BROKEN = (requests.RequestException, OAuth2Error, KeyError, TypeError, ValueError, ImproperlyConfigured)


class Callback(OAuth2CallbackView):
    """The nonce of the state that came back is what the id token must hold."""

    adapter: CheckedAdapter

    def _get_state(self, request: HttpRequest, provider: Provider) -> tuple[dict[str, Any] | None, Any]:
        state, answer = super()._get_state(request, provider)
        if state is not None:
            self.adapter.nonce = (state.get("data") or {}).get(NONCE, "")
        return state, answer


@public
@require_POST
def begin(request: HttpRequest, provider_id: str) -> HttpResponse:
    """A page that leads on by itself: a redirect out of a form is what the page's policy forbids."""
    provider = _provider(request, provider_id)
    if not ratelimit.consume(request, action="login"):
        return too_many_requests(request, retry_after=60)
    try:
        address = provider.begin(request, _safe(request, request.POST.get("next", "")))
    except BROKEN:
        return openid_failed(request, f"{provider.name} does not answer.", status=502)
    return render(request, "access/leaving.html", {"provider": provider, "address": address})


@public
@require_GET
def back(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Where the provider sends the person back to."""
    provider = _provider(request, provider_id)
    if not ratelimit.consume(request, action="login"):
        return too_many_requests(request, retry_after=60)
    try:
        return Callback.adapter_view(CheckedAdapter(request, provider_id))(request)
    except BROKEN:
        return openid_failed(request, f"{provider.name} does not answer as an OpenID provider should.", status=502)


def _provider(request: HttpRequest, provider_id: str) -> Provider:
    try:
        return get_adapter().get_provider(request, provider_id)
    except SocialApp.DoesNotExist:
        raise Http404("There is no such provider.") from None


def _safe(request: HttpRequest, address: str) -> str:
    good = url_has_allowed_host_and_scheme(address, {request.get_host()}, require_https=request.is_secure())
    return address if good else ""
