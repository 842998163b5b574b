"""REST addresses with or without a slash at their end: a program's POST must not be lost to a redirect."""

from typing import Any

from rest_framework.routers import SimpleRouter


class Router(SimpleRouter):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trailing_slash = "/?"
