"""REST of jobs, for staff by session and for tenants by their API key."""

import uuid
from datetime import datetime
from typing import Any

import django_filters
from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers, status
from rest_framework.authentication import SessionAuthentication
from rest_framework.decorators import action
from rest_framework.mixins import ListModelMixin
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.audit.actors import Actor, actor_of
from controlplane.jobs import actions, queries
from controlplane.jobs.actions import JobOrder
from controlplane.jobs.key_authentication import KeyAuthentication
from controlplane.jobs.models import Job
from controlplane.tenants.access import RolePermission
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.tenants.queries import visible_tenants
from controlplane.tenants.rest import KeyReused, VersionedViewSet, writes

# An API key may do all of this for its own tenant, nothing else in the REST interface.
KEY_ACTIONS = frozenset({"list", "retrieve", "create", "cancel"})


class JobPermission(RolePermission):
    """Roles as everywhere; a tenant's API key may declare, read and cancel its own tenant's jobs."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        if isinstance(request.auth, ApiKey):
            return getattr(view, "action", None) in KEY_ACTIONS
        return super().has_permission(request, view)


class InstantField(serializers.CharField):
    """ISO 8601 with its offset: a wall clock without one would be somebody's guess."""

    def to_internal_value(self, data: Any) -> datetime:  # type: ignore[override]
        try:
            at = datetime.fromisoformat(super().to_internal_value(data))
        except ValueError:
            raise serializers.ValidationError("Write an instant, such as 2026-12-01T06:00:00+01:00.") from None
        if at.tzinfo is None:
            raise serializers.ValidationError("Give the instant with its offset, such as 2026-12-01T06:00:00+01:00.")
        return at


class JobSerializer(serializers.ModelSerializer):
    """A job with its progress and its estimate. `uuid` is what the header `x-flexband-job` carries."""

    tenant = serializers.SlugRelatedField("slug", read_only=True)
    pool = serializers.SlugRelatedField("slug", read_only=True)
    model = serializers.CharField(source="pool.model.name", read_only=True)
    items_failed = serializers.IntegerField(
        read_only=True, help_text="Requests that failed. An item whose client retries it may fail often and complete."
    )
    standing = serializers.SerializerMethodField()
    remaining_gpu_us = serializers.SerializerMethodField()
    estimate_gpu_us_per_item = serializers.SerializerMethodField()

    class Meta:
        model = Job
        fields = (
            "uuid", "tenant", "name", "class", "pool", "model", "state", "standing", "items", "items_completed",
            "items_failed", "prompt_tokens", "expected_output_tokens", "deadline", "gpu_us_done", "remaining_gpu_us",
            "estimate_gpu_us_per_item", "created_by", "created_at", "first_attempt_at", "finished_at", "version",
        )  # fmt: skip

    @extend_schema_field(
        {"type": "string", "enum": ["waiting", "running", "completed", "cancelled", "missed", "best_effort"]}
    )
    def get_standing(self, job: Job) -> str:
        return queries.status_of(job, timezone.now()).standing

    def get_remaining_gpu_us(self, job: Job) -> int:
        return queries.remaining_gpu_us(job, job.pool)

    def get_estimate_gpu_us_per_item(self, job: Job) -> int:
        return queries.estimate_of(job, job.pool).gpu_us_per_item


# `class` is a word of the language, so these fields cannot be declared like the others
JobSerializer._declared_fields["class"] = serializers.SlugRelatedField("slug", source="workload_class", read_only=True)


class JobOrderSerializer(serializers.Serializer):
    """A job as its owner declares it; token counts are those of one item. `tenant` is for staff only."""

    tenant = serializers.CharField(max_length=63, required=False)
    name = serializers.CharField(max_length=120, required=False, allow_blank=True)
    items = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    expected_output_tokens = serializers.IntegerField()
    deadline = InstantField(required=False, allow_null=True, help_text="Without one the class's default.")
    best_effort = serializers.BooleanField(required=False, help_text="No deadline: ordered last, never lent for.")
    pool = serializers.CharField(max_length=63, required=False)
    model = serializers.CharField(max_length=120, required=False)


