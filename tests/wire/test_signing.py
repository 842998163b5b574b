"""Canonical bytes, digests, signatures."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.wire import policy, signing

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()


def test_canonical_form():
    assert signing.canonical({"b": 1, "a": {"d": None, "c": "é"}}) == '{"a":{"c":"é","d":null},"b":1}'.encode()


def test_a_request_is_signed_over_all_of_it():
    base = {"method": "POST", "path": "/agent/v1/report", "body": b"{}", "epoch": 3, "stamp": 4}
    message = signing.request_message(**base)
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert message == f"POST\n/agent/v1/report\n{digest}\n3\n4".encode()
    others = [{"method": "GET"}, {"path": "/x"}, {"body": b"{ }"}, {"epoch": 4}, {"stamp": 5}]
    signature = signing.sign(KEY, message)
    assert signing.verify(PUBLIC, signature, message)
    for change in others:
        assert not signing.verify(PUBLIC, signature, signing.request_message(**{**base, **change}))


@settings(max_examples=50)
@given(st.binary(max_size=200), st.integers(0, 63), st.integers(1, 255))
def test_a_signature_that_is_changed_anywhere_does_not_hold(message, at, flip):
    signature = bytearray(signing.sign(KEY, message))
    assert signing.verify(PUBLIC, bytes(signature), message)
    signature[at] ^= flip
    assert not signing.verify(PUBLIC, bytes(signature), message)


@pytest.mark.parametrize(("public", "signature"), [(b"", b""), (b"x" * 31, b"y" * 64), (PUBLIC, b"short")])
def test_keys_and_signatures_of_wrong_size_are_false_not_errors(public, signature):
    assert not signing.verify(public, signature, b"m")


def test_text_form_and_key_id():
    assert signing.from_text(signing.to_text(PUBLIC)) == PUBLIC
    assert signing.key_id(PUBLIC) == "56475aa75463474c"
    with pytest.raises(ValueError):
        signing.from_text("a")


def test_messages_of_different_uses_never_coincide():
    texts = {
        policy.policy_message(installation="i", pool="p", revision=1, digest="d", accept_until="u"),
        policy.live_message(installation="i", number=1, digest="d"),
        policy.nudge_message(installation="i", digest="d"),
    }
    assert texts == {b"policy\ni\np\n1\nd\nu", b"live\ni\n1\nd", b"nudge\ni\nd"}
