"""Request ids: UUIDv7, so that records sort by arrival (RFC 9562)."""

from __future__ import annotations

import os
import random
from typing import Final

_getrandbits = random.Random(os.urandom(32)).getrandbits  # noqa: S311  ids have to differ, not to be secret
_VARIANT: Final = 0x8 << 60


class _Millisecond:
    """The part of the ids of one millisecond that they share."""

    __slots__ = ("ms", "prefix")

    def __init__(self) -> None:
        self.ms = -1
        self.prefix = ""


_last: Final = _Millisecond()


def new_request_id(now_us: int) -> str:
    """A UUIDv7 of an instant in Unix microseconds."""
    now_ms = now_us // 1000
    if now_ms != _last.ms:
        time = f"{now_ms & 0xFFFF_FFFF_FFFF:012x}"
        _last.ms, _last.prefix = now_ms, f"{time[:8]}-{time[8:]}-7"
    # 12 random bits, the variant in the two bits after them, 62 random bits.
    rest = f"{_getrandbits(12) << 64 | _VARIANT | _getrandbits(62):019x}"
    return f"{_last.prefix}{rest[:3]}-{rest[3:7]}-{rest[7:]}"
