"""One's own second factors: an authenticator app, passkeys, recovery codes."""

from typing import Any

from allauth.core import context
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal import flows as code_flows
from allauth.mfa.recovery_codes.views import ViewRecoveryCodesView
from allauth.mfa.totp.forms import ActivateTOTPForm
from allauth.mfa.totp.internal import auth as totp_auth
from allauth.mfa.totp.internal import flows as totp_flows
from allauth.mfa.totp.views import ActivateTOTPView
from allauth.mfa.webauthn.internal import flows as passkey_flows
from allauth.mfa.webauthn.views import AddWebAuthnView
from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.access.confirming import confirmed, own_account
from controlplane.access.passkeys import passkey_obstacle
from controlplane.access.queries import factors_of
from controlplane.access.session_store import SECOND_FACTOR
from controlplane.access.sign_in_views import NeedsCache
from controlplane.audit.actions import record
from controlplane.audit.actors import actor_of


class _Add(NeedsCache):
    """The page of a factor that is added; the first of all leads on to its recovery codes."""

    did_generate_recovery_codes: bool

    def form_invalid(self, form: Any) -> HttpResponse:
        return self.render_to_response(self.get_context_data(form=form), status=400)  # type: ignore[attr-defined]

    def get_success_url(self) -> str:
        return reverse("mfa_view_recovery_codes" if self.did_generate_recovery_codes else "account")


class AppForm(ActivateTOTPForm):
    """The secret stays the same until it is confirmed: a page that is opened again must not part from the phone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        begun = context.request.session.get(totp_auth.SECRET_SESSION_KEY)
        super().__init__(*args, **kwargs)
        if begun:
            self.secret = context.request.session[totp_auth.SECRET_SESSION_KEY] = begun


class AddApp(_Add, ActivateTOTPView):
    """A secret as a picture and as letters, and a code that shows that the app took it."""

    template_name = "access/totp_add.html"

    form_class = AppForm

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if factors_of(request.user).totp is not None:  # type: ignore[arg-type]
            return redirect("account")
        return super().dispatch(request, *args, **kwargs)

    @transaction.atomic
    def form_valid(self, form: Any) -> HttpResponse:
        answer = super().form_valid(form)
        _record(self.request, "factor.add", after={"kind": "app"})
        self.request.session[SECOND_FACTOR] = True
        messages.success(self.request, "Your authenticator app is set up. It is asked for from the next sign-in on.")
        return answer


class AddPasskey(_Add, AddWebAuthnView):
    """A key in this device, on a stick, or in the phone."""

    template_name = "access/passkey_add.html"

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if obstacle := passkey_obstacle(request):
            messages.error(request, obstacle)
            return redirect("account")
        return super().dispatch(request, *args, **kwargs)

    @transaction.atomic
    def form_valid(self, form: Any) -> HttpResponse:
        answer = super().form_valid(form)
        _record(self.request, "factor.add", after={"kind": "passkey", "name": form.cleaned_data["name"]})
        self.request.session[SECOND_FACTOR] = True
        messages.success(self.request, f"Added the passkey {form.cleaned_data['name']}.")
        return answer


class Codes(ViewRecoveryCodesView):
    """Recovery codes, shown this once."""

    template_name = "access/codes.html"

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if factors_of(request.user).codes is None:  # type: ignore[arg-type]
            return redirect("account")
        return super().dispatch(request, *args, **kwargs)


app_add = own_account(confirmed(AddApp.as_view()))
passkey_add = own_account(confirmed(AddPasskey.as_view()))
codes = own_account(confirmed(Codes.as_view()))


@require_POST
@own_account
@confirmed
def app_remove(request: HttpRequest) -> HttpResponse:
    row = get_object_or_404(Authenticator, user=request.user, type=Authenticator.Type.TOTP)
    with transaction.atomic():
        totp_flows.deactivate_totp(request, row)
        _record(request, "factor.remove", before={"kind": "app"})
    return _removed(request, "Removed the authenticator app.")


@require_POST
@own_account
@confirmed
def passkey_remove(request: HttpRequest, pk: int) -> HttpResponse:
    row = get_object_or_404(Authenticator, user=request.user, type=Authenticator.Type.WEBAUTHN, pk=pk)
    with transaction.atomic():
        passkey_flows.remove_authenticator(request, row)
        _record(request, "factor.remove", before={"kind": "passkey", "name": row.wrap().name})
    return _removed(request, f"Removed the passkey {row.wrap().name}.")


@require_POST
@own_account
@confirmed
def codes_new(request: HttpRequest) -> HttpResponse:
    """Other recovery codes; those before stop working."""
    if not factors_of(request.user).any:  # type: ignore[arg-type]
        messages.error(request, "Recovery codes stand in for a factor: set one up first.")
        return redirect("account")
    with transaction.atomic():
        code_flows.generate_recovery_codes(request)
        _record(request, "factor.codes", after={"kind": "recovery codes"})
    return redirect("mfa_view_recovery_codes")


def _removed(request: HttpRequest, said: str) -> HttpResponse:
    if not factors_of(request.user).any:  # type: ignore[arg-type]
        request.session.pop(SECOND_FACTOR, None)
    messages.success(request, said)
    return redirect("account")


def _record(request: HttpRequest, action: str, **change: Any) -> None:
    name = request.user.get_username()[:80]
    record(actor=actor_of(request), action=action, noun="member", object_id=name, now=timezone.now(), **change)
