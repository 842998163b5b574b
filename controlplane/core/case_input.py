"""Reading of worked cases: dictionaries decoded from JSON, with errors that name the key at fault."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from controlplane.core.money import parse_decimal

Case = Mapping[str, Any]


def required(case: Case, key: str) -> Any:
    """Value of a key; ValueError when it is missing or the case is not an object."""
    if not isinstance(case, Mapping):
        raise ValueError(f"expected an object with {key!r}, not {type(case).__name__}")
    if key not in case:
        raise ValueError(f"{key!r} is missing")
    return case[key]


def text(case: Case, key: str) -> str:
    """A non-empty string."""
    value = required(case, key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key!r} must be a non-empty string, not {value!r}")
    return value


def whole(case: Case, key: str, default: int | None = None, *, least: int | None = 0) -> int:
    """An integer, at least `least`."""
    value = default if default is not None and case.get(key) is None else required(case, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{key!r} must be a whole number, not {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{key!r} must be at least {least}, not {value!r}")
    return int(value)


def exact(value: Any, key: str) -> Fraction:
    """A number, or a decimal string, as the decimal it was written as."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{key!r} must be a number, not {value!r}")
    try:
        return parse_decimal(str(value))
    except ValueError as error:
        raise ValueError(f"{key!r}: {error}") from None


def us_of_seconds(value: Any, key: str) -> int:
    """Seconds as integer microseconds; ValueError when finer than a microsecond."""
    us = exact(value, key) * 1_000_000
    if us.denominator != 1:
        raise ValueError(f"{key!r} is finer than a microsecond: {value!r}")
    return us.numerator


def rows(case: Case, key: str, default: list[Any] | None = None) -> list[Any]:
    """A list."""
    value = default if default is not None and case.get(key) is None else required(case, key)
    if not isinstance(value, list):
        raise ValueError(f"{key!r} must be a list, not {type(value).__name__}")
    return value


def mapping(case: Case, key: str) -> dict[str, Any]:
    """An object, empty when the key is missing."""
    value = case.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key!r} must be an object, not {type(value).__name__}")
    return value
