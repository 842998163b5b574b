"""REST of pools with their slots, agents and enrolment tokens."""

from typing import Any

import django_filters
from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from django.utils import timezone
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers, status
from rest_framework.decorators import action
from rest_framework.mixins import ListModelMixin, RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from controlplane.audit.actors import actor_of
from controlplane.fleet import actions, keys, queries
from controlplane.fleet.models import Agent, EnrolmentToken, Pool, Slot
from controlplane.fleet.served_classes import room_warnings
from controlplane.tenants.rest import ReasonField, ReasonSerializer, VersionedViewSet, checked, edits, writes
from controlplane.web.openapi import problem

SLUGS = "[a-z0-9-]+"


# ---- pools and slots ----


class SafeRateSerializer(serializers.Serializer):
    """Tested interactive requests/s by number of slots that serve interactive."""

    entries = serializers.DictField(child=serializers.FloatField(), required=False)
    measured_at = serializers.CharField(max_length=40, allow_blank=True, required=False)
    trace = serializers.CharField(max_length=200, allow_blank=True, required=False)
    valid_until = serializers.CharField(max_length=40, allow_blank=True, required=False)


@extend_schema_field(SafeRateSerializer)
class SafeRateField(serializers.JSONField):
    """The table as it is kept."""


class PoolSerializer(serializers.ModelSerializer):
    """A pool. Shares are in millionths, durations in the unit of their name."""

    safe_rate = SafeRateField(read_only=True)
    model = serializers.SlugRelatedField("name", read_only=True)

    class Meta:
        model = Pool
        fields = (
            "slug", "model", *actions.POOL_FIELDS, "frozen_since", "frozen_until", "frozen_by", "freeze_reason",
            "archived_at", "created_at", "updated_at", "version",
        )  # fmt: skip


class WarnedPoolSerializer(PoolSerializer):
    """A pool that was written, with sentences on what it leaves no room for."""

    warnings = serializers.ListField(child=serializers.CharField(), read_only=True)

    class Meta(PoolSerializer.Meta):
        fields = (*PoolSerializer.Meta.fields, "warnings")


class PoolWriteSerializer(serializers.ModelSerializer):
    """What can be written of a pool."""

    safe_rate = SafeRateSerializer(required=False)
    reason = ReasonField()

    class Meta:
        model = Pool
        fields = (*actions.POOL_FIELDS, "reason")
        extra_kwargs = {name: {"required": False} for name in actions.POOL_FIELDS}
        validators: list[Any] = []


class PoolCreateSerializer(PoolWriteSerializer):
    slug = serializers.CharField(max_length=63)
    model = serializers.CharField(max_length=120)
    reason = ReasonField(required=False)

    class Meta(PoolWriteSerializer.Meta):
        fields = (*PoolWriteSerializer.Meta.fields, "slug", "model")


class FleetSlotSerializer(serializers.ModelSerializer):
    """A slot in the fleet."""

    pool = serializers.SlugRelatedField("slug", read_only=True)
    agent = serializers.SlugRelatedField("name", read_only=True, allow_null=True)

    class Meta:
        model = Slot
        fields = ("id", "pool", "name", "agent", *actions.SLOT_FIELDS, "version")


class SlotWriteSerializer(serializers.Serializer):
    """What can be written of a slot; another band needs it home."""

    band = serializers.ChoiceField(Slot.Band.choices)
    places = serializers.IntegerField(min_value=1, max_value=100_000, required=False)
    kv_tokens = serializers.IntegerField(min_value=1, max_value=2**31 - 1, required=False)
    gpu_share_ppm = serializers.IntegerField(min_value=1, max_value=10**9, required=False)
    reason = ReasonField(required=False)


class SlotsCreateSerializer(SlotWriteSerializer):
    """Several slots of one kind."""

    names = serializers.ListField(child=serializers.CharField(max_length=32), allow_empty=False, max_length=1_000)


class PoolFilter(django_filters.FilterSet):
    q = django_filters.CharFilter("slug", "icontains", label="Part of the slug")
    model = django_filters.CharFilter("model__name")
    archived = django_filters.BooleanFilter("archived_at", "isnull", exclude=True)

    class Meta:
        model = Pool
        fields = ("isolation", "interactive_class", "batch_class")


