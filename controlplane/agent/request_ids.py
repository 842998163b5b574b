"""Request ids: UUIDv7, so that records sort by arrival (RFC 9562)."""

import os
import random

_getrandbits = random.Random(os.urandom(32)).getrandbits  # noqa: S311  ids have to differ, not to be secret


def new_request_id(now_us: int) -> str:
    """A UUIDv7 of an instant in Unix microseconds."""
    now_ms, bits = now_us // 1000, _getrandbits(74)
    high, low = now_ms >> 16 & 0xFFFF_FFFF, now_ms & 0xFFFF
    variant, node = 0x8000 | bits >> 48 & 0x3FFF, bits & 0xFFFF_FFFF_FFFF
    return f"{high:08x}-{low:04x}-7{bits >> 62:03x}-{variant:04x}-{node:012x}"
