"""REST of the flex band: decisions with their checks, slots, and the two acts of on-call: recall and freeze."""

from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.generics import get_object_or_404
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from controlplane.audit.actors import actor_of
from controlplane.fleet.models import Pool, Slot
from controlplane.flex import actions, effects, queries
from controlplane.flex.models import Decision, Lend
from controlplane.tenants.rest import ReasonSerializer, checked, writes
from controlplane.web.cursor import CursorPages


class DecisionPages(CursorPages):
    ordering = ("-at", "-id")


class LoanPages(CursorPages):
    ordering = ("-lent_at", "-id")


class SlotPages(CursorPages):
    ordering = "id"


class DecisionSerializer(serializers.ModelSerializer):
    """A decision as lists show it. `slack` is null with `missed` true where nothing is enough."""

    pool = serializers.CharField(source="pool.slug", read_only=True)

    class Meta:
        model = Decision
        fields = ("id", "pool", "at", "term", "required", "available", "slack", "missed", "actions")


class DecisionDetailSerializer(DecisionSerializer):
    """With every check and the snapshot that the decision was made from."""

    recomputes = serializers.SerializerMethodField()

    class Meta(DecisionSerializer.Meta):
        fields = (*DecisionSerializer.Meta.fields, "checks", "snapshot", "recomputes")

    def get_recomputes(self, row: Decision) -> bool:
        """True when the decision function answers the stored snapshot as it did then."""
        return queries.recomputes(row)


class SlotSerializer(serializers.Serializer):
    """A flex slot and the present word on it."""

    id = serializers.IntegerField(source="pk")
    name = serializers.CharField()
    pool = serializers.CharField(source="pool.slug")
    agent = serializers.CharField(source="agent.name", default=None, allow_null=True)
    state = serializers.CharField(source="grant.state", default="home")
    fence = serializers.IntegerField(source="grant.fence", default=0)
    reason = serializers.CharField(source="grant.reason", default="")
    lent_at = serializers.DateTimeField(source="grant.lent_at", default=None, allow_null=True)
    recalled_at = serializers.DateTimeField(source="grant.recalled_at", default=None, allow_null=True)
    expires_at = serializers.DateTimeField(source="grant.expires_at", default=None, allow_null=True)
    manual_recall = serializers.BooleanField(source="grant.manual_recall", default=False)


class LoanSerializer(serializers.ModelSerializer):
    """A loan. `stop_admit_at`, `last_token_at` and `drained_at` are by the agent's clock; null is not measured."""

    pool = serializers.CharField(source="pool.slug", read_only=True)
    slot = serializers.CharField(source="slot.name", read_only=True)
    lend_decision = serializers.IntegerField(source="lend_decision_id", read_only=True)
    recall_decision = serializers.IntegerField(source="recall_decision_id", read_only=True, allow_null=True)

    class Meta:
        model = Lend
        fields = (
            "id", "pool", "slot", "fence", "lent_at", "lend_decision", "recalled_at", "recall_reason",
            "recall_decision", "stop_admit_at", "last_token_at", "drained_at", "drain_us", "home_at", "overdue", "lost",
        )  # fmt: skip


class FreezeSerializer(ReasonSerializer):
    """`recall` asks every lent slot back too. `frozen` false allows loans again."""

    minutes = serializers.IntegerField(min_value=1, max_value=actions.FREEZE_MOST // timedelta(minutes=1), default=60)
    recall = serializers.BooleanField(default=False)
    frozen = serializers.BooleanField(default=True)


class FrozenSerializer(serializers.ModelSerializer):
    """A pool's freeze."""

    class Meta:
        model = Pool
        fields = ("slug", "frozen_since", "frozen_until", "frozen_by", "freeze_reason")


_POOL = OpenApiParameter("pool", str, description="Slug of one pool.")


@extend_schema_view(
    list=extend_schema(parameters=[_POOL, OpenApiParameter("acts", bool, description="Only ticks that acted.")])
)
class DecisionViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet):
    """Ticks that acted, flipped a check or began a minute; never changed."""

    pagination_class = DecisionPages
    read_permission = write_permission = "flex.read"
    queryset = Decision.objects.none()

    def get_queryset(self) -> QuerySet[Decision]:
        pool, acts = self.request.query_params.get("pool"), self.request.query_params.get("acts")
        rows = queries.decisions(acting=acts in ("true", "1"))
        return rows if pool is None else rows.filter(pool__slug=pool)

    def get_serializer_class(self) -> type[serializers.BaseSerializer[Any]]:
        return DecisionDetailSerializer if self.action == "retrieve" else DecisionSerializer


