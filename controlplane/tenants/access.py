"""How a route says what it needs: `@requires("tenant.write")`, `@public`, and DRF's `RolePermission`."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.contrib.auth.models import AnonymousUser, User
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.http import HttpRequest, HttpResponseBase
from rest_framework.permissions import BasePermission

from controlplane.tenants.models import Member
from controlplane.tenants.roles import allows

if TYPE_CHECKING:
    from rest_framework.request import Request
    from rest_framework.views import APIView

View = Callable[..., HttpResponseBase]


def member_of(user: User | AnonymousUser) -> Member | None:
    """The member row of a signed-in person, or None: then nothing is allowed."""
    if not user.is_authenticated:
        return None
    try:
        return user.member  # type: ignore[union-attr]
    except ObjectDoesNotExist:
        return None


def role_of(user: User | AnonymousUser) -> str | None:
    member = member_of(user)
    return member.role if member else None


def may(user: User | AnonymousUser, permission: str) -> bool:
    return allows(role_of(user), permission)


def requires(permission: str, *, write: str | None = None) -> Callable[[View], View]:
    """Guards a page: `permission` to see it and, where given, `write` for any method but GET and HEAD.

    Nobody signed in is sent to sign in; a role that lacks the permission gets 403.
    """

    def decorate(view: View) -> View:
        @functools.wraps(view)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            if not request.user.is_authenticated:
                return redirect_to_login(request.get_full_path())
            needed = permission if request.method in ("GET", "HEAD") else (write or permission)
            if not may(request.user, needed):
                raise PermissionDenied(f"Your role does not include {needed}.")
            return view(request, *args, **kwargs)

        guarded.permission = permission  # type: ignore[attr-defined]
        guarded.write_permission = write or permission  # type: ignore[attr-defined]
        return guarded

    return decorate


def public(view: View) -> View:
    """Marks a route that anybody may open (sign-in, health)."""
    view.permission = None  # type: ignore[attr-defined]
    return view


class RolePermission(BasePermission):
    """A DRF view names `read_permission` and, if it writes, `write_permission`; `action_permissions` overrides both."""

    def has_permission(self, request: "Request", view: "APIView") -> bool:
        return may(request.user, permission_of(view, request.method or "GET"))


def permission_of(view: "APIView", method: str) -> str:
    """The permission that a REST view needs for a method; a view that names none is a bug (AttributeError)."""
    actions: dict[str, str] = getattr(view, "action_permissions", {})
    action = getattr(view, "action", None)
    if action in actions:
        return actions[action]
    name = "read_permission" if method in ("GET", "HEAD", "OPTIONS") else "write_permission"
    return getattr(view, name)
