"""What the REST description says of every operation alike: problems, `Idempotency-Key`, `If-Match` and `ETag`."""

from collections.abc import Iterator
from typing import Any, Final

from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework import serializers

from controlplane.web.api import PROBLEM_TYPE

KEY_CHARS_MAX = 200
WALL_CLOCK = r"^([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9](\.[0-9]{1,6})?)?$"
WHY = {
    400: "The address, a header or the body cannot be used; `errors` has the sentences by field.",
    401: "Nobody is signed in, or the token or key is wrong, over or revoked.",
    403: "The role, or the token, does not include it.",
    404: "There is no such object, or it is not the caller's to see.",
    406: "The answer has no form that `Accept` names.",
    409: "It has ended, or is in no state for that.",
    412: "Somebody changed the row since its ETag was read.",
    413: "The body is too large.",
    415: "The body is of another media type.",
    422: "The Idempotency-Key was used with another body.",
    428: "Send `If-Match`.",
    429: "Too many calls: `Retry-After` says how many seconds to wait.",
}

_HEADER: Final = "header"
IDEMPOTENCY_KEY = OpenApiParameter(
    "Idempotency-Key",
    {"type": "string", "maxLength": KEY_CHARS_MAX},
    _HEADER,
    description="Repeats with the same key and body get the first answer and do nothing twice.",
)
REPLAYED = OpenApiParameter(
    "Idempotency-Replayed", str, _HEADER, response=[200, 201, 204], description="`true` on a repeated answer."
)
IF_MATCH = OpenApiParameter(
    "If-Match", str, _HEADER, required=True, description="The ETag that was read; `*` overwrites whatever is there."
)
ETAG = OpenApiParameter("ETag", str, _HEADER, response=[200, 201], description="The version, for `If-Match`.")
RETRY_AFTER = OpenApiParameter("Retry-After", int, _HEADER, response=[429], description="Seconds to wait.")


class ProblemSerializer(serializers.Serializer):
    """What went wrong (RFC 9457). `errors`: sentences by field."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    code = serializers.CharField(required=False)
    detail = serializers.CharField(required=False)
    errors = serializers.JSONField(required=False)  # type: ignore[assignment]
    request_id = serializers.CharField(required=False)


def problem(status: int, why: str = "") -> dict[tuple[int, str], OpenApiResponse]:
    """A problem that an operation has beside those of all: a part of `responses` of `extend_schema`."""
    return {(status, PROBLEM_TYPE): OpenApiResponse(ProblemSerializer, why or WHY[status])}


class RestSchema(AutoSchema):
    """An operation with what all of its kind take and answer. Handlers say by their decorators what they take."""

    def get_override_parameters(self) -> list[Any]:
        found = [*super().get_override_parameters(), RETRY_AFTER]
        if self._handler_has("takes_idempotency_key"):
            found += [IDEMPOTENCY_KEY, REPLAYED]
        if self._handler_has("asks_if_match"):
            found.append(IF_MATCH)
        if hasattr(self.view, "wanted_version") and not self._is_list_view():
            found.append(ETAG)
        return found

    def get_operation(self, *arguments: Any) -> dict[str, Any] | None:
        operation = super().get_operation(*arguments)
        if operation is None:
            return None
        said = operation["responses"]
        for status in self._problems("requestBody" in operation):
            if str(status) not in said:
                ((key, answer),) = problem(status).items()
                said[str(status)] = self._get_response_for_code(answer, str(status), [*key[1:]])
        return {**operation, "responses": dict(sorted(said.items()))}

    def _map_basic_serializer(self, serializer: Any, direction: Any) -> dict[str, Any]:
        """Bodies are closed: a field that there is not is refused, see `tenants.rest.checked`. Where others say what a
        body has, the serializer says so: `takes_more`.
        """
        found = super()._map_basic_serializer(serializer, direction)
        closed = direction == "request" and not getattr(serializer, "takes_more", False)
        return {**found, "additionalProperties": False} if closed else found

    def _map_serializer_field(self, field: Any, direction: Any, bypass_extensions: bool = False) -> dict[str, Any]:
        """With what the framework checks and its description leaves out."""
        found = super()._map_serializer_field(field, direction, bypass_extensions)
        if direction == "request" and isinstance(field, serializers.ListField) and not field.allow_empty:
            found.setdefault("minItems", 1)
        if isinstance(field, serializers.TimeField):
            found.pop("format", None)  # in a description a time has a zone, here it has none
            found["pattern"] = WALL_CLOCK
        return found

    def _problems(self, has_body: bool) -> Iterator[int]:
        """Statuses that every operation of this kind can answer."""
        yield from (400, 401, 403, 406, 429)
        if "{" in self.path or (self._is_list_view() and self._get_paginator()):
            yield 404
        if has_body:
            yield from (413, 415)
        if self._handler_has("takes_idempotency_key"):
            yield 422
        if self._handler_has("asks_if_match"):
            yield from (412, 428)

    def _handler_has(self, mark: str) -> bool:
        """Whether a decorator marked the handler; reading is never marked, where one handler reads and writes."""
        handler = getattr(self.view, getattr(self.view, "action", None) or self.method.lower(), None)
        return self.method != "GET" and getattr(handler, mark, False)
