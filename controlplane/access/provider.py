"""The OpenID provider class that allauth finds by this module's name: PKCE, a nonce, and a checked id token."""

import hmac
import secrets
from typing import Any

from allauth.account.models import EmailAddress
from allauth.socialaccount.internal import jwtkit
from allauth.socialaccount.models import SocialApp, SocialToken
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from allauth.socialaccount.providers.openid_connect.provider import OpenIDConnectProvider
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.http import HttpRequest

NONCE = "nonce"


class CheckedAdapter(OpenIDConnectOAuth2Adapter):
    """`nonce` is what this sign-in was begun with; the callback sets it before tokens are looked at."""

    nonce: str = ""

    def complete_login(self, request: HttpRequest, app: SocialApp, token: SocialToken, **kwargs: Any) -> Any:
        """Raises OAuth2Error for an answer without an id token, or with one that is not of this sign-in."""
        raw = kwargs["response"].get("id_token")
        if not raw:
            raise OAuth2Error("The provider sent no id token.")
        claims = self._decode_id_token(app, raw)
        if not self.nonce or not hmac.compare_digest(str(claims.get(NONCE, "")), self.nonce):
            raise OAuth2Error("The id token belongs to another sign-in.")
        told = self._fetch_user_info(token.token) if "userinfo_endpoint" in self.openid_config else {}
        if told and told.get("sub") != claims["sub"]:
            raise OAuth2Error("The provider's answers are about two people.")
        return self.get_provider().sociallogin_from_response(request, {"userinfo": {**claims, **told}})

    def _decode_id_token(self, app: SocialApp, id_token: str) -> dict[str, Any]:
        """The signature is always verified: not every way to a provider is TLS all along."""
        return jwtkit.verify_and_decode(
            credential=id_token, keys_url=self.openid_config["jwks_uri"], issuer=self.openid_config["issuer"],
            audience=app.client_id, lookup_kid=jwtkit.lookup_kid_jwk, verify_signature=True,
        )  # fmt: skip


class Provider(OpenIDConnectProvider):
    """Keeps of a person what the list of links shows, nothing else that the provider tells."""

    oauth2_adapter_class = CheckedAdapter
    pkce_enabled_default = True

    def begin(self, request: HttpRequest, next_url: str) -> str:
        """The provider's address to send the person to. Raises requests' exceptions when it cannot be reached."""
        nonce = secrets.token_urlsafe(24)
        answer = self.redirect(
            request, process="login", next_url=next_url, data={NONCE: nonce}, auth_params={NONCE: nonce}
        )
        return answer["Location"]

    def extract_extra_data(self, data: dict[str, Any]) -> dict[str, Any]:
        told = data["userinfo"]
        return {name: str(told[name])[:200] for name in ("email", "name") if told.get(name)}

    def extract_email_addresses(self, data: dict[str, Any]) -> list[EmailAddress]:
        """An address counts as verified only where the provider says so with a plain true."""
        found = super().extract_email_addresses(data)
        for one in found:
            one.verified = data["userinfo"].get("email_verified") is True
        return found


provider_classes = [Provider]
