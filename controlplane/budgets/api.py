"""REST of budgets. Money is a decimal string; `limit_nanos` says the same as an integer."""

from typing import Any

import django_filters
from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from django.utils import timezone
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers, status
from rest_framework.decorators import action
from rest_framework.mixins import ListModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.audit.actors import actor_of
from controlplane.budgets import actions
from controlplane.budgets.increase_queries import increases_of, state_of
from controlplane.budgets.increases import add_increase, end_increase
from controlplane.budgets.models import Budget, BudgetIncrease, BudgetNotice
from controlplane.budgets.queries import STATES, Standing, notices, standings, visible_budgets
from controlplane.budgets.spend_states import budgets_in_state
from controlplane.tenants.access import may
from controlplane.tenants.queries import visible_tenants
from controlplane.tenants.rest import MoneyField, ReasonField, ReasonSerializer, VersionedViewSet, edits, writes
from controlplane.web.openapi import problem

INCREASES_MAX = 200


class OutlookSerializer(serializers.Serializer):
    """What the window will hold at its end and when its limit is reached, each with an 80 % interval.

    From the `days` before; all null while these are too few. An instant that is null lies behind the window's end.
    """

    days = serializers.IntegerField()
    low = MoneyField(source="forecast.low_nanos", allow_null=True, default=None)
    point = MoneyField(source="forecast.point_nanos", allow_null=True, default=None)
    high = MoneyField(source="forecast.high_nanos", allow_null=True, default=None)
    reached_at = serializers.DateTimeField(allow_null=True)
    earliest_at = serializers.DateTimeField(allow_null=True)
    latest_at = serializers.DateTimeField(allow_null=True)


class StandingSerializer(serializers.Serializer):
    """A budget in its present window."""

    starts_at = serializers.DateTimeField()
    ends_at = serializers.DateTimeField()
    settled = MoneyField(source="settled_nanos")
    leased = MoneyField(source="leased_nanos")
    left = MoneyField(source="left_nanos")
    forecast = MoneyField(source="forecast_nanos", allow_null=True)
    outlook = OutlookSerializer()
    increase = MoneyField(source="increase_nanos")
    raised_until = serializers.DateTimeField(allow_null=True)
    limit_in_force = MoneyField(source="limit_in_force_nanos")
    state = serializers.CharField()


class BudgetSerializer(serializers.ModelSerializer):
    """A budget and where it stands now."""

    tenant = serializers.SlugRelatedField("slug", read_only=True)
    limit = MoneyField(source="limit_nanos", read_only=True)
    present = serializers.SerializerMethodField()

    class Meta:
        model = Budget
        fields = (
            "id", "tenant", "name", "period", "anchor_day", "zone", "limit", "limit_nanos", "hard",
            "thresholds_percent", "archived_at", "created_at", "updated_at", "version", "present",
        )  # fmt: skip

    @extend_schema_field(StandingSerializer)
    def get_present(self, row: Budget) -> dict[str, object]:
        known: dict[int, Standing] = self.context.get("standings", {})
        standing = known.get(row.pk) or standings([row], timezone.now())[0]
        return StandingSerializer(standing).data


class BudgetWriteSerializer(serializers.Serializer):
    """What can be written of a budget; its calendar only while nothing was spent in it."""

    name = serializers.CharField(max_length=120)
    limit = MoneyField()
    hard = serializers.BooleanField(required=False)
    period = serializers.ChoiceField(Budget.Period.choices, required=False)
    anchor_day = serializers.IntegerField(min_value=1, max_value=31, required=False)
    zone = serializers.CharField(max_length=64, required=False)
    thresholds_percent = serializers.ListField(child=serializers.IntegerField(), required=False)
    reason = ReasonField()


class BudgetCreateSerializer(BudgetWriteSerializer):
    tenant = serializers.SlugField(max_length=63)


class IncreaseSerializer(serializers.ModelSerializer):
    """More than the limit for a time."""

    amount = MoneyField(source="amount_nanos", read_only=True)
    state = serializers.SerializerMethodField()

    class Meta:
        model = BudgetIncrease
        fields = (
            "id", "amount", "starts_at", "ends_at", "state", "reason", "made_at", "made_by", "ended_at", "ended_by",
        )  # fmt: skip

    def get_state(self, row: BudgetIncrease) -> str:
        return state_of(row, timezone.now())

    def to_representation(self, row: BudgetIncrease) -> dict[str, object]:
        """Who and why are for those who read the audit log."""
        body = super().to_representation(row)
        if not may(self.context["request"].user, "audit.read"):
            for name in ("reason", "made_by", "ended_by"):
                body.pop(name)
        return body


class IncreaseWriteSerializer(serializers.Serializer):
    """Without `starts_at` it begins at once."""

    amount = MoneyField()
    starts_at = serializers.DateTimeField(required=False)
    ends_at = serializers.DateTimeField()
    reason = ReasonField()


class IncreaseEndSerializer(serializers.Serializer):
    increase = serializers.IntegerField(min_value=1)
    reason = ReasonField()


