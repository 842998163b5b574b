"""The audit log: who changed what, when, from what to what, and why. Rows are only ever added."""

from django.contrib.postgres.indexes import GinIndex, OpClass
from django.db import models
from django.db.models import Q
from django.db.models.functions import Upper


class AuditEntry(models.Model):
    """One change. `before` and `after` hold the changed fields only; secrets never appear."""

    at = models.DateTimeField(db_index=True)
    actor_id = models.BigIntegerField(null=True)
    actor_name = models.CharField(max_length=200)
    actor_role = models.CharField(max_length=20)
    action = models.CharField(max_length=60, db_index=True)
    noun = models.CharField(max_length=40)
    object_id = models.CharField(max_length=80)
    tenant_slug = models.CharField(max_length=63, blank=True, default="", db_index=True)
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    reason = models.TextField(blank=True, default="")
    request_id = models.CharField(max_length=64, blank=True, default="")
    previous_hash = models.BinaryField(max_length=32)
    hash = models.BinaryField(max_length=32, unique=True)

    class Meta:
        indexes = [
            models.Index(fields=["noun", "object_id"]),
            models.Index(fields=["noun", "action"], name="audit_entry_vocabulary"),
            # what `icontains` compares, by the three letters that follow each other in it
            GinIndex(OpClass(Upper("actor_name"), "gin_trgm_ops"), name="audit_entry_actor"),
            models.Index(fields=["request_id"], condition=~Q(request_id=""), name="audit_entry_request"),
        ]


class CarriedRevision(models.Model):
    """How far a pushed revision carried the log: every entry up to `through_id` about policy was in it or an earlier.

    Entries are never changed, so where a change went out is read from here. Revisions that repeat an earlier content
    (rollback, new bindings) carry nothing new and have no row.
    """

    revision = models.IntegerField(primary_key=True)
    through_id = models.BigIntegerField(db_index=True)
