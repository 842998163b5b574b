"""When a session was last used: written at most once a minute, by one UPDATE of its row."""

from collections.abc import Callable

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils import timezone

from controlplane.access.models import Session
from controlplane.access.session_store import USED_EVERY


class LastUseMiddleware:
    """Behind the authentication: a request without a session costs nothing here."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        session, now = request.session, timezone.now()
        last = getattr(session, "last_used_at", None)
        if last is not None and now - last >= USED_EVERY:
            Session.objects.filter(session_key=session.session_key).update(last_used_at=now)
        return response
