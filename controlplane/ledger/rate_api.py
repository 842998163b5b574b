"""REST of cost rates and rate cards: versions are added, never changed. Money is exact decimal text."""

import django_filters
from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.mixins import ListModelMixin, RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from controlplane.audit.actors import actor_of
from controlplane.ledger import rate_queries, rates
from controlplane.ledger.models import CostRate, RateCard
from controlplane.tenants.rest import MoneyField, ReasonField, checked, writes


class CostRateSerializer(serializers.ModelSerializer):
    """A cost rate from an instant on."""

    pool = serializers.SlugRelatedField("slug", read_only=True)
    per_slot_hour = MoneyField(source="nanos_per_slot_hour", read_only=True)

    class Meta:
        model = CostRate
        fields = ("id", "pool", "per_slot_hour", "effective_from", "created_at", "created_by", "reason")


class CostRateWriteSerializer(serializers.Serializer):
    pool = serializers.CharField(max_length=63)
    per_slot_hour = MoneyField()
    effective_from = serializers.DateTimeField(required=False)
    reason = ReasonField()


class CostRateFilter(django_filters.FilterSet):
    pool = django_filters.CharFilter("pool__slug")

    class Meta:
        model = CostRate
        fields: tuple[str, ...] = ()


class CostRateViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet):
    """Cost rates."""

    read_permission = "rate.read"
    write_permission = "rate.write"
    serializer_class = CostRateSerializer
    filterset_class = CostRateFilter
    ordering_fields = ("id", "effective_from")
    ordering = ("-id",)
    lookup_value_regex = "[0-9]+"

    def get_queryset(self) -> QuerySet[CostRate]:
        return rate_queries.cost_rates()

    @extend_schema(request=CostRateWriteSerializer, responses={201: CostRateSerializer})
    @writes
    def create(self, request: Request) -> Response:
        values = checked(CostRateWriteSerializer, request)
        row = rates.add_cost_rate(
            pool_slug=values["pool"],
            nanos_per_slot_hour=values["per_slot_hour"],
            effective_from=values.get("effective_from"),
            reason=values["reason"],
            actor=actor_of(request),
            now=timezone.now(),
        )
        return Response(self.get_serializer(row).data, status=status.HTTP_201_CREATED)


class RateCardSerializer(serializers.ModelSerializer):
    """A rate card from an instant on; `id` is the `rate_version` of records. Prices are per million tokens."""

    workload_class = serializers.CharField(source="class_slug", read_only=True)
    model = serializers.SlugRelatedField("name", read_only=True)
    prompt_per_mtok = MoneyField(source="prompt_nanos_per_mtok", read_only=True)
    cached_per_mtok = MoneyField(source="cached_nanos_per_mtok", read_only=True)
    output_per_mtok = MoneyField(source="output_nanos_per_mtok", read_only=True)
    gpu_per_slot_hour = MoneyField(source="gpu_nanos_per_slot_hour", read_only=True)

    class Meta:
        model = RateCard
        fields = (
            "id", "workload_class", "model", "effective_from", "prompt_per_mtok", "cached_per_mtok", "output_per_mtok",
            "gpu_per_slot_hour", "discount_ppm", "created_at", "created_by", "reason",
        )  # fmt: skip


class RateCardWriteSerializer(serializers.Serializer):
    """The next card; prices that are left out stay as on the newest."""

    workload_class = serializers.CharField(max_length=63)
    model = serializers.CharField(max_length=120)
    effective_from = serializers.DateTimeField(required=False)
    prompt_per_mtok = MoneyField(source="prompt_nanos_per_mtok", required=False)
    cached_per_mtok = MoneyField(source="cached_nanos_per_mtok", required=False)
    output_per_mtok = MoneyField(source="output_nanos_per_mtok", required=False)
    gpu_per_slot_hour = MoneyField(source="gpu_nanos_per_slot_hour", required=False)
    discount_ppm = serializers.IntegerField(min_value=0, max_value=1_000_000, required=False)
    reason = ReasonField()


class RateCardFilter(django_filters.FilterSet):
    workload_class = django_filters.CharFilter("class_slug")
    model = django_filters.CharFilter("model__name")

    class Meta:
        model = RateCard
        fields: tuple[str, ...] = ()


class RateCardViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet):
    """Rate cards."""

    read_permission = "rate.read"
    write_permission = "rate.write"
    serializer_class = RateCardSerializer
    filterset_class = RateCardFilter
    ordering_fields = ("id", "effective_from")
    ordering = ("-id",)
    lookup_value_regex = "[0-9]+"

    def get_queryset(self) -> QuerySet[RateCard]:
        return rate_queries.rate_cards()

    @extend_schema(request=RateCardWriteSerializer, responses={201: RateCardSerializer})
    @writes
    def create(self, request: Request) -> Response:
        values = checked(RateCardWriteSerializer, request)
        row = rates.add_rate_card(
            class_slug=values.pop("workload_class"),
            model=values.pop("model"),
            effective_from=values.pop("effective_from", None),
            reason=values.pop("reason"),
            values=values,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return Response(self.get_serializer(row).data, status=status.HTTP_201_CREATED)
