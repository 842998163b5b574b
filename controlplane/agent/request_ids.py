"""Request ids: UUIDv7, so that records sort by arrival (RFC 9562)."""

from __future__ import annotations

import os
from typing import Final

POOL_BYTES: Final = 4_096
_DIGITS: Final = 19
"""Hexadecimal digits of an id that are random: 12 bits, two of the digit of the variant, and 60 bits."""
_VARIANTS: Final = {digit: "89ab"[at % 4] for at, digit in enumerate("0123456789abcdef")}


class _Ids:
    """What the next id is made of: the part that ids of one millisecond share, and random digits."""

    __slots__ = ("at", "ms", "pool", "prefix")

    def __init__(self) -> None:
        self.ms = -1
        self.prefix = ""
        self.pool = ""
        self.at = 0


_ids: Final = _Ids()


def new_request_id(now_us: int) -> str:
    """A UUIDv7 of an instant in Unix microseconds."""
    ids, now_ms = _ids, now_us // 1000
    if now_ms != ids.ms:
        time = f"{now_ms & 0xFFFF_FFFF_FFFF:012x}"
        ids.ms, ids.prefix = now_ms, f"{time[:8]}-{time[8:]}-7"
    pool, at = ids.pool, ids.at
    if at + _DIGITS > len(pool):
        # Formatting random numbers costs more than all the rest of an id.
        pool = ids.pool = os.urandom(POOL_BYTES).hex()
        at = 0
    ids.at = at + _DIGITS
    return f"{ids.prefix}{pool[at : at + 3]}-{_VARIANTS[pool[at + 3]]}{pool[at + 4 : at + 7]}-{pool[at + 7 : at + 19]}"
