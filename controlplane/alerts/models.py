"""Alerts as they were raised, acknowledged and resolved; silences; who is told and how that went."""

import uuid

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q


class Severity(models.TextChoices):
    """Whether somebody is woken (page) or it waits for working hours (ticket)."""

    PAGE = "page"
    TICKET = "ticket"


class Alert(models.Model):
    """One incident from the instant it was seen until it ended. `key` names the condition: it can be open once only.

    `causes`: the likeliest causes with their values, [{"label", "value", "url"}], as of the last look.
    """

    key = models.CharField(max_length=200)
    kind = models.CharField(max_length=20)
    severity = models.CharField(max_length=6, choices=Severity.choices)
    grade = models.CharField(max_length=8)
    word = models.CharField(max_length=20)
    group = models.CharField(max_length=120)
    pool = models.CharField(max_length=63, blank=True, default="")
    contract = models.CharField(max_length=63, blank=True, default="")
    title = models.CharField(max_length=300)
    text = models.TextField(blank=True, default="")
    url = models.CharField(max_length=300, blank=True, default="")
    causes = models.JSONField(default=list)
    since = models.DateTimeField(null=True)
    raised_at = models.DateTimeField()
    seen_at = models.DateTimeField()
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.CharField(max_length=150, blank=True, default="")
    note = models.TextField(blank=True, default="")
    notified_at = models.DateTimeField(null=True)
    resolved_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["key"], condition=Q(resolved_at=None), name="alert_open_once"),
            models.CheckConstraint(
                condition=Q(resolved_at=None) | Q(resolved_at__gte=F("raised_at")), name="alert_resolved_after_raised"
            ),
        ]
        indexes = [models.Index(fields=["-raised_at"]), models.Index(fields=["kind", "-raised_at"])]


class AlertChange(models.Model):
    """What happened to an alert, kept for ever."""

    class Kind(models.TextChoices):
        RAISED = "raised"
        ESCALATED = "escalated"
        ACKNOWLEDGED = "acknowledged"
        REARMED = "rearmed"
        RESOLVED = "resolved"

    alert = models.ForeignKey(Alert, on_delete=models.PROTECT, related_name="history")
    at = models.DateTimeField()
    kind = models.CharField(max_length=12, choices=Kind.choices)
    by = models.CharField(max_length=150, blank=True, default="")
    note = models.TextField(blank=True, default="")


class Silence(models.Model):
    """A time in which alerts that fit are raised and shown but told to nobody; planned ahead, a maintenance window.

    An empty list or text fits everything; at least one of the three narrows it.
    """

    kinds = ArrayField(models.CharField(max_length=20), default=list)
    pool = models.CharField(max_length=63, blank=True, default="")
    contract = models.CharField(max_length=63, blank=True, default="")
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    created_by = models.CharField(max_length=150)
    created_at = models.DateTimeField()
    reason = models.TextField()

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(ends_at__gt=F("starts_at")), name="silence_has_length")]


class Receiver(models.Model):
    """Who is told: a webhook or an e-mail address. `severity` is the least that is told."""

    class Kind(models.TextChoices):
        WEBHOOK = "webhook"
        EMAIL = "email"

    name = models.CharField(max_length=120)
    kind = models.CharField(max_length=7, choices=Kind.choices)
    target = models.CharField(max_length=500)
    severity = models.CharField(max_length=6, choices=Severity.choices, default=Severity.PAGE)
    enabled = models.BooleanField(default=True)
    # Names the secret, which is derived and never stored; the one before signs too until `previous_until`.
    secret_id = models.UUIDField(default=uuid.uuid4)
    previous_secret_id = models.UUIDField(null=True)
    previous_until = models.DateTimeField(null=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    archived_at = models.DateTimeField(null=True)
    version = models.IntegerField(default=1)


class Delivery(models.Model):
    """One message to one receiver, written with the change that it tells and sent at least once."""

    class State(models.TextChoices):
        WAITING = "waiting"
        DELIVERED = "delivered"
        GIVEN_UP = "given_up"

    receiver = models.ForeignKey(Receiver, on_delete=models.PROTECT, related_name="deliveries")
    message_id = models.UUIDField(default=uuid.uuid4, unique=True)
    event = models.CharField(max_length=12)
    subject = models.CharField(max_length=300)
    body = models.JSONField()
    alerts = models.ManyToManyField(Alert, related_name="deliveries")
    state = models.CharField(max_length=9, choices=State.choices, default=State.WAITING)
    created_at = models.DateTimeField()
    next_at = models.DateTimeField()
    attempts = models.PositiveSmallIntegerField(default=0)
    delivered_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["next_at"], condition=Q(state="waiting"), name="delivery_due"),
            models.Index(fields=["receiver", "-created_at"]),
        ]


class DeliveryAttempt(models.Model):
    """One try, kept as the delivery log."""

    delivery = models.ForeignKey(Delivery, on_delete=models.CASCADE, related_name="log")
    at = models.DateTimeField()
    took_us = models.BigIntegerField()
    status = models.PositiveSmallIntegerField(null=True)
    error = models.CharField(max_length=300, blank=True, default="")


class Event(models.Model):
    """Something outside that may explain an incident: a deploy, a change of the network, a move of machines."""

    at = models.DateTimeField(db_index=True)
    kind = models.CharField(max_length=20)
    title = models.CharField(max_length=200)
    url = models.CharField(max_length=500, blank=True, default="")
    pool = models.CharField(max_length=63, blank=True, default="")
    created_by = models.CharField(max_length=150)
    created_at = models.DateTimeField()
