"""Pools, slots and the agents that run them: columns and constraints, no rules."""

import uuid

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q

from controlplane.tenants.models import SLUG


class ServedModel(models.Model):
    id = models.AutoField(primary_key=True)
    name = models.CharField(max_length=120, unique=True)


class Pool(models.Model):
    """The slots that serve one model on one GPU shape under one isolation design, with its flex policy.

    `safe_rate` is `{"entries": {"4": 16.0}, "measured_at": ISO, "trace": text, "valid_until": ISO}`: the tested
    interactive requests/s by number of slots that serve interactive. Durations of the flex policy are in the unit of
    their name. `max_batch_size` counts inputs that a slot runs at once for a one-shot model; 1 is no batching.
    """

    class Isolation(models.TextChoices):
        SHARED = "shared"
        DEDICATED = "dedicated"
        RESERVED = "reserved"

    class IdlePolicy(models.TextChoices):
        WEIGHTS = "weights"
        USAGE = "usage"
        EVEN = "even"
        PLATFORM = "platform"

    class Unit(models.TextChoices):
        REQUESTS = "requests"
        TOKENS = "tokens"
        GPU_TIME = "gpu_time"

    class Spillover(models.TextChoices):
        WARN = "warn"
        BLOCK = "block"

    id = models.AutoField(primary_key=True)
    slug = models.CharField(max_length=63, unique=True, validators=[SLUG])
    name = models.CharField(max_length=120)
    model = models.ForeignKey(ServedModel, on_delete=models.PROTECT, related_name="pools")
    gpu_type = models.CharField(max_length=60)
    isolation = models.CharField(max_length=10, choices=Isolation.choices, default=Isolation.RESERVED)
    interactive_class = models.CharField(max_length=63, blank=True, default="")
    batch_class = models.CharField(max_length=63, blank=True, default="")
    idle_policy = models.CharField(max_length=10, choices=IdlePolicy.choices, default=IdlePolicy.USAGE)
    lend_price_share_ppm = models.PositiveIntegerField(default=0)
    fairness_unit = models.CharField(max_length=10, choices=Unit.choices, default=Unit.TOKENS)
    prompt_weight = models.PositiveIntegerField(default=1)
    output_weight = models.PositiveIntegerField(default=2)
    size_bounds_gpu_ms = ArrayField(models.PositiveIntegerField(), default=list)
    aging_s = models.PositiveIntegerField(default=10)
    reserve_after_ms = models.PositiveIntegerField(default=2_000)
    prefill_us_per_token = models.PositiveIntegerField(default=60)
    decode_us_per_token = models.PositiveIntegerField(default=2_500)
    safe_rate = models.JSONField(default=dict)
    max_batch_size = models.PositiveIntegerField(default=1, db_default=1)
    max_batch_wait_ms = models.PositiveIntegerField(default=0, db_default=0)

    lend_p95_ms = models.PositiveIntegerField(default=200)
    lend_hold_s = models.PositiveIntegerField(default=600)
    load_limit = models.FloatField(default=0.70)
    lend_slack = models.FloatField(default=0.25)
    return_slack = models.FloatField(default=0.35)
    return_hold_s = models.PositiveIntegerField(default=60)
    min_hold_s = models.PositiveIntegerField(default=60)
    drain_bound_s = models.PositiveIntegerField(default=30)
    grant_ttl_s = models.PositiveIntegerField(default=15)
    cooldown_s = models.PositiveIntegerField(default=300)
    decision_interval_s = models.PositiveIntegerField(default=30)
    max_lent = models.PositiveIntegerField(null=True, blank=True)
    spillover_per_week = models.PositiveIntegerField(default=20)
    spillover_action = models.CharField(max_length=5, choices=Spillover.choices, default=Spillover.WARN)
    demo_values = models.BooleanField(default=False)

    frozen_since = models.DateTimeField(null=True, blank=True)
    frozen_until = models.DateTimeField(null=True, blank=True)
    frozen_by = models.CharField(max_length=200, blank=True, default="")
    freeze_reason = models.TextField(blank=True, default="")

    archived_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    live_number = models.BigIntegerField(default=0, db_index=True)
    version = models.IntegerField(default=1)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(return_slack__gt=F("lend_slack")), name="pool_return_slack_over_lend_slack"
            ),
            models.CheckConstraint(
                condition=Q(lend_price_share_ppm__lte=1_000_000), name="pool_lend_price_share_at_most_1"
            ),
            models.CheckConstraint(condition=Q(max_batch_size__gte=1), name="pool_max_batch_size_at_least_1"),
        ]


