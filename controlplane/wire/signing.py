"""Canonical JSON, digests and Ed25519 signatures of everything that crosses between agent and control plane."""

import base64
import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nacl.bindings import crypto_sign_open
from nacl.exceptions import BadSignatureError
from nacl.exceptions import ValueError as NaClValueError

AGENT_HEADER = "x-flexband-agent"
EPOCH_HEADER = "x-flexband-epoch"
SEQ_HEADER = "x-flexband-seq"
TIME_HEADER = "x-flexband-time"
SIGNATURE_HEADER = "x-flexband-signature"
# How far the signed time of a request without a seq may lie from the receiver's clock.
TIME_TOLERANCE_US = 300_000_000

_encoder = msgspec.json.Encoder(order="deterministic")


def canonical(document: Any) -> bytes:
    """The one byte form of a document: JSON, keys sorted, no spaces, UTF-8."""
    return _encoder.encode(document)


def digest_hex(body: bytes) -> str:
    """SHA-256 as 64 hex digits."""
    return hashlib.sha256(body).hexdigest()


def request_message(
    *, method: str, path: str, body: bytes, epoch: int, stamp: int, digest: bytes | None = None
) -> bytes:
    """What an agent signs. `stamp` is the seq, or Unix microseconds where there is none.

    `digest` is the SHA-256 of the body, where it is known already.
    """
    text = digest_hex(body) if digest is None else digest.hex()
    return f"{method}\n{path}\n{text}\n{epoch}\n{stamp}".encode()


def sign(key: Ed25519PrivateKey, message: bytes) -> bytes:
    """64 bytes."""
    return key.sign(message)


def verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """True when `signature` (64 bytes) of `message` was made by the private half of `public_key` (32 raw bytes).

    By libsodium, in half the time of OpenSSL: it is the largest part of taking a small report.
    """
    try:
        crypto_sign_open(signature + message, public_key)
    except (BadSignatureError, NaClValueError):
        return False
    return True


def keys_digest(names: Iterable[str]) -> str:
    """16 hex digits that change when a signing key comes or goes; names are `policy:<kid>` and the like."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


def to_text(raw: bytes) -> str:
    """Base64url with padding."""
    return base64.urlsafe_b64encode(raw).decode()


def from_text(text: str | bytes) -> bytes:
    """Raises ValueError on text that is not base64."""
    return base64.urlsafe_b64decode(text.encode() if isinstance(text, str) else text)


def key_id(public_key: bytes) -> str:
    """`kid`: the first 16 hex digits of the key's SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:16]
