"""Error pages, and the style guide that shows every component in every state."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.templatetags.static import static
from django.views.decorators.cache import cache_control
from django.views.decorators.csrf import requires_csrf_token

from controlplane.web import styleguide_data
from controlplane.web.context import THEME_COOKIE, THEMES

PROGRAM_PREFIXES = ("/api/", "/v1/", "/agent/", "/metrics")
TITLES = {
    400: "Request not understood",
    403: "Not allowed",
    404: "Not found",
    429: "Too many tries",
    500: "Something failed",
}


def for_programs(request: HttpRequest) -> bool:
    """True when the caller wants a problem document, not a page."""
    return request.path.startswith(PROGRAM_PREFIXES) or not request.accepts("text/html")


def error_response(
    request: HttpRequest,
    status: int,
    *,
    detail: str = "",
    retry_after: int | None = None,
    page: str = "",
    title: str = "",
    **more: Any,
) -> HttpResponse:
    """The page (or problem+json) of an error. Needs no database, no session and no navigation."""
    title, page = title or TITLES[status], page or str(status)
    request_id = getattr(request, "request_id", "")
    if for_programs(request):
        body = {"type": "about:blank", "title": title, "status": status, "request_id": request_id}
        if detail:
            body["detail"] = detail
        response: HttpResponse = JsonResponse(body, status=status, content_type="application/problem+json")
    else:
        theme = request.COOKIES.get(THEME_COOKIE, "")
        context = {
            **more,
            "title": title,
            "status": status,
            "detail": detail,
            "request_id": request_id,
            "retry_after": retry_after,
            "theme": theme if theme in THEMES else "",
        }
        try:
            response = HttpResponse(render_to_string(f"errors/{page}.html", context), status=status)
        except (TemplateDoesNotExist, ValueError):  # ValueError: a static file without a manifest entry
            response = HttpResponse(f"{title}. Request {request_id}", status=status, content_type="text/plain")
    if retry_after is not None:
        response.headers["Retry-After"] = str(retry_after)
    return response


@requires_csrf_token
def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return error_response(request, 400)


@requires_csrf_token
def permission_denied(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return error_response(request, 403, detail=str(exception) if exception else "")


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """A form without its token: nobody's role is at fault, and what was typed is still in the browser's last page."""
    detail = "Its security token is missing or old: the page was open for long, you signed in anew, or cookies are off."
    return error_response(
        request,
        403,
        detail=detail,
        page="csrf",
        title="The form was not taken",
        signed_out=not request.COOKIES.get(settings.SESSION_COOKIE_NAME),
    )


@requires_csrf_token
def page_not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return error_response(request, 404)


def too_many_requests(request: HttpRequest, *, retry_after: int | None = None) -> HttpResponse:
    """For views that throttle: a 429 with Retry-After."""
    return error_response(request, 429, retry_after=retry_after)


@requires_csrf_token
def server_error(request: HttpRequest) -> HttpResponse:
    return error_response(request, 500)


@cache_control(public=True, max_age=86_400)
def favicon(request: HttpRequest) -> HttpResponse:
    """Where browsers look for the icon of an answer that names none: exports, REST answers, problem documents."""
    return redirect(static("flexband/favicon.svg"))


def styleguide(request: HttpRequest) -> HttpResponse:
    """Every component and state on one page; for staff users, or for everybody while DEBUG is on."""
    user: Any = getattr(request, "user", None)
    if not settings.DEBUG and not getattr(user, "is_staff", False):
        raise Http404
    return render(request, "web/styleguide.html", styleguide_data.context())


# Anybody may have the icon.
favicon.permission = None  # type: ignore[attr-defined]
# Guards itself (404 for everybody else), so no permission of the roles' table stands on it.
styleguide.permission = None  # type: ignore[attr-defined]
