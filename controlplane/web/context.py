"""The shell's context: organisation, role, navigation, theme, request id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject
from django.utils.module_loading import import_string

from controlplane.web import navigation

THEME_COOKIE = "flexband_theme"
THEMES = frozenset({"light", "dark"})
DEFAULT_ORGANISATION = "Flexband"


@cache
def _provider(path: str) -> Callable[[HttpRequest], Mapping[str, Any]]:
    provider: Callable[[HttpRequest], Mapping[str, Any]] = import_string(path)
    return provider


def shell_facts(request: HttpRequest) -> dict[str, Any]:
    """`organisation` and `role` from the callable that `settings.SHELL_CONTEXT` names (a dotted path or a callable)."""
    provider = getattr(settings, "SHELL_CONTEXT", None)
    facts: dict[str, Any] = {"organisation": DEFAULT_ORGANISATION, "role": ""}
    if isinstance(provider, str):
        provider = _provider(provider)
    if provider is not None:
        facts.update(provider(request))
    return facts


class Shell:
    """Lazily computed facts of the frame around a page; nothing is queried until the template asks."""

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self.facts = SimpleLazyObject(lambda: shell_facts(request))

    @property
    def organisation(self) -> str:
        return self.facts["organisation"] or DEFAULT_ORGANISATION

    @property
    def role(self) -> str:
        return self.facts["role"] or ""

    @property
    def theme(self) -> str:
        """`light`, `dark` or empty for the system's choice."""
        chosen = self.request.COOKIES.get(THEME_COOKIE, "")
        return chosen if chosen in THEMES else ""

    @property
    def shortcuts(self) -> dict[str, str]:
        return navigation.shortcuts(self.role)

    def primary(self, section: str | None = None) -> list[navigation.Link]:
        path = self.request.path
        key = section or navigation.section_of(self.role, path)
        return navigation.primary_links(self.role, path, current_key=key)

    def sub(self, section: str | None = None) -> list[navigation.Link]:
        path = self.request.path
        return navigation.sub_links(section or navigation.section_of(self.role, path), self.role, path)


def shell(request: HttpRequest) -> dict[str, Any]:
    """Context processor: `shell`, `organisation`, `role`, `theme`, `request_id`."""
    frame = Shell(request)
    return {
        "shell": frame,
        "organisation": SimpleLazyObject(lambda: frame.organisation),
        "role": SimpleLazyObject(lambda: frame.role),
        "theme": frame.theme,
        "request_id": getattr(request, "request_id", ""),
    }
