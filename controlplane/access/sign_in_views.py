"""Signing in: password, then a second factor where the person has one; a passkey alone; confirming that it is you."""

from typing import Any

from allauth.account.internal.flows.login import perform_password_login
from allauth.account.models import Login
from allauth.account.views._reauthenticate import ReauthenticateView
from allauth.core import ratelimit
from allauth.mfa.base.views import AuthenticateView
from allauth.mfa.base.views import ReauthenticateView as CodeReauthenticateView
from allauth.mfa.models import Authenticator
from allauth.mfa.webauthn.views import LoginWebAuthnView, ReauthenticateWebAuthnView
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import logout
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView, LogoutView
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.http import urlencode
from redis.exceptions import RedisError

from controlplane.access.confirming import own_account
from controlplane.access.queries import factors_of
from controlplane.audit.actions import record
from controlplane.audit.actors import actor_for
from controlplane.tenants import throttle
from controlplane.tenants.access import public
from controlplane.web.views import error_response, too_many_requests

NO_CACHE = "The cache that counts tries does not answer. Try again in a minute; if it stays so, tell your operator."
NOT_TAKEN = "This passkey was not taken: it belongs to nobody here, or the browser waited too long. Try again."


class NeedsCache:
    """Codes are used once, which the cache remembers: without it nobody passes, and the page says so."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        try:
            return super().dispatch(request, *args, **kwargs)  # type: ignore[misc]
        except (RedisError, ConnectionError):
            return error_response(request, 503, detail=NO_CACHE)


class SignIn(LoginView):
    """The sign-in page; a try over the limit is answered 429 without a look at the password."""

    template_name = "registration/login.html"
    form_class = AuthenticationForm
    redirect_authenticated_user = False

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        now = timezone.now()
        name, address = request.POST.get("username", "").strip()[:150], request.META.get("REMOTE_ADDR", "")
        gate = throttle.enter(name, address, now)
        if not gate.open and gate.try_again_at is not None:
            wait_s = max(1, round((gate.try_again_at - now).total_seconds()))
            context = self.get_context_data(
                form=self.form_class(request, initial={"username": name}), try_again_at=gate.try_again_at, now=now
            )
            response = self.render_to_response(context, status=429)
            response.headers["Retry-After"] = str(wait_s)
            return response
        answer = super().post(request, *args, **kwargs)
        if answer.status_code == 302:
            throttle.forget(name, address, now)
        elif hasattr(answer, "status_code"):
            answer.status_code = 400
        return answer

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        """The password is right: on to the second factor, or in."""
        user = form.get_user()
        login = Login(user=user, redirect_url=self.get_success_url())
        return perform_password_login(self.request, {"username": user.get_username()}, login)

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return {**super().get_context_data(**kwargs), "providers": settings.OPENID_PROVIDERS}

    def get_redirect_url(self) -> str:  # type: ignore[override]  # the stubs are of a later Django
        """The page that was asked for; who asked only for the front page begins where the role does."""
        wanted = super().get_redirect_url()
        return "" if wanted == "/" else wanted

    def get_default_redirect_url(self) -> str:
        return reverse("start")


class SecondFactor(NeedsCache, AuthenticateView):
    """A code or a passkey, after the password or a provider said who it is."""

    template_name = "access/second_factor.html"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return {**super().get_context_data(**kwargs), "factors": factors_of(self.stage.login.user)}

    @transaction.atomic
    def form_valid(self, form: Any) -> HttpResponse:
        used, user = getattr(form, "authenticator", None), self.stage.login.user
        if used is not None and used.type == Authenticator.Type.RECOVERY_CODES:
            left = factors_of(user).codes
            record(
                actor=actor_for(user, getattr(self.request, "request_id", "")),
                action="member.recovery_code", noun="member", object_id=user.username[:80],
                after={"codes_left": left}, now=timezone.now(),
            )  # fmt: skip
            messages.warning(self.request, f"You used a recovery code. {left} left.")
        return super().form_valid(form)

    def form_invalid(self, form: Any) -> HttpResponse:
        answer = super().form_invalid(form)
        answer.status_code = 400
        return answer


class PasskeyAlone(NeedsCache, LoginWebAuthnView):
    """A passkey that lies in the device with whose it is: no name, no password."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not ratelimit.consume(request, action="login"):
            return too_many_requests(request, retry_after=60)
        return super().dispatch(request, *args, **kwargs)

    def form_invalid(self, form: Any) -> HttpResponse:
        messages.error(self.request, NOT_TAKEN)
        return redirect("login")


class _Confirm(NeedsCache):
    """Pages that ask who it is once more before something about access changes."""

    request: HttpRequest

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return {**super().get_context_data(**kwargs), "next": self.request.GET.get("next", "")}  # type: ignore[misc]


class ConfirmPassword(_Confirm, ReauthenticateView):
    template_name = "access/confirm.html"


class ConfirmCode(_Confirm, CodeReauthenticateView):
    template_name = "access/confirm.html"


class ConfirmPasskey(_Confirm, ReauthenticateWebAuthnView):
    template_name = "access/confirm_passkey.html"

    def form_invalid(self, form: Any) -> HttpResponse:
        messages.error(self.request, NOT_TAKEN)
        return redirect(self.request.get_full_path())


sign_in = public(SignIn.as_view())
sign_out = public(LogoutView.as_view(next_page="login"))
second_factor = public(SecondFactor.as_view())
passkey_alone = public(PasskeyAlone.as_view())
confirm_password = own_account(ConfirmPassword.as_view())
confirm_code = own_account(ConfirmCode.as_view())
confirm_passkey = own_account(ConfirmPasskey.as_view())


@own_account
def sign_in_again(request: HttpRequest) -> HttpResponse:
    """For people without a password: what they came by is asked again, by signing in anew."""
    if request.method == "POST":
        logout(request)
        return redirect(f"{reverse('login')}?{urlencode({'next': reverse('account')})}")
    return render(request, "access/sign_in_again.html")
