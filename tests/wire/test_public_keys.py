"""Keys that name nobody are told apart from keys."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.wire.public_keys import is_public_key

P = 2**255 - 19
ORDER_8 = int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little")


def encoded(y: int, sign: int = 0) -> bytes:
    return (y | sign << 255).to_bytes(32, "little")


def test_every_made_key_is_one():
    for _ in range(100):
        assert is_public_key(Ed25519PrivateKey.generate().public_key().public_bytes_raw())


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("y", [0, 1, P - 1, ORDER_8, P - ORDER_8, P, P + 1])
def test_points_of_small_order_are_none(y, sign):
    assert not is_public_key(encoded(y, sign))


def test_off_the_curve_and_of_another_length():
    assert not is_public_key(encoded(2))
    assert is_public_key(encoded(3))
    assert not is_public_key(b"\xff" * 32)
    assert not is_public_key(encoded(3) + b"\0")
    assert not is_public_key(b"")
