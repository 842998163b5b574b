"""How a route says what it needs: `@requires("tenant.write")`, `@public`, and DRF's `RolePermission`."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect
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
    """What the role allows; through a personal token within `token_permissions`, which its authentication sets."""
    within: frozenset[str] | None = getattr(user, "token_permissions", None)
    return allows(role_of(user), permission) and (within is None or permission in within)


def lacks_second_factor(role: str | None, session: Mapping[str, Any]) -> bool:
    """True for a session without a second factor where the installation asks the role for one."""
    return role in settings.SECOND_FACTOR_ROLES and not session.get("second_factor")


def requires(
    permission: str, *, write: str | None = None, before_second_factor: bool = False
) -> Callable[[View], View]:
    """Guards a page: `permission` to see it and, where given, `write` for any method but GET and HEAD.

    Nobody signed in is sent to sign in; a role that lacks the permission gets 403. Who still needs a second factor is
    sent to set one up, but for the pages that this takes (`before_second_factor`).
    """

    def decorate(view: View) -> View:
        @functools.wraps(view)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            if not request.user.is_authenticated:
                return redirect_to_login(request.get_full_path())
            needed = permission if request.method in ("GET", "HEAD") else (write or permission)
            if not may(request.user, needed):
                raise PermissionDenied(f"Your role does not include {needed}.")
            if not before_second_factor and lacks_second_factor(role_of(request.user), request.session):
                return redirect(settings.SECOND_FACTOR_PAGE)
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

    message = "Your role does not include this, or your token leaves it out, or a second factor is asked of your role."

    def has_permission(self, request: "Request", view: "APIView") -> bool:
        # A session comes without `auth`; tokens and keys were made by somebody who was in.
        if request.auth is None and lacks_second_factor(role_of(request.user), request.session):
            return False
        return may(request.user, permission_of(view, request.method or "GET"))


def permission_of(view: "APIView", method: str) -> str:
    """The permission that a REST view needs for a method; a view that names none is a bug (AttributeError)."""
    actions: dict[str, str] = getattr(view, "action_permissions", {})
    action = getattr(view, "action", None)
    if action in actions:
        return actions[action]
    if method in ("GET", "HEAD", "OPTIONS") or not hasattr(view, method.lower()):
        return view.read_permission  # type: ignore[attr-defined] # of a method that there is not: 405 for who may read
    return view.write_permission  # type: ignore[attr-defined]
