"""REST of the configuration file and of signing keys: export, plan, apply; public keys and their successions."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import orjson
from django.core.exceptions import ValidationError as Refused
from django.http.response import HttpResponseBase
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.audit.actors import actor_of
from controlplane.audit.reasons import REASON_CHARS_MAX
from controlplane.policy.apply_plan import Plan
from controlplane.policy.applying import apply, export_pieces, prepare
from controlplane.policy.queries import public_keys, successions
from controlplane.policy.yaml_lines import BYTES_MOST, Unreadable
from controlplane.tenants.access import may
from controlplane.tenants.rest import checked, writes
from controlplane.web.exports import StreamedResponse


class ConfigurationSerializer(serializers.Serializer):
    """`text` is the YAML that `plan` and `apply` take."""

    text = serializers.CharField()


class ConfigurationFileSerializer(serializers.Serializer):
    text = serializers.CharField(max_length=BYTES_MOST, trim_whitespace=False)


class ConfigurationApplySerializer(ConfigurationFileSerializer):
    """`against`: the digest that `plan` answered; applied only while nobody changed anything since."""

    reason = serializers.CharField(max_length=REASON_CHARS_MAX)
    against = serializers.CharField(max_length=64, required=False)


class ConfigurationStepSerializer(serializers.Serializer):
    verb = serializers.CharField()
    section = serializers.CharField()
    subject = serializers.CharField()
    sentence = serializers.CharField()
    line = serializers.IntegerField()


class ConfigurationPlanSerializer(serializers.Serializer):
    steps = ConfigurationStepSerializer(many=True)
    modes = serializers.DictField(child=serializers.CharField())
    against = serializers.CharField(allow_null=True)
    applied = serializers.BooleanField()


class SuccessionSerializer(serializers.Serializer):
    """`signature`: the predecessor's word for the key, as `manage.py policy verify --successions` reads it."""

    use = serializers.CharField()
    predecessor = serializers.CharField()
    kid = serializers.CharField()
    public_key = serializers.CharField()
    signature = serializers.CharField()


class SigningKeySerializer(serializers.Serializer):
    use = serializers.CharField()
    kid = serializers.CharField()
    public_key = serializers.CharField()
    created_at = serializers.DateTimeField()
    revoked_at = serializers.DateTimeField(allow_null=True)


class SigningKeysSerializer(serializers.Serializer):
    keys = SigningKeySerializer(many=True)
    successions = SuccessionSerializer(many=True)


class ConfigurationView(APIView):
    """The whole configuration in use, without secrets."""

    read_permission = "policy.read"
    write_permission = "policy.push"

    @extend_schema(responses=ConfigurationSerializer)
    def get(self, request: Request) -> HttpResponseBase:
        """Streamed: of ten thousand tenants the text is several megabytes and takes seconds to write."""
        return StreamedResponse("", _as_json(export_pieces(timezone.now())), "application/json")


class PlanView(APIView):
    """What a file would change. Nothing is changed."""

    read_permission = "policy.push"
    write_permission = "policy.push"

    @extend_schema(request=ConfigurationFileSerializer, responses={200: ConfigurationPlanSerializer})
    @writes
    def post(self, request: Request) -> Response:
        data = checked(ConfigurationFileSerializer, request)
        try:
            found = prepare(data["text"], timezone.now())
        except Unreadable as error:
            raise _refused(error) from error
        return Response(_answer(found.plan, against=found.against, applied=False))


class ApplyView(APIView):
    """Does what a file says, all of it or nothing; the same file again changes nothing."""

    read_permission = "policy.push"
    write_permission = "policy.push"

    @extend_schema(request=ConfigurationApplySerializer, responses={200: ConfigurationPlanSerializer})
    @writes
    def post(self, request: Request) -> Response:
        data = checked(ConfigurationApplySerializer, request)
        try:
            plan = apply(
                data["text"],
                actor=actor_of(request),
                now=timezone.now(),
                reason=data["reason"],
                against=data.get("against"),
                may=partial(may, request.user),
            )
        except Unreadable as error:
            raise _refused(error) from error
        return Response(_answer(plan, against=None, applied=not plan.empty))


class SigningKeysView(APIView):
    """Public halves of all signing keys, and how each follows from the one before."""

    read_permission = "policy.read"
    write_permission = "policy.push"

    @extend_schema(responses=SigningKeysSerializer)
    def get(self, request: Request) -> Response:
        return Response(SigningKeysSerializer({"keys": public_keys(), "successions": successions()}).data)


def _as_json(text: Iterator[str]) -> Iterator[bytes]:
    """`{"text": ...}` piece by piece: what JSON writes of a text is what it writes of its parts."""
    first = next(text)
    yield b'{"text":"' + orjson.dumps(first)[1:-1]
    for piece in text:
        yield orjson.dumps(piece)[1:-1]
    yield b'"}'


def _answer(plan: Plan, *, against: str | None, applied: bool) -> dict[str, Any]:
    said = {"steps": plan.steps, "modes": plan.modes, "against": against, "applied": applied}
    return dict(ConfigurationPlanSerializer(said).data)


def _refused(error: Unreadable) -> Refused:
    return Refused({"text": [str(problem) for problem in error.problems]})
