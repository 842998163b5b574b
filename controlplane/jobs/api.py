"""REST of jobs, for staff by session and for tenants by their API key."""

import math
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import django_filters
from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import serializers, status
from rest_framework.authentication import SessionAuthentication
from rest_framework.decorators import action
from rest_framework.mixins import ListModelMixin
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.access.authentication import TokenAuthentication
from controlplane.audit.actors import Actor, actor_of
from controlplane.core.batch_items import ItemState
from controlplane.core.job_admission import IfLate
from controlplane.jobs import actions, batch_actions, item_queries, queries
from controlplane.jobs.actions import JobOrder
from controlplane.jobs.admitting import MONEY_CODE, NotAdmitted
from controlplane.jobs.batch_actions import REQUESTS_MOST
from controlplane.jobs.batch_serializer import BatchSerializer
from controlplane.jobs.deadlines import is_clock, read_deadline
from controlplane.jobs.job_money import shortage_of
from controlplane.jobs.key_authentication import KeyAuthentication, actor_of_key
from controlplane.jobs.models import Job
from controlplane.jobs.openai_form import batch_form
from controlplane.tenants.access import RolePermission, may, member_of
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.tenants.queries import visible_tenants
from controlplane.tenants.rest import KeyReused, VersionedViewSet, writes
from controlplane.web.api import PROBLEM_TYPE
from controlplane.web.openapi import IDEMPOTENCY_KEY, problem

# An API key may do all of this for its own tenant, nothing else in the REST interface.
KEY_ACTIONS = frozenset({"list", "retrieve", "create", "cancel", "items", "retry_parked", "extend_deadline"})


class JobPermission(RolePermission):
    """Roles as everywhere; a tenant's API key may declare, read and cancel its own tenant's jobs."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        if isinstance(request.auth, ApiKey):
            return getattr(view, "action", None) in KEY_ACTIONS
        return super().has_permission(request, view)


@dataclass(frozen=True, slots=True)
class WrittenDeadline:
    """A deadline with its text, which says the same tomorrow; `clock` where it is a time and a zone."""

    at: datetime
    text: str
    clock: bool


@extend_schema_field({"type": "string", "examples": ["2026-12-01T06:00:00+01:00", "06:00 Europe/Berlin"]})
class DeadlineField(serializers.CharField):
    """An instant with its offset, or a time and a zone: a wall clock without one would be somebody's guess."""

    def to_internal_value(self, data: Any) -> WrittenDeadline:  # type: ignore[override]
        text = super().to_internal_value(data).strip()
        try:
            at = read_deadline(text, timezone.now())
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from None
        clock = is_clock(text)
        return WrittenDeadline(at, text if clock else at.isoformat(), clock)


