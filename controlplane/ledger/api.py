"""REST reports: attribution (what the fleet's cost was and whose) and charges (what tenants are billed)."""

from dataclasses import asdict, dataclass
from typing import Any

from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.core.period import format_utc
from controlplane.ledger.queries import Charge, CostRow, charges, checks, cost_rows
from controlplane.ledger.ranges import FinanceRange, read_range
from controlplane.tenants.models import Installation
from controlplane.tenants.queries import installation, sees_all_tenants, tenant_for, visible_tenants
from controlplane.web.renderers import RowsRenderer

SPAN = [
    OpenApiParameter("period", str, description="2026-10, 2026-W44 or 2026-10-31 in the billing zone; default: now's"),
    OpenApiParameter("from", str, description="First day, with `to`, instead of `period`."),
    OpenApiParameter("to", str, description="Last day, included."),
    OpenApiParameter("tenant", str, description="Slug of one tenant."),
]


class CostRowSerializer(serializers.Serializer):
    """`amount_nanos` null: no rate was in force, so the amount is unknown."""

    day = serializers.DateField()
    pool = serializers.CharField()
    tenant = serializers.CharField()
    workload_class = serializers.CharField(source="class_", allow_blank=True)
    line = serializers.CharField()
    slot_us = serializers.IntegerField()
    amount_nanos = serializers.IntegerField(source="nanos", allow_null=True)

    def to_representation(self, row: CostRow) -> dict[str, Any]:
        """Written out as `ChargeSerializer` does."""
        return {
            "day": row.day, "pool": row.pool, "tenant": row.tenant, "workload_class": row.class_, "line": row.line,
            "slot_us": row.slot_us, "amount_nanos": row.nanos,
        }  # fmt: skip


class SpanSerializer(serializers.Serializer):
    since = serializers.CharField()
    until = serializers.CharField()
    zone = serializers.CharField()
    currency = serializers.CharField()


class AttributionReportSerializer(SpanSerializer):
    """`fleet_nanos` is the pool hours' cost, `attributed_nanos` the sum of the rows: equal, unless filtered."""

    fleet_nanos = serializers.IntegerField()
    attributed_nanos = serializers.IntegerField()
    unpriced_us = serializers.IntegerField()
    posted_through = serializers.DateTimeField(allow_null=True)
    rows = CostRowSerializer(many=True)


class ChargeSerializer(serializers.Serializer):
    tenant = serializers.CharField()
    workload_class = serializers.CharField(source="class_")
    model = serializers.CharField()
    pool = serializers.CharField()
    rate_version = serializers.IntegerField()
    requests = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    gpu_us = serializers.IntegerField()
    prompt_nanos = serializers.IntegerField(allow_null=True)
    cached_nanos = serializers.IntegerField(allow_null=True)
    output_nanos = serializers.IntegerField(allow_null=True)
    gpu_nanos = serializers.IntegerField(allow_null=True)
    charge_nanos = serializers.IntegerField(source="nanos", allow_null=True)

    def to_representation(self, row: Charge) -> dict[str, Any]:
        """Amounts are null where no rate card was in force: unknown, not zero. Written out, since there are thousands:
        asking each field for each row takes ten times as long.
        """
        body = {
            "tenant": row.tenant, "workload_class": row.class_, "model": row.model, "pool": row.pool,
            "rate_version": row.rate_version, "requests": row.requests, "prompt_tokens": row.prompt_tokens,
            "cached_tokens": row.cached_tokens, "output_tokens": row.output_tokens, "gpu_us": row.gpu_us,
            "prompt_nanos": row.prompt_nanos, "cached_nanos": row.cached_nanos, "output_nanos": row.output_nanos,
            "gpu_nanos": row.gpu_nanos, "charge_nanos": row.nanos,
        }  # fmt: skip
        return {**body, **dict.fromkeys(AMOUNTS)} if row.is_unpriced else body


AMOUNTS = ("prompt_nanos", "cached_nanos", "output_nanos", "gpu_nanos", "charge_nanos")


class ChargesReportSerializer(SpanSerializer):
    """`unpriced_requests` had no rate card in force: their charge is unknown and not in the sum."""

    charge_nanos = serializers.IntegerField()
    unpriced_requests = serializers.IntegerField()
    rows = ChargeSerializer(many=True)


@dataclass(frozen=True)
class _Span:
    since: str
    until: str
    zone: str
    currency: str


def _span(request: Request) -> tuple[FinanceRange, dict[str, str]]:
    book: Installation = installation()
    try:
        shown = read_range(request.query_params.dict(), book.billing_zone, timezone.now())
    except ValueError as error:
        raise serializers.ValidationError({"period": [f"{error}."]}) from error
    span = _Span(format_utc(shown.window.start), format_utc(shown.window.end), shown.zone, book.currency)
    return shown, asdict(span)


class AttributionReport(APIView):
    """Cost of the fleet by day, pool, tenant, class and line; rows add up to the fleet's cost exactly."""

    renderer_classes = (RowsRenderer,)
    read_permission = "finance.read"
    write_permission = "finance.write"

    @extend_schema(parameters=SPAN, responses=AttributionReportSerializer)
    def get(self, request: Request) -> Response:
        shown, span = _span(request)
        rows = cost_rows(shown.days, request.query_params.get("tenant"))
        found = checks(shown.window)
        body: dict[str, Any] = {
            **span,
            "fleet_nanos": found.intervals_nanos,
            "attributed_nanos": sum(row.nanos or 0 for row in rows),
            "unpriced_us": found.unpriced_us,
            "posted_through": found.posted_through,
            "rows": rows,
        }
        return Response(AttributionReportSerializer(body).data)


class ChargesReport(APIView):
    """Charges by tenant, class, model, pool and rate version; a tenant's member sees its own tenant only."""

    renderer_classes = (RowsRenderer,)
    read_permission = "own.read"
    write_permission = "finance.write"

    @extend_schema(parameters=SPAN, responses=ChargesReportSerializer)
    def get(self, request: Request) -> Response:
        shown, span = _span(request)
        slug = request.query_params.get("tenant")
        ids: list[int] | None = None
        if slug:
            ids = [tenant_for(request.user, slug).pk]
        elif not sees_all_tenants(request.user):
            ids = list(visible_tenants(request.user).values_list("id", flat=True))
        rows = charges(shown.window.start, shown.window.end, ids)
        unpriced = sum(row.requests for row in rows if row.is_unpriced)
        body = {**span, "charge_nanos": sum(row.nanos for row in rows), "unpriced_requests": unpriced, "rows": rows}
        return Response(ChargesReportSerializer(body).data)
