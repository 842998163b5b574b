"""REST of policy: revisions with their diff and rollout, push, rollback, drift."""

from typing import Any

from django.http import Http404, HttpResponse
from django.utils import timezone
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.generics import get_object_or_404
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from controlplane.audit.actors import actor_of
from controlplane.policy.actions import REASON_MOST, push, rollback
from controlplane.policy.configuration import Configuration
from controlplane.policy.diff import diff
from controlplane.policy.models import Revision, Rollout
from controlplane.policy.pages import rollout_page
from controlplane.policy.queries import configuration_of, drift, revision_before
from controlplane.policy.triton_files import triton_file
from controlplane.policy.wave_plan import HOLD_S_MOST, TIMEOUT_S_MOST, WAVES_MOST, Gates, WavePlan, read_waves
from controlplane.tenants.rest import checked, writes
from controlplane.web.cursor import CursorPages


class RevisionPages(CursorPages):
    ordering = "-number"


class RevisionSerializer(serializers.ModelSerializer):
    """A revision as lists show it."""

    rollout_state = serializers.CharField(source="rollout.state", read_only=True)

    class Meta:
        model = Revision
        fields = (
            "number", "created_at", "created_by", "reason", "digest", "rolls_back_from", "rolls_back_to",
            "not_before", "accept_until", "rollout_state",
        )  # fmt: skip


class RevisionDetailSerializer(RevisionSerializer):
    """With its configuration: one document per pool."""

    class Meta(RevisionSerializer.Meta):
        fields = (*RevisionSerializer.Meta.fields, "configuration")


@extend_schema_field(
    {"oneOf": [{"type": "integer", "minimum": 1, "maximum": 100}, {"type": "string", "maxLength": 2000}]}
)
class WaveField(serializers.Field):  # type: ignore[type-arg]
    """A rising percentage of each pool's agents, or text that names pools and agents: `pool:a agent:gpu-01`."""

    def to_internal_value(self, data: Any) -> WavePlan:
        if isinstance(data, int) and not isinstance(data, bool):
            return WavePlan(percent=data)
        if not isinstance(data, str) or len(data) > 2_000:
            raise serializers.ValidationError("Give a percentage, or pool:NAME and agent:NAME.")
        found = read_waves(data)
        if len(found) != 1:
            raise serializers.ValidationError("Give one wave per element of the list.")
        return found[0]

    def to_representation(self, value: WavePlan) -> int | str:
        return value.percent if value.percent is not None else value.text


class GatesSerializer(serializers.Serializer):
    """What may happen in a wave. `burn_most` null does not ask for burn."""

    hold_s = serializers.IntegerField(default=Gates.hold_s, min_value=0, max_value=HOLD_S_MOST)
    gate_timeout_s = serializers.IntegerField(default=Gates.gate_timeout_s, min_value=0, max_value=TIMEOUT_S_MOST)
    refusals_most = serializers.IntegerField(default=Gates.refusals_most, min_value=0, max_value=1_000_000)
    refusals_most_percent = serializers.IntegerField(default=Gates.refusals_most_percent, min_value=0, max_value=100)
    silent_most = serializers.IntegerField(default=Gates.silent_most, min_value=0, max_value=1_000_000)
    burn_most = serializers.FloatField(default=Gates.burn_most, allow_null=True, min_value=0.001, max_value=1_000)


WAVES_HELP = (
    "Rising percentages of each pool's agents that end with 100, and pools or agents by name: "
    '`["agent:gpu-01 pool:canary", 25, 100]`. Without it all at once. Several waves have the usual gates unless '
    "`gates` says otherwise."
)


class RollbackSerializer(serializers.Serializer):
    reason = serializers.CharField(max_length=REASON_MOST)
    waves = serializers.ListField(
        child=WaveField(), required=False, allow_empty=False, max_length=WAVES_MOST, help_text=WAVES_HELP
    )
    gates = GatesSerializer(required=False, allow_null=True)


class PushSerializer(RollbackSerializer):
    """`reviewed_digest`: push only if it still compiles to this."""

    reviewed_digest = serializers.CharField(max_length=64, required=False)


class ChangeSerializer(serializers.Serializer):
    kind = serializers.CharField()
    subject = serializers.CharField()
    sentence = serializers.CharField()
    before = serializers.CharField()
    after = serializers.CharField()


class DiffSerializer(serializers.Serializer):
    before = serializers.IntegerField(allow_null=True)
    after = serializers.IntegerField()
    changes = ChangeSerializer(many=True)


class RolloutAgentSerializer(serializers.Serializer):
    name = serializers.CharField()
    pool = serializers.CharField()
    wave = serializers.IntegerField()
    state = serializers.CharField()
    reason = serializers.CharField()
    sent_at = serializers.DateTimeField(allow_null=True)
    answered_at = serializers.DateTimeField(allow_null=True)
    reported_at = serializers.DateTimeField(allow_null=True)


class GateReadingSerializer(serializers.Serializer):
    """One gate of a wave. `state`: held, failed, waits or asks (a person decides)."""

    gate = serializers.CharField()
    state = serializers.CharField()
    observed = serializers.CharField()
    limit = serializers.CharField()
    why = serializers.CharField()


class RolloutWaveSerializer(serializers.Serializer):
    number = serializers.IntegerField()
    reaches = serializers.CharField()
    percent = serializers.IntegerField(allow_null=True)
    state = serializers.CharField()
    sent_at = serializers.DateTimeField(allow_null=True)
    agents = serializers.IntegerField()
    acked = serializers.IntegerField()
    nacked = serializers.IntegerField()
    silent = serializers.IntegerField()
    passed_at = serializers.DateTimeField(allow_null=True)
    gates = GateReadingSerializer(many=True, source="readings")


