"""Both servers in a folder of their own that is gone afterwards: for tests and measurements."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controlplane.embedded.postgres import PostgresServer, remove_postgres, start_postgres
from controlplane.embedded.valkey import ValkeyServer, remove_valkey, start_valkey


@dataclass(frozen=True)
class ThrowawayServers:
    """The running servers and the folder that holds their files."""

    postgres: PostgresServer
    valkey: ValkeyServer
    folder: Path


@contextlib.contextmanager
def throwaway_servers(*, durable: bool = False) -> Iterator[ThrowawayServers]:
    """Start PostgreSQL and Valkey in a temporary folder; stop and remove them at the end, or when this process dies.

    The role `owner` may create databases, as test runners do. Enter it on a thread that lives as long as the servers
    are needed: the kernel ends them with that thread.
    """
    folder = Path(tempfile.mkdtemp(prefix="flexband-test-"))
    folder.chmod(0o755)  # an unprivileged user runs PostgreSQL when we are root; what is secret is closed further in
    try:
        postgres = start_postgres(folder, durable=durable, owner_creates_databases=True, bound_to_parent=True)
        valkey = start_valkey(folder, durable=durable, bound_to_parent=True)
        yield ThrowawayServers(postgres, valkey, folder)
    finally:
        remove_valkey(folder)
        remove_postgres(folder)
        shutil.rmtree(folder, ignore_errors=True)