class PoolViewSet(ListModelMixin, VersionedViewSet):
    """Pools."""

    read_permission = "pool.read"
    write_permission = "pool.write"
    serializer_class = PoolSerializer
    filterset_class = PoolFilter
    ordering_fields = ("slug", "created_at")
    ordering = ("slug",)
    lookup_field = "slug"
    lookup_value_regex = SLUGS

    def get_queryset(self) -> QuerySet[Pool]:
        return Pool.objects.select_related("model")

    @extend_schema(request=PoolCreateSerializer, responses={201: WarnedPoolSerializer})
    @writes
    def create(self, request: Request) -> Response:
        values = self.body(PoolCreateSerializer)
        pool = actions.create_pool(
            slug=values.pop("slug"),
            model=values.pop("model"),
            reason=values.pop("reason", ""),
            values=values,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self._warned(pool, status.HTTP_201_CREATED)

    @extend_schema(request=PoolWriteSerializer, responses=WarnedPoolSerializer)
    @edits
    def partial_update(self, request: Request, slug: str) -> Response:
        pool = self.get_object()
        version = self.wanted_version(pool)
        values = self.body(PoolWriteSerializer, partial=True)
        row = actions.edit_pool(
            slug=slug,
            reason=values.pop("reason", ""),
            values=values,
            version=version,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self._warned(row)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @edits
    def archive(self, request: Request, slug: str) -> Response:
        """Takes a pool without slots and agents out of use."""
        pool = self.get_object()
        version, reason = self.wanted_version(pool), self.body(ReasonSerializer)["reason"]
        row = actions.archive_pool(
            slug=slug, reason=reason, version=version, actor=actor_of(request), now=timezone.now()
        )
        return self.answer(row)

    @extend_schema(request=SlotsCreateSerializer, responses={201: FleetSlotSerializer(many=True)})
    @action(detail=True, methods=["post"], url_path="slots", pagination_class=None)
    @writes
    def add_slots(self, request: Request, slug: str) -> Response:
        """Adds slots; their tenure and cost begin now."""
        pool = self.get_object()
        values = self.body(SlotsCreateSerializer)
        slots = actions.add_slots(
            pool_slug=pool.slug,
            names=values.pop("names"),
            reason=values.pop("reason", ""),
            actor=actor_of(request),
            now=timezone.now(),
            **values,
        )
        return Response(FleetSlotSerializer(slots, many=True).data, status=status.HTTP_201_CREATED)

    def _warned(self, pool: Pool, status_code: int = status.HTTP_200_OK) -> Response:
        return self.answer(pool, status_code, warnings=list(room_warnings(pool, timezone.now())))


class SlotFilter(django_filters.FilterSet):
    pool = django_filters.CharFilter("pool__slug")
    agent = django_filters.CharFilter("agent__name")

    class Meta:
        model = Slot
        fields = ("band",)


class SlotViewSet(ListModelMixin, VersionedViewSet):
    """Slots in the fleet."""

    read_permission = "pool.read"
    write_permission = "pool.write"
    serializer_class = FleetSlotSerializer
    filterset_class = SlotFilter
    ordering_fields = ("id", "name")
    ordering = ("id",)
    lookup_value_regex = "[0-9]+"

    def get_queryset(self) -> QuerySet[Slot]:
        return Slot.objects.filter(removed_at__isnull=True).select_related("pool", "agent")

    @extend_schema(request=SlotWriteSerializer)
    @edits
    def partial_update(self, request: Request, pk: str) -> Response:
        slot = self.get_object()
        version = self.wanted_version(slot)
        values = self.body(SlotWriteSerializer, partial=True)
        row = actions.edit_slot(
            slot_id=slot.pk,
            reason=values.pop("reason", ""),
            values=values,
            version=version,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self.answer(row)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @edits
    def remove(self, request: Request, pk: str) -> Response:
        """Takes a slot that is home out of the fleet: tenure and cost end now."""
        slot = self.get_object()
        version, reason = self.wanted_version(slot), self.body(ReasonSerializer)["reason"]
        row = actions.remove_slot(
            slot_id=slot.pk, reason=reason, version=version, actor=actor_of(request), now=timezone.now()
        )
        return self.answer(row)


# ---- agents ----


class AgentKeySerializer(serializers.Serializer):
    """Its key and, in a rotation, the next one, by the first 16 hex digits of each one's SHA-256."""

    id = serializers.CharField(source="key_id")
    since = serializers.DateTimeField()
    rotation_asked_at = serializers.DateTimeField(source="asked_at", allow_null=True)
    next_id = serializers.CharField(source="next_key_id", allow_null=True)
    next_posted_at = serializers.DateTimeField(source="posted_at", allow_null=True)
    refused_from = serializers.DateTimeField(source="old_until", allow_null=True)


class AgentSerializer(serializers.ModelSerializer):
    """An agent with what it last said; null is unknown."""

    pool = serializers.SlugRelatedField("slug", read_only=True)
    key = serializers.SerializerMethodField()
    reported_at = serializers.SerializerMethodField()
    revision = serializers.SerializerMethodField()

    class Meta:
        model = Agent
        fields = (
            "id", "uuid", "name", "pool", "state", "epoch", "address", "software", "enrolled_at", "retired_at",
            "drain_requested_at", "key", "reported_at", "revision",
        )  # fmt: skip

    @extend_schema_field(AgentKeySerializer)
    def get_key(self, agent: Agent) -> Any:
        return AgentKeySerializer(keys.key_state(agent)).data

    def get_reported_at(self, agent: Agent) -> str | None:
        live = getattr(agent, "live", None)
        return live.reported_at.isoformat() if live else None

    def get_revision(self, agent: Agent) -> int | None:
        live = getattr(agent, "live", None)
        return live.revision if live else None


class AgentFilter(django_filters.FilterSet):
    pool = django_filters.CharFilter("pool__slug")
    name = django_filters.CharFilter("name", "icontains")

    class Meta:
        model = Agent
        fields = ("state",)


class AgentViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet):
    """Agents. Nothing about them is edited; what is done to them are actions."""

    read_permission = "agent.read"
    write_permission = "agent.retire"
    action_permissions = {
        "approve": "agent.enrol",
        "drain": "agent.drain",
        "undrain": "agent.drain",
        "rotate_key": "agent.rotate_key",
    }
    serializer_class = AgentSerializer
    filterset_class = AgentFilter
    ordering_fields = ("id", "name", "enrolled_at")
    ordering = ("id",)
    lookup_value_regex = "[0-9]+"

    def get_queryset(self) -> QuerySet[Agent]:
        return Agent.objects.select_related("pool", "live")

    @extend_schema(request=None)
    @action(detail=True, methods=["post"])
    @writes
    def approve(self, request: Request, pk: str) -> Response:
        """Lets a pending agent in."""
        agent = self.get_object()
        return self._done(actions.approve_agent(agent_id=agent.pk, actor=actor_of(request), now=timezone.now()))

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def drain(self, request: Request, pk: str) -> Response:
        """The agent takes nothing new from its next report on."""
        return self._with_reason(request, actions.request_drain)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def undrain(self, request: Request, pk: str) -> Response:
        """The agent serves again from its next report on."""
        return self._with_reason(request, actions.cancel_drain)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"], url_path="rotate-key")
    @writes
    def rotate_key(self, request: Request, pk: str) -> Response:
        """The agent makes a new signing key with its next report; the old one ends with its first report by the new."""
        return self._with_reason(request, keys.ask_for_new_key)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def retire(self, request: Request, pk: str) -> Response:
        """Ends the agent for good; the tenures of its slots end."""
        return self._with_reason(request, actions.retire_agent)

    def _with_reason(self, request: Request, act: Any) -> Response:
        agent = self.get_object()
        reason = checked(ReasonSerializer, request)["reason"]
        return self._done(act(agent_id=agent.pk, reason=reason, actor=actor_of(request), now=timezone.now()))

    def _done(self, agent: Agent) -> Response:
        return Response(self.get_serializer(queries.agent_for(agent.pk)).data)


class TokenSerializer(serializers.ModelSerializer):
    """An enrolment token without its secret."""

    pool = serializers.SlugRelatedField("slug", read_only=True)
    agent = serializers.SlugRelatedField("name", read_only=True, allow_null=True)

    class Meta:
        model = EnrolmentToken
        fields = ("id", "prefix", "pool", "created_by", "created_at", "expires_at", "used_at", "agent")


class IssuedTokenSerializer(TokenSerializer):
    """A token with the secret that is shown this once; null where it cannot be shown again."""

    secret = serializers.CharField(allow_null=True, read_only=True)

    class Meta(TokenSerializer.Meta):
        fields = (*TokenSerializer.Meta.fields, "secret")


class TokenCreateSerializer(serializers.Serializer):
    pool = serializers.CharField(max_length=63)


class TokenFilter(django_filters.FilterSet):
    pool = django_filters.CharFilter("pool__slug")
    used = django_filters.BooleanFilter("used_at", "isnull", exclude=True)

    class Meta:
        model = EnrolmentToken
        fields: tuple[str, ...] = ()


class TokenViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet):
    """Enrolment tokens: one agent, one pool, one hour."""

    read_permission = "agent.enrol"
    write_permission = "agent.enrol"
    serializer_class = TokenSerializer
    filterset_class = TokenFilter
    ordering_fields = ("id",)
    ordering = ("-id",)
    lookup_value_regex = "[0-9]+"

    def get_queryset(self) -> QuerySet[EnrolmentToken]:
        return EnrolmentToken.objects.select_related("pool", "agent")

    @extend_schema(request=TokenCreateSerializer, responses={201: IssuedTokenSerializer, **problem(404)})
    @writes
    def create(self, request: Request) -> Response:
        slug = checked(TokenCreateSerializer, request)["pool"]
        pool = get_object_or_404(Pool.objects.filter(archived_at=None), slug=slug)
        row, secret = actions.create_enrolment_token(pool=pool, actor=actor_of(request), now=timezone.now())
        return Response({**self.get_serializer(row).data, "secret": secret}, status=status.HTTP_201_CREATED)
