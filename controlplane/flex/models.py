"""The flex controller's memory: leadership, decisions with their evidence, grants, the lend ledger and pool samples."""

from typing import Any

from django.contrib.postgres.indexes import BrinIndex
from django.db import models

from controlplane.fleet.models import Pool, Slot


class Evidence(models.JSONField):
    """An object or array of JSON as it was written: a hundred are written for one that is read, and `jsonb` would have
    the database take each apart and put it together again. It cannot be compared or indexed there.
    """

    def db_type(self, connection: Any) -> str:
        return "json"

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        # The driver reads `json` by itself, unlike `jsonb`, which Django tells it to leave alone.
        return super().from_db_value(value, expression, connection) if isinstance(value, str) else value


class ControllerTerm(models.Model):
    """Who leads a shard. Every write of decisions, grants and fences is conditional on `term` in the same statement."""

    shard = models.CharField(max_length=32, primary_key=True)
    term = models.BigIntegerField(default=0)
    holder = models.CharField(max_length=120, blank=True, default="")
    expires_at = models.DateTimeField()


class Decision(models.Model):
    """One tick of one pool, kept when it acts, when a check flips and once a minute; never changed."""

    id = models.BigAutoField(primary_key=True)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="+", db_index=False)
    at = models.DateTimeField()
    term = models.BigIntegerField()
    snapshot = Evidence()
    required = models.FloatField(null=True)
    available = models.FloatField(null=True)
    slack = models.FloatField(null=True)
    missed = models.BooleanField(default=False)
    checks = Evidence()
    actions = models.JSONField()

    class Meta:
        indexes = [models.Index(fields=["pool", "-at"])]


class Grant(models.Model):
    """The present word on one flex slot: lend or recall under a fencing number that grows by one at each."""

    slot = models.OneToOneField(Slot, on_delete=models.PROTECT, primary_key=True, related_name="grant")
    fence = models.BigIntegerField(default=0)
    action = models.CharField(max_length=6, default="recall")
    reason = models.CharField(max_length=24, blank=True, default="")
    ttl_us = models.BigIntegerField(default=0)
    state = models.CharField(max_length=10, default="home")
    lent_at = models.DateTimeField(null=True, blank=True)
    renewed_at = models.DateTimeField(null=True, blank=True)
    recalled_at = models.DateTimeField(null=True, blank=True)
    cancelled_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    stop_admit_at = models.DateTimeField(null=True, blank=True)
    manual_recall = models.BooleanField(default=False)
    manual_recall_by = models.CharField(max_length=200, blank=True, default="")
    slack_above_return_since = models.DateTimeField(null=True, blank=True)


class Lend(models.Model):
    """The lend ledger: one row a loan, from its decision to the slot's return, with measured drain and evidence.

    `stop_admit_at`, `last_token_at` and `drained_at` are by the agent's clock: when batch could not start any more, the
    last token of what ran, and nothing running. `home_at` is when the controller knew.
    """

    id = models.BigAutoField(primary_key=True)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="+")
    slot = models.ForeignKey(Slot, on_delete=models.PROTECT, related_name="lends")
    fence = models.BigIntegerField()
    lent_at = models.DateTimeField(db_index=True)
    lend_decision = models.ForeignKey(Decision, on_delete=models.PROTECT, related_name="+")
    recalled_at = models.DateTimeField(null=True, blank=True)
    recall_reason = models.CharField(max_length=24, blank=True, default="")
    recall_decision = models.ForeignKey(Decision, null=True, blank=True, on_delete=models.PROTECT, related_name="+")
    home_at = models.DateTimeField(null=True, blank=True)
    stop_admit_at = models.DateTimeField(null=True, blank=True)
    last_token_at = models.DateTimeField(null=True, blank=True)
    drained_at = models.DateTimeField(null=True, blank=True)
    drain_us = models.BigIntegerField(null=True, blank=True)
    overdue = models.BooleanField(default=False)
    lost = models.BooleanField(default=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["slot", "fence"], name="lend_fence_unique")]


class Trip(models.Model):
    """A local tripwire as an agent reported it."""

    id = models.BigAutoField(primary_key=True)
    slot = models.ForeignKey(Slot, on_delete=models.PROTECT, related_name="+")
    fence = models.BigIntegerField()
    at = models.DateTimeField()
    reason = models.CharField(max_length=40)
    value = models.FloatField(null=True)
    handled_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["slot", "fence"], name="one_trip_per_fence")]
        indexes = [models.Index(fields=["slot"], condition=models.Q(handled_at=None), name="flex_trip_unhandled")]


class PoolSample(models.Model):
    """One second of one pool as the controller saw it, kept 48 h, then one a minute; null is unknown, never zero.

    `figures` is `{"seen": snapshot without its limits, "marks": the controller's memory after the tick}` where
    `whole_at` is null. In a row between it is what differs from the pool's row at `whole_at` beyond the columns, and
    `samples` makes it whole.
    """

    # Without a constraint: a thousand rows a second would each lock their pool to check that it is there.
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="+", db_constraint=False, db_index=False)
    at = models.DateTimeField()
    p95_queue_us = models.BigIntegerField(null=True)
    admitted_per_s = models.FloatField(null=True)
    safe_rate_per_s = models.FloatField(null=True)
    required = models.FloatField(null=True)
    available = models.FloatField(null=True)
    slack = models.FloatField(null=True)
    telemetry_age_us = models.BigIntegerField(null=True)
    figures = Evidence(default=dict)
    whole_at = models.DateTimeField(null=True)
    #: The pool's first whole row since its turn in this minute: kept beyond 48 h. Null: written before there were any.
    kept = models.BooleanField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["pool", "-at"]),
            BrinIndex(fields=["at"], name="flex_poolsample_at_brin", autosummarize=True),
        ]


class PoolChange(models.Model):
    """A pool of which something changed that its controller keeps in memory; written by triggers, taken by the leader.

    `jobs_only`: nothing but its running jobs.
    """

    id = models.BigAutoField(primary_key=True)
    pool_id = models.BigIntegerField()
    jobs_only = models.BooleanField(default=False)
