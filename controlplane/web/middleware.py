"""Request id, security headers, addresses that cannot be meant. The policy header is django-csp's, from `csp.py`."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

import structlog
from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from controlplane.web.views import error_response

HEADERS = {
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

Handler = Callable[[HttpRequest], HttpResponseBase] | Callable[[HttpRequest], Awaitable[HttpResponseBase]]


def _begin(request: HttpRequest) -> None:
    """Give the request its id. One sent by the client is not taken over: ids name our log lines."""
    request.request_id = str(uuid.uuid4())  # type: ignore[attr-defined]
    structlog.contextvars.bind_contextvars(request_id=request.request_id)  # type: ignore[attr-defined]


def _finish(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    response.headers.setdefault("X-Request-Id", request.request_id)  # type: ignore[attr-defined]
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    if response.headers.get("Content-Type", "").startswith("text/html"):
        # Pages show money and keys: a shared cache must not keep them, the browser asks again.
        response.headers.setdefault("Cache-Control", "private, no-cache")
    structlog.contextvars.unbind_contextvars("request_id")
    return response


@sync_and_async_middleware
def RequestIdMiddleware(get_response: Handler) -> Handler:
    """Stands before CSPMiddleware in MIDDLEWARE: request id and headers on every answer."""
    if iscoroutinefunction(get_response):

        async def serve_async(request: HttpRequest) -> HttpResponseBase:
            _begin(request)
            return _finish(request, await get_response(request))

        return serve_async

    def serve(request: HttpRequest) -> HttpResponseBase:
        _begin(request)
        return _finish(request, get_response(request))  # type: ignore[arg-type]

    return serve


def _has_zero_character(request: HttpRequest) -> bool:
    return "%00" in request.META.get("QUERY_STRING", "") or "\x00" in request.path_info


@sync_and_async_middleware
def ZeroCharacterMiddleware(get_response: Handler) -> Handler:
    """Refuses addresses with a zero character: no name here has one, and PostgreSQL takes it in no comparison."""
    detail = "The address has a zero character (%00). Remove it."
    if iscoroutinefunction(get_response):

        async def serve_async(request: HttpRequest) -> HttpResponseBase:
            if _has_zero_character(request):
                return error_response(request, 400, detail=detail)
            return await get_response(request)

        return serve_async

    def serve(request: HttpRequest) -> HttpResponseBase:
        if _has_zero_character(request):
            return error_response(request, 400, detail=detail)
        return get_response(request)  # type: ignore[return-value]

    return serve