class Agent(models.Model):
    """A process next to 1..n slots. Only its public key is stored. `epoch` fences older processes of the same agent.

    A rotation is asked for at `key_rotation_asked_at`; the agent posts `next_public_key` at `next_key_at`; the first
    report signed by it makes it the `public_key`, at `key_changed_at`, and ends the rotation.
    """

    class State(models.TextChoices):
        PENDING = "pending"
        ACTIVE = "active"
        RETIRED = "retired"

    id = models.AutoField(primary_key=True)
    uuid = models.UUIDField(default=uuid.uuid4, unique=True)
    name = models.CharField(max_length=63)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="agents")
    state = models.CharField(max_length=8, choices=State.choices, default=State.PENDING)
    public_key = models.BinaryField(max_length=32)
    next_public_key = models.BinaryField(max_length=32, null=True, blank=True)
    key_rotation_asked_at = models.DateTimeField(null=True, blank=True)
    next_key_at = models.DateTimeField(null=True, blank=True)
    key_changed_at = models.DateTimeField(null=True, blank=True)
    epoch = models.IntegerField(default=0)
    address = models.CharField(max_length=200, blank=True, default="")
    software = models.CharField(max_length=60, blank=True, default="")
    enrolled_at = models.DateTimeField()
    retired_at = models.DateTimeField(null=True, blank=True)
    drain_requested_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["name"], condition=~Q(state="retired"), name="agent_name_unique_while_in_use"
            )
        ]


class AgentLive(models.Model):
    """The last report of an agent, in one row that is overwritten: the next report rebuilds it, so it is unlogged.

    `figures` is `wire.report.LiveFigures` as JSON. `refused` is the reason the agent gave for not applying
    `refused_revision`. `band` is what the controller needs of the figures (`band_report`), as long as `band_epoch` and
    `band_seq` are those of the row.
    """

    agent = models.OneToOneField(Agent, on_delete=models.CASCADE, primary_key=True, related_name="live")
    epoch = models.IntegerField()
    seq = models.BigIntegerField()
    reported_at = models.DateTimeField()
    revision = models.IntegerField(default=0)
    live_number = models.BigIntegerField(default=0)
    refused_revision = models.IntegerField(null=True)
    refused = models.TextField(blank=True, default="")
    clock_offset_us = models.BigIntegerField(null=True)
    figures = models.JSONField(default=dict)
    band = models.BinaryField(null=True)
    band_epoch = models.IntegerField(null=True)
    band_seq = models.BigIntegerField(null=True)


class Slot(models.Model):
    """`removed_at`: taken out of the pool by a person; the row stays for its history and may come back by its name."""

    class Band(models.TextChoices):
        INTERACTIVE = "interactive"
        BATCH = "batch"
        FLEX = "flex"

    id = models.AutoField(primary_key=True)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="slots")
    agent = models.ForeignKey(Agent, null=True, blank=True, on_delete=models.PROTECT, related_name="slots")
    name = models.CharField(max_length=32)
    band = models.CharField(max_length=11, choices=Band.choices)
    places = models.PositiveIntegerField(default=4)
    kv_tokens = models.PositiveIntegerField(default=60_000)
    gpu_share_ppm = models.PositiveIntegerField(default=1_000_000)
    removed_at = models.DateTimeField(null=True, blank=True)
    version = models.IntegerField(default=1)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["pool", "name"], name="slot_name_unique_in_pool"),
            models.CheckConstraint(condition=Q(places__gte=1), name="slot_places_at_least_1"),
        ]


class SlotTenure(models.Model):
    """When a slot was part of the fleet: cost runs over tenure. Half-open; `ended_at` null means now."""

    slot = models.ForeignKey(Slot, on_delete=models.PROTECT, related_name="tenures")
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["slot"], condition=Q(ended_at__isnull=True), name="one_open_tenure_per_slot"
            )
        ]


class SlotInterval(models.Model):
    """Who owned a slot and in what state: intervals tile a tenure without gap or overlap.

    `state` is home, lent, draining, cancelling, overdue or lost; `owner_class` the class it was assigned to (empty:
    nobody's). The next interval starts where the one before ends, in the same statement.
    """

    slot = models.ForeignKey(Slot, on_delete=models.PROTECT, related_name="intervals")
    state = models.CharField(max_length=10)
    owner_class = models.CharField(max_length=63, blank=True, default="")
    fence = models.BigIntegerField(default=0)
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    reason = models.CharField(max_length=40, blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["slot"], condition=Q(ended_at__isnull=True), name="one_open_interval_per_slot"
            ),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True) | Q(ended_at__gt=F("started_at")), name="interval_has_length"
            ),
        ]
        indexes = [models.Index(fields=["slot", "started_at"])]


class EnrolmentToken(models.Model):
    """Single use, one pool, one hour. Stored hashed; `used_key` lets the same agent repeat a lost exchange."""

    id = models.AutoField(primary_key=True)
    prefix = models.CharField(max_length=16)
    token_hash = models.CharField(max_length=64, unique=True)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="enrolment_tokens")
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)
    used_key = models.BinaryField(max_length=32, null=True, blank=True)
    agent = models.ForeignKey(Agent, null=True, blank=True, on_delete=models.PROTECT, related_name="+")