class NoticeSerializer(serializers.ModelSerializer):
    """A threshold that a window passed, once a crossing."""

    window_starts_at = serializers.DateTimeField(source="window.starts_at")
    settled = MoneyField(source="settled_nanos")
    limit = MoneyField(source="limit_nanos")

    class Meta:
        model = BudgetNotice
        fields = ("id", "at", "percent", "settled", "limit", "window_starts_at")


class BudgetFilter(django_filters.FilterSet):
    tenant = django_filters.CharFilter("tenant__slug")
    archived = django_filters.BooleanFilter("archived_at", "isnull", exclude=True)
    state = django_filters.ChoiceFilter(
        choices=[(name, name) for name in STATES],
        method="in_state",
        help_text="stopped (or over a soft limit), near or forecast: over it, as of the last forecast of all budgets.",
    )

    class Meta:
        model = Budget
        fields = ("period", "hard")

    def in_state(self, rows: QuerySet[Budget], name: str, value: str) -> QuerySet[Budget]:
        return rows.filter(pk__in=budgets_in_state(*STATES[value], now=timezone.now()))


class BudgetViewSet(ListModelMixin, VersionedViewSet):
    """Budgets."""

    read_permission = "budget.read"
    write_permission = "budget.write"
    serializer_class = BudgetSerializer
    filterset_class = BudgetFilter
    ordering_fields = ("id", "name", "limit_nanos", "created_at")
    ordering = ("id",)
    lookup_value_regex = "[0-9]+"

    def get_queryset(self) -> QuerySet[Budget]:
        return visible_budgets(self.request.user)

    def list(self, request: Request) -> Response:
        rows = self.paginate_queryset(self.filter_queryset(self.get_queryset())) or []
        known = {standing.budget.pk: standing for standing in standings(rows, timezone.now())}
        context = {**self.get_serializer_context(), "standings": known}
        return self.get_paginated_response(BudgetSerializer(rows, many=True, context=context).data)

    @extend_schema(request=BudgetCreateSerializer, responses={201: BudgetSerializer, **problem(404)})
    @writes
    def create(self, request: Request) -> Response:
        values = self.body(BudgetCreateSerializer)
        tenant = get_object_or_404(visible_tenants(request.user), slug=values.pop("tenant"))
        row = actions.create_budget(
            tenant_id=tenant.pk,
            limit_nanos=values.pop("limit"),
            **values,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self.answer(row, status.HTTP_201_CREATED)

    @extend_schema(request=BudgetWriteSerializer)
    @edits
    def partial_update(self, request: Request, pk: str) -> Response:
        row = self.get_object()
        version = self.wanted_version(row)
        values = self.body(BudgetWriteSerializer, partial=True)
        reason = values.pop("reason", "")
        if "limit" in values:
            values["limit_nanos"] = values.pop("limit")
        row = actions.edit_budget(
            budget_id=row.pk,
            version=version,
            changes=values,
            reason=reason,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self.answer(row)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @edits
    def archive(self, request: Request, pk: str) -> Response:
        """The budget limits nothing from now on."""
        row, reason = self.get_object(), self.body(ReasonSerializer)["reason"]
        version = self.wanted_version(row)
        row = actions.archive_budget(
            budget_id=row.pk, version=version, reason=reason, actor=actor_of(request), now=timezone.now()
        )
        return self.answer(row)

    @extend_schema(methods=["get"], responses=IncreaseSerializer(many=True))
    @extend_schema(methods=["post"], request=IncreaseWriteSerializer, responses={201: IncreaseSerializer})
    @action(detail=True, methods=["get", "post"], pagination_class=None, filterset_class=None)
    @writes
    def increases(self, request: Request, pk: str) -> Response:
        """Increases of the limit for a time, the newest first; a POST adds one."""
        row = self.get_object()
        if request.method == "GET":
            return Response(self._increases(increases_of(row)[:INCREASES_MAX], many=True))
        values = self.body(IncreaseWriteSerializer)
        made = add_increase(
            budget_id=row.pk, amount_nanos=values.pop("amount"), **values, actor=actor_of(request), now=timezone.now()
        )
        return Response(self._increases(made), status=status.HTTP_201_CREATED)

    @extend_schema(request=IncreaseEndSerializer, responses=IncreaseSerializer)
    @action(detail=True, methods=["post"], url_path="end-increase")
    @writes
    def end_increase(self, request: Request, pk: str) -> Response:
        """Ends an increase before its time; what was leased meanwhile stays counted until it ends."""
        values = self.body(IncreaseEndSerializer)
        row = get_object_or_404(increases_of(self.get_object()), pk=values["increase"])
        done = end_increase(increase_id=row.pk, reason=values["reason"], actor=actor_of(request), now=timezone.now())
        return Response(self._increases(done))

    def _increases(self, rows: Any, *, many: bool = False) -> Any:
        return IncreaseSerializer(rows, many=many, context=self.get_serializer_context()).data

    @extend_schema(responses=NoticeSerializer(many=True))
    @action(detail=True, methods=["get"], pagination_class=None, filterset_class=None)
    def notices(self, request: Request, pk: str) -> Response:
        """Thresholds that were passed, the latest first."""
        return Response(NoticeSerializer(notices([self.get_object()]), many=True).data)
