"""Cursor pages of every REST list."""

from rest_framework.pagination import CursorPagination


class CursorPages(CursorPagination):
    page_size = 50
    page_size_query_param = "limit"
    max_page_size = 500
    ordering = "-id"