_USED = {
    "type": "object",
    "properties": {
        name: {"type": ["integer", "null"]} for name in ("gpu_us", "prompt_tokens", "output_tokens", "charge_nanos")
    },
}


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
    items_parked = serializers.IntegerField(
        read_only=True,
        help_text="Items given up after three failures, by the engine's verdict or after twenty lapsed leases.",
    )
    required_slots = serializers.SerializerMethodField(help_text="What its own deadline asks for from now on.")
    estimated_finish_at = serializers.SerializerMethodField(help_text="At its pace so far; null while unknown.")
    admission = serializers.JSONField(
        read_only=True,
        help_text="The arithmetic of its admission: required and available slots and slack, with and without the band.",
    )
    estimated = serializers.SerializerMethodField(help_text="As at its submission; null where it was not known.")
    actual = serializers.SerializerMethodField(help_text="What was used and charged until now.")
    batch = serializers.SerializerMethodField(help_text="The batch it came from, in OpenAI's form; null for others.")

    class Meta:
        model = Job
        fields = (
            "uuid", "tenant", "name", "class", "pool", "model", "state", "standing", "items", "items_completed",
            "items_failed", "prompt_tokens", "expected_output_tokens", "deadline", "gpu_us_done", "remaining_gpu_us",
            "estimate_gpu_us_per_item", "created_by", "created_at", "first_attempt_at", "finished_at", "version",
            "has_items", "endpoint", "items_parked", "items_cancelled", "charge_nanos", "required_slots",
            "estimated_finish_at", "admission", "estimated", "actual", "reserved_nanos", "batch",
        )  # fmt: skip

    @extend_schema_field({"type": "string", "enum": list(queries.STANDINGS)})
    def get_standing(self, job: Job) -> str:
        return queries.status_of(job, timezone.now()).standing

    def get_remaining_gpu_us(self, job: Job) -> int:
        return queries.remaining_gpu_us(job, job.pool)

    def get_estimate_gpu_us_per_item(self, job: Job) -> int:
        return queries.estimate_of(job, job.pool).gpu_us_per_item

    def get_required_slots(self, job: Job) -> float | None:
        return queries.status_of(job, timezone.now()).required_slots

    def get_estimated_finish_at(self, job: Job) -> datetime | None:
        return queries.estimated_finish(job, timezone.now())

    @extend_schema_field(_USED)
    def get_estimated(self, job: Job) -> dict[str, Any]:
        return {
            "gpu_us": job.estimated_gpu_us,
            "prompt_tokens": job.items * job.prompt_tokens,
            "output_tokens": job.items * job.expected_output_tokens,
            "charge_nanos": job.estimated_charge_nanos,
        }

    @extend_schema_field(_USED)
    def get_actual(self, job: Job) -> dict[str, Any]:
        return {
            "gpu_us": job.gpu_us_done,
            "prompt_tokens": job.prompt_tokens_done,
            "output_tokens": job.output_tokens_done,
            "charge_nanos": job.charge_nanos,
        }

    @extend_schema_field(BatchSerializer(allow_null=True))
    def get_batch(self, job: Job) -> dict[str, Any] | None:
        return batch_form(job.batch) if job.has_items else None


class JobDetailSerializer(JobSerializer):
    """One job, with what its items wait for."""

    waits_for = serializers.SerializerMethodField(
        help_text="The budget window that does not pay for one more item; null while its items may run."
    )

    class Meta(JobSerializer.Meta):
        fields = (*JobSerializer.Meta.fields, "waits_for")

    @extend_schema_field({"type": ["object", "null"]})
    def get_waits_for(self, job: Job) -> dict[str, Any] | None:
        found = shortage_of(job, timezone.now())
        if found is None:
            return None
        # A budget above the tenant's own is its owner's: a member learns that it is short, not by how much.
        known = found.window.level == job.tenant.slug or may(self.context["request"].user, "live.read")
        return {
            "reason": MONEY_CODE,
            "budget": found.window.level if known else None,
            "window": found.window.window,
            "remaining_nanos": found.window.remaining_nanos if known else None,
            "item_bound_nanos": found.item_bound_nanos,
            "ends_at": found.ends_at,
        }


# `class` is a word of the language, so these fields cannot be declared like the others
_CLASS = serializers.SlugRelatedField("slug", source="workload_class", read_only=True)
JobSerializer._declared_fields["class"] = JobDetailSerializer._declared_fields["class"] = _CLASS


class RetriedJobSerializer(JobSerializer):
    """A job with how many of its parked items are tried again."""

    retried = serializers.IntegerField(read_only=True)

    class Meta(JobSerializer.Meta):
        fields = (*JobSerializer.Meta.fields, "retried")


NOT_ADMITTED = {
    **problem(409, "Its deadline cannot be met: `admission` has the arithmetic."),
    **problem(429, "Its budget is used up: `admission` has the arithmetic; or too many calls."),
}


class JobOrderSerializer(serializers.Serializer):
    """A job as its owner declares it; token counts are those of one item. `tenant` is for staff only.

    With `input_file` or `requests` its items are run here, and `items` and token counts are read from them.
    """

    tenant = serializers.CharField(max_length=63, required=False)
    name = serializers.CharField(max_length=120, required=False, allow_blank=True)
    items = serializers.IntegerField(required=False)
    prompt_tokens = serializers.IntegerField(required=False)
    expected_output_tokens = serializers.IntegerField(required=False)
    input_file = serializers.CharField(max_length=60, required=False, help_text="The id of an uploaded file.")
    requests = serializers.ListField(
        child=serializers.DictField(), min_length=1, max_length=REQUESTS_MOST, required=False,
        help_text="Lines of a batch file: custom_id, method, url and body.",
    )  # fmt: skip
    endpoint = serializers.CharField(max_length=40, required=False, help_text="What the requests are for.")
    deadline = DeadlineField(
        required=False, allow_null=True,
        help_text="An instant, or a time and zone. Without one the class's default; 24 h for what is run here.",
    )  # fmt: skip
    if_late = serializers.ChoiceField(
        tuple(IfLate), required=False,
        help_text="When its deadline cannot be met: refuse it (as without this), or run it behind everything else.",
    )  # fmt: skip
    best_effort = serializers.BooleanField(required=False, help_text="No deadline: ordered last, never lent for.")
    pool = serializers.CharField(max_length=63, required=False)
    model = serializers.CharField(max_length=120, required=False)


