"""Keyset pages: a cursor names the last row seen, so a page costs the same at any depth and no row is shown twice."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import orjson
from django.db.models import Q, QuerySet

DEFAULT_LIMIT = 50
LIMIT_MAX = 200
CURSOR_CHARS_MAX = 1_000


class BadCursor(ValueError):
    """The cursor in the address was not made by this list. The caller answers 400 or starts at the first page."""


@dataclass(frozen=True)
class Page:
    """Rows in the list's order and the cursors around them (None at an end); `components/pager.html` shows it."""

    rows: list[Any]
    next_cursor: str | None
    previous_cursor: str | None


def _plain(value: Any) -> Any:
    for kind, tag in ((datetime, "t"), (date, "d"), (UUID, "u"), (Decimal, "n")):
        if isinstance(value, kind):
            return {tag: value.isoformat() if isinstance(value, date) else str(value)}
    return value


_READERS: dict[str, Callable[[str], Any]] = {
    "t": datetime.fromisoformat,
    "d": date.fromisoformat,
    "u": UUID,
    "n": Decimal,
}


def _value(plain: Any) -> Any:
    if isinstance(plain, dict):
        ((tag, text),) = plain.items()
        return _READERS[tag](text)
    return plain


def _encode(direction: str, values: Sequence[Any]) -> str:
    body = orjson.dumps([direction, *[_plain(v) for v in values]])
    return base64.urlsafe_b64encode(body).decode().rstrip("=")


def _decode(cursor: str, width: int) -> tuple[str, list[Any]]:
    if len(cursor) > CURSOR_CHARS_MAX:
        raise BadCursor("the cursor is too long")
    try:
        parts = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        direction, *values = parts
        values = [_value(v) for v in values]
    except (binascii.Error, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise BadCursor("the cursor cannot be read; start again at the first page") from error
    if direction not in ("after", "before") or len(values) != width or any(isinstance(v, list) for v in values):
        raise BadCursor("the cursor does not belong to this list; start again at the first page")
    return direction, values


def _beyond(order: Sequence[str], values: Sequence[Any], *, forward: bool) -> Q:
    """Rows strictly after (or before) the given key, for any mix of ascending and descending columns."""
    condition = Q()
    equal: dict[str, Any] = {}
    for name, value in zip(order, values, strict=True):
        column = name.lstrip("-")
        greater = name.startswith("-") != forward
        condition |= Q(**equal, **{f"{column}__{'gt' if greater else 'lt'}": value})
        equal[column] = value
    return condition


def _reversed(order: Sequence[str]) -> list[str]:
    return [name[1:] if name.startswith("-") else f"-{name}" for name in order]


def _key(row: Any, order: Sequence[str]) -> list[Any]:
    names = [name.lstrip("-") for name in order]
    if isinstance(row, dict):
        return [row[name] for name in names]
    values = []
    for name in names:
        value = row
        for part in name.split("__"):
            value = getattr(value, part)
        values.append(value)
    return values


def keyset_page(
    queryset: QuerySet[Any, Any], order: Sequence[str], *, cursor: str | None, limit: int = DEFAULT_LIMIT
) -> Page:
    """One page of a queryset of models or `values()` dicts.

    `order`: column names, `-` for descending; together unique and never null (end with the primary key).
    Raises BadCursor for a cursor that is not of this list; `limit` is held between 1 and LIMIT_MAX.
    """
    limit = min(max(limit, 1), LIMIT_MAX)
    direction, values = _decode(cursor, len(order)) if cursor else ("after", None)
    forward = direction == "after"
    rows_wanted = queryset.order_by(*(order if forward else _reversed(order)))
    if values is not None:
        try:
            rows_wanted = rows_wanted.filter(_beyond(order, values, forward=forward))
            rows = list(rows_wanted[: limit + 1])
        except (TypeError, ValueError) as error:
            raise BadCursor("the cursor does not belong to this list; start again at the first page") from error
    else:
        rows = list(rows_wanted[: limit + 1])
    more = len(rows) > limit
    rows = rows[:limit]
    if not forward:
        rows.reverse()
    has_next = more if forward else True
    has_previous = values is not None if forward else more
    return Page(
        rows=rows,
        next_cursor=_encode("after", _key(rows[-1], order)) if rows and has_next else None,
        previous_cursor=_encode("before", _key(rows[0], order)) if rows and has_previous else None,
    )
