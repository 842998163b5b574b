"""Who this agent is: an Ed25519 key made here and the id that enrolment gave, in files only their owner can read."""

import base64
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.agent.atomic_file import sync_directory, write_atomic
from controlplane.agent.errors import AgentError
from controlplane.wire import signing
from controlplane.wire.enrolment import Enrolled, Helloed

KEY_FILE = "agent.key"
NEXT_KEY_FILE = "agent.key.next"
IDENTITY_FILE = "identity.json"


class StoredIdentity(msgspec.Struct, frozen=True):
    """What enrolment answered, refreshed by each hello."""

    agent: str
    agent_id: int
    pool: str
    installation: str
    signing_keys: dict[str, str]
    control_plane: str
    broker: str = ""


@dataclass(frozen=True)
class Identity:
    """The key pair and what the control plane knows it as; `stored` is None before enrolment."""

    key: Ed25519PrivateKey
    stored: StoredIdentity | None

    @property
    def public_key(self) -> bytes:
        return self.key.public_key().public_bytes_raw()


def load(state_dir: Path) -> Identity:
    """The identity in a state directory; a key is made on first use. Raises AgentError when files are unusable."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = _load_key(state_dir / KEY_FILE)
        path = state_dir / IDENTITY_FILE
        stored = msgspec.json.decode(path.read_bytes(), type=StoredIdentity) if path.exists() else None
    except (OSError, ValueError) as error:
        raise AgentError(f"the state directory {state_dir} cannot be used: {error}") from error
    return Identity(key=key, stored=stored)


def stored_next_key(state_dir: Path) -> Ed25519PrivateKey | None:
    """The key of a rotation that is under way. Raises AgentError when its file is unusable."""
    path = state_dir / NEXT_KEY_FILE
    try:
        return _load_key(path) if path.exists() else None
    except (OSError, ValueError) as error:
        raise AgentError(f"the state directory {state_dir} cannot be used: {error}") from error


def make_next_key(state_dir: Path) -> Ed25519PrivateKey:
    """A new key, on disk beside the present one. Raises OSError."""
    return _make_key(state_dir / NEXT_KEY_FILE)


def promote_next_key(state_dir: Path) -> None:
    """The next key is the key: one rename, so that a kill leaves either both files or the new one. Raises OSError."""
    (state_dir / NEXT_KEY_FILE).replace(state_dir / KEY_FILE)
    sync_directory(state_dir)


def _make_key(path: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    write_atomic(path, base64.b64encode(key.private_bytes_raw()), mode=0o600)
    return key


def _load_key(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        return _make_key(path)
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} can be read by others: run chmod 600 on it")
    os.chmod(path, 0o600)
    return Ed25519PrivateKey.from_private_bytes(base64.b64decode(path.read_bytes(), validate=True))


def remember_enrolment(state_dir: Path, identity: Identity, enrolled: Enrolled, control_plane: str) -> Identity:
    """Store what enrolment answered."""
    stored = StoredIdentity(
        agent=enrolled.agent,
        agent_id=enrolled.agent_id,
        pool=enrolled.pool,
        installation=enrolled.installation,
        signing_keys=enrolled.signing_keys,
        control_plane=control_plane,
        broker=enrolled.broker,
    )
    return _store(state_dir, identity, stored)


def remember_hello(state_dir: Path, identity: Identity, helloed: Helloed) -> Identity:
    """Store what a hello refreshed: the agent's number and pool, the signing keys and the broker's address."""
    if identity.stored is None:
        raise AgentError("this agent has not enrolled yet")
    stored = msgspec.structs.replace(
        identity.stored,
        agent_id=helloed.agent_id,
        pool=helloed.pool,
        installation=helloed.installation,
        signing_keys=helloed.signing_keys,
        broker=helloed.broker,
    )
    return identity if stored == identity.stored else _store(state_dir, identity, stored)


def _store(state_dir: Path, identity: Identity, stored: StoredIdentity) -> Identity:
    write_atomic(state_dir / IDENTITY_FILE, msgspec.json.encode(stored), mode=0o600)
    return Identity(key=identity.key, stored=stored)


def signing_key(keys: dict[str, str], use: str, kid: str) -> bytes | None:
    """The public key for one use (`policy`, `live` or `nudge`) and kid, with or without the use before it."""
    name = kid if kid.startswith(f"{use}:") else f"{use}:{kid}"
    text = keys.get(name)
    if text is None:
        return None
    try:
        return signing.from_text(text)
    except ValueError:
        return None
