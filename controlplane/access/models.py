"""How people get in: their sessions, the invitations they came by, and tokens that act for them over REST."""

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.contrib.sessions.base_session import AbstractBaseSession
from django.db import models
from django.db.models import Q

from controlplane.access.session_store import SessionStore
from controlplane.tenants.models import Member, Tenant


class Session(AbstractBaseSession):
    """A browser that is, or was about to be, signed in. Deleting the row ends it: at once for pages, within seconds
    for open sockets, which look every other second.
    """

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.CASCADE, related_name="browser_sessions"
    )
    # For a moment two rows have it: a session that changes its key is written anew before the old row goes.
    public_id = models.UUIDField(null=True, db_index=True)
    began_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField()
    address = models.CharField(max_length=45, blank=True, default="")
    agent = models.CharField(max_length=300, blank=True, default="")
    method = models.CharField(max_length=20, blank=True, default="")

    class Meta:
        indexes = [models.Index(fields=["user", "-last_used_at"])]

    @classmethod
    def get_session_store_class(cls) -> type[SessionStore]:
        return SessionStore


class Invitation(models.Model):
    """A link by which one person becomes a member; only the hash of its secret is kept."""

    email = models.EmailField()
    full_name = models.CharField(max_length=150, blank=True, default="")
    role = models.CharField(max_length=10, choices=Member.Role.choices)
    tenant = models.ForeignKey(Tenant, null=True, blank=True, on_delete=models.PROTECT, related_name="invitations")
    secret_hash = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=200)
    expires_at = models.DateTimeField()
    accepted_at = models.DateTimeField(null=True)
    withdrawn_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(role="tenant", tenant__isnull=False) | (~Q(role="tenant") & Q(tenant__isnull=True)),
                name="invitation_tenant_matches_role",
            )
        ]


class PersonalToken(models.Model):
    """A person's token for REST: acts as the person, within `permissions` and whatever the role still allows."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="personal_tokens")
    name = models.CharField(max_length=120)
    prefix = models.CharField(max_length=16)
    secret_hash = models.CharField(max_length=64, unique=True)
    permissions = ArrayField(models.CharField(max_length=60))
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["user", "-created_at"])]
