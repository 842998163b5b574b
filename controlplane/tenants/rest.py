"""What REST writes of every noun share: a version as ETag, If-Match against lost updates, and Idempotency-Key."""

import functools
import hashlib
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.core.files.uploadedfile import UploadedFile
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.datastructures import MultiValueDict
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers, status
from rest_framework.exceptions import APIException, ParseError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from controlplane.audit.actions import SECRET_FIELDS
from controlplane.audit.reasons import REASON_CHARS_MAX
from controlplane.core.money import format_nanos, parse_nanos
from controlplane.tenants.actions import Stale
from controlplane.tenants.models import IdempotentWrite
from controlplane.web.api import PreconditionFailed
from controlplane.web.openapi import KEY_CHARS_MAX
from controlplane.wire.signing import canonical

KEPT = timedelta(hours=24)
PURGE_MAX = 100
Handler = Callable[..., Response]


class PreconditionRequired(APIException):
    status_code = 428
    default_detail = "Send If-Match with the ETag that you read, or If-Match: * to overwrite whatever is there."
    default_code = "precondition_required"


class KeyReused(APIException):
    status_code = 422
    default_detail = "This Idempotency-Key was used with another body: take a new key for another write."
    default_code = "idempotency_key_reused"


class ReasonField(serializers.CharField):
    """Why; kept in the audit log."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=REASON_CHARS_MAX, **{"required": True, **options})


class SlugField(serializers.SlugRelatedField):
    """A row by its short name; text that no database can hold names none."""

    def __init__(self, queryset: QuerySet[Any], **options: Any) -> None:
        super().__init__("slug", queryset=queryset, **options)

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, str) and "\x00" in data:
            self.fail("does_not_exist", slug_name="slug", value=data.replace("\x00", ""))
        return super().to_internal_value(data)


MONEY = re.compile(r"^-?[0-9]+(\.[0-9]{1,9})?$")


@extend_schema_field({"type": "string", "format": "decimal", "pattern": MONEY.pattern})
class MoneyField(serializers.Field):
    """`"2.50"`: exact decimal text of the currency outside, integer nanos inside. A JSON number is refused."""

    def to_representation(self, value: int) -> str:
        return format_nanos(value)

    def to_internal_value(self, data: object) -> int:
        if not isinstance(data, str):
            raise serializers.ValidationError('Send money as text, such as "22000.00": a float is not exact.')
        try:
            nanos = parse_nanos(data)
            if not MONEY.fullmatch(data):
                raise ValueError(f"{data[:80]!r} is not written like 1234.56")
            return nanos
        except ValueError as error:
            raise serializers.ValidationError(f"{str(error)[0].upper()}{str(error)[1:]}.") from None


class ReasonSerializer(serializers.Serializer):
    """The body of an action that only needs a reason."""

    reason = ReasonField()


class VersionedViewSet(GenericViewSet):
    """Rows with a `version`: answers carry it as ETag, changes are sent with If-Match."""

    http_method_names = ["get", "post", "patch", "delete", "head", "options"]

    def answer(self, row: Any, status_code: int = status.HTTP_200_OK, **extra: Any) -> Response:
        """The row as its reader sees it, with its ETag."""
        body = {**self.get_serializer(row).data, **extra}
        return Response(body, status=status_code, headers={"ETag": etag_of(row)})

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return self.answer(self.get_object())

    def wanted_version(self, row: Any) -> int:
        """The version of If-Match. Raises PreconditionRequired without one and PreconditionFailed for an old one."""
        given = self.request.headers.get("If-Match", "").strip()
        if not given:
            raise PreconditionRequired
        if given != "*" and etag_of(row) not in [part.strip().removeprefix("W/") for part in given.split(",")]:
            raise PreconditionFailed
        return int(row.version)

    def body(self, serializer_class: type[serializers.Serializer], *, partial: bool = False) -> dict[str, Any]:
        """The request's body, checked."""
        return checked(serializer_class, self.request, partial=partial)


