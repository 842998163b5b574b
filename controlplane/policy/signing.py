"""Signing keys: private halves are files that only worker and controller can read, rows hold the public halves.

There is one key in use per use (policy, live, nudge), so that whoever holds the key of nudges can sign no policy.
"""

import logging
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from django.conf import settings
from django.db import connection, transaction

from controlplane.policy.models import SigningKey
from controlplane.wire.signing import key_id, sign
from controlplane.wire.verification import succession_message

log = logging.getLogger(__name__)

# Any fixed number: whoever makes keys first, the others wait and find them.
KEYS_LOCK = 0x666C6B79
PRIVATE_FILE_MODE = 0o600
PRIVATE_DIRECTORY_MODE = 0o700


class SigningKeyMissing(Exception):
    """The public half is known, the private half is not here; says which file and what to do."""


@dataclass(frozen=True)
class Signer:
    """A private key with its `kid`; never printed, never stored in a row."""

    kid: str
    key: Ed25519PrivateKey

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""
        return sign(self.key, message)

    def __repr__(self) -> str:
        return f"Signer(kid={self.kid!r})"


def ensure_keys(now: datetime) -> dict[str, str]:
    """Makes the keys that are missing: use -> kid. Several processes may call it at once."""
    kids: dict[str, str] = {}
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [KEYS_LOCK])
        for use in SigningKey.Use.values:
            row = _in_use(use)
            kids[use] = row.kid if row is not None else _create(use, now)
    return kids


def signer(use: str, now: datetime) -> Signer:
    """The key in use; made when there is none yet. Raises SigningKeyMissing where its file cannot be read."""
    row = _in_use(use)
    kid = row.kid if row is not None else ensure_keys(now)[use]
    return Signer(kid, _read_private(use, kid))


def rotate(use: str, now: datetime) -> str:
    """Revokes the key in use and makes its successor; the sweep signs what is in force again. Returns the new kid.

    The successor is signed by the key before where its private half can be read: whoever trusts the one can check the
    other. Where it is lost, the successor has to be handed over by people.
    """
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [KEYS_LOCK])
        before = _in_use(use)
        kid = _create(use, now)
        if before is not None:
            _succeed(use, before.kid, kid)
        SigningKey.objects.filter(use=use, revoked_at__isnull=True).exclude(kid=kid).update(revoked_at=now)
        return kid


def _succeed(use: str, predecessor: str, kid: str) -> None:
    try:
        key = _read_private(use, predecessor)
    except SigningKeyMissing as error:
        log.warning("the %s key %s has no word of its predecessor: %s", use, kid, error)
        return
    public = bytes(SigningKey.objects.values_list("public_key", flat=True).get(pk=kid))
    message = succession_message(use=use, predecessor=predecessor, public_key=public)
    SigningKey.objects.filter(pk=kid).update(predecessor=predecessor, predecessor_signature=sign(key, message))


def private_path(use: str, kid: str) -> Path:
    return Path(settings.SIGNING_KEY_DIR) / f"{use}-{kid}.pem"


def _in_use(use: str) -> SigningKey | None:
    return SigningKey.objects.filter(use=use, revoked_at__isnull=True).order_by("-created_at", "kid").first()


def _create(use: str, now: datetime) -> str:
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    kid = key_id(public)
    _write_private(private_path(use, kid), key)
    SigningKey.objects.create(kid=kid, use=use, public_key=public, created_at=now)
    return kid


def _write_private(path: Path, key: Ed25519PrivateKey) -> None:
    path.parent.mkdir(mode=PRIVATE_DIRECTORY_MODE, parents=True, exist_ok=True)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())


def _read_private(use: str, kid: str) -> Ed25519PrivateKey:
    path = private_path(use, kid)
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise SigningKeyMissing(
            f"the private half of the {use} key {kid} cannot be read at {path} ({error.strerror}): give this process "
            f"the directory of signing keys, or make a successor with `manage.py policy rotate-key {use}`"
        ) from error
    key = load_pem_private_key(pem, password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningKeyMissing(f"{path} does not hold an Ed25519 key: restore it from the backup")
    return key
