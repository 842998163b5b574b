"""Batch jobs: a declared set of requests of one tenant and class with one deadline; the unit of backlog."""

import uuid

from django.db import models
from django.db.models import Q

from controlplane.contracts.models import WorkloadClass
from controlplane.fleet.models import Pool
from controlplane.tenants.models import ApiKey, Tenant


class Job(models.Model):
    """Done when `items_completed` reaches `items`. `items_failed` counts failed requests: one item may fail often.

    `has_items`: its items are rows here (`Item`), `day` is the UTC day of their partition, and it is done when every
    item is completed or parked. Otherwise its client has a loop of its own and its items are only counted.

    `admission` is the arithmetic by which it was admitted, as JSON of `job_admission.as_json`. The estimates are those
    of that instant; `reserved_nanos` is what it took out of hard budgets. None is not known.
    """

    class State(models.TextChoices):
        IMPORTING = "importing"
        RUNNING = "running"
        COMPLETED = "completed"
        CANCELLED = "cancelled"
        EXPIRED = "expired"
        FAILED = "failed"

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
    has_items = models.BooleanField(default=False, db_default=False)
    day = models.DateField(null=True, blank=True)
    key = models.ForeignKey(ApiKey, null=True, blank=True, on_delete=models.PROTECT, related_name="+")
    endpoint = models.CharField(max_length=40, blank=True, default="", db_default="")
    items_parked = models.PositiveIntegerField(default=0, db_default=0)
    items_cancelled = models.PositiveIntegerField(default=0, db_default=0)
    charge_nanos = models.BigIntegerField(default=0, db_default=0)
    admission = models.JSONField(null=True, blank=True)
    estimated_gpu_us = models.BigIntegerField(null=True, blank=True)
    estimated_charge_nanos = models.BigIntegerField(null=True, blank=True)
    reserved_nanos = models.BigIntegerField(default=0, db_default=0)
    prompt_tokens_done = models.BigIntegerField(default=0, db_default=0)
    output_tokens_done = models.BigIntegerField(default=0, db_default=0)
    rows_purged_at = models.DateTimeField(null=True, blank=True)
    version = models.IntegerField(default=1)

    class Meta:
        indexes = [
            models.Index(
                fields=["pool", "deadline"], condition=Q(state="running", has_items=True), name="job_leasable"
            ),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "idempotency_key"],
                condition=Q(idempotency_key__isnull=False),
                name="job_idempotency_key_unique",
            ),
            models.CheckConstraint(condition=Q(items__gte=1), name="job_has_items"),
            models.CheckConstraint(condition=Q(has_items=False) | Q(day__isnull=False), name="job_items_have_a_day"),
        ]


class JobProgress(models.Model):
    """The counts of a running job at one instant of a minute; see `jobs.progress`."""

    id = models.BigAutoField(primary_key=True)
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="progress")
    minute = models.DateTimeField(db_index=True)
    at = models.DateTimeField()
    items_completed = models.PositiveIntegerField()
    items_failed = models.PositiveIntegerField()
    items_parked = models.PositiveIntegerField()
    items_cancelled = models.PositiveIntegerField()
    gpu_us_done = models.BigIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "minute"], name="one_progress_a_minute")]


class StoredFile(models.Model):
    """A file of a tenant: uploaded requests, or the results and errors of a job. Its bytes are in `jobs.storage`.

    `lines` counts those with something in them; `digest` is the SHA-256 of the bytes. A row without `ready_at` is an
    upload that has not ended.
    """

    class Purpose(models.TextChoices):
        BATCH = "batch"
        BATCH_OUTPUT = "batch_output"

    id = models.BigAutoField(primary_key=True)
    uuid = models.UUIDField(default=uuid.uuid4, unique=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="files")
    purpose = models.CharField(max_length=12, choices=Purpose.choices)
    filename = models.CharField(max_length=200)
    path = models.CharField(max_length=200, unique=True)
    size_bytes = models.BigIntegerField(default=0)
    lines = models.PositiveIntegerField(default=0)
    digest = models.CharField(max_length=64, blank=True, default="")
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField()
    ready_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField()
    deleted_at = models.DateTimeField(null=True, blank=True)
    erased_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [models.Index(fields=["tenant", "-id"], name="file_of_tenant")]