class RolloutSerializer(serializers.Serializer):
    revision = serializers.IntegerField(source="revision.number")
    state = serializers.CharField(source="rollout.state")
    note = serializers.CharField(source="rollout.note")
    requested_at = serializers.DateTimeField(source="rollout.requested_at")
    requested_by = serializers.CharField(source="rollout.requested_by")
    finished_at = serializers.DateTimeField(source="rollout.finished_at", allow_null=True)
    gates = GatesSerializer(allow_null=True)
    counts = serializers.DictField(child=serializers.IntegerField())
    waves = RolloutWaveSerializer(many=True)
    agents = RolloutAgentSerializer(many=True)


class DriftSerializer(serializers.Serializer):
    agent_id = serializers.IntegerField()
    name = serializers.CharField()
    pool = serializers.CharField()
    software = serializers.CharField()
    state = serializers.CharField()
    desired = serializers.IntegerField(allow_null=True)
    applied = serializers.IntegerField(allow_null=True)
    reported_at = serializers.DateTimeField(allow_null=True)
    since = serializers.DateTimeField(allow_null=True)
    reason = serializers.CharField()


class RevisionViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet):
    """Revisions are made by a push or a rollback and never change."""

    # Its configuration, of many tenants twenty megabytes, is read when it is asked for.
    queryset = Revision.objects.defer("configuration").select_related("rollout").order_by("-number")
    pagination_class = RevisionPages
    lookup_field = "number"
    lookup_value_regex = r"\d{1,9}"
    filterset_fields = ("created_by",)
    read_permission = "policy.read"
    write_permission = "policy.push"
    action_permissions = {"push": "policy.push", "rollback": "policy.rollback"}

    def get_serializer_class(self) -> type[serializers.BaseSerializer[Any]]:
        return RevisionDetailSerializer if self.action == "retrieve" else RevisionSerializer

    @extend_schema(request=PushSerializer, responses={201: RevisionSerializer})
    @action(detail=False, methods=["post"])
    @writes
    def push(self, request: Request) -> Response:
        data = checked(PushSerializer, request)
        revision = push(
            actor=actor_of(request),
            reason=data["reason"],
            **_way(data),
            reviewed_digest=data.get("reviewed_digest"),
            now=timezone.now(),
        )
        return Response(RevisionSerializer(revision).data, status=status.HTTP_201_CREATED)

    @extend_schema(request=RollbackSerializer, responses={201: RevisionSerializer})
    @action(detail=True, methods=["post"])
    @writes
    def rollback(self, request: Request, number: str) -> Response:
        target = self.get_object()
        data = checked(RollbackSerializer, request)
        revision = rollback(
            to_number=target.number,
            actor=actor_of(request),
            reason=data["reason"],
            **_way(data),
            now=timezone.now(),
        )
        return Response(RevisionSerializer(revision).data, status=status.HTTP_201_CREATED)

    @extend_schema(
        parameters=[OpenApiParameter("from", int, description="Revision to compare with; the one before by default.")],
        responses=DiffSerializer,
    )
    @action(detail=True, methods=["get"])
    def diff(self, request: Request, number: str) -> Response:
        revision = self.get_object()
        earlier = _number(request.query_params.get("from"))
        if earlier is None:
            previous = revision_before(revision.number)
            earlier = previous.number if previous else None
        before = configuration_of(earlier) if earlier is not None else None
        if earlier is not None and before is None:
            raise Http404
        changes = diff(before, Configuration.from_json(revision.configuration), now=timezone.now())
        body = {"before": earlier, "after": revision.number, "changes": [change._asdict() for change in changes]}
        return Response(DiffSerializer(body).data)

    @extend_schema(
        parameters=[OpenApiParameter("agent", str, description="Only the slots that this agent (its id) runs.")],
        responses={(200, "text/plain"): OpenApiTypes.STR},
    )
    @action(detail=True, methods=["get"], url_path="triton/(?P<pool>[-a-zA-Z0-9_]+)")
    def triton(self, request: Request, number: str, pool: str) -> HttpResponse:
        """A pool's blocks of Triton's config.pbtxt: instance_group, rate_limiter and dynamic_batching."""
        return triton_file(self.get_object(), pool, agent=request.query_params.get("agent", ""))

    @extend_schema(responses=RolloutSerializer)
    @action(detail=True, methods=["get"])
    def rollout(self, request: Request, number: str) -> Response:
        rollout = get_object_or_404(
            Rollout.objects.select_related("revision").defer("revision__configuration"), revision_id=int(number)
        )
        return Response(RolloutSerializer(rollout_page(rollout, timezone.now())).data)


class DriftView(APIView):
    """What every active agent applies against what it should."""

    read_permission = "policy.read"
    write_permission = "policy.push"

    @extend_schema(responses=DriftSerializer(many=True))
    def get(self, request: Request) -> Response:
        return Response(DriftSerializer(drift(timezone.now()), many=True).data)


def _way(data: dict[str, Any]) -> dict[str, Any]:
    """Waves and gates of a push or rollback as the actions take them."""
    waves = tuple(data.get("waves") or (100,))
    given = data.get("gates")
    gates = Gates(**given) if given else Gates() if len(waves) > 1 else None
    return {"waves": waves, "gates": gates}


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise serializers.ValidationError({"from": ["Give the number of a revision."]})
    return int(text)