JobOrderSerializer._declared_fields["class"] = serializers.CharField(max_length=63)


class CancelSerializer(serializers.Serializer):
    reason = serializers.CharField(max_length=400, required=False, allow_blank=True)


class JobFilter(django_filters.FilterSet):
    tenant = django_filters.CharFilter("tenant__slug")
    pool = django_filters.CharFilter("pool__slug")
    missed = django_filters.BooleanFilter(method="past_deadline", label="Only those past their deadline")

    class Meta:
        model = Job
        fields = ("state",)

    def past_deadline(self, rows: QuerySet[Job], name: str, value: bool) -> QuerySet[Job]:
        return queries.missed(rows, timezone.now()) if value else rows


class JobViewSet(ListModelMixin, VersionedViewSet):
    """Jobs: declared sets of batch requests with one deadline."""

    read_permission = "job.read"
    write_permission = "job.write"
    authentication_classes = (KeyAuthentication, SessionAuthentication)
    permission_classes = (JobPermission,)
    http_method_names = ["get", "post", "head", "options"]
    serializer_class = JobSerializer
    filterset_class = JobFilter
    ordering_fields = ("id", "deadline", "created_at")
    ordering = ("-id",)
    lookup_field = "uuid"
    lookup_value_regex = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"

    def get_queryset(self) -> QuerySet[Job]:
        return queries.visible_jobs(self.request.user)

    @extend_schema(request=JobOrderSerializer, responses={200: JobSerializer, 201: JobSerializer})
    def create(self, request: Request) -> Response:
        """Declares a job. With `Idempotency-Key` the same order answers the same job for ever (200), another is 422."""
        values = self.body(JobOrderSerializer)
        tenant, key = self._tenant(values), request.headers.get("Idempotency-Key")
        order = JobOrder(class_slug=values.pop("class"), best_effort=values.pop("best_effort", False), **values)
        allowed = list(request.auth.classes) if isinstance(request.auth, ApiKey) else None
        try:
            submitted = actions.submit_job(
                tenant=tenant,
                order=order,
                actor=self._actor(request),
                now=timezone.now(),
                idempotency_key=key or None,
                allowed_classes=allowed,
            )
        except actions.KeyReused as error:
            raise KeyReused(str(error)) from error
        job = self.get_queryset().get(pk=submitted.job.pk)
        if submitted.repeated:
            response = self.answer(job)
            response["Idempotency-Replayed"] = "true"
            return response
        return self.answer(job, status.HTTP_201_CREATED)

    @extend_schema(request=CancelSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def cancel(self, request: Request, uuid: uuid.UUID) -> Response:
        """Ends the job: its items are backlog no longer."""
        job = self.get_object()
        reason = self.body(CancelSerializer).get("reason", "") if request.data else ""
        actions.cancel_job(job_uuid=job.uuid, actor=self._actor(request), now=timezone.now(), reason=reason)
        return self.answer(self.get_object())

    def _tenant(self, values: dict[str, Any]) -> Tenant:
        named = values.pop("tenant", "")
        if isinstance(self.request.auth, ApiKey):
            if named and named != self.request.auth.tenant.slug:
                raise serializers.ValidationError({"tenant": ["The key belongs to another tenant: leave this out."]})
            return self.request.auth.tenant
        if not named:
            raise serializers.ValidationError({"tenant": ["Say whose job it is."]})
        tenant = visible_tenants(self.request.user).filter(slug=named).first()
        if tenant is None:
            raise serializers.ValidationError({"tenant": [f"There is no tenant {named!r}."]})
        return tenant

    def _actor(self, request: Request) -> Actor:
        if isinstance(request.auth, ApiKey):
            request_id = getattr(request._request, "request_id", "")
            return Actor(id=None, name=f"key {request.auth.public_id}", role="tenant", request_id=request_id)
        return actor_of(request)
