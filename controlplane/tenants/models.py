"""Tenants, the people who act for them and their API keys: columns and constraints, no rules."""

import uuid

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import GinIndex, OpClass
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q
from django.db.models.functions import Upper

SLUG = RegexValidator(r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$", "Use 1 to 63 lower-case letters, digits and hyphens.")


class Installation(models.Model):
    """One row, id 1: identity and the numbers that only grow.

    `live_number` numbers every change that acts at once (keys, suspensions, freezes); it is raised by an UPDATE of
    this row in the same transaction as the change, so numbers become visible in order.
    """

    id = models.SmallIntegerField(primary_key=True, default=1)
    uuid = models.UUIDField(default=uuid.uuid4, unique=True)
    name = models.CharField(max_length=120)
    billing_zone = models.CharField(max_length=64, default="UTC")
    currency = models.CharField(max_length=3, default="EUR")
    generation = models.IntegerField(default=1)
    live_number = models.BigIntegerField(default=0)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(id=1), name="installation_is_one_row")]


class Tenant(models.Model):
    class State(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"
        ARCHIVED = "archived"

    class Posture(models.TextChoices):
        CLOSED = "closed"
        OPEN = "open"

    id = models.AutoField(primary_key=True)
    slug = models.CharField(max_length=63, unique=True, validators=[SLUG])
    name = models.CharField(max_length=120)
    parent = models.ForeignKey("self", null=True, blank=True, on_delete=models.PROTECT, related_name="children")
    state = models.CharField(max_length=12, choices=State.choices, default=State.ACTIVE)
    weight = models.PositiveIntegerField(default=1)
    max_concurrency = models.PositiveIntegerField(default=32)
    classes = ArrayField(models.CharField(max_length=63), default=list, blank=True)
    model_names = ArrayField(models.CharField(max_length=120), default=list, blank=True)
    outage_posture = models.CharField(max_length=8, choices=Posture.choices, default=Posture.CLOSED)
    cost_centre = models.CharField(max_length=60, blank=True, default="")
    suspend_reason = models.TextField(blank=True, default="")
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    live_number = models.BigIntegerField(default=0, db_index=True)
    version = models.IntegerField(default=1)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(weight__gte=1), name="tenant_weight_at_least_1"),
            models.CheckConstraint(condition=~Q(slug="platform"), name="tenant_slug_not_reserved"),
        ]


class Member(models.Model):
    """What a signed-in person may do; one row a person."""

    class Role(models.TextChoices):
        ADMIN = "admin"
        FINANCE = "finance"
        ONCALL = "oncall"
        VIEWER = "viewer"
        TENANT = "tenant"

    user = models.OneToOneField(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="member")
    role = models.CharField(max_length=10, choices=Role.choices)
    tenant = models.ForeignKey(Tenant, null=True, blank=True, on_delete=models.PROTECT, related_name="members")
    version = models.IntegerField(default=1)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(role="tenant", tenant__isnull=False) | (~Q(role="tenant") & Q(tenant__isnull=True)),
                name="member_tenant_matches_role",
            )
        ]


class ApiKey(models.Model):
    """`public_id` and budget stay for ever; the secret is stored hashed (SHA-256) and may be rotated with overlap.

    `rotation_id` is the caller's name for the last rotation: repeating it changes nothing. `rotation_nonce` is one of
    the three parts from which the same answer is made again for a short time; alone it says nothing.
    """

    class State(models.TextChoices):
        ACTIVE = "active"
        REVOKED = "revoked"

    id = models.AutoField(primary_key=True)
    public_id = models.CharField(max_length=24, unique=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="keys")
    name = models.CharField(max_length=120)
    prefix = models.CharField(max_length=16, db_index=True)
    secret_hash = models.CharField(max_length=64, unique=True)
    previous_hash = models.CharField(max_length=64, blank=True, default="")
    previous_valid_until = models.DateTimeField(null=True, blank=True)
    rotation_id = models.CharField(max_length=64, blank=True, default="")
    rotation_nonce = models.CharField(max_length=64, blank=True, default="")
    rotated_at = models.DateTimeField(null=True, blank=True)
    state = models.CharField(max_length=8, choices=State.choices, default=State.ACTIVE)
    expires_at = models.DateTimeField(null=True, blank=True)
    classes = ArrayField(models.CharField(max_length=63), default=list)
    default_class = models.CharField(max_length=63)
    max_concurrency = models.PositiveIntegerField(null=True, blank=True)
    requests_per_s = models.FloatField(null=True, blank=True)
    tokens_per_minute = models.PositiveIntegerField(null=True, blank=True)
    created_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    live_number = models.BigIntegerField(default=0, db_index=True)
    version = models.IntegerField(default=1)

    class Meta:
        indexes = [
            models.Index(fields=["expires_at"], condition=Q(state="active"), name="key_expiry"),
            # what `icontains` compares, by the three letters that follow each other in it
            GinIndex(
                *(OpClass(Upper(name), "gin_trgm_ops") for name in ("name", "public_id", "prefix")), name="key_text"
            ),
        ]


class IdempotentWrite(models.Model):
    """The answer to a write that came with an Idempotency-Key: a repeat gets it again instead of a second write.

    `body_digest` tells a repeat from another body under the same key. `response` has no secrets.
    """

    id = models.BigAutoField(primary_key=True)
    principal_id = models.BigIntegerField()
    method = models.CharField(max_length=7)
    path = models.CharField(max_length=400)
    key = models.CharField(max_length=200)
    body_digest = models.CharField(max_length=64)
    status = models.SmallIntegerField()
    response = models.JSONField(null=True)
    etag = models.CharField(max_length=80, blank=True, default="")
    created_at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["principal_id", "method", "path", "key"], name="idempotent_write_once_per_scope"
            )
        ]
