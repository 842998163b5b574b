"""Usage: records by day partition, rollups, slot minutes, refusals, cursors and quarantine.

`usage_record`, `rollup_delta` are written by COPY only; `usage_record` is partitioned by the UTC day of receipt and
has no unique index: exactly-once comes from the agent cursor that is moved in the same transaction.
"""

from django.db import models


class AgentCursor(models.Model):
    """How far one epoch of one agent has been taken: seq is strict, so a repeat stores nothing and a gap has a name.

    `claimed_by` is the latest epoch of the same agent that said it holds this epoch's spool: what a page tells of it.
    `hello_mark` is the digest of the hello that was answered with this epoch.
    """

    agent_id = models.IntegerField()
    epoch = models.IntegerField()
    last_seq = models.BigIntegerField(default=0)
    last_digest = models.BinaryField(max_length=32, default=b"")
    records = models.BigIntegerField(default=0)
    repeats = models.BigIntegerField(default=0)
    updated_at = models.DateTimeField()
    claimed_by = models.IntegerField(null=True, blank=True)
    hello_mark = models.BinaryField(max_length=32, null=True, blank=True)
    sealed_at = models.DateTimeField(null=True, blank=True)
    sealed_by = models.CharField(max_length=200, blank=True, default="")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["agent_id", "epoch"], name="one_cursor_per_epoch")]


class UsageRecord(models.Model):
    """One attempt of one request, closed exactly once by its agent. Ids refer to rows that are never deleted."""

    request_id = models.UUIDField(primary_key=True)
    received_at = models.DateTimeField()
    arrived_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    attempt = models.SmallIntegerField()
    agent_id = models.IntegerField()
    pool_id = models.IntegerField()
    slot_id = models.IntegerField()
    tenant_id = models.IntegerField()
    key_id = models.IntegerField()
    class_id = models.IntegerField()
    asked_class_id = models.IntegerField()
    model_id = models.IntegerField()
    job_id = models.BigIntegerField()
    revision = models.IntegerField()
    rate_version = models.IntegerField()
    outcome = models.SmallIntegerField()
    status = models.SmallIntegerField()
    flags = models.SmallIntegerField()
    prompt_tokens = models.IntegerField()
    cached_tokens = models.IntegerField()
    output_tokens = models.IntegerField()
    admission_us = models.BigIntegerField()
    queue_us = models.BigIntegerField()
    batch_wait_us = models.BigIntegerField()
    preprocess_us = models.BigIntegerField()
    prefill_us = models.BigIntegerField()
    decode_us = models.BigIntegerField()
    return_us = models.BigIntegerField()
    ttft_us = models.BigIntegerField()
    gpu_us = models.BigIntegerField()
    estimated_gpu_us = models.BigIntegerField()
    charge_prompt_nanos = models.BigIntegerField()
    charge_cached_nanos = models.BigIntegerField()
    charge_output_nanos = models.BigIntegerField()
    charge_gpu_nanos = models.BigIntegerField()
    client_request_id = models.TextField()

    class Meta:
        managed = False
        db_table = "usage_record"


class RollupColumns(models.Model):
    """Key and values that every rollup table shares; `stages` holds the sketches of `core.histogram`.

    Sums are of rounded charges. `stages` is a versioned blob: each stage's histogram and the end-to-end stack.
    """

    pool_id = models.IntegerField()
    tenant_id = models.IntegerField()
    class_id = models.IntegerField()
    model_id = models.IntegerField()
    rate_version = models.IntegerField()
    outcome = models.SmallIntegerField()
    requests = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField()
    cached_tokens = models.BigIntegerField()
    output_tokens = models.BigIntegerField()
    gpu_us = models.BigIntegerField()
    charge_prompt_nanos = models.BigIntegerField()
    charge_cached_nanos = models.BigIntegerField()
    charge_output_nanos = models.BigIntegerField()
    charge_gpu_nanos = models.BigIntegerField()
    stages = models.BinaryField()

    class Meta:
        abstract = True


KEY = ["pool_id", "tenant_id", "class_id", "model_id", "rate_version", "outcome"]


class RollupDelta(RollupColumns):
    """What one ingest transaction adds to a minute of end; folded into `RollupMinute` and removed once it is closed.

    The table has no index over `id`: an index for each row of every transaction costs more than all that reads them.
    """

    id = models.BigAutoField(primary_key=True)
    minute = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["minute"])]


class RollupMinute(RollupColumns):
    minute = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["minute", *KEY], name="rollup_minute_key")]


class RollupQuarter(RollupColumns):
    """UTC quarters of an hour: days and months of every zone are added from these."""

    quarter = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["quarter", *KEY], name="rollup_quarter_key")]


class RollupDay(RollupColumns):
    """Days of the billing zone."""

    day = models.DateField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["day", *KEY], name="rollup_day_key")]
        # What a tenant was charged day by day is asked for each row of its lists.
        indexes = [models.Index(fields=["tenant_id", "day"], name="rollup_day_of_tenant")]


class SlotUsageMinute(models.Model):
    """GPU time of one tenant and class on one slot in one minute; the sum over tenants is the slot's busy time.

    `charged` is false for attempts nobody pays for (repeated work).
    """

    slot_id = models.IntegerField()
    minute = models.DateTimeField()
    tenant_id = models.IntegerField()
    class_id = models.IntegerField()
    charged = models.BooleanField(default=True)
    gpu_us = models.BigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["minute", "slot_id", "tenant_id", "class_id", "charged"], name="slot_usage_minute_key"
            )
        ]


