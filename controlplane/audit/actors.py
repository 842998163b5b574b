"""Who acts: a signed-in person through a request, or a part of the system by name."""

import getpass
from dataclasses import dataclass

from django.contrib.auth.models import User
from django.core.exceptions import ObjectDoesNotExist
from django.http import HttpRequest


@dataclass(frozen=True, slots=True)
class Actor:
    """`id` is the user's, None for a part of the system; `role` is the role at that moment."""

    id: int | None
    name: str
    role: str
    request_id: str = ""

    @classmethod
    def system(cls, name: str) -> "Actor":
        return cls(id=None, name=name, role="system")


def actor_of(request: HttpRequest) -> Actor:
    """The person behind a request. Raises ValueError when nobody is signed in: guard the view first."""
    if not request.user.is_authenticated:
        raise ValueError("nobody is signed in: the view lacks its guard")
    return actor_for(request.user, getattr(request, "request_id", ""))


def actor_for(user: User, request_id: str) -> Actor:
    """A person who is known but not, or not yet, signed in by the request."""
    try:
        role = user.member.role  # type: ignore[attr-defined]
    except ObjectDoesNotExist:
        role = ""
    return Actor(id=user.pk, name=user.get_username(), role=role, request_id=request_id)


def command_actor() -> Actor:
    """Who runs a command of manage.py on this machine."""
    return Actor.system(f"{getpass.getuser()} by manage.py")
