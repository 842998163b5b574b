"""How PostgreSQL, which refuses to run as root, is run when we are root.

In this order: as we are (not root); as an unprivileged user, in place; as ourselves inside a user namespace, where we
are not root (the project lies under a folder that only root may enter); as an unprivileged user with programs and data
in a place that everybody may enter.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from controlplane.embedded.errors import EmbeddedError
from controlplane.embedded.processes import RunAs

USERS = ("postgres", "nobody")
RELOCATED_ROOT = Path("/var/lib")


class Way(Enum):
    """The way in which the server is run."""

    PLAIN = "plain"
    DROP = "drop"
    USER_NAMESPACE = "user-namespace"
    RELOCATE = "relocate"


@dataclass(frozen=True)
class Identity:
    """Who runs the server, with which programs, and where its files lie.

    prefix: arguments put before the program. home: folder that holds data and socket.
    """

    way: Way
    binaries: Path
    home: Path
    run_as: RunAs | None = None
    prefix: tuple[str, ...] = ()

    @property
    def uid(self) -> int:
        """The user id that must own the server's files, as seen from outside."""
        return self.run_as.uid if self.run_as is not None else os.geteuid()

    def own(self, path: Path) -> None:
        """Give `path`, with everything in it, to the user that runs the server."""
        if os.geteuid() != 0 or path.stat().st_uid == self.uid:
            return
        gid = self.run_as.gid if self.run_as is not None else os.getegid()
        os.chown(path, self.uid, gid)
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                os.chown(Path(folder, name), self.uid, gid, follow_symlinks=False)


def choose_identity(folder: Path, binaries: Path, *, without: Collection[Way] = ()) -> Identity:
    """Choose the way to run the programs in `binaries` on files under `folder`.

    `without` leaves out ways, for tests of the later ones. A cluster that was relocated before stays where it is.
    """
    if os.geteuid() != 0:
        return Identity(Way.PLAIN, binaries, folder)
    users = _unprivileged_users()
    relocated = relocated_home(folder)
    if not (relocated / "data/PG_VERSION").exists():
        if Way.DROP not in without:
            for user in users:
                if _usable_by(user, folder, binaries):
                    return Identity(Way.DROP, binaries, folder, run_as=user)
        if Way.USER_NAMESPACE not in without and (prefix := _namespace_prefix(binaries)):
            return Identity(Way.USER_NAMESPACE, binaries, folder, prefix=prefix)
    if not users:
        raise EmbeddedError(
            "PostgreSQL does not run as root and there is no unprivileged user (postgres, nobody) to run it as; "
            "start as another user or set DATABASE_URL to a server of your own"
        )
    relocated.mkdir(mode=0o755, parents=True, exist_ok=True)
    relocated.chmod(0o755)
    in_place = _usable_by(users[0], relocated, binaries)
    programs = binaries if in_place else _copy_programs(binaries, relocated)
    return Identity(Way.RELOCATE, programs, relocated, run_as=users[0])


def relocated_home(folder: Path) -> Path:
    """Where the files of the cluster of `folder` lie when it had to be relocated."""
    return RELOCATED_ROOT / f"flexband-{hashlib.sha256(str(folder).encode()).hexdigest()[:10]}"


def _unprivileged_users() -> list[RunAs]:
    users = []
    for name in USERS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            users.append(RunAs(entry.pw_uid, entry.pw_gid))
    return users


def _usable_by(user: RunAs, folder: Path, binaries: Path) -> bool:
    tests = ([str(binaries / "postgres"), "--version"], ["test", "-x", str(folder)])
    return all(_succeeds(test, user=user) for test in tests)


def _namespace_prefix(binaries: Path) -> tuple[str, ...]:
    program = shutil.which("unshare")
    if program is None:
        return ()
    prefix = (program, "--user", "--map-user=1000", "--map-group=1000", "--")
    return prefix if _succeeds([*prefix, str(binaries / "postgres"), "--version"]) else ()


def _succeeds(argv: list[str], *, user: RunAs | None = None) -> bool:
    try:
        answer = subprocess.run(
            argv,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            cwd="/",
            timeout=20,
            check=False,
            user=None if user is None else user.uid,
            group=None if user is None else user.gid,
            extra_groups=None if user is None else [],
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return answer.returncode == 0


def _copy_programs(binaries: Path, home: Path) -> Path:
    """Copy the whole installation beside the relocated data, with the libraries that its programs look for by path."""
    installation = binaries.parent
    target = home / "package" / installation.name
    if (target / "bin/postgres").exists():
        return target / "bin"
    scratch = home / f"package.{os.getpid()}"
    shutil.copytree(installation, scratch / installation.name, symlinks=True)
    libraries = installation.parent.parent / f"{installation.parent.name}.libs"
    shutil.rmtree(home / "package", ignore_errors=True)
    scratch.rename(home / "package")
    if libraries.is_dir():  # the wheel's programs look for them beside their package
        shutil.copytree(libraries, home / libraries.name, dirs_exist_ok=True)
    return target / "bin"
