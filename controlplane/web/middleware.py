"""Request id and security headers. The policy header itself is django-csp's, from `csp.py`."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

import structlog
from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

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
