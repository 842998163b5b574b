"""TCP ports on loopback: stable across restarts, moved only when another program sits on them."""

from __future__ import annotations

import hashlib
import secrets
import socket
import time
from pathlib import Path

from controlplane.embedded.errors import PortTakenError

LOOPBACK = "127.0.0.1"
# Below the range that kernels hand out for outgoing connections (32768 and up), above the well-known services.
FIRST_PORT = 21_000
PORTS = 9_000
TRIES = 100


def port_is_free(port: int) -> bool:
    """True when a server could bind `port` on loopback now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def preferred_port(state_dir: Path, purpose: str) -> int:
    """The port that this installation tries first: derived from its folder, so that two installations rarely meet."""
    digest = hashlib.sha256(f"{purpose}:{state_dir}".encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % PORTS


def free_port() -> int:
    """A port that is free now and that no outgoing connection is given before it is used, at random.

    Where none of `TRIES` is free it is one of the kernel's choice, which an outgoing connection may be given, too.
    """
    for _ in range(TRIES):
        if port_is_free(port := FIRST_PORT + secrets.randbelow(PORTS)):
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def choose_port(*, explicit: int | None, recorded: int | None, preferred: int, settle_s: float) -> int:
    """Choose the port to listen on.

    `explicit` was asked for and is taken or refused (`PortTakenError`); `recorded` is the port of the last run, which
    clients may still hold, so it is given `settle_s` seconds to become free; else `preferred`, else any.
    """
    if explicit is not None:
        if not _becomes_free(explicit, settle_s):
            raise PortTakenError(f"port {explicit} is in use by another program; stop it or choose another port")
        return explicit
    if recorded is not None and _becomes_free(recorded, settle_s):
        return recorded
    return preferred if port_is_free(preferred) else free_port()


def _becomes_free(port: int, settle_s: float) -> bool:
    deadline = time.monotonic() + settle_s
    while not port_is_free(port):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
