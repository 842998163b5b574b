"""Which 32 bytes are an Ed25519 public key that binds its holder (RFC 8032, section 5.1).

Libraries read any 32 bytes. A point of small order, such as all zeros, lets a signature be made without a private key,
and one that is off the curve lets none be verified: neither may name an agent.
"""

from typing import Final

_P: Final = 2**255 - 19
_D: Final = -121665 * pow(121666, -1, _P) % _P


def is_public_key(raw: bytes) -> bool:
    """True for the one encoding of a point on the curve whose order is not 1, 2, 4 or 8."""
    if len(raw) != 32:
        return False
    number = int.from_bytes(raw, "little")
    y, negative = number & (2**255 - 1), number >> 255
    if y >= _P:
        return False
    squared = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    if (squared and pow(squared, (_P - 1) // 2, _P) != 1) or (not squared and negative):
        return False
    for _ in range(3):
        y, squared = _doubled(y, squared)
    return (y, squared) != (1, 0)


def _doubled(y: int, squared: int) -> tuple[int, int]:
    """y and x squared of twice a point, from y and x squared: the sign of x has no say in either."""
    y2 = y * y % _P
    product = _D * squared * y2 % _P
    twice_y = (y2 + squared) * pow(1 - product, -1, _P) % _P
    twice_x_squared = 4 * squared * y2 * pow((1 + product) * (1 + product), -1, _P) % _P
    return twice_y, twice_x_squared
