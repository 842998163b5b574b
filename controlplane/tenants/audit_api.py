"""REST of the audit log: reading only."""

from decimal import Decimal

import django_filters
from django.db.models import QuerySet
from rest_framework import serializers
from rest_framework.mixins import ListModelMixin, RetrieveModelMixin
from rest_framework.viewsets import GenericViewSet

from controlplane.audit.models import AuditEntry
from controlplane.audit.queries import of_revision, with_revision


class AuditSerializer(serializers.ModelSerializer):
    """One change. `hash` and `previous_hash` are SHA-256 in hex."""

    actor = serializers.CharField(source="actor_name")
    role = serializers.CharField(source="actor_role")
    object = serializers.CharField(source="object_id")
    tenant = serializers.CharField(source="tenant_slug")
    before = serializers.DictField(allow_null=True)
    after = serializers.DictField(allow_null=True)
    revision = serializers.CharField(
        source="went_out",
        allow_null=True,
        help_text="The revision in which it went out; null: none yet, or none at all",
    )
    hash = serializers.SerializerMethodField()
    previous_hash = serializers.SerializerMethodField()

    class Meta:
        model = AuditEntry
        fields = (
            "id", "at", "actor", "role", "action", "noun", "object", "tenant", "before", "after", "reason",
            "request_id", "revision", "hash", "previous_hash",
        )  # fmt: skip

    def get_hash(self, entry: AuditEntry) -> str:
        return bytes(entry.hash).hex()

    def get_previous_hash(self, entry: AuditEntry) -> str:
        return bytes(entry.previous_hash).hex()


class AuditFilterSet(django_filters.FilterSet):
    actor = django_filters.CharFilter("actor_name", "icontains")
    object = django_filters.CharFilter("object_id")
    tenant = django_filters.CharFilter("tenant_slug")
    since = django_filters.IsoDateTimeFilter("at", "gte")
    until = django_filters.IsoDateTimeFilter("at", "lt")
    revision = django_filters.NumberFilter(method="of_revision", min_value=1, max_value=999_999_999)

    class Meta:
        model = AuditEntry
        fields = ("noun", "action")

    def of_revision(self, rows: QuerySet[AuditEntry], name: str, value: Decimal) -> QuerySet[AuditEntry]:
        return rows.filter(of_revision(int(value)))


class AuditViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet):
    """The audit log, newest first."""

    read_permission = "audit.read"
    write_permission = "audit.read"
    serializer_class = AuditSerializer
    filterset_class = AuditFilterSet
    ordering_fields = ("id", "at")
    ordering = ("-id",)
    lookup_value_regex = "[0-9]+"
    http_method_names = ["get", "head", "options"]

    def get_queryset(self) -> QuerySet[AuditEntry]:
        return with_revision(AuditEntry.objects.all())
