"""REST of alerts: acknowledge one, and silences."""

from typing import Any

from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.decorators import action
from rest_framework.mixins import ListModelMixin
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from controlplane.alerts import actions, queries
from controlplane.alerts.messages import alert_json
from controlplane.alerts.models import Event, Silence
from controlplane.audit.actors import actor_of
from controlplane.tenants.rest import ReasonField, ReasonSerializer, checked, writes
from controlplane.web.api import Ended
from controlplane.web.openapi import problem


class CauseSerializer(serializers.Serializer):
    """What may have caused it, with its value then; `url` may be empty."""

    label = serializers.CharField()
    value = serializers.CharField()
    url = serializers.CharField(allow_blank=True)


class AlertSerializer(serializers.Serializer):
    """An alert as it is kept."""

    id = serializers.IntegerField()
    key = serializers.CharField()
    kind = serializers.CharField()
    severity = serializers.CharField()
    state = serializers.ChoiceField(["open", "acknowledged", "resolved"])
    title = serializers.CharField()
    text = serializers.CharField(allow_blank=True)
    url = serializers.CharField()
    pool = serializers.CharField(allow_blank=True)
    contract = serializers.CharField(allow_blank=True)
    causes = CauseSerializer(many=True)
    since = serializers.DateTimeField(allow_null=True)
    raised_at = serializers.DateTimeField()
    acknowledged_at = serializers.DateTimeField(allow_null=True)
    acknowledged_by = serializers.CharField(allow_blank=True)
    resolved_at = serializers.DateTimeField(allow_null=True)


class AlertAck(APIView):
    """Acknowledges an open alert; twice keeps the first note."""

    read_permission = "alert.read"
    write_permission = "alert.act"

    @extend_schema(
        operation_id="alert_ack",
        request=ReasonSerializer,
        responses={200: AlertSerializer, **problem(409, "It is resolved.")},
    )
    @writes
    def post(self, request: Request, alert_id: int) -> Response:
        row, note = queries.alert_or_404(alert_id), checked(ReasonSerializer, request)["reason"]
        actor = actor_of(request)
        try:
            row = actions.acknowledge(alert_id=row.pk, note=note, actor=actor, now=timezone.now())
        except actions.AlreadyEnded as error:
            raise Ended(str(error)) from error
        return Response(alert_json(row))


class SilenceSerializer(serializers.ModelSerializer):
    """A silence. An empty list or text fits everything."""

    kinds = serializers.ListField(child=serializers.ChoiceField(actions.KINDS), required=False, default=list)
    starts_at = serializers.DateTimeField(required=False)
    reason = ReasonField()

    class Meta:
        model = Silence
        fields = (
            "id", "kinds", "pool", "contract", "starts_at", "ends_at", "ended_at", "created_by", "created_at", "reason",
        )  # fmt: skip
        read_only_fields = ("id", "ended_at", "created_by", "created_at")
        validators: list[Any] = []


class SilenceViewSet(ListModelMixin, GenericViewSet):
    """Silences and maintenance windows."""

    read_permission = "alert.read"
    write_permission = "alert.act"
    serializer_class = SilenceSerializer
    ordering_fields = ("starts_at", "ends_at")
    ordering = ("-id",)
    lookup_value_regex = r"\d{1,18}"

    def get_queryset(self) -> QuerySet[Silence]:
        return Silence.objects.all()

    @writes
    def create(self, request: Request) -> Response:
        values, now = checked(SilenceSerializer, request), timezone.now()
        row = actions.create_silence(
            kinds=values["kinds"],
            pool=values.get("pool", ""),
            contract=values.get("contract", ""),
            starts_at=values.get("starts_at", now),
            ends_at=values["ends_at"],
            reason=values["reason"],
            actor=actor_of(request),
            now=now,
        )
        return Response(self.get_serializer(row).data, status=status.HTTP_201_CREATED)

    @extend_schema(request=ReasonSerializer, responses={200: SilenceSerializer, **problem(409)})
    @action(detail=True, methods=["post"])
    @writes
    def end(self, request: Request, pk: str) -> Response:
        row, reason = self.get_object(), checked(ReasonSerializer, request)["reason"]
        actor = actor_of(request)
        try:
            row = actions.end_silence(silence_id=row.pk, reason=reason, actor=actor, now=timezone.now())
        except actions.AlreadyEnded as error:
            raise Ended(str(error)) from error
        return Response(self.get_serializer(row).data)


class EventSerializer(serializers.ModelSerializer):
    """Something that happened outside. `at` is now when it is left out."""

    at = serializers.DateTimeField(required=False)
    kind = serializers.ChoiceField(actions.EVENT_KINDS, default="deploy")
    url = serializers.CharField(max_length=500, required=False, default="", allow_blank=True)
    pool = serializers.CharField(max_length=63, required=False, default="", allow_blank=True)

    class Meta:
        model = Event
        fields = ("id", "at", "kind", "title", "url", "pool", "created_by", "created_at")
        read_only_fields = ("id", "created_by", "created_at")


class EventViewSet(ListModelMixin, GenericViewSet):
    """Deploys and the like, for the lane "what changed"."""

    read_permission = "alert.read"
    write_permission = "event.write"
    serializer_class = EventSerializer
    ordering_fields = ("at",)
    ordering = ("-at",)

    def get_queryset(self) -> QuerySet[Event]:
        return Event.objects.all()

    @writes
    def create(self, request: Request) -> Response:
        values, now = checked(EventSerializer, request), timezone.now()
        row = actions.create_event(**{"at": now, **values}, actor=actor_of(request), now=now)
        return Response(self.get_serializer(row).data, status=status.HTTP_201_CREATED)
