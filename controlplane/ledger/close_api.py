"""REST of the month's end: reconciliations, periods with close and reopen, proposals. Money is exact decimal text."""

from typing import Any

from django.core.exceptions import ValidationError
from django.http import Http404, HttpResponse
from django.shortcuts import get_object_or_404
from django.utils import timezone
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.filters import OrderingFilter
from rest_framework.generics import GenericAPIView
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.audit.actors import actor_of
from controlplane.core.money import format_nanos, parse_nanos
from controlplane.core.period import format_utc
from controlplane.ledger import period_queries, periods, proposals
from controlplane.ledger.closing_checks import checklist
from controlplane.ledger.export_files import CONTENT_TYPES, FORMATS, TooManyRows
from controlplane.ledger.exports import export_file
from controlplane.ledger.models import PeriodExport, PeriodVersion, Proposal
from controlplane.ledger.reconciliation import month_window, reconcile, to_json
from controlplane.ledger.reconciliation_form import ReconciliationSerializer
from controlplane.tenants.queries import installation
from controlplane.tenants.rest import ReasonField, ReasonSerializer, checked, writes


def _check_month(period: str) -> None:
    try:
        month_window(period, installation().billing_zone)
    except ValueError as error:
        raise Http404(f"{error}.") from None


def _refused(error: ValidationError) -> serializers.ValidationError:
    return serializers.ValidationError(error.message_dict if hasattr(error, "error_dict") else error.messages)


class ReconciliationView(APIView):
    """Estimates, meters and invoices of a month; every residual of the bridge by its name."""

    read_permission = "finance.read"
    write_permission = "finance.write"

    @extend_schema(responses=ReconciliationSerializer)
    def get(self, request: Request, period: str) -> Response:
        _check_month(period)
        return Response(to_json(reconcile(period, now=timezone.now())))


class PeriodVersionSerializer(serializers.Serializer):
    """One closing; `exports` are the digests of its kept files by format."""

    version = serializers.IntegerField()
    closed_at = serializers.DateTimeField()
    closed_by = serializers.CharField()
    reason = serializers.CharField()
    cost = serializers.CharField()
    charges = serializers.CharField()
    fingerprint = serializers.CharField()
    statements = serializers.IntegerField()
    exports = serializers.DictField(child=serializers.CharField())
    reopened_at = serializers.DateTimeField(allow_null=True)
    reopen_reason = serializers.CharField()


class UnpricedUseSerializer(serializers.Serializer):
    """Requests that ended without a rate card in force."""

    tenant = serializers.CharField()
    workload_class = serializers.CharField()
    model = serializers.CharField()
    requests = serializers.IntegerField()


class CheckSerializer(serializers.Serializer):
    """A check of the list; `state` is ok, risk, bad or unknown. `unpriced`: whose the unpriced requests are, the most
    first, at most 100.
    """

    name = serializers.CharField()
    title = serializers.CharField()
    state = serializers.CharField()
    word = serializers.CharField()
    text = serializers.CharField()
    unpriced = UnpricedUseSerializer(many=True)


class PeriodSerializer(serializers.Serializer):
    """A month: running, open or closed. `checks` and `versions` only where one month is asked for."""

    period = serializers.CharField()
    state = serializers.CharField()
    version = serializers.IntegerField()
    checks = CheckSerializer(many=True, required=False)
    versions = PeriodVersionSerializer(many=True, required=False)


class CloseSerializer(serializers.Serializer):
    """Why: needed when a check is open."""

    reason = serializers.CharField(max_length=400, required=False, allow_blank=True, default="")


def _version_json(row: PeriodVersion) -> dict[str, Any]:
    digests = PeriodExport.objects.filter(version=row).values_list("format", "sha256")
    return {
        "version": row.version, "closed_at": format_utc(row.closed_at), "closed_by": row.closed_by,
        "reason": row.reason, "cost": format_nanos(row.cost_nanos), "charges": format_nanos(row.charge_nanos),
        "fingerprint": row.fingerprint, "statements": row.statements.count(), "exports": dict(digests),
        "reopened_at": format_utc(row.reopened_at) if row.reopened_at else None, "reopen_reason": row.reopen_reason,
    }  # fmt: skip


