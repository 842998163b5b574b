"""Cursor pages of every REST list: keyset pages like those of the pages, so that any order can be walked to its end."""

from typing import Any

from django.db.models import QuerySet
from rest_framework.exceptions import NotFound
from rest_framework.pagination import CursorPagination
from rest_framework.request import Request
from rest_framework.utils.urls import replace_query_param

from controlplane.web.pagination import BadCursor, Page, first_rows, keyset_page


class CursorPages(CursorPagination):
    """The framework's parameters and answer over `keyset_page`: its own cursors skip at most 1,000 rows that are equal
    in the order, and ten thousand tenants have few weights. Rows that are equal stand by their primary key.
    """

    page_size = 50
    page_size_query_param = "limit"
    max_page_size = 500
    ordering = "-id"
    found: Page

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any] | None:
        self.base_url = request.build_absolute_uri()
        order = self.whole_order(queryset, self.get_ordering(request, queryset, view))
        try:
            self.found = keyset_page(
                queryset,
                order,
                cursor=request.query_params.get(self.cursor_query_param),
                limit=self.get_page_size(request) or self.page_size,
                most=self.max_page_size,
                read=self.read,
            )
        except BadCursor as error:
            raise NotFound(self.invalid_cursor_message) from error
        return self.found.rows

    def whole_order(self, queryset: QuerySet[Any], ordering: tuple[str, ...]) -> tuple[str, ...]:
        """An order that no two rows share."""
        return _to_the_row(queryset, ordering)

    def read(self, rows: QuerySet[Any], start: Any, count: int) -> list[Any]:
        """How the rows are fetched; see `keyset_page`."""
        return first_rows(rows, start, count)

    def get_next_link(self) -> str | None:
        return self._link(self.found.next_cursor)

    def get_previous_link(self) -> str | None:
        return self._link(self.found.previous_cursor)

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        link = {"type": "string", "format": "uri", "nullable": True}
        other = "its `cursor` is what a client gives to ask for it; null: there is none."
        return {
            "type": "object",
            "required": ["next", "previous", "results"],
            "properties": {
                "next": {**link, "description": f"The address of the following page: {other}"},
                "previous": {**link, "description": f"The address of the page before: {other}"},
                "results": schema,
            },
        }

    def _link(self, cursor: str | None) -> str | None:
        return None if cursor is None else replace_query_param(str(self.base_url), self.cursor_query_param, cursor)


def _to_the_row(queryset: QuerySet[Any], ordering: tuple[str, ...]) -> tuple[str, ...]:
    """An order that no two rows share: ended by the primary key, the way its last column goes."""
    key = queryset.model._meta.pk.name
    for place, name in enumerate(ordering):
        if name.lstrip("-") in (key, "pk"):
            return (*ordering[:place], name.replace("pk", key))
    return (*ordering, f"-{key}" if ordering[-1].startswith("-") else key)