class SlotMinute(models.Model):
    """What a slot's meter saw in one minute. `observed_us` less than the minute means the rest is unknown.

    `states` maps a state (ready, warming, broken, draining) to microseconds.
    """

    slot_id = models.IntegerField()
    minute = models.DateTimeField()
    busy_us = models.BigIntegerField()
    observed_us = models.BigIntegerField()
    warming_us = models.BigIntegerField(default=0)
    broken_us = models.BigIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["minute", "slot_id"], name="slot_minute_key")]


class RefusalMinute(models.Model):
    """Refusals counted exactly, by minute of arrival."""

    minute = models.DateTimeField()
    pool_id = models.IntegerField()
    tenant_id = models.IntegerField()
    class_id = models.IntegerField()
    reason = models.SmallIntegerField()
    count = models.BigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["minute", "pool_id", "tenant_id", "class_id", "reason"], name="refusal_minute_key"
            )
        ]


class DecisionSample(models.Model):
    """An admission decision kept in full: refused ones (the first 100 of a kind a minute) and sampled admitted ones."""

    request_id = models.UUIDField(primary_key=True)
    at = models.DateTimeField(db_index=True)
    agent_id = models.IntegerField()
    pool_id = models.IntegerField()
    tenant_id = models.IntegerField(db_index=True)
    key_id = models.IntegerField()
    class_id = models.IntegerField()
    decision = models.CharField(max_length=9)
    reason = models.SmallIntegerField()
    checks = models.JSONField()


class Quarantine(models.Model):
    """What was reported but cannot be counted, with the reason; totals are untouched by it.

    `nanos` is what its records say they were charged; null where one of them says nothing that can be true.
    """

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(db_index=True)
    agent_id = models.IntegerField(null=True)
    epoch = models.IntegerField(null=True)
    seq = models.BigIntegerField(null=True)
    reason = models.CharField(max_length=60)
    payload = models.JSONField()
    records = models.IntegerField(default=1)
    nanos = models.BigIntegerField(null=True, blank=True)
    resolved_at = models.DateTimeField(null=True, blank=True)


class ImportedUsage(models.Model):
    """Usage that no agent of ours reported: a public trace, a file of one's own, events of another gateway.

    Identity is (source, tenant, external id); lines of a file without ids have the file's digest and line as theirs.
    Never charged and never attributed. `digest` is of the content: the same identity with another content is refused.
    `prompt_tokens` includes `cached_tokens`.
    """

    id = models.BigAutoField(primary_key=True)
    source = models.CharField(max_length=120)
    tenant_slug = models.CharField(max_length=200, blank=True, default="")
    external_id = models.CharField(max_length=200)
    at = models.DateTimeField()
    model = models.CharField(max_length=200, blank=True, default="")
    prompt_tokens = models.BigIntegerField()
    cached_tokens = models.BigIntegerField(default=0)
    output_tokens = models.BigIntegerField()
    digest = models.BinaryField(max_length=16)
    imported_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["source", "tenant_slug", "external_id"], name="imported_usage_once")
        ]
        indexes = [models.Index(fields=["source", "at"])]


class DuplicateRecord(models.Model):
    """An attempt that stands in the records more than once: what its copies after the first added, to be corrected.

    Records and rollups stay as they were reported; the sums here are what they hold too much. `same_content` is false
    where the copies disagree. Found by the hourly audit, once per attempt however often the audit runs.
    """

    id = models.BigAutoField(primary_key=True)
    request_id = models.UUIDField()
    attempt = models.SmallIntegerField()
    hour = models.DateTimeField(db_index=True)
    found_at = models.DateTimeField()
    copies = models.IntegerField()
    agent_ids = models.JSONField()
    same_content = models.BooleanField()
    first_received_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    pool_id = models.IntegerField()
    tenant_id = models.IntegerField()
    class_id = models.IntegerField()
    model_id = models.IntegerField()
    rate_version = models.IntegerField()
    outcome = models.SmallIntegerField()
    prompt_tokens = models.BigIntegerField()
    cached_tokens = models.BigIntegerField()
    output_tokens = models.BigIntegerField()
    gpu_us = models.BigIntegerField()
    charge_prompt_nanos = models.BigIntegerField()
    charge_cached_nanos = models.BigIntegerField()
    charge_output_nanos = models.BigIntegerField()
    charge_gpu_nanos = models.BigIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["request_id", "attempt"], name="one_duplicate_per_attempt")]


class AuditedHour(models.Model):
    """An hour of receipt whose records were looked through for copies."""

    hour = models.DateTimeField(primary_key=True)
    records = models.BigIntegerField()
    duplicates = models.IntegerField()
    audited_at = models.DateTimeField()


class RetiredDay(models.Model):
    """A day of records that left the database for a Parquet file.

    `content_digest` is the SHA-256 of its rows, the same from the table and from the file; `file_digest` of the file.
    A day is dropped from the database only with `verified_at` set.
    """

    day = models.DateField(primary_key=True)
    path = models.CharField(max_length=400)
    records = models.BigIntegerField()
    file_bytes = models.BigIntegerField()
    table_bytes = models.BigIntegerField()
    file_digest = models.BinaryField(max_length=32)
    content_digest = models.BinaryField(max_length=32)
    verified_at = models.DateTimeField()
    dropped_at = models.DateTimeField(null=True, blank=True)
