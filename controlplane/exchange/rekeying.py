"""A new key of an agent, at its door: read, proved, kept beside the present one, and then its only one."""

from __future__ import annotations

from datetime import datetime

from controlplane.core.period import to_us
from controlplane.exchange.authentication import Caller
from controlplane.exchange.problems import Refusal
from controlplane.fleet.keys import KeyRefused, complete_rotation, has_key, take_new_key
from controlplane.wire import signing
from controlplane.wire.public_keys import is_public_key
from controlplane.wire.rekeying import Rekey, Rekeyed, proof_message


def take(caller: Caller, message: Rekey, now: datetime) -> Rekeyed:
    """Raises Refusal: unreadable for what is no key or has no proof, conflict where no key or another is awaited."""
    key = _proved_key(caller.agent.uuid, message)
    try:
        until = take_new_key(agent_id=caller.agent.id, public_key=key, now=now)
    except KeyRefused as refused:
        raise Refusal("conflict", str(refused)) from None
    return Rekeyed(until_us=to_us(until))


def complete(caller: Caller, now: datetime) -> None:
    """After a report that was taken: the key that signed it is the only one from now on.

    Raises Refusal: bad_signature for a key that was withdrawn meanwhile. Its agent would drop the old one for it; so it
    sends the report again with the old one, as a repeat.
    """
    key = caller.public_key
    if not complete_rotation(agent_id=caller.agent.id, public_key=key, now=now) and not has_key(caller.agent.id, key):
        raise Refusal("bad_signature", "This new key was withdrawn. Sign with the one before it and post it again.")


def _proved_key(uuid: str, message: Rekey) -> bytes:
    try:
        key, proof = signing.from_text(message.public_key), signing.from_text(message.proof)
    except ValueError:
        raise Refusal("unreadable", "public_key and proof must be base64url.") from None
    if not is_public_key(key):
        raise Refusal("unreadable", "public_key must be a sound Ed25519 public key: 32 bytes as base64url.")
    if not signing.verify(key, proof, proof_message(uuid, key)):
        raise Refusal("unreadable", "proof is not the new key's signature: send it from who holds the new key.")
    return key
