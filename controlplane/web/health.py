"""What a load balancer asks: whether the process lives, and whether it can serve."""

from __future__ import annotations

from django.db import DatabaseError, connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache


@never_cache
def alive(request: HttpRequest) -> JsonResponse:
    """`/healthz`: the process answers."""
    return JsonResponse({"alive": True})


@never_cache
def ready(request: HttpRequest) -> JsonResponse:
    """`/readyz`: 200 when the database answers, else 503. Says nothing about where it is."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return JsonResponse({"ready": False, "database": "unreachable"}, status=503)
    return JsonResponse({"ready": True})


# Anybody may ask; the roles' table has no permission for them.
alive.permission = None  # type: ignore[attr-defined]
ready.permission = None  # type: ignore[attr-defined]
