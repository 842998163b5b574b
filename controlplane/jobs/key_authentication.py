"""A tenant's API key as the principal of a REST request: `Authorization: Bearer fb_...`."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q
from django.utils import timezone
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from controlplane.audit.actors import Actor
from controlplane.tenants.key_actions import secret_hash
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.tenants.roles import Role


@dataclass(frozen=True, slots=True)
class KeyMembership:
    """What a key may see: its tenant, like a member of it."""

    tenant: Tenant
    role: str = Role.TENANT

    @property
    def tenant_id(self) -> int:
        return self.tenant.pk


class KeyPrincipal:
    """Stands where a signed-in person stands; it belongs to the key's tenant and can never sign in."""

    is_authenticated = True
    is_anonymous = False
    is_active = True
    is_staff = False

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.member = KeyMembership(key.tenant)
        # below every person's id, so that what is kept by principal never mixes
        self.pk = self.id = -key.pk

    def get_username(self) -> str:
        return f"key {self.key.public_id}"


def actor_of_key(key: ApiKey, request_id: str = "") -> Actor:
    """A key in the audit log."""
    return Actor(id=None, name=f"key {key.public_id}", role=Role.TENANT, request_id=request_id)


class KeyAuthentication(BaseAuthentication):
    """Answers with (KeyPrincipal, ApiKey); a header with another scheme is left to others, a bad key is 401."""

    def authenticate(self, request: Request) -> tuple[Any, Any] | None:
        scheme, _, secret = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            return None
        key = key_of(secret.strip(), timezone.now())
        if key is None:
            raise AuthenticationFailed("This API key is unknown, revoked or expired. Use a key that is in force.")
        return KeyPrincipal(key), key

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class KeyScheme(OpenApiAuthenticationExtension):
    """How the schema describes `KeyAuthentication`."""

    target_class = KeyAuthentication
    name = "tenantKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "A tenant's API key: `Authorization: Bearer fb_...`"}


def key_of(secret: str, now: datetime) -> ApiKey | None:
    """The key in force with this secret; the one before a rotation is good until its overlap ends."""
    digest = secret_hash(secret)
    rows = ApiKey.objects.select_related("tenant").filter(state=ApiKey.State.ACTIVE)
    rows = rows.filter(Q(secret_hash=digest) | Q(previous_hash=digest, previous_valid_until__gt=now))
    return rows.filter(Q(expires_at__isnull=True) | Q(expires_at__gt=now)).first()
