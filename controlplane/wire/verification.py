"""A bundle checked with nothing but a public key: who signed what for whom, and how one key follows another.

A succession is signed by the key before: whoever trusts one key can follow it to those that came after it, as long as
no key on the way was given up (a revoked key's successor made after a theft has to be handed over by people).
"""

from typing import Any

import msgspec
from msgspec import Struct

from controlplane.wire.policy import PolicyDocument, SignedPolicy, document_message
from controlplane.wire.signing import digest_hex, from_text, key_id, verify


class Succession(Struct, frozen=True):
    """`use` (policy, live, nudge): the key `kid` follows `predecessor`, which signed `succession_message`."""

    use: str
    predecessor: str
    kid: str
    public_key: str
    signature: str


class UnverifiedBundle(ValueError):
    """Why a bundle is not to be trusted, in one sentence."""


def succession_message(*, use: str, predecessor: str, public_key: bytes) -> bytes:
    """What a key signs for the one after it."""
    return b"succession\n%b\n%b\n%b" % (use.encode(), predecessor.encode(), public_key.hex().encode())


def follow(trusted: bytes, use: str, successions: list[Succession]) -> dict[str, bytes]:
    """kid -> public key of every key that the trusted one leads to, itself among them. Raises UnverifiedBundle."""
    known = {key_id(trusted): trusted}
    left = [one for one in successions if one.use == use]
    while step := next((one for one in left if one.predecessor in known), None):
        left.remove(step)
        public = _bytes(step.public_key, "a successor's key")
        message = succession_message(use=use, predecessor=step.predecessor, public_key=public)
        signature = _bytes(step.signature, "a succession's signature")
        if key_id(public) != step.kid or not verify(known[step.predecessor], signature, message):
            raise UnverifiedBundle(f"the succession from {step.predecessor} to {step.kid} does not hold")
        known[step.kid] = public
    return known


def verify_bundle(bundle: bytes, *, public_key: str, successions: bytes = b"[]") -> dict[str, Any]:
    """What the bundle is, once everything about it holds. Raises UnverifiedBundle with what does not.

    `public_key` is base64url of 32 bytes, `successions` JSON of a list of Succession. The signature covers
    installation, pool, revision, digest and accept_until, so none of them can be swapped.
    """
    try:
        envelope = msgspec.json.decode(bundle, type=SignedPolicy)
        body = from_text(envelope.body)
        document = msgspec.json.decode(body, type=PolicyDocument)
        links = msgspec.json.decode(successions, type=list[Succession])
    except ValueError as error:
        raise UnverifiedBundle(f"it cannot be read: {error}") from error
    trusted = _bytes(public_key, "the public key")
    if len(trusted) != 32:
        raise UnverifiedBundle("the public key is not 32 bytes of base64url")
    known = follow(trusted, "policy", links)
    if envelope.kid not in known:
        raise UnverifiedBundle(f"it was signed by {envelope.kid}, which the key {key_id(trusted)} does not lead to")
    digest = digest_hex(body)
    if not verify(known[envelope.kid], _bytes(envelope.signature, "the signature"), document_message(document, digest)):
        raise UnverifiedBundle(f"the signature of {envelope.kid} does not hold: the bundle was changed")
    return {
        "holds": True,
        "installation": document.installation,
        "pool": document.pool.slug,
        "revision": document.revision,
        "digest": digest,
        "schema": document.schema,
        "not_before": document.not_before,
        "accept_until": document.accept_until,
        "kid": envelope.kid,
    }


def _bytes(text: str, what: str) -> bytes:
    try:
        return from_text(text)
    except ValueError as error:
        raise UnverifiedBundle(f"{what} is not base64url: {error}") from error
