"""REST conventions of every noun: errors as problem+json (RFC 9457)."""

from typing import Any

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent, ValidationError
from django.http import Http404
from rest_framework.exceptions import APIException, ParseError, PermissionDenied
from rest_framework.response import Response
from rest_framework.views import exception_handler

from controlplane.web.parsers import BodyTooLarge

PROBLEM_TYPE = "application/problem+json"


class PreconditionFailed(APIException):
    status_code = 412
    default_detail = "Somebody changed this since you read it: read it again and repeat your change."
    default_code = "stale"


class Ended(APIException):
    status_code = 409
    default_detail = "It is over already."
    default_code = "already_ended"


def problem_json(error: Exception, context: dict[str, Any]) -> Response | None:
    """DRF's exception handler: one problem document per error, with the fields that were wrong."""
    if isinstance(error, ValidationError):
        fields: Any = error.message_dict if hasattr(error, "error_dict") else {"detail": error.messages}
        return _problem(400, "Some values cannot be used.", "invalid", fields)
    # What Django refuses while it reads a form is no page of its own here.
    if isinstance(error, RequestDataTooBig):
        error = BodyTooLarge(settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
    elif isinstance(error, (TooManyFieldsSent, TooManyFilesSent)):
        error = ParseError("The form has too many fields.")
    response = exception_handler(error, context)
    if response is None:
        return None
    status = response.status_code
    if isinstance(error, Http404):
        return _problem(status, "There is no such object, or it is not yours.", "not_found", None)
    detail = response.data.get("detail") if isinstance(response.data, dict) else None
    code = getattr(error, "default_code", "error")
    if code == PermissionDenied.default_code:
        code = "forbidden"
    wrong = None if detail is not None else response.data
    title = str(detail) if detail is not None else "Some values cannot be used."
    problem = _problem(status, title, code, wrong)
    for header in ("WWW-Authenticate", "Retry-After", "Allow"):
        if header in response:
            problem[header] = response[header]
    return problem


def _problem(status: int, title: str, code: str, fields: Any) -> Response:
    body: dict[str, Any] = {"type": f"about:blank#{code}", "title": title, "status": status, "code": code}
    if fields is not None:
        body["errors"] = fields
    return Response(body, status=status, content_type=PROBLEM_TYPE)