JobOrderSerializer._declared_fields["class"] = serializers.CharField(max_length=63)


def refusal(refused: NotAdmitted) -> Response:
    """A job that was not admitted, with its arithmetic: 409 for its deadline, 429 for its money."""
    money = refused.refusal == MONEY_CODE
    status_code = status.HTTP_429_TOO_MANY_REQUESTS if money else status.HTTP_409_CONFLICT
    body = {
        "type": f"about:blank#{refused.refusal}",
        "title": refused.words,
        "status": status_code,
        "code": refused.refusal,
        "admission": refused.arithmetic,
    }
    headers = {"x-should-retry": "false"}
    if refused.retry_at is not None:
        headers["Retry-After"] = str(max(1, math.ceil((refused.retry_at - timezone.now()).total_seconds())))
    return Response(body, status=status_code, content_type=PROBLEM_TYPE, headers=headers)


class ItemSerializer(serializers.Serializer):
    line = serializers.IntegerField()
    custom_id = serializers.CharField(allow_blank=True)
    state = serializers.CharField()
    attempt = serializers.IntegerField()
    failures = serializers.IntegerField()
    reason = serializers.CharField(allow_blank=True)
    status = serializers.IntegerField(allow_null=True)


class ItemsSerializer(serializers.Serializer):
    """A page of items by line; `after` of the next page, null on the last."""

    results = ItemSerializer(many=True)
    after = serializers.IntegerField(allow_null=True)


class SubmittedSerializer(serializers.Serializer):
    """A batch in OpenAI's form whose file or requests are to be read; then there is a job."""

    batch = BatchSerializer()


class CancelSerializer(serializers.Serializer):
    reason = serializers.CharField(max_length=400, required=False, allow_blank=True)


class ExtendSerializer(serializers.Serializer):
    deadline = DeadlineField()
    reason = serializers.CharField(max_length=400, required=False, allow_blank=True)


