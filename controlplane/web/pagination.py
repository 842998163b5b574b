"""Keyset pages: a cursor names the last row seen, so a page costs the same at any depth and no row is shown twice."""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import orjson
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db.models import Model, Q, QuerySet

DEFAULT_LIMIT = 50
LIMIT_MAX = 200
CURSOR_CHARS_MAX = 1_000


NOT_OF_THIS_LIST = "the cursor does not belong to this list; start again at the first page"


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
        raise BadCursor(NOT_OF_THIS_LIST)
    return direction, values


def _beyond(model: type[Model], order: Sequence[str], values: Sequence[Any], *, forward: bool) -> Q:
    """Rows strictly after (or before) the given key, for any mix of ascending and descending columns.

    Null is the largest value, as PostgreSQL sorts it.
    """
    condition = Q()
    equal = Q()
    for name, value in zip(order, values, strict=True):
        column = name.lstrip("-")
        greater = name.startswith("-") != forward
        condition |= equal & _past(column, value, greater=greater, nullable=bool(_is_nullable(model, column)))
        equal &= Q(**{f"{column}__isnull": True} if value is None else {column: value})
    return condition & _from_there(model, order[0], values[0], forward=forward) if len(order) > 1 else condition


def _past(column: str, value: Any, *, greater: bool, nullable: bool) -> Q:
    if value is None:
        return Q(pk__in=[]) if greater else Q(**{f"{column}__isnull": False})
    if not greater:
        return Q(**{f"{column}__lt": value})
    return Q(**{f"{column}__gt": value}) | (Q(**{f"{column}__isnull": True}) if nullable else Q())


def _from_there(model: type[Model], name: str, value: Any, *, forward: bool) -> Q:
    """What `_beyond` implies for the first column: the database starts there in an index, which no OR lets it do."""
    column, greater = name.lstrip("-"), name.startswith("-") != forward
    nullable = _is_nullable(model, column)
    if value is None or nullable is None or (greater and nullable):
        return Q()
    return Q(**{f"{column}__{'gte' if greater else 'lte'}": value})


def _is_nullable(model: type[Model], path: str) -> bool | None:
    """Whether a column can be null; None for an annotation, which a list makes without nulls and no index holds."""
    found: bool = False
    for part in path.split("__"):
        try:
            field = model._meta.get_field(part)
        except FieldDoesNotExist:
            return None
        found = found or bool(getattr(field, "null", False))
        model = field.related_model  # type: ignore[assignment]
    return found


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


def sorted_page(
    rows: Sequence[Any], key: Callable[[Any], tuple[Any, ...]], *, cursor: str | None, limit: int = DEFAULT_LIMIT
) -> Page:
    """One page of rows that are in memory, in the ascending order of `key`, which no two share.

    Raises BadCursor for a cursor that is not of this list.
    """
    limit = min(max(limit, 1), LIMIT_MAX)
    begin, end = 0, limit
    if cursor and rows:
        direction, values = _decode(cursor, len(key(rows[0])))
        try:
            if direction == "after":
                begin = bisect_right(rows, tuple(values), key=key)
                end = begin + limit
            else:
                end = bisect_left(rows, tuple(values), key=key)
                begin = max(0, end - limit)
        except TypeError as error:
            raise BadCursor(NOT_OF_THIS_LIST) from error
    shown = list(rows[begin:end])
    return Page(
        rows=shown,
        next_cursor=_encode("after", key(shown[-1])) if shown and end < len(rows) else None,
        previous_cursor=_encode("before", key(shown[0])) if shown and begin > 0 else None,
    )


def first_rows(rows: QuerySet[Any, Any], start: Any, count: int) -> list[Any]:
    """The first `count` rows in their order. `start` is the cursor's value of the first column, None without one."""
    return list(rows[:count])


def keyset_page(
    queryset: QuerySet[Any, Any],
    order: Sequence[str],
    *,
    cursor: str | None,
    limit: int = DEFAULT_LIMIT,
    most: int = LIMIT_MAX,
    read: Callable[[QuerySet[Any, Any], Any, int], list[Any]] = first_rows,
) -> Page:
    """One page of a queryset of models or `values()` dicts.

    `order`: column names, `-` for descending; together unique (end with the primary key). `read` fetches the rows, for
    tables that no index orders.
    Raises BadCursor for a cursor that is not of this list; `limit` is held between 1 and `most`.
    """
    limit = min(max(limit, 1), most)
    direction, values = _decode(cursor, len(order)) if cursor else ("after", None)
    forward = direction == "after"
    rows_wanted = queryset.order_by(*(order if forward else _reversed(order)))
    if values is not None:
        try:
            rows_wanted = rows_wanted.filter(_beyond(queryset.model, order, values, forward=forward))
            rows = read(rows_wanted, values[0], limit + 1)
        except (TypeError, ValueError, ValidationError) as error:
            raise BadCursor(NOT_OF_THIS_LIST) from error
    else:
        rows = read(rows_wanted, None, limit + 1)
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
