"""`Authorization: Bearer fbp_…`: a personal token over REST."""

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from controlplane.access.models import PersonalToken
from controlplane.access.token_actions import PREFIX, token_behind, used
from controlplane.access.token_throttle import enter


class TokenAuthentication(BaseAuthentication):
    """A person through a token. Other bearers (a tenant's key) are left to others; a wrong token is 401."""

    def authenticate(self, request: Request) -> tuple[Any, PersonalToken] | None:
        words = get_authorization_header(request).split()
        if len(words) != 2 or words[0].lower() != b"bearer" or not words[1].startswith(PREFIX.encode()):
            return None
        token = token_behind(words[1].decode("latin-1"))
        enter(token.pk if token else None, request.META.get("REMOTE_ADDR", ""))
        if token is None:
            raise AuthenticationFailed("The token is wrong, over or revoked: make another one on your account page.")
        used(token)
        user: Any = token.user
        user.token_permissions = frozenset(token.permissions)
        return user, token

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class TokenScheme(OpenApiAuthenticationExtension):
    """How the REST description tells of it."""

    target_class = "controlplane.access.authentication.TokenAuthentication"
    name = "personalToken"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {
            "type": "http", "scheme": "bearer", "bearerFormat": "fbp_…",
            "description": "A personal token of your account page: it acts as you, within its permissions.",
        }  # fmt: skip
