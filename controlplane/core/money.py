"""Money as integer nanos (1e-9 of the book currency) and the two ways it is rounded and split.

Nothing here uses floats. Exact intermediate values are `fractions.Fraction`; a value becomes an integer once, by
`round_half_even`, and an integer is divided among owners only by `distribute`, so that parts add up to the whole.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

Key = TypeVar("Key", str, int)

NANOS_PER_UNIT = 1_000_000_000
NANOS_PER_CENT = NANOS_PER_UNIT // 100
US_PER_HOUR = 3_600_000_000

_DECIMAL = re.compile(r"([+-]?)(\d+)(?:\.(\d*))?(?:[eE]([+-]?\d{1,3}))?", re.ASCII)
_MAX_DIGITS = 60
_MAX_EXPONENT = 40


def round_half_even(value: Fraction | int) -> int:
    """Nearest integer, ties to the even one; round_half_even(-x) == -round_half_even(x)."""
    return round(value)


def round_ratio(numerator: int, denominator: int) -> int:
    """numerator / denominator rounded half-even, in integers only; the denominator is positive."""
    if denominator <= 0:
        raise ValueError(f"the denominator must be positive, not {denominator}")
    quotient = numerator // denominator
    twice = 2 * (numerator - quotient * denominator)
    if twice > denominator or (twice == denominator and quotient & 1):
        return quotient + 1
    return quotient


def ceil_ratio(numerator: int, denominator: int) -> int:
    """numerator / denominator rounded up; the denominator is positive."""
    if denominator <= 0:
        raise ValueError(f"the denominator must be positive, not {denominator}")
    return -(-numerator // denominator)


def parse_decimal(text: str) -> Fraction:
    """Exact value of a decimal string ("14880.00", "-0.5", "2.5e-7").

    Raises ValueError for anything else: thousands separators, currency signs, infinities, more than 60 digits.
    """
    match = _DECIMAL.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:80]!r} is not a decimal number: write it like 1234.56, without separators or signs")
    sign, whole, part, exponent = match.groups()
    part = part or ""
    shift = int(exponent or 0)
    if len(whole) + len(part) > _MAX_DIGITS or abs(shift) > _MAX_EXPONENT:
        raise ValueError(
            f"{text[:80]!r} has too many digits: at most {_MAX_DIGITS} digits and exponent {_MAX_EXPONENT}"
        )
    value = Fraction(int(whole + part)) * Fraction(10) ** (shift - len(part))
    return -value if sign == "-" else value


def parse_nanos(text: str) -> int:
    """Nanos of an exact decimal string of currency; ValueError when it is finer than a nano."""
    value = parse_decimal(text) * NANOS_PER_UNIT
    if value.denominator != 1:
        raise ValueError(f"{text.strip()!r} is finer than 0.000000001: money has at most nine decimals")
    return value.numerator


def format_nanos(nanos: int, *, places_min: int = 2) -> str:
    """Exact decimal string of nanos with at least `places_min` (0 to 9) decimals and no needless zeros after them."""
    if not 0 <= places_min <= 9:
        raise ValueError(f"places_min must be 0 to 9, not {places_min}")
    whole, part = divmod(abs(nanos), NANOS_PER_UNIT)
    digits = f"{part:09d}".rstrip("0").ljust(places_min, "0")
    sign = "-" if nanos < 0 else ""
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"


def format_cents(cents: int) -> str:
    """Decimal string of an integer number of cents with two decimals: -150 is "-1.50"."""
    whole, part = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole}.{part:02d}"


def cents_of(nanos: int) -> int:
    """Cents of one amount printed alone, rounded half-even; amounts printed in a column use `distribute_cents`."""
    return round_ratio(nanos, NANOS_PER_CENT)


def distribute(total: int, quotas: Mapping[Key, Fraction]) -> dict[Key, int]:
    """Integers next to exact `quotas` that add up to `total`, by largest remainder, ties in key order.

    `total` must be the sum of the quotas rounded up or down; each part is then its quota rounded down or up.
    Quotas may be negative. Sign-symmetric: the parts of the negated problem are the negated parts.
    Returns the keys in key order. Raises ValueError when `total` is a unit or more away from the sum.
    """
    exact = sum(quotas.values(), Fraction(0))
    if abs(exact - total) >= 1:
        raise ValueError(f"cannot distribute {total}: the quotas add up to {float(exact)}")
    keys = sorted(quotas)
    if _leads_negative(exact, quotas, keys):
        negated = distribute(-total, {key: -quotas[key] for key in keys})
        return {key: -part for key, part in negated.items()}
    parts = {key: quotas[key].numerator // quotas[key].denominator for key in keys}
    left = total - sum(parts.values())
    if left:
        # sorted() is stable, so equal remainders stay in key order
        for key in sorted(keys, key=lambda key: parts[key] - quotas[key])[:left]:
            parts[key] += 1
    return parts


def _leads_negative(exact: Fraction, quotas: Mapping[Key, Fraction], keys: list[Key]) -> bool:
    if exact:
        return exact < 0
    return next((quotas[key] < 0 for key in keys if quotas[key]), False)


def split_largest_remainder(total: int, exact_weights: Mapping[Key, Fraction | int]) -> dict[Key, int]:
    """Split an integer in proportion to exact non-negative weights; parts add up to `total`, ties in key order.

    Raises ValueError for a negative weight, or when no weight is positive and there is something to split.
    """
    if any(weight < 0 for weight in exact_weights.values()):
        raise ValueError("a weight is negative: split amounts by weights of zero or more")
    whole = sum((Fraction(weight) for weight in exact_weights.values()), Fraction(0))
    if not whole:
        if total:
            raise ValueError(f"cannot split {total}: no weight is positive")
        return dict.fromkeys(sorted(exact_weights), 0)
    return distribute(total, {key: total * Fraction(weight) / whole for key, weight in exact_weights.items()})


def split_by_counts(total: int, counts: Mapping[Key, int]) -> dict[Key, int]:
    """`split_largest_remainder` for a total and counts of zero or more, with at least one positive; no fractions."""
    whole = sum(counts.values())
    if total < 0 or whole <= 0 or any(count < 0 for count in counts.values()):
        raise ValueError(f"cannot split {total} by {dict(counts)}: no number may be negative, nor all counts 0")
    keys = sorted(counts)
    parts = {key: total * counts[key] // whole for key in keys}
    left = total - sum(parts.values())
    if left:
        # sorted() is stable, so equal remainders stay in key order
        for key in sorted(keys, key=lambda key: -(total * counts[key] % whole))[:left]:
            parts[key] += 1
    return parts


def distribute_cents(parts_nanos: Mapping[str, int]) -> dict[str, int]:
    """Cents to print for each part, adding up to the printed (half-even) total of all parts."""
    return share_cents(cents_of(sum(parts_nanos.values())), parts_nanos)


def share_cents(total_cents: int, parts_nanos: Mapping[str, int]) -> dict[str, int]:
    """Cents of parts whose sum is printed as `total_cents`: `distribute` of amounts, without fractions, since pages
    share out ten thousand tenants by it. Raises ValueError when `total_cents` is a cent or more away from the sum.
    """
    whole = sum(parts_nanos.values())
    if abs(whole - total_cents * NANOS_PER_CENT) >= NANOS_PER_CENT:
        raise ValueError(f"cannot distribute {total_cents} cents: the parts add up to {whole} nanos")
    keys = sorted(parts_nanos)
    sign = -1 if whole < 0 or (not whole and _first_nonzero(parts_nanos, keys) < 0) else 1
    split = {key: divmod(sign * parts_nanos[key], NANOS_PER_CENT) for key in keys}
    left = sign * total_cents - sum(cents for cents, _ in split.values())
    # sorted() is stable, so equal remainders stay in key order
    more = set(sorted(keys, key=lambda key: -split[key][1])[:left]) if left else set()
    return {key: sign * (split[key][0] + (key in more)) for key in keys}


def _first_nonzero(parts: Mapping[str, int], keys: Sequence[str]) -> int:
    return next((parts[key] for key in keys if parts[key]), 0)
