import base64
import json

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from controlplane.wire.policy import SignedPolicy, policy_message
from controlplane.wire.signing import canonical, digest_hex, from_text, key_id, sign, to_text
from controlplane.wire.verification import Succession, UnverifiedBundle, follow, succession_message, verify_bundle
from tests.wire.messages import DOCUMENT


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def bundle(key: Ed25519PrivateKey, **changes) -> bytes:
    document = msgspec.structs.replace(DOCUMENT, **changes)
    body = canonical(document)
    message = policy_message(
        installation=DOCUMENT.installation, pool=DOCUMENT.pool.slug, revision=DOCUMENT.revision,
        digest=digest_hex(body), accept_until=DOCUMENT.accept_until,
    )  # fmt: skip
    return msgspec.json.encode(SignedPolicy(key_id(public(key)), to_text(sign(key, message)), to_text(body)))


def succession(before: Ed25519PrivateKey, after: Ed25519PrivateKey, use: str = "policy") -> Succession:
    old, new = key_id(public(before)), public(after)
    message = succession_message(use=use, predecessor=old, public_key=new)
    return Succession(use, old, key_id(new), to_text(new), to_text(sign(before, message)))


ONE, TWO, THREE, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3, 9))


def test_a_bundle_holds_under_its_key_and_says_what_it_is():
    found = verify_bundle(bundle(ONE), public_key=to_text(public(ONE)))
    assert (found["pool"], found["revision"]) == (DOCUMENT.pool.slug, DOCUMENT.revision)


def test_another_key_a_changed_body_and_swapped_targets_do_not_hold():
    with pytest.raises(UnverifiedBundle, match="does not lead to"):
        verify_bundle(bundle(ONE), public_key=to_text(public(TWO)))
    for changes in ({"revision": 99}, {"installation": "other"}, {"accept_until": "2099-01-01T00:00:00Z"}):
        with pytest.raises(UnverifiedBundle, match="signature"):
            verify_bundle(bundle(ONE, **changes), public_key=to_text(public(ONE)))


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_of_body_or_signature_holds(place, bit):
    envelope = json.loads(bundle(ONE))
    for name in ("body", "signature"):
        raw = bytearray(from_text(envelope[name]))
        raw[place % len(raw)] ^= 1 << bit
        changed = json.dumps({**envelope, name: to_text(bytes(raw))}).encode()
        with pytest.raises(UnverifiedBundle):
            verify_bundle(changed, public_key=to_text(public(ONE)))


def test_trust_follows_signed_successors_only():
    chain = [succession(TWO, THREE), succession(ONE, TWO)]
    links = msgspec.json.encode(chain)
    assert verify_bundle(bundle(THREE), public_key=to_text(public(ONE)), successions=links)["kid"] == key_id(
        public(THREE)
    )
    # not backwards, not past a gap, not by another use, not by a stranger's word
    with pytest.raises(UnverifiedBundle):
        verify_bundle(bundle(ONE), public_key=to_text(public(THREE)), successions=links)
    with pytest.raises(UnverifiedBundle):
        verify_bundle(bundle(THREE), public_key=to_text(public(ONE)), successions=msgspec.json.encode(chain[:1]))
    with pytest.raises(UnverifiedBundle):
        nudge = msgspec.json.encode([succession(ONE, TWO, use="nudge")])
        verify_bundle(bundle(TWO), public_key=to_text(public(ONE)), successions=nudge)
    forged = msgspec.structs.replace(succession(OTHER, TWO), predecessor=key_id(public(ONE)))
    with pytest.raises(UnverifiedBundle, match="succession"):
        follow(public(ONE), "policy", [forged])


@given(raw=st.binary(max_size=200), key=st.text(max_size=60), links=st.binary(max_size=60))
def test_anything_else_is_refused_with_a_sentence(raw, key, links):
    with pytest.raises(UnverifiedBundle):
        verify_bundle(raw, public_key=key, successions=links)
    with pytest.raises(UnverifiedBundle):
        verify_bundle(bundle(ONE), public_key=base64.urlsafe_b64encode(raw[:31]).decode())
