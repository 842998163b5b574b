"""What allauth asks the project: who may come in, what is told, how secrets lie in the database."""

import base64
import logging
import secrets
import time
from typing import Any

import requests
from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.internal.flows.login import get_authentication_records
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialApp, SocialLogin
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from controlplane.access import openid_transport, session_store
from controlplane.access.linking import NotAdmitted, person_behind
from controlplane.access.refusals import openid_failed
from controlplane.tenants.queries import installation

log = logging.getLogger(__name__)
SIGN_IN_AGAIN = "sign_in_again"


class AccountAdapter(DefaultAccountAdapter):
    """Nobody signs up; messages are the views' own; a session knows from where and how it began."""

    error_messages = {
        **DefaultAccountAdapter.error_messages,
        "too_many_login_attempts": "Too many wrong codes. Wait five minutes, then try again.",
        "incorrect_password": "This is not your password.",
    }

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def add_message(self, *args: Any, **kwargs: Any) -> None:
        """Left to the views: each says what it did."""

    def get_login_redirect_url(self, request: HttpRequest) -> str:
        return reverse("start")

    def get_client_ip(self, request: HttpRequest) -> str:
        return request.META.get("REMOTE_ADDR", "") or "unknown"

    def respond_user_inactive(self, request: HttpRequest, user: Any) -> HttpResponse:
        return openid_failed(request, "You are no longer a member here.", status=403)

    def login(self, request: HttpRequest, user: Any) -> None:
        records = get_authentication_records(request, user)
        super().login(request, user)
        methods = [str(record["method"]) for record in records]
        request.session[session_store.ABOUT] = session_store.about(
            address=self.get_client_ip(request), agent=request.META.get("HTTP_USER_AGENT", ""),
            method=" + ".join(dict.fromkeys(methods)),
        )  # fmt: skip
        if "mfa" in methods:
            request.session[session_store.SECOND_FACTOR] = True

    def get_reauthentication_methods(self, user: User | AnonymousUser) -> list[dict[str, Any]]:
        """Somebody with neither password nor factor comes by a provider: signing in again is the proof."""
        methods = super().get_reauthentication_methods(user)
        if methods or not user.is_authenticated:
            return methods
        return [{"id": SIGN_IN_AGAIN, "description": "Sign in again", "url": reverse("sign-in-again")}]

    def is_reauthentication_required(self, *, app: str, **kwargs: Any) -> bool:
        request = self.request
        methods = self.get_reauthentication_methods(request.user)
        if [method["id"] for method in methods] == [SIGN_IN_AGAIN]:
            records = get_authentication_records(request, request.user)
            return not records or time.time() - records[-1]["at"] > settings.ACCOUNT_REAUTHENTICATION_TIMEOUT
        return super().is_reauthentication_required(app=app, **kwargs)


class FactorAdapter(DefaultMFAAdapter):
    """Secrets of factors are encrypted with a key that is derived from the installation's secret."""

    error_messages = {
        **DefaultMFAAdapter.error_messages,
        "incorrect_code": "This code is not right, or was used before. Take the next one.",
    }

    def encrypt(self, text: str) -> str:
        return _fernet().encrypt(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        """What cannot be read becomes a secret that nobody has: no code is right then, instead of a guessable one."""
        try:
            return _fernet().decrypt(encrypted_text.encode()).decode()
        except InvalidToken:
            log.warning("the secret of a second factor was encrypted under another secret key")
            return base64.b32encode(secrets.token_bytes(20)).decode()

    def get_totp_issuer(self) -> str:
        return installation().name

    def get_public_key_credential_rp_entity(self) -> dict[str, str]:
        return {**super().get_public_key_credential_rp_entity(), "name": installation().name}


def _fernet() -> MultiFernet:
    return MultiFernet(
        [_key(secret) for secret in (str(settings.SECRET_KEY), *map(str, settings.SECRET_KEY_FALLBACKS))]
    )


def _key(secret: str) -> Fernet:
    derived = HKDF(SHA256(), 32, salt=None, info=b"flexband second factors").derive(secret.encode())
    return Fernet(base64.urlsafe_b64encode(derived))


class OpenIdAdapter(DefaultSocialAccountAdapter):
    """Providers come from the settings only; who comes in by one is decided in `linking`."""

    def list_apps(
        self, request: HttpRequest, provider: str | None = None, client_id: str | None = None
    ) -> list[SocialApp]:
        return [
            SocialApp(
                provider="openid_connect", provider_id=one.id, name=one.name, client_id=one.client_id,
                secret=one.client_secret, settings={"server_url": one.issuer},
            )
            for one in settings.OPENID_PROVIDERS
            if provider in (None, "openid_connect", one.id) and client_id in (None, one.client_id)
        ]  # fmt: skip

    def is_open_for_signup(self, request: HttpRequest, sociallogin: SocialLogin) -> bool:
        return False

    def get_requests_session(self) -> requests.Session:
        return openid_transport.session()

    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        try:
            sociallogin.user = person_behind(sociallogin, getattr(request, "request_id", ""))
        except NotAdmitted as error:
            raise ImmediateHttpResponse(openid_failed(request, str(error), status=403)) from error

    def on_authentication_error(
        self, request: HttpRequest, provider: Any, error: Any = None, exception: Any = None, extra_context: Any = None
    ) -> None:
        log.warning("sign-in by %s failed: %s %s", provider.name, error, exception or "")
        if error == "cancelled":
            raise ImmediateHttpResponse(openid_failed(request, f"You stopped at {provider.name}.", status=400))
        if isinstance(exception, requests.RequestException):
            raise ImmediateHttpResponse(openid_failed(request, f"{provider.name} does not answer.", status=502))
        detail = (
            f"The answer of {provider.name} does not belong to a sign-in that began in this browser within ten minutes,"
            " or could not be checked. Nothing was changed."
        )
        raise ImmediateHttpResponse(openid_failed(request, detail, status=400))
