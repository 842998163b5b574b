"""Batch jobs: a declared set of requests of one tenant and class with one deadline; the unit of backlog."""

import uuid

from django.db import models
from django.db.models import Q

from controlplane.contracts.models import WorkloadClass
from controlplane.fleet.models import Pool
from controlplane.tenants.models import Tenant


class Job(models.Model):
    """Done when `items_completed` reaches `items`. `items_failed` counts failed requests: one item may fail often."""

    class State(models.TextChoices):
        RUNNING = "running"
        COMPLETED = "completed"
        CANCELLED = "cancelled"

    id = models.BigAutoField(primary_key=True)
    uuid = models.UUIDField(default=uuid.uuid4, unique=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="jobs")
    workload_class = models.ForeignKey(WorkloadClass, on_delete=models.PROTECT, related_name="+")
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="jobs")
    name = models.CharField(max_length=120, blank=True, default="")
    idempotency_key = models.CharField(max_length=120, null=True, blank=True)
    body_digest = models.CharField(max_length=64, blank=True, default="")
    items = models.PositiveIntegerField()
    items_completed = models.PositiveIntegerField(default=0)
    items_failed = models.PositiveIntegerField(default=0)
    gpu_us_done = models.BigIntegerField(default=0)
    prompt_tokens = models.PositiveIntegerField()
    expected_output_tokens = models.PositiveIntegerField()
    deadline = models.DateTimeField(null=True, blank=True)
    state = models.CharField(max_length=9, choices=State.choices, default=State.RUNNING)
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField()
    first_attempt_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    version = models.IntegerField(default=1)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "idempotency_key"],
                condition=Q(idempotency_key__isnull=False),
                name="job_idempotency_key_unique",
            ),
            models.CheckConstraint(condition=Q(items__gte=1), name="job_has_items"),
        ]