@extend_schema_view(list=extend_schema(parameters=[_POOL]))
class LoanViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet):
    """Loans of flex slots with the measured way home."""

    pagination_class = LoanPages
    serializer_class = LoanSerializer
    read_permission = write_permission = "flex.read"
    queryset = Lend.objects.none()

    def get_queryset(self) -> QuerySet[Lend]:
        pool = self.request.query_params.get("pool")
        return queries.loans() if pool is None else queries.loans().filter(pool__slug=pool)


@extend_schema_view(list=extend_schema(parameters=[_POOL]))
class FlexSlotViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet):
    """Flex slots."""

    pagination_class = SlotPages
    serializer_class = SlotSerializer
    read_permission = "flex.read"
    write_permission = "flex.act"
    queryset = Slot.objects.none()

    def get_queryset(self) -> QuerySet[Slot]:
        rows = Slot.objects.filter(band=Slot.Band.FLEX).select_related("pool", "agent", "grant").order_by("id")
        pool = self.request.query_params.get("pool")
        return rows if pool is None else rows.filter(pool__slug=pool)

    @extend_schema(request=ReasonSerializer, responses=SlotSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def recall(self, request: Request, pk: str) -> Response:
        """Asks the slot back: it stops taking batch within a second."""
        slot, now = self.get_object(), timezone.now()
        data = checked(ReasonSerializer, request)
        actions.recall_slot(
            slot_id=slot.pk, actor=actor_of(request), now=now, reason=data["reason"],
            noted=effects.of_recall(slot, now).noted,
        )  # fmt: skip
        return Response(SlotSerializer(self.get_object()).data)

    @extend_schema(request=FreezeSerializer, responses=FrozenSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def freeze(self, request: Request, pk: str) -> Response:
        """Freezes lending in the slot's pool, or allows it again."""
        return Response(_freeze(self.get_object().pool, request))


class FlexPoolViewSet(mixins.RetrieveModelMixin, GenericViewSet):
    """The freeze of a pool, by its slug."""

    serializer_class = FrozenSerializer
    lookup_field = "slug"
    read_permission = "flex.read"
    write_permission = "flex.act"
    queryset = Pool.objects.filter(archived_at__isnull=True)

    @extend_schema(request=FreezeSerializer, responses=FrozenSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def freeze(self, request: Request, slug: str) -> Response:
        """Freezes lending in the pool, or allows it again."""
        return Response(_freeze(get_object_or_404(self.get_queryset(), slug=slug), request))


def _freeze(pool: Pool, request: Request) -> dict[str, Any]:
    """What is expected of it is kept beside it, as the pages do."""
    data, now = checked(FreezeSerializer, request), timezone.now()
    common = {"pool_id": pool.pk, "actor": actor_of(request), "now": now, "reason": data["reason"]}
    if not data["frozen"]:
        changed = actions.unfreeze(**common, noted=effects.of_unfreeze(pool, now).noted)
    else:
        act = actions.freeze_and_recall if data["recall"] else actions.freeze
        noted = effects.of_freeze(pool, now).noted_with(recalls=data["recall"])
        changed = act(**common, until=now + timedelta(minutes=data["minutes"]), noted=noted)
    return FrozenSerializer(changed).data
