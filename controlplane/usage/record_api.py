"""REST of the usage records: one row for each attempt of each request, as its agent closed it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.apps import apps
from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import APIException
from rest_framework.filters import OrderingFilter
from rest_framework.generics import ListAPIView
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param

from controlplane.core.reasons import BY_CODE, Outcome
from controlplane.fleet.models import Pool, ServedModel
from controlplane.tenants.queries import key_for, sees_all_tenants, tenant_for, visible_tenants
from controlplane.usage.models import UsageRecord
from controlplane.usage.record_pages import ORDER, Received, first_records
from controlplane.usage.retired_records import retired_days
from controlplane.web.cursor import CursorPages
from controlplane.web.openapi import problem
from controlplane.wire.report import (
    FLAG_CAPPED,
    FLAG_ESTIMATED,
    FLAG_NOT_CHARGED,
    FLAG_OUTAGE,
    FLAG_STREAMED,
    FLAG_TOKENLESS,
)

LOOK_BACK = timedelta(hours=1)
SPAN_MOST = timedelta(days=1)
# Before the first record there can be; a time is still a time that far before it.
_EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)


class Retired(APIException):
    status_code = 410
    default_detail = (
        "Records of that time have left the database for the archive's Parquet files. `requests/<id>/` still has each,"
        " `reports/charges/` their sums."
    )
    default_code = "retired"


class RecordQuerySerializer(serializers.Serializer):
    """Which records. `since` and `until` are instants of receipt."""

    tenant = serializers.CharField(max_length=63, required=False, help_text="Slug.")
    key = serializers.CharField(max_length=63, required=False, help_text="Id of an API key.")
    workload_class = serializers.CharField(max_length=63, required=False, help_text="Slug of the class that served.")
    model = serializers.CharField(max_length=120, required=False, help_text="Name.")
    pool = serializers.CharField(max_length=63, required=False, help_text="Slug.")
    outcome = serializers.ChoiceField([str(one) for one in Outcome], required=False)
    since = serializers.DateTimeField(
        required=False, help_text="Received then or later; default: an hour before `until`."
    )
    until = serializers.DateTimeField(required=False, help_text="Received before; default: now.")


class RecordSerializer(serializers.Serializer):
    """An attempt of a request. Null is unknown or none: times that were not measured, tokens of work that is not made
    of tokens, amounts where no rate card was in force.

    `prompt_tokens` includes `cached_tokens`. `rate_version` is the id of a rate card. `outage_slice`: admitted with
    neither the control plane nor a lease there. `capped`: charged up to the reservation only.
    """

    request_id = serializers.UUIDField()
    client_request_id = serializers.CharField(allow_blank=True)
    attempt = serializers.IntegerField()
    received_at = serializers.DateTimeField()
    arrived_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField()
    tenant = serializers.CharField(allow_null=True)
    key = serializers.CharField(allow_null=True)
    workload_class = serializers.CharField(allow_null=True)
    asked_workload_class = serializers.CharField(allow_null=True)
    model = serializers.CharField(allow_null=True)
    pool = serializers.CharField(allow_null=True)
    slot = serializers.CharField(allow_null=True)
    agent = serializers.CharField(allow_null=True)
    job = serializers.UUIDField(allow_null=True)
    revision = serializers.IntegerField(allow_null=True)
    rate_version = serializers.IntegerField(allow_null=True)
    outcome = serializers.CharField()
    status = serializers.IntegerField()
    streamed = serializers.BooleanField()
    tokens_estimated = serializers.BooleanField()
    outage_slice = serializers.BooleanField()
    capped = serializers.BooleanField()
    charged = serializers.BooleanField()
    prompt_tokens = serializers.IntegerField(allow_null=True)
    cached_tokens = serializers.IntegerField(allow_null=True)
    output_tokens = serializers.IntegerField(allow_null=True)
    admission_us = serializers.IntegerField(allow_null=True)
    queue_us = serializers.IntegerField(allow_null=True)
    batch_wait_us = serializers.IntegerField(allow_null=True)
    preprocess_us = serializers.IntegerField(allow_null=True)
    prefill_us = serializers.IntegerField(allow_null=True)
    decode_us = serializers.IntegerField(allow_null=True)
    return_us = serializers.IntegerField(allow_null=True)
    ttft_us = serializers.IntegerField(allow_null=True)
    gpu_us = serializers.IntegerField(allow_null=True)
    estimated_gpu_us = serializers.IntegerField(allow_null=True)
    prompt_nanos = serializers.IntegerField(allow_null=True)
    cached_nanos = serializers.IntegerField(allow_null=True)
    output_nanos = serializers.IntegerField(allow_null=True)
    gpu_nanos = serializers.IntegerField(allow_null=True)
    charge_nanos = serializers.IntegerField(allow_null=True)


_TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")
_TIMES = tuple(name for name in RecordSerializer._declared_fields if name.endswith("_us"))
_AMOUNTS = ("prompt_nanos", "cached_nanos", "output_nanos", "gpu_nanos")
# Classes and jobs belong to apps above this one, so they are asked for by name, like a foreign key.
_NAMED = {
    "tenant": ("tenants.Tenant", "slug", "tenant_id"),
    "key": ("tenants.ApiKey", "public_id", "key_id"),
    "workload_class": ("contracts.WorkloadClass", "slug", "class_id"),
    "asked_workload_class": ("contracts.WorkloadClass", "slug", "asked_class_id"),
    "model": ("fleet.ServedModel", "name", "model_id"),
    "pool": ("fleet.Pool", "slug", "pool_id"),
    "slot": ("fleet.Slot", "name", "slot_id"),
    "agent": ("fleet.Agent", "name", "agent_id"),
    "job": ("jobs.Job", "uuid", "job_id"),
}


def records_json(rows: Sequence[UsageRecord]) -> list[dict[str, Any]]:
    """Records as REST tells them; one statement for each kind of name."""
    names = {
        name: dict(
            apps.get_model(model).objects.filter(pk__in={getattr(row, at) for row in rows}).values_list("pk", of)
        )
        for name, (model, of, at) in _NAMED.items()
    }
    return [_record_json(row, {name: known.get(getattr(row, _NAMED[name][2])) for name, known in names.items()})
            for row in rows]  # fmt: skip


def _record_json(row: UsageRecord, names: dict[str, Any]) -> dict[str, Any]:
    tokenless, charged = bool(row.flags & FLAG_TOKENLESS), not row.flags & FLAG_NOT_CHARGED
    amounts = {name: getattr(row, f"charge_{name}") for name in _AMOUNTS}
    amounts["charge_nanos"] = sum(amounts.values())
    # No rate card was in force: what it is to be charged is unknown, it is not zero.
    unpriced = charged and not row.rate_version and not amounts["charge_nanos"]
    return {
        "request_id": row.request_id, "client_request_id": row.client_request_id, "attempt": row.attempt,
        "received_at": row.received_at, "arrived_at": row.arrived_at, "ended_at": row.ended_at, **names,
        "revision": row.revision or None, "rate_version": row.rate_version or None,
        "outcome": str(BY_CODE.get(row.outcome, f"outcome {row.outcome}")), "status": row.status,
        "streamed": bool(row.flags & FLAG_STREAMED), "tokens_estimated": bool(row.flags & FLAG_ESTIMATED),
        "outage_slice": bool(row.flags & FLAG_OUTAGE), "capped": bool(row.flags & FLAG_CAPPED), "charged": charged,
        **{name: None if tokenless else getattr(row, name) for name in _TOKENS},
        **{name: us if (us := getattr(row, name)) >= 0 else None for name in _TIMES},
        **(dict.fromkeys(amounts) if unpriced else amounts),
    }  # fmt: skip


class RecordPages(CursorPages):
    """Pages by receipt. Their addresses hold the time that was asked for: its default moves on."""

    received: Received

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any] | None:
        self.received = view.received
        rows = super().paginate_queryset(queryset, request, view)
        for name, at in (("since", self.received.since), ("until", self.received.until)):
            self.base_url = replace_query_param(str(self.base_url), name, at.isoformat())
        return rows

    def whole_order(self, queryset: QuerySet[Any], ordering: tuple[str, ...]) -> tuple[str, ...]:
        way = "-" if ordering[0].startswith("-") else ""
        return tuple(f"{way}{name}" for name in ORDER)

    def read(self, rows: QuerySet[Any], start: Any, count: int) -> list[Any]:
        return first_records(rows, self.received, start, count)


class UsageRecords(ListAPIView):
    """Usage records in the order of their receipt, the newest first; a tenant's member sees its own tenant's.

    At most a day at once, by default the last hour. Where a day of that time has left the database the answer is 410:
    a page never lacks records in silence.
    """

    read_permission = "usage.read"
    write_permission = "usage.read"
    serializer_class = RecordSerializer
    pagination_class = RecordPages
    filter_backends = (OrderingFilter,)
    ordering_fields = ("received_at",)
    ordering = ("-received_at",)
    queryset = UsageRecord.objects.none()
    received: Received

    @extend_schema(
        operation_id="usage_records",
        parameters=[RecordQuerySerializer],
        responses={200: RecordSerializer(many=True), **problem(410, Retired.default_detail)},
    )
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        asked = RecordQuerySerializer(data=request.query_params)
        asked.is_valid(raise_exception=True)
        self.received = _received(asked.validated_data, timezone.now())
        rows = self.paginate_queryset(self.filter_queryset(_wanted(request, asked.validated_data)))
        # Asked afterwards: a day that leaves while the page is read is gone by then.
        if days := retired_days(self.received.since, self.received.until):
            raise Retired(f"Records received on {' and '.join(f'{row.day}' for row in days)}: {Retired.default_detail}")
        return self.get_paginated_response(records_json(rows or []))


def _received(asked: dict[str, Any], now: datetime) -> Received:
    until = asked.get("until") or now
    since = asked.get("since") or max(until, _EARLIEST + LOOK_BACK) - LOOK_BACK
    if since >= until:
        raise serializers.ValidationError({"since": ["Give an instant before `until`, which is now where left out."]})
    if until - since > SPAN_MOST:
        raise serializers.ValidationError({"since": ["Ask for at most 24 hours at once: give an `until` too."]})
    return Received(since, until)


def _wanted(request: Request, asked: dict[str, Any]) -> QuerySet[UsageRecord]:
    rows = UsageRecord.objects.all()
    if tenant := asked.get("tenant"):
        rows = rows.filter(tenant_id=tenant_for(request.user, tenant).pk)
    elif not sees_all_tenants(request.user):
        rows = rows.filter(tenant_id__in=list(visible_tenants(request.user).values_list("pk", flat=True)))
    if key := asked.get("key"):
        rows = rows.filter(key_id=key_for(request.user, key).pk)
    classes = apps.get_model("contracts", "WorkloadClass").objects
    for name, column, found in (
        ("workload_class", "class_id", classes.filter(slug=asked.get("workload_class"))),
        ("model", "model_id", ServedModel.objects.filter(name=asked.get("model"))),
        ("pool", "pool_id", Pool.objects.filter(slug=asked.get("pool"))),
    ):
        if name in asked:
            rows = rows.filter(**{f"{column}__in": list(found.values_list("pk", flat=True))})
    if outcome := asked.get("outcome"):
        rows = rows.filter(outcome=Outcome(outcome).code)
    return rows
