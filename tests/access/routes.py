"""Every address of the project out of the resolver, with what it needs and how it is reached."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver

# Not ours: DRF and Django would bring these only if somebody mounted them, and then they must say who may open them.
METHODS = ("get", "post", "put", "patch", "delete")


@dataclass(frozen=True)
class Route:
    """`needs` maps a method to its permission; None stands for public. `marked` is False when the view says nothing."""

    path: str
    name: str
    arguments: tuple[str, ...]
    marked: bool
    needs: dict[str, str | None]
    rest: bool

    @property
    def public(self) -> bool:
        return self.marked and all(permission is None for permission in self.needs.values())


def routes() -> list[Route]:
    return list(_walk(get_resolver().url_patterns, "", ()))


def _walk(patterns: list[Any], before: str, arguments: tuple[str, ...]) -> Iterator[Route]:
    for entry in patterns:
        path = before + str(entry.pattern)
        names = (*arguments, *entry.pattern.regex.groupindex)
        if isinstance(entry, URLResolver):
            yield from _walk(entry.url_patterns, path, names)
        elif isinstance(entry, URLPattern):
            marked, needs, rest = _needs(entry.callback)
            yield Route(path, entry.name or "", names, marked, needs, rest)


def _needs(view: Any) -> tuple[bool, dict[str, str | None], bool]:
    api = getattr(view, "cls", None)
    if api is not None:
        return _needs_of_api(view, api)
    if not hasattr(view, "permission"):
        return False, {}, False
    read = view.permission
    return True, {"get": read, "post": getattr(view, "write_permission", read)}, False


def _needs_of_api(view: Any, api: Any) -> tuple[bool, dict[str, str | None], bool]:
    """A REST view with `public = True` says that it guards itself by other means (an agent's or a tenant's key)."""
    allowed = set(getattr(api, "http_method_names", METHODS))
    actions = getattr(view, "actions", None) or {method: None for method in METHODS if hasattr(api, method)}
    if getattr(api, "public", False):
        return True, dict.fromkeys(actions), True
    named: dict[str, str] = getattr(api, "action_permissions", {})
    needs: dict[str, str | None] = {}
    for method, action in actions.items():
        if method not in allowed or method in ("head", "options"):
            continue
        attribute = "read_permission" if method == "get" else "write_permission"
        permission = named.get(action) if action else None
        permission = permission or getattr(api, attribute, None)
        if permission is None:
            return False, {}, True
        needs[method] = permission
    return True, needs, True