def checked(
    serializer_class: type[serializers.Serializer], request: Request, *, partial: bool = False
) -> dict[str, Any]:
    """The request's body as the serializer reads it. Unknown fields are an error, so that a slip of the pen is no
    silent success. Raises ParseError or ValidationError.
    """
    if not isinstance(request.data, dict):
        raise ParseError("Send a JSON object.")
    serializer = serializer_class(data=request.data, partial=partial)
    unknown = sorted(set(request.data) - {n for n, f in serializer.fields.items() if not f.read_only})
    if unknown:
        raise serializers.ValidationError({name: ["There is no such field to write."] for name in unknown})
    serializer.is_valid(raise_exception=True)
    return dict(serializer.validated_data)


def etag_of(row: Any) -> str:
    return f'"{row._meta.model_name}-{row.pk}-{row.version}"'


def writes(handler: Handler) -> Handler:
    """Decorates a handler that writes: repeats under one Idempotency-Key get the first answer, stale writes are 412."""

    @functools.wraps(handler)
    def wrapped(view: Any, request: Request, *args: Any, **kwargs: Any) -> Response:
        try:
            key = request.headers.get("Idempotency-Key", "")
            if not key:
                return handler(view, request, *args, **kwargs)
            return _once(key, handler, view, request, args, kwargs)
        except Stale as error:
            raise PreconditionFailed from error

    wrapped.takes_idempotency_key = True  # type: ignore[attr-defined]
    return wrapped


def edits(handler: Handler) -> Handler:
    """`writes` of a row with a version: it asks for If-Match, and the description says so."""
    wrapped = writes(handler)
    wrapped.asks_if_match = True  # type: ignore[attr-defined]
    return wrapped


def _once(
    key: str, handler: Handler, view: Any, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Response:
    """Row first, write second, both in one transaction: whoever comes at the same time waits for the first one's end.

    A write that fails leaves no row, so it can be repeated with the same key.
    """
    if len(key) > KEY_CHARS_MAX:
        raise ParseError(f"An Idempotency-Key has at most {KEY_CHARS_MAX} characters.")
    now = timezone.now()
    digest = hashlib.sha256(canonical(_plain(request.data))).hexdigest()
    scope = {
        "principal_id": request.user.pk,
        "method": request.method,
        "path": request.path[:400],
        "key": key,
    }
    with transaction.atomic():
        _purge(now - KEPT)
        row, made = IdempotentWrite.objects.get_or_create(
            **scope, defaults={"body_digest": digest, "status": 0, "created_at": now}
        )
        if not made:
            return _replay(row, digest)
        response = handler(view, request, *args, **kwargs)
        if response.status_code >= status.HTTP_400_BAD_REQUEST:
            row.delete()
            return response
        row.status, row.response = response.status_code, _without_secrets(response.data)
        row.etag = response.headers.get("ETag", "")
        row.save(update_fields=["status", "response", "etag"])
    return response


def _plain(data: Any) -> Any:
    """A body as what is compared: of a form every value of a field, of a file its name and digest."""
    if not isinstance(data, MultiValueDict):
        return data
    return {name: [_part(value) for value in data.getlist(name)] for name in data}


def _part(value: Any) -> Any:
    if not isinstance(value, UploadedFile):
        return value
    digest = hashlib.sha256()
    for chunk in value.chunks():
        digest.update(chunk)
    value.seek(0)
    return {"name": value.name, "sha256": digest.hexdigest()}


def _replay(row: IdempotentWrite, digest: str) -> Response:
    if row.body_digest != digest:
        raise KeyReused
    headers = {"Idempotency-Replayed": "true", **({"ETag": row.etag} if row.etag else {})}
    return Response(row.response, status=row.status, headers=headers)


def _without_secrets(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: None if name in SECRET_FIELDS else _without_secrets(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_without_secrets(value) for value in data]
    return data


def _purge(before: Any) -> None:
    old = IdempotentWrite.objects.filter(created_at__lt=before).order_by("pk").values("pk")[:PURGE_MAX]
    IdempotentWrite.objects.filter(pk__in=list(old.values_list("pk", flat=True))).delete()
