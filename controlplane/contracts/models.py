"""Workload classes, and contracts with their versions: columns and constraints, no rules."""

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from controlplane.tenants.models import SLUG, Tenant


class WorkloadClass(models.Model):
    class Kind(models.TextChoices):
        INTERACTIVE = "interactive"
        BATCH = "batch"

    class Overload(models.TextChoices):
        REJECT = "reject"
        QUEUE = "queue"
        DOWNGRADE = "downgrade"
        CANCEL = "cancel"

    class State(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"
        ARCHIVED = "archived"

    id = models.AutoField(primary_key=True)
    slug = models.CharField(max_length=63, unique=True, validators=[SLUG])
    name = models.CharField(max_length=120)
    kind = models.CharField(max_length=11, choices=Kind.choices)
    state = models.CharField(max_length=9, choices=State.choices, default=State.ACTIVE)
    priority = models.PositiveIntegerField(default=100)
    min_share_ppm = models.PositiveIntegerField(default=0)
    max_prompt_tokens = models.PositiveIntegerField(default=8_192)
    max_output_tokens = models.PositiveIntegerField(default=2_048)
    default_output_tokens = models.PositiveIntegerField(default=256)
    template_allowance_tokens = models.PositiveIntegerField(default=64)
    max_queue = models.PositiveIntegerField(default=64)
    max_wait_ms = models.PositiveIntegerField(default=2_000)
    stage_timeout_s = models.PositiveIntegerField(default=300)
    overload = models.CharField(max_length=9, choices=Overload.choices, default=Overload.REJECT)
    downgrade_to = models.ForeignKey("self", null=True, blank=True, on_delete=models.PROTECT, related_name="+")
    retry_safe = models.BooleanField(default=False)
    cancellable = models.BooleanField(default=True)
    default_deadline_s = models.PositiveIntegerField(default=86_400)
    model_names = ArrayField(models.CharField(max_length=120), default=list, blank=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    live_number = models.BigIntegerField(default=0, db_index=True)
    version = models.IntegerField(default=1)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(min_share_ppm__lte=1_000_000), name="class_min_share_at_most_1"),
        ]


class Contract(models.Model):
    """What a class, or one tenant in it, is promised; the promise itself is in its versions."""

    id = models.AutoField(primary_key=True)
    slug = models.CharField(max_length=63, unique=True, validators=[SLUG])
    name = models.CharField(max_length=120)
    workload_class = models.ForeignKey(WorkloadClass, on_delete=models.PROTECT, related_name="contracts")
    tenant = models.ForeignKey(Tenant, null=True, blank=True, on_delete=models.PROTECT, related_name="contracts")
    archived_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField()
    version = models.IntegerField(default=1)


class ContractVersion(models.Model):
    """One promise with the instant from which requests that arrive are judged by it. Never changed once in force.

    `target_ppm` is the promised share in millionths. Batch objectives read wall clocks in `zone`.
    """

    class Objective(models.TextChoices):
        LATENCY = "latency"
        DEADLINE = "deadline"

    class Metric(models.TextChoices):
        QUEUE_WAIT = "queue_wait"
        TTFT = "ttft"
        TPOT = "tpot"
        E2E = "e2e"

    class Population(models.TextChoices):
        OFFERED = "offered"
        ADMITTED = "admitted"
        SUCCESSFUL = "successful"

    id = models.AutoField(primary_key=True)
    contract = models.ForeignKey(Contract, on_delete=models.PROTECT, related_name="versions")
    number = models.PositiveIntegerField()
    effective_from = models.DateTimeField()
    objective = models.CharField(max_length=8, choices=Objective.choices, default=Objective.LATENCY)
    target_ppm = models.PositiveIntegerField()
    population = models.CharField(max_length=10, choices=Population.choices, default=Population.OFFERED)
    metric = models.CharField(max_length=10, choices=Metric.choices, default=Metric.TTFT)
    threshold_ms = models.PositiveIntegerField(default=0)
    window_s = models.PositiveIntegerField(default=900)
    budget_period_s = models.PositiveIntegerField(default=30 * 86_400)
    load_limit_per_s = models.FloatField(null=True, blank=True)
    min_events = models.PositiveIntegerField(default=100)
    admitted_before = models.TimeField(null=True, blank=True)
    finished_by = models.TimeField(null=True, blank=True)
    first_attempt_within_s = models.PositiveIntegerField(null=True, blank=True)
    zone = models.CharField(max_length=64, default="UTC")
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField()
    reason = models.TextField(blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["contract", "number"], name="contract_version_number_unique"),
            models.UniqueConstraint(fields=["contract", "effective_from"], name="contract_version_instant_unique"),
            models.CheckConstraint(
                condition=Q(target_ppm__gte=1) & Q(target_ppm__lt=1_000_000), name="contract_target_between_0_and_1"
            ),
        ]


class ObjectiveMinute(models.Model):
    """Exact counts of one contract version by minute of arrival and pool, added up from the agents' reports.

    `bad` maps a cause to its count; offered = admitted + refused, admitted = good + neutral + bad of the admitted, once
    all have ended.
    """

    contract_version_id = models.IntegerField()
    pool_id = models.IntegerField()
    minute = models.DateTimeField()
    offered = models.BigIntegerField(default=0)
    admitted = models.BigIntegerField(default=0)
    successful = models.BigIntegerField(default=0)
    good = models.BigIntegerField(default=0)
    neutral = models.BigIntegerField(default=0)
    bad = models.JSONField(default=dict)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["contract_version_id", "pool_id", "minute"], name="objective_minute_unique")
        ]
        indexes = [models.Index(fields=["minute"])]


class ObjectiveHour(models.Model):
    """Minutes of one hour added up: those above the version's load range apart (`outside`), as they stood when folded.

    `minutes` has a bit for each minute that was counted, so that one counted in two pools counts once. Valid only with
    a `FoldedHour`.
    """

    contract_version_id = models.IntegerField()
    pool_id = models.IntegerField()
    hour = models.DateTimeField()
    outside = models.BooleanField()
    offered = models.BigIntegerField()
    admitted = models.BigIntegerField()
    successful = models.BigIntegerField()
    good = models.BigIntegerField()
    neutral = models.BigIntegerField()
    nonsense = models.BooleanField()
    minutes = models.BigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["hour", "contract_version_id", "pool_id", "outside"], name="objective_hour_unique"
            )
        ]


class FoldedHour(models.Model):
    """An hour whose minutes are all in `ObjectiveHour`; late counts take the row away."""

    hour = models.DateTimeField(primary_key=True)