def _period_json(period: str) -> dict[str, Any]:
    now = timezone.now()
    found = next((month for month in period_queries.months(now) if month.name == period), None)
    versions = list(period_queries.versions(period))
    return {
        "period": period, "state": found.state if found else period_queries.state_of(period),
        "version": versions[0].version if versions else 0,
        "checks": checklist(period, now=now).to_json(), "versions": [_version_json(row) for row in versions],
    }  # fmt: skip


class PeriodsView(APIView):
    """Months, newest first, with their states."""

    read_permission = "finance.read"
    write_permission = "finance.write"

    @extend_schema(responses=PeriodSerializer(many=True))
    def get(self, request: Request) -> Response:
        return Response(
            [
                {"period": month.name, "state": month.state, "version": month.version.version if month.version else 0}
                for month in period_queries.months(timezone.now())
            ]
        )


class PeriodView(APIView):
    """A month with its checklist and versions."""

    read_permission = "finance.read"
    write_permission = "finance.write"

    @extend_schema(responses=PeriodSerializer)
    def get(self, request: Request, period: str) -> Response:
        _check_month(period)
        return Response(_period_json(period))


class ClosePeriodView(APIView):
    """Closes a month that has ended; closing it again changes nothing."""

    read_permission = "finance.read"
    write_permission = "finance.write"

    @extend_schema(request=CloseSerializer, responses=PeriodSerializer)
    @writes
    def post(self, request: Request, period: str) -> Response:
        _check_month(period)
        reason = checked(CloseSerializer, request)["reason"]
        try:
            periods.close_period(period, actor=actor_of(request), now=timezone.now(), reason=reason)
        except ValidationError as error:
            raise _refused(error) from error
        return Response(_period_json(period))


class ReopenPeriodView(APIView):
    """Opens a closed month again, with a reason."""

    read_permission = "finance.read"
    write_permission = "finance.write"

    @extend_schema(request=ReasonSerializer, responses=PeriodSerializer)
    @writes
    def post(self, request: Request, period: str) -> Response:
        _check_month(period)
        reason = checked(ReasonSerializer, request)["reason"]
        try:
            periods.reopen_period(period, actor=actor_of(request), now=timezone.now(), reason=reason)
        except ValidationError as error:
            raise _refused(error) from error
        return Response(_period_json(period))


class PeriodExportView(APIView):
    """A file of a month: the kept bytes of its last closing, or of `?version=`; made now while it is open."""

    read_permission = "finance.read"
    write_permission = "finance.write"

    @extend_schema(responses={(200, kind.partition(";")[0]): OpenApiTypes.BINARY for kind in CONTENT_TYPES.values()})
    def get(self, request: Request, period: str, file_format: str) -> HttpResponse:
        _check_month(period)
        version = request.query_params.get("version", "0")
        if file_format not in FORMATS or not version.isdigit():
            raise Http404("There is no such file.")
        try:
            made = export_file(period, file_format, version=int(version))
        except TooManyRows as error:
            raise serializers.ValidationError([f"{error}."]) from error
        except ValueError as error:
            raise Http404(f"{error}.") from None
        answer = HttpResponse(made.content, content_type=CONTENT_TYPES[file_format])
        answer["Content-Disposition"] = f'attachment; filename="{made.name}"'
        return answer


class PostedLineSerializer(serializers.Serializer):
    """What is to be posted, or was: an amount from one account to another."""

    debit = serializers.CharField()
    credit = serializers.CharField()
    nanos = serializers.IntegerField()


