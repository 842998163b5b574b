"""Reads questions in JSON and says which key is wrong, with its full path, and what is wrong with it.

Durations become integer microseconds by the unit that ends their key, instants become microseconds since 1970 UTC.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from fractions import Fraction
from typing import Any

from controlplane.core.flex_policy import exact
from controlplane.core.money import parse_decimal

#: Stands for "this key must be there" where a default may be given.
ABSENT: Any = object()

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNIT_US = {"_ms": 1_000, "_s": 1_000_000}


class JsonReader:
    """Reads one JSON object, names the full path of a key in every error, and remembers which keys were read."""

    def __init__(self, value: object, path: str) -> None:
        self._path = path
        if not isinstance(value, dict):
            raise ValueError(f"{path.rstrip('.') or 'input'}: must be an object, not {_kind(value)}")
        self._value: dict[str, Any] = value
        self._read: set[str] = set()
        self._parts: dict[str, JsonReader | list[JsonReader]] = {}

    def located(self, problem: str) -> str:
        """A problem with the path of this object before it, unless it is there."""
        place = self._path.rstrip(".")
        return problem if problem.startswith(place) else f"{place}: {problem}"

    def names(self) -> tuple[str, ...]:
        return tuple(self._value)

    def take(self, key: str, default: Any = ABSENT) -> Any:
        self._read.add(key)
        value = self._value.get(key, default)
        if value is ABSENT:
            raise ValueError(f"{self._path}{key}: is missing")
        return value

    def part(self, key: str) -> JsonReader:
        if key not in self._parts:
            self._parts[key] = JsonReader(self.take(key), f"{self._path}{key}.")
        part = self._parts[key]
        assert isinstance(part, JsonReader)
        return part

    def part_or_empty(self, key: str) -> JsonReader:
        """The object of a key; an empty one when it is missing or null."""
        if self._value.get(key) is None:
            self._read.add(key)
            return JsonReader({}, f"{self._path}{key}.")
        return self.part(key)

    def listed(self, key: str, default: Any = ABSENT) -> list[Any]:
        value = self.take(key, default)
        if not isinstance(value, list):
            raise ValueError(f"{self._path}{key}: must be a list, not {_kind(value)}")
        return value

    def items(self, key: str, default: Any = ABSENT) -> list[JsonReader]:
        if key not in self._parts:
            listed = self.listed(key, default)
            self._parts[key] = [JsonReader(item, f"{self._path}{key}[{n}].") for n, item in enumerate(listed)]
        items = self._parts[key]
        assert isinstance(items, list)
        return items

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{self._path}{key}: must be a text, not {_kind(value)}")
        return value

    def flag(self, key: str) -> bool:
        value = self.take(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"{self._path}{key}: must be true or false, not {_kind(value)}")
        return value

    def number(self, key: str, default: Any) -> float:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self._path}{key}: must be a finite number, not {_kind(value)}")
        return value

    def integer(self, key: str, default: Any = ABSENT, *, least: int | None = 0) -> Any:
        """A whole number, at least `least`; null where null is the default."""
        value = self.take(key, default)
        if value is None and default is None:
            return None
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not whole or (least is not None and value < least):
            wanted = "a whole number" if least is None else f"a whole number of {least} or more"
            raise ValueError(f"{self._path}{key}: must be {wanted}, not {_kind(value)}")
        return int(value)

    def decimal(self, key: str, default: Any = ABSENT) -> Fraction:
        """A number, or a decimal in a text, as the decimal it was written as."""
        return _decimal(self.take(key, default), f"{self._path}{key}")

    def seconds_us(self, key: str) -> int:
        """Seconds as microseconds, exactly: what is finer is refused."""
        return _seconds_us(self.take(key), f"{self._path}{key}")

    def seconds_us_items(self, key: str) -> list[int]:
        """A list of such seconds."""
        return [_seconds_us(value, f"{self._path}{key}[{n}]") for n, value in enumerate(self.listed(key))]

    def duration_us(self, key: str, default_us: Any) -> int:
        """The unit is the key's ending. Fractions under a microsecond are rounded half to even."""
        if default_us is not ABSENT and key not in self._value:
            return int(default_us)
        value = self.number(key, ABSENT)
        if value < 0:
            raise ValueError(f"{self._path}{key}: must be 0 or more, not {value}")
        return round(exact(value) * _UNIT_US["_ms" if key.endswith("_ms") else "_s"])

    def choice(self, key: str, kind: type[StrEnum], default: Any) -> Any:
        value = self.take(key, default)
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(member.value for member in kind)
            raise ValueError(f"{self._path}{key}: must be one of {known}, not {value!r}") from None

    def instant(self, key: str, *, required: bool = False) -> Any:
        value = self.take(key, ABSENT if required else None)
        if value is None and not required:
            return None
        if not isinstance(value, str):
            raise ValueError(f"{self._path}{key}: must be an ISO 8601 instant, not {_kind(value)}")
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{self._path}{key}: {value!r} is not an ISO 8601 instant") from None
        if moment.tzinfo is None:
            raise ValueError(f"{self._path}{key}: {value!r} names no zone; end it with Z or an offset")
        return (moment - _EPOCH) // timedelta(microseconds=1)

    def ignored(self) -> Iterator[str]:
        """Paths of keys that nothing asked for."""
        for key in self._value:
            if key not in self._read:
                yield f"{self._path}{key}"
        for part in self._parts.values():
            for reader in part if isinstance(part, list) else [part]:
                yield from reader.ignored()


def _decimal(value: object, place: str) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{place}: must be a number, not {_kind(value)}")
    try:
        return parse_decimal(str(value))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _seconds_us(value: object, place: str) -> int:
    us = _decimal(value, place) * 1_000_000
    if us.denominator != 1:
        raise ValueError(f"{place}: {value!r} is finer than a microsecond")
    return us.numerator


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), repr(value))
