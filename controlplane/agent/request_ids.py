"""Request ids: UUIDv7, so that records sort by arrival (RFC 9562)."""

import os
import random

_random = random.Random(os.urandom(32))  # noqa: S311  ids have to differ, not to be secret


def new_request_id(now_us: int) -> str:
    """A UUIDv7 of an instant in Unix microseconds."""
    bits = _random.getrandbits(74)
    value = (
        (now_us // 1000 & 0xFFFF_FFFF_FFFF) << 80 | 0x7 << 76 | (bits >> 62) << 64 | 0b10 << 62 | bits & (1 << 62) - 1
    )
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