class ProposalSerializer(serializers.Serializer):
    """A posting that needs a second person."""

    id = serializers.IntegerField(read_only=True)
    kind = serializers.ChoiceField(Proposal.Kind.choices)
    period = serializers.CharField(max_length=7)
    tenant = serializers.CharField(required=False, max_length=63, allow_blank=True, default="")
    workload_class = serializers.CharField(required=False, max_length=63, allow_blank=True, default="", write_only=True)
    step = serializers.CharField(required=False, max_length=40, allow_blank=True, default="")
    spread = serializers.CharField(required=False, max_length=12, allow_blank=True, default="")
    amount = serializers.CharField(required=False, max_length=40, allow_blank=True, default="")
    reason = ReasonField()
    state = serializers.CharField(read_only=True)
    made_by = serializers.CharField(read_only=True)
    decided_by = serializers.CharField(read_only=True)
    event = serializers.CharField(read_only=True, allow_null=True)
    lines = PostedLineSerializer(many=True, read_only=True)


def _proposal_json(row: Proposal) -> dict[str, Any]:
    return {
        "id": row.pk, "kind": row.kind, "period": row.period, "tenant": row.tenant_slug, "step": row.step,
        "spread": row.spread, "amount": format_nanos(row.amount_nanos), "reason": row.reason, "state": row.state,
        "made_by": row.made_by, "decided_by": row.decided_by, "event": row.event.key if row.event else None,
        "lines": [{**line, "nanos": int(line["nanos"])} for line in row.lines],
    }  # fmt: skip


class ProposalQuerySerializer(serializers.Serializer):
    """Which proposals."""

    period = serializers.CharField(max_length=7, required=False)
    state = serializers.ChoiceField(Proposal.State.choices, required=False)


class ProposalsView(GenericAPIView):
    """Adjustments, credit notes and variances, the latest first; a POST proposes one."""

    read_permission = "finance.read"
    write_permission = "finance.write"
    queryset = Proposal.objects.select_related("event")
    serializer_class = ProposalSerializer
    filter_backends = (OrderingFilter,)
    ordering_fields = ("id", "period")
    ordering = ("-id",)

    @extend_schema(parameters=[ProposalQuerySerializer], responses=ProposalSerializer(many=True))
    def get(self, request: Request) -> Response:
        asked = ProposalQuerySerializer(data=request.query_params)
        asked.is_valid(raise_exception=True)
        page = self.paginate_queryset(self.get_queryset().filter(**asked.validated_data)) or []
        return self.get_paginated_response([_proposal_json(row) for row in page])

    @extend_schema(request=ProposalSerializer, responses={201: ProposalSerializer})
    @writes
    def post(self, request: Request) -> Response:
        given = checked(ProposalSerializer, request)
        try:
            row = _propose(given, request)
        except ValidationError as error:
            raise _refused(error) from error
        return Response(_proposal_json(row), status=status.HTTP_201_CREATED)


def _propose(given: dict[str, Any], request: Request) -> Proposal:
    actor, now = actor_of(request), timezone.now()
    if given["kind"] == Proposal.Kind.VARIANCE:
        return proposals.propose_variance(
            period=given["period"], step=given["step"], spread=given["spread"], actor=actor, now=now,
            reason=given["reason"],
        )  # fmt: skip
    try:
        nanos = parse_nanos(given["amount"])
    except ValueError as error:
        raise ValidationError({"amount": f"{error}."}) from None
    make = proposals.propose_adjustment
    if given["kind"] == Proposal.Kind.CREDIT_NOTE:
        make = proposals.propose_credit_note
    return make(
        period=given["period"], tenant=given["tenant"], class_=given["workload_class"], amount_nanos=nanos, actor=actor,
        now=now, reason=given["reason"],
    )  # fmt: skip


class _DecideView(APIView):
    read_permission = "finance.read"
    write_permission = "finance.write"
    decide = staticmethod(proposals.approve)

    @extend_schema(request=ReasonSerializer, responses=ProposalSerializer)
    @writes
    def post(self, request: Request, pk: int) -> Response:
        get_object_or_404(Proposal, pk=pk)
        reason = checked(ReasonSerializer, request)["reason"]
        try:
            row = self.decide(pk, actor=actor_of(request), now=timezone.now(), reason=reason)
        except ValidationError as error:
            raise _refused(error) from error
        return Response(_proposal_json(row))


class ApproveView(_DecideView):
    """Posts a proposal that somebody else made; again changes nothing."""


class RejectView(_DecideView):
    """Ends a proposal without a posting."""

    decide = staticmethod(proposals.reject)