class Batch(models.Model):
    """A file of requests that was submitted as a job, in the states of the OpenAI Batch form.

    Its job is made when the first line was read, since that line's model decides the pool. `imported_bytes` and
    `imported_lines` are how far the file was imported, the token counts are sums over what was; `errors` are those of
    its lines, with their numbers, cut at a bound. `prompt_bytes` and `output_bound_tokens` bound its charge;
    `if_late` says what its owner wants when its deadline cannot be met.
    """

    class State(models.TextChoices):
        VALIDATING = "validating"
        IN_PROGRESS = "in_progress"
        FINALIZING = "finalizing"
        COMPLETED = "completed"
        FAILED = "failed"
        EXPIRED = "expired"
        CANCELLING = "cancelling"
        CANCELLED = "cancelled"

    id = models.BigAutoField(primary_key=True)
    uuid = models.UUIDField(default=uuid.uuid4, unique=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="batches")
    key = models.ForeignKey(ApiKey, null=True, blank=True, on_delete=models.PROTECT, related_name="+")
    job = models.OneToOneField(Job, null=True, blank=True, on_delete=models.PROTECT, related_name="batch")
    input_file = models.ForeignKey(StoredFile, on_delete=models.PROTECT, related_name="+")
    output_file = models.ForeignKey(StoredFile, null=True, blank=True, on_delete=models.PROTECT, related_name="+")
    error_file = models.ForeignKey(StoredFile, null=True, blank=True, on_delete=models.PROTECT, related_name="+")
    class_slug = models.CharField(max_length=63)
    pool_slug = models.CharField(max_length=63, blank=True, default="")
    endpoint = models.CharField(max_length=40)
    completion_window = models.CharField(max_length=20)
    deadline = models.DateTimeField(null=True, blank=True)
    metadata = models.JSONField(default=dict)
    idempotency_key = models.CharField(max_length=120, null=True, blank=True)
    body_digest = models.CharField(max_length=64, blank=True, default="")
    state = models.CharField(max_length=12, choices=State.choices, default=State.VALIDATING)
    imported_bytes = models.BigIntegerField(default=0)
    imported_lines = models.PositiveIntegerField(default=0)
    imported_items = models.PositiveIntegerField(default=0)
    prompt_tokens = models.BigIntegerField(default=0)
    asked_output_tokens = models.BigIntegerField(default=0)
    prompt_bytes = models.BigIntegerField(default=0, db_default=0)
    output_bound_tokens = models.BigIntegerField(default=0, db_default=0)
    if_late = models.CharField(max_length=11, default="best_effort", db_default="best_effort")
    errors = models.JSONField(default=list)
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    in_progress_at = models.DateTimeField(null=True, blank=True)
    finalizing_at = models.DateTimeField(null=True, blank=True)
    completed_at = models.DateTimeField(null=True, blank=True)
    failed_at = models.DateTimeField(null=True, blank=True)
    expired_at = models.DateTimeField(null=True, blank=True)
    cancelling_at = models.DateTimeField(null=True, blank=True)
    cancelled_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "-id"], name="batch_of_tenant"),
            models.Index(
                fields=["state"],
                condition=Q(state__in=["validating", "in_progress", "finalizing", "cancelling"]),
                name="batch_open",
            ),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "idempotency_key"],
                condition=Q(idempotency_key__isnull=False),
                name="batch_idempotency_key_unique",
            )
        ]


class ItemHolder(models.Model):
    """What an agent's present epoch can take: `free` is the room it last reported less what it was leased since.

    `through` is the highest fence it has received; `held` the items leased to it.
    """

    agent_id = models.IntegerField(primary_key=True)
    epoch = models.IntegerField()
    pool_id = models.IntegerField(db_index=True)
    class_id = models.IntegerField()
    room = models.IntegerField()
    room_gpu_us = models.BigIntegerField()
    free = models.IntegerField()
    through = models.BigIntegerField()
    held = models.IntegerField(default=0)
    seen_at = models.DateTimeField()


class Item(models.Model):
    """One line of a job; `state` is a code of `core.batch_items.ItemState`. Partitioned by the job's day."""

    pk = models.CompositePrimaryKey("day", "job_id", "line")
    day = models.DateField()
    job_id = models.BigIntegerField()
    line = models.IntegerField()
    state = models.SmallIntegerField()
    attempt = models.SmallIntegerField()
    failures = models.SmallIntegerField()
    prompt_tokens = models.IntegerField()
    agent_id = models.IntegerField(null=True)
    epoch = models.IntegerField(null=True)
    fence = models.BigIntegerField()
    lease_expires = models.DateTimeField(null=True)
    reason = models.TextField()

    class Meta:
        managed = False
        db_table = "jobs_item"


class ItemBody(models.Model):
    """What was submitted for an item, unchanged. Beside `Item`, so that a lease does not write the body again."""

    pk = models.CompositePrimaryKey("day", "job_id", "line")
    day = models.DateField()
    job_id = models.BigIntegerField()
    line = models.IntegerField()
    custom_id = models.TextField()
    body = models.BinaryField()

    class Meta:
        managed = False
        db_table = "jobs_itembody"


class ItemResult(models.Model):
    """The one result of an item: an answer, or the failure that parked it (`status` is the engine's, 0 for none)."""

    pk = models.CompositePrimaryKey("day", "job_id", "line")
    day = models.DateField()
    job_id = models.BigIntegerField()
    line = models.IntegerField()
    attempt = models.SmallIntegerField()
    agent_id = models.IntegerField()
    request_id = models.UUIDField()
    outcome = models.SmallIntegerField()
    status = models.SmallIntegerField()
    finished_at = models.DateTimeField()
    response = models.BinaryField()

    class Meta:
        managed = False
        db_table = "jobs_itemresult"


class BatchEfficiency(models.Model):
    """What a batch slot of a pool was worth in the last hour: work at the pool's rates over what the meters saw."""

    pool_id = models.IntegerField(primary_key=True)
    efficiency = models.FloatField()
    work_us = models.BigIntegerField()
    metered_us = models.BigIntegerField()
    measured_at = models.DateTimeField()