class JobFilter(django_filters.FilterSet):
    tenant = django_filters.CharFilter("tenant__slug")
    pool = django_filters.CharFilter("pool__slug")
    batch = django_filters.UUIDFilter("batch__uuid", label="The one that came from a batch")
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
    authentication_classes = (TokenAuthentication, KeyAuthentication, SessionAuthentication)
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

    def get_serializer_class(self) -> type[JobSerializer]:
        return JobDetailSerializer if self.action == "retrieve" else JobSerializer

    @extend_schema(
        request=JobOrderSerializer,
        parameters=[IDEMPOTENCY_KEY],
        responses={
            200: JobSerializer,
            201: JobSerializer,
            202: SubmittedSerializer,
            **NOT_ADMITTED,
            **problem(422),
        },
    )
    def create(self, request: Request) -> Response:
        """Declares a job. With `Idempotency-Key` the same order answers the same job for ever (200), another is 422.

        With `input_file` or `requests` the answer is 202 with the batch: its job is there when a worker has begun to
        read it (`?batch=` finds it).
        """
        values = self.body(JobOrderSerializer)
        tenant, key = self._tenant(values), request.headers.get("Idempotency-Key")
        if "input_file" in values or "requests" in values:
            return self._submit(request, tenant, values, key or None)
        missing = [name for name in ("items", "prompt_tokens", "expected_output_tokens") if name not in values]
        if missing or "endpoint" in values:
            wrong = {name: ["Say how many, or send input_file or requests."] for name in missing}
            raise serializers.ValidationError(wrong or {"endpoint": ["Only requests that are run here have one."]})
        due: WrittenDeadline | None = values.pop("deadline", None)
        order = JobOrder(
            class_slug=values.pop("class"),
            best_effort=values.pop("best_effort", False),
            deadline=due.at if due else None,
            clock=due.text if due and due.clock else "",
            **values,
        )
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
        except NotAdmitted as refused:
            return refusal(refused)
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

    def _submit(self, request: Request, tenant: Tenant, values: dict[str, Any], key: str | None) -> Response:
        try:
            batch = batch_actions.submit_rest(
                tenant=tenant,
                key=request.auth if isinstance(request.auth, ApiKey) else None,
                values=values,
                actor=self._actor(request),
                now=timezone.now(),
                idempotency_key=key,
            )
        except actions.KeyReused as error:
            raise KeyReused(str(error)) from error
        return Response({"batch": batch_form(batch)}, status=status.HTTP_202_ACCEPTED)

    @extend_schema(
        parameters=[
            OpenApiParameter("state", str, enum=[state.name.lower() for state in ItemState]),
            OpenApiParameter("after", {"type": "integer", "minimum": 0, "maximum": item_queries.LINE_MOST}),
        ],
        responses=ItemsSerializer,
    )
    @action(detail=True, methods=["get"], pagination_class=None, filter_backends=[])
    def items(self, request: Request, uuid: uuid.UUID) -> Response:
        """Items of a job by line: `?state=parked` with their reasons, `?after=` the last line seen."""
        job = self.get_object()
        state = request.query_params.get("state", "")
        if state and state.upper() not in ItemState.__members__:
            raise serializers.ValidationError({"state": [f"Ask for {', '.join(s.name.lower() for s in ItemState)}."]})
        try:
            after = item_queries.line_of(request.query_params.get("after", "0"))
        except ValueError as error:
            raise serializers.ValidationError({"after": [str(error)]}) from None
        wanted = ItemState[state.upper()] if state else None
        rows = item_queries.items_page(job, after=after, limit=51, state=wanted)
        page = rows[:50]
        more = page[-1].line if len(rows) > len(page) else None
        return Response({"results": [asdict(row) for row in page], "after": more})

    @extend_schema(request=CancelSerializer, responses={200: RetriedJobSerializer, **NOT_ADMITTED})
    @action(detail=True, methods=["post"], url_path="retry-parked")
    @writes
    def retry_parked(self, request: Request, uuid: uuid.UUID) -> Response:
        """Makes parked items leasable again; a job that was completed runs again."""
        job = self.get_object()
        reason = self.body(CancelSerializer).get("reason", "") if request.data else ""
        try:
            retried = batch_actions.retry_parked(
                job_uuid=job.uuid, actor=self._actor(request), now=timezone.now(), reason=reason
            )
        except NotAdmitted as refused:
            return refusal(refused)
        return self.answer(self.get_object(), retried=retried)

    @extend_schema(request=ExtendSerializer)
    @action(detail=True, methods=["post"], url_path="extend-deadline")
    @writes
    def extend_deadline(self, request: Request, uuid: uuid.UUID) -> Response:
        """Moves the deadline of a running job to a later instant."""
        job = self.get_object()
        values = self.body(ExtendSerializer)
        batch_actions.extend_deadline(
            job_uuid=job.uuid, deadline=values["deadline"].at, actor=self._actor(request), now=timezone.now(),
            reason=values.get("reason", ""),
        )  # fmt: skip
        return self.answer(self.get_object())

    def _tenant(self, values: dict[str, Any]) -> Tenant:
        named = values.pop("tenant", "")
        if isinstance(self.request.auth, ApiKey):
            if named and named != self.request.auth.tenant.slug:
                raise serializers.ValidationError({"tenant": ["The key belongs to another tenant: leave this out."]})
            return self.request.auth.tenant
        member = member_of(self.request.user)
        if not named and member is not None and member.tenant is not None:
            return member.tenant
        if not named:
            raise serializers.ValidationError({"tenant": ["Say whose job it is."]})
        tenant = visible_tenants(self.request.user).filter(slug=named).first()
        if tenant is None:
            raise serializers.ValidationError({"tenant": [f"There is no tenant {named!r}."]})
        return tenant

    def _actor(self, request: Request) -> Actor:
        if isinstance(request.auth, ApiKey):
            return actor_of_key(request.auth, getattr(request._request, "request_id", ""))
        return actor_of(request)
