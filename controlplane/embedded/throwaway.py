"""Both servers in a folder of their own that is gone afterwards: for tests and measurements."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controlplane.embedded.postgres import PostgresServer, remove_postgres, start_postgres
from controlplane.embedded.processes import start_mark
from controlplane.embedded.state import read_json, write_json
from controlplane.embedded.valkey import ValkeyServer, remove_valkey, start_valkey

PREFIX = "flexband-test-"
OWNER_FILE = "owner.json"


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
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    write_json(folder / OWNER_FILE, {"pid": os.getpid(), "mark": start_mark(os.getpid())})
    folder.chmod(0o755)  # an unprivileged user runs PostgreSQL when we are root; what is secret is closed further in
    try:
        postgres = start_postgres(folder, durable=durable, owner_creates_databases=True, bound_to_parent=True)
        valkey = start_valkey(folder, durable=durable, bound_to_parent=True)
        yield ThrowawayServers(postgres, valkey, folder)
    finally:
        remove_valkey(folder)
        remove_postgres(folder)
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the folders of owners that were killed before they could (their servers ended with them)."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = read_json(folder / OWNER_FILE)
        if owner and start_mark(owner["pid"]) != owner["mark"]:
            remove_valkey(folder)
            remove_postgres(folder)
            shutil.rmtree(folder, ignore_errors=True)
