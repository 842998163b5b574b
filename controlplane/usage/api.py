"""REST of usage from elsewhere: CloudEvents of other gateways, with a result for each."""

from collections import Counter
from typing import Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import ParseError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.tenants.access import RolePermission
from controlplane.usage.events import EVENTS_MOST, ID_CHARS_MOST, SOURCE_CHARS_MOST, EventResult, take_events
from controlplane.web.parsers import BoundedJSONParser


class EventsParser(BoundedJSONParser):
    """A text that is none costs its event only."""

    whole_text = False


class BatchParser(EventsParser):
    """The media type of a batch in the CloudEvents HTTP binding."""

    media_type = "application/cloudevents-batch+json"


class EventParser(EventsParser):
    """The media type of a single event."""

    media_type = "application/cloudevents+json"


class TokenCountsSerializer(serializers.Serializer):
    """What a request took."""

    prompt_tokens = serializers.IntegerField(min_value=0)
    output_tokens = serializers.IntegerField(min_value=0)
    cached_tokens = serializers.IntegerField(min_value=0, required=False)
    model = serializers.CharField(required=False)


class CloudEventSerializer(serializers.Serializer):
    """A request that another gateway served; `subject` is the tenant's short name. More attributes are passed over."""

    takes_more = True
    specversion = serializers.ChoiceField(["1.0"])
    id = serializers.CharField(max_length=ID_CHARS_MOST)
    source = serializers.CharField(max_length=SOURCE_CHARS_MOST)
    type = serializers.CharField(max_length=ID_CHARS_MOST)
    time = serializers.DateTimeField()
    subject = serializers.CharField(max_length=63)
    data = TokenCountsSerializer()


class EventOutcomeSerializer(serializers.Serializer):
    """What became of one event of the batch."""

    index = serializers.IntegerField()
    id = serializers.CharField()
    result = serializers.ChoiceField([result.value for result in EventResult])
    reason = serializers.CharField()


class EventsAnswerSerializer(serializers.Serializer):
    """Counts by result, and each event's."""

    stored = serializers.IntegerField()
    duplicate = serializers.IntegerField()
    conflict = serializers.IntegerField()
    refused = serializers.IntegerField()
    results = EventOutcomeSerializer(many=True)


class UsageEvents(APIView):
    """Usage that another gateway measured: kept by source and id, shown, never charged.

    Send a JSON array of at most 1,000 CloudEvents: `specversion` 1.0, `id`, `source`, `type`, `time`, `subject` (the
    tenant's short name) and `data` with `prompt_tokens`, `output_tokens` and where known `cached_tokens`, `model`. The
    media types of the CloudEvents binding are taken too: `application/cloudevents-batch+json`, and for one event
    `application/cloudevents+json`.
    """

    permission_classes = [RolePermission]
    parser_classes = [EventsParser, BatchParser, EventParser]
    read_permission = "usage.read"
    write_permission = "usage.write"

    @extend_schema(
        request={BoundedJSONParser.media_type: CloudEventSerializer(many=True)}, responses=EventsAnswerSerializer
    )
    def post(self, request: Request) -> Response:
        events = request.data if isinstance(request.data, list) else [request.data]
        if not 1 <= len(events) <= EVENTS_MOST:
            raise ParseError(f"Send 1 to {EVENTS_MOST:,} events, not {len(events):,}.")
        outcomes = take_events(events, now=timezone.now())
        counts = Counter(outcome.result.value for outcome in outcomes)
        body: dict[str, Any] = {result.value: counts[result.value] for result in EventResult}
        body["results"] = [
            {"index": row.index, "id": _sayable(row.id), "result": row.result.value, "reason": _sayable(row.reason)}
            for row in outcomes
        ]
        return Response(body)


def _sayable(text: str) -> str:
    """The text with a question mark for each half of a character."""
    return text.encode(errors="replace").decode()
