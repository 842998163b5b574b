"""Revisions, their signed bundles, rollouts and deliveries: columns and constraints, no rules."""

import uuid

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from controlplane.fleet.models import Agent, Pool


class SigningKey(models.Model):
    """The public half of a signing key; the private half is a file that only worker and controller read.

    A successor names its `predecessor`, which signed it (`predecessor_signature`, 64 bytes): whoever trusts the one can
    check the other without asking anybody. Both are empty for the first key of a use.
    """

    class Use(models.TextChoices):
        POLICY = "policy"
        LIVE = "live"
        NUDGE = "nudge"

    kid = models.CharField(max_length=24, primary_key=True)
    use = models.CharField(max_length=6, choices=Use.choices)
    public_key = models.BinaryField(max_length=32)
    created_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True, blank=True)
    predecessor = models.CharField(max_length=24, blank=True, default="", db_default="")
    predecessor_signature = models.BinaryField(max_length=64, null=True, blank=True)


class Revision(models.Model):
    """An immutable, numbered compilation of all policy. `rolls_back_to` names the revision whose content it repeats."""

    number = models.AutoField(primary_key=True)
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=200)
    reason = models.TextField()
    digest = models.CharField(max_length=64)
    configuration = models.JSONField()
    rolls_back_from = models.IntegerField(null=True, blank=True)
    rolls_back_to = models.IntegerField(null=True, blank=True)
    not_before = models.DateTimeField()
    accept_until = models.DateTimeField()


class PolicyBundle(models.Model):
    """What one pool's agents pull: canonical JSON, by the SHA-256 of its bytes; the signer fills in the signature."""

    revision = models.ForeignKey(Revision, on_delete=models.PROTECT, related_name="bundles")
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="bundles")
    digest = models.CharField(max_length=64, unique=True)
    body = models.BinaryField()
    kid = models.CharField(max_length=24, blank=True, default="")
    signature = models.BinaryField(null=True, blank=True)
    signed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["revision", "pool"], name="one_bundle_per_revision_and_pool")]
        indexes = [models.Index(fields=["pool", "-revision"], name="bundles_of_pool_newest")]


class Rollout(models.Model):
    """The way of one revision to the agents. `fence` is taken by whoever works on it: only its holder may write.

    `note` says why it was stopped or superseded. With `gated`, every wave is judged: `refusals_most` agents (or
    `refusals_most_percent` of the wave, whichever is more) may refuse, `silent_most` may fall silent, and no contract
    may burn at `burn_most` or faster among the wave's agents (null: burn is not asked). A wave that was answered is
    held for `hold_s`; what is still unknown `gate_timeout_s` later is left to a person.
    """

    class State(models.TextChoices):
        REQUESTED = "requested"
        RUNNING = "running"
        DONE = "done"
        SUPERSEDED = "superseded"
        STOPPED = "stopped"

    revision = models.OneToOneField(Revision, on_delete=models.PROTECT, related_name="rollout")
    state = models.CharField(max_length=10, choices=State.choices, default=State.REQUESTED)
    requested_at = models.DateTimeField()
    requested_by = models.CharField(max_length=200)
    finished_at = models.DateTimeField(null=True, blank=True)
    fence = models.UUIDField(default=uuid.uuid4)
    note = models.TextField(blank=True, default="")
    gated = models.BooleanField(default=False, db_default=False)
    hold_s = models.PositiveIntegerField(default=0, db_default=0)
    gate_timeout_s = models.PositiveIntegerField(default=600, db_default=600)
    refusals_most = models.PositiveIntegerField(default=0, db_default=0)
    refusals_most_percent = models.PositiveSmallIntegerField(default=0, db_default=0)
    silent_most = models.PositiveIntegerField(default=0, db_default=0)
    burn_most = models.FloatField(null=True, blank=True)

    class Meta:
        indexes = [models.Index(fields=["state"])]


class Wave(models.Model):
    """A share of the agents of each pool, cumulative in `percent`, or the agents and pools that it names.

    `nudged_at` is null until a broadcast went out. `readings` is what its gates said when they were judged last.
    """

    class State(models.TextChoices):
        PENDING = "pending"
        SENT = "sent"

    rollout = models.ForeignKey(Rollout, on_delete=models.PROTECT, related_name="waves")
    number = models.PositiveSmallIntegerField()
    percent = models.PositiveSmallIntegerField(null=True, default=100)
    pools = ArrayField(models.CharField(max_length=63), default=list, db_default=[], blank=True)
    agents = ArrayField(models.CharField(max_length=120), default=list, db_default=[], blank=True)
    state = models.CharField(max_length=7, choices=State.choices, default=State.PENDING)
    sent_at = models.DateTimeField(null=True, blank=True)
    nudged_at = models.DateTimeField(null=True, blank=True)
    readings = models.JSONField(default=list, db_default=[], blank=True)
    passed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["rollout", "number"], name="wave_number_unique")]


class Delivery(models.Model):
    """One agent's way to a revision: pending, sent, acked, nacked (with its reason) or timed out."""

    class State(models.TextChoices):
        PENDING = "pending"
        SENT = "sent"
        ACKED = "acked"
        NACKED = "nacked"
        TIMED_OUT = "timed_out"

    rollout = models.ForeignKey(Rollout, on_delete=models.PROTECT, related_name="deliveries")
    agent = models.ForeignKey(Agent, on_delete=models.PROTECT, related_name="deliveries")
    wave = models.PositiveSmallIntegerField(default=1)
    digest = models.CharField(max_length=64)
    state = models.CharField(max_length=9, choices=State.choices, default=State.PENDING)
    sent_at = models.DateTimeField(null=True, blank=True)
    answered_at = models.DateTimeField(null=True, blank=True)
    reason = models.TextField(blank=True, default="")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["rollout", "agent"], name="one_delivery_per_agent")]
        indexes = [models.Index(fields=["state"], condition=Q(state__in=["pending", "sent"]), name="open_deliveries")]


class WatchedCount(models.Model):
    """Exact objective counts of one agent since it applied a revision whose waves are judged by burn.

    Only whole minutes of arrival under the new revision are in it; it goes with its rollout's end.
    """

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="watched")
    agent_id = models.IntegerField()
    contract_version_id = models.IntegerField()
    offered = models.BigIntegerField(default=0)
    admitted = models.BigIntegerField(default=0)
    successful = models.BigIntegerField(default=0)
    good = models.BigIntegerField(default=0)
    neutral = models.BigIntegerField(default=0)
    bad = models.BigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["rollout", "agent_id", "contract_version_id"], name="watched_count_key")
        ]


class LiveEntry(models.Model):
    """One signed entry of the live list: what acts at once beside the revision. `number` only grows.

    `body` is canonical JSON of `wire.live_list`; a later entry about the same subject replaces an earlier one.
    """

    number = models.BigIntegerField(primary_key=True)
    kind = models.CharField(max_length=10)
    subject = models.CharField(max_length=80)
    body = models.BinaryField()
    kid = models.CharField(max_length=24)
    signature = models.BinaryField()
    signed_at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["kind", "subject"])]
