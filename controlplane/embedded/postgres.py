"""An embedded PostgreSQL: prepared, started, found again after a crash, stopped.

`prepare_postgres` makes the data folder and returns the program to run in the foreground, for a supervisor;
`start_postgres` runs it detached and waits for it. Port and passwords stay the same from start to start. TCP asks for
a password (SCRAM); without one only the socket works, whose folder belongs to the server's user alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psycopg

from controlplane.embedded.binaries import find_postgres, postgres_major
from controlplane.embedded.errors import DiskFullError, EmbeddedError, PortTakenError
from controlplane.embedded.identity import Identity, Way, choose_identity, relocated_home
from controlplane.embedded.ports import LOOPBACK, choose_port, preferred_port
from controlplane.embedded.processes import Command, command_line, end_process, process_alive, spawn_server
from controlplane.embedded.roles import APP, DATABASE, OWNER, READER, ROLES, SUPERUSER, ensure_roles
from controlplane.embedded.state import (
    DISK_FULL_TEXT,
    locked,
    make_folder,
    read_json,
    require_free_space,
    tail,
    write_json,
)

CONNECTIONS_MAX = 300
RECOVERY_S = 20.0  # a killed postmaster's orphans hold the shared memory for a second or two
READY_TIMEOUT_S = 180.0  # the write-ahead log is replayed first, which takes long after a crash under load
STOP_SIGNAL = signal.SIGINT  # "fast": ends sessions, writes a checkpoint
STOP_STEPS = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 5.0))
SOCKET_PATH_MAX = 100  # sun_path holds 107 bytes and the socket's name takes some
LOCK = ".lock"

SETTINGS = {
    "listen_addresses": LOOPBACK,
    "max_connections": str(CONNECTIONS_MAX),
    "shared_buffers": "256MB",
    "jit": "off",
    "wal_compression": "on",
    "max_wal_size": "2GB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
    "unix_socket_permissions": "0700",
    "logging_collector": "off",
}
SETTINGS_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


@dataclass(frozen=True)
class PostgresServer:
    """A running server. `dsn` and `unix_dsn` are the superuser's; programs use one of the three roles' addresses."""

    port: int
    pid: int
    version: int
    dsn: str
    unix_dsn: str
    owner_dsn: str
    app_dsn: str
    reader_dsn: str
    data: Path
    log: Path
    way: str


@dataclass(frozen=True)
class PreparedPostgres:
    """A data folder with the command that serves it; addresses are known before the start."""

    command: Command
    port: int
    version: int
    folder: Path
    data: Path
    socket_folder: Path
    passwords: dict[str, str]
    identity: Identity
    owner_creates_databases: bool | None

    @property
    def log(self) -> Path:
        """Where a detached server writes."""
        return self.folder / "server.log"

    @property
    def unix_dsn(self) -> str:
        """Key/value address of the superuser over the socket, without a database."""
        return f"host={self.socket_folder} port={self.port} user={SUPERUSER}"

    def role_dsn(self, role: str, database: str = DATABASE) -> str:
        """URL of `role` on `database` over TCP."""
        return f"postgresql://{role}:{self.passwords[role]}@{LOOPBACK}:{self.port}/{database}"

    def await_release(self, timeout_s: float = RECOVERY_S) -> None:
        """Wait until nothing of an earlier server uses the data folder; a live earlier server is stopped."""
        if (pid := _postmaster(self.data)) is not None:
            end_process(pid, STOP_STEPS)
        deadline = time.monotonic() + timeout_s
        while (attached := _shared_memory_users(self.data)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if attached == 0:  # PostgreSQL itself would take any process with the recorded number for the earlier server
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            (self.socket_folder / f".s.PGSQL.{self.port}.lock").unlink(missing_ok=True)

    def accepts_connections(self) -> bool:
        """True once the server takes connections and the roles are in place. Made for a readiness check."""
        if _ready_postmaster(self.data) is None:
            return False
        try:
            ensure_roles(self.unix_dsn, self.passwords, owner_creates_databases=self.owner_creates_databases)
        except psycopg.OperationalError:  # it went down between the look and the call
            return False
        return True

    def server(self, pid: int) -> PostgresServer:
        """The server that runs as `pid` on this data folder."""
        return PostgresServer(
            port=self.port,
            pid=pid,
            version=self.version,
            dsn=self.role_dsn(SUPERUSER),
            unix_dsn=f"postgresql://{SUPERUSER}@/{DATABASE}?host={self.socket_folder}&port={self.port}",
            owner_dsn=self.role_dsn(OWNER),
            app_dsn=self.role_dsn(APP),
            reader_dsn=self.role_dsn(READER),
            data=self.data,
            log=self.log,
            way=self.identity.way.value,
        )


def prepare_postgres(
    state_dir: Path,
    *,
    port: int | None = None,
    durable: bool = True,
    owner_creates_databases: bool = False,
    without: Collection[Way] = (),
) -> PreparedPostgres:
    """Make the data folder under `state_dir` when there is none and choose user, port and command.

    Raises EmbeddedError when there are no programs, no room, the port asked for is taken, or the data folder belongs
    to another major version.
    """
    with locked(state_dir / "postgres", LOCK):
        return _prepare(state_dir, port, durable, owner_creates_databases, without)


def start_postgres(
    state_dir: Path,
    *,
    port: int | None = None,
    durable: bool = True,
    owner_creates_databases: bool = False,
    bound_to_parent: bool = False,
    without: Collection[Way] = (),
) -> PostgresServer:
    """Start the server of `state_dir`, or find it running, and return it when it takes connections.

    `bound_to_parent` makes it end when the calling thread's process dies; `durable=False` trades safety against power
    loss for speed (tests). Raises EmbeddedError.
    """
    with locked(state_dir / "postgres", LOCK):
        folder = _folder(state_dir)
        if (found := _running(folder, owner_creates_databases)) is not None:
            return found
        prepared = _prepare(state_dir, port, durable, owner_creates_databases, without)
        deadline = time.monotonic() + RECOVERY_S
        while True:
            try:
                return prepared.server(_start(prepared, bound_to_parent))
            except _NotYetReleasedError as error:
                if time.monotonic() >= deadline:
                    raise EmbeddedError(str(error)) from error
                time.sleep(0.3)


def stop_postgres(state_dir: Path) -> bool:
    """Stop the server of `state_dir` in order; True when one was running."""
    with locked(state_dir / "postgres", LOCK):
        pid = _postmaster(_data(_folder(state_dir)))
        if pid is not None and not end_process(pid, STOP_STEPS):
            raise EmbeddedError(f"PostgreSQL (pid {pid}) did not end; look at {_folder(state_dir) / 'server.log'}")
        return pid is not None


def find_running_postgres(state_dir: Path) -> PostgresServer | None:
    """The server that runs on `state_dir`, or None; starts nothing."""
    return _running(_folder(state_dir), owner_creates_databases=None)


def remove_postgres(state_dir: Path) -> None:
    """Stop the server of `state_dir` and remove its files, relocated ones too."""
    stop_postgres(state_dir)
    folder = _folder(state_dir)
    sockets = read_json(folder / "run.json").get("socket_folder")
    for path in (folder, relocated_home(folder), *([] if sockets is None else [Path(sockets)])):
        shutil.rmtree(path, ignore_errors=True)


class _NotYetReleasedError(Exception):
    """The data folder is still in use by what a killed server left behind."""


def _folder(state_dir: Path) -> Path:
    return state_dir.resolve() / "postgres"


def _data(folder: Path) -> Path:
    relocated = relocated_home(folder) / "data"
    return relocated if (relocated / "PG_VERSION").exists() else folder / "data"


def _prepare(
    state_dir: Path, port: int | None, durable: bool, owner_creates_databases: bool, without: Collection[Way]
) -> PreparedPostgres:
    folder = make_folder(_folder(state_dir), mode=0o755)
    require_free_space(folder)
    binaries = find_postgres()
    version = postgres_major(binaries)
    identity = choose_identity(folder, binaries, without=without)
    data = identity.home / "data"
    passwords = _passwords(folder)
    _require_version(data, version, binaries)
    record = read_json(folder / "run.json")
    if _postmaster(data) is not None and record and port in (None, record["port"]):
        chosen = int(record["port"])  # our own server sits on it and is about to be replaced
    else:
        chosen = choose_port(
            explicit=port,
            recorded=record.get("port"),
            preferred=preferred_port(folder, "postgres"),
            settle_s=5.0 if (data / "postmaster.pid").exists() else 0.3,
        )
    if not (data / "PG_VERSION").exists():
        _initialise(identity, data, folder, version, passwords[SUPERUSER], durable)
    identity.own(data)
    sockets = _socket_folder(identity, folder, record.get("socket_folder"))
    write_json(folder / "run.json", {"port": chosen, "socket_folder": str(sockets)})
    settings = {**SETTINGS, **({} if durable else SETTINGS_NOT_DURABLE)}
    settings |= {"port": str(chosen), "unix_socket_directories": str(sockets)}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    argv = (*identity.prefix, str(identity.binaries / "postgres"), "-D", str(data), *options)
    return PreparedPostgres(
        command=Command(argv, _environment(identity.home), identity.run_as),
        port=chosen,
        version=version,
        folder=folder,
        data=data,
        socket_folder=sockets,
        passwords=passwords,
        identity=identity,
        owner_creates_databases=owner_creates_databases,
    )


def _passwords(folder: Path) -> dict[str, str]:
    path = folder / "secrets.json"
    known = read_json(path)
    passwords = {role: known.get(role) or secrets.token_urlsafe(24) for role in (SUPERUSER, *ROLES)}
    if passwords != known:
        write_json(path, passwords)
    return passwords


def _require_version(data: Path, version: int, binaries: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        have = (data / "PG_VERSION").read_text().strip()
        if have != str(version):
            raise EmbeddedError(
                f"the data in {data} were written by PostgreSQL {have} and the programs in {binaries} are "
                f"PostgreSQL {version}: dump them with the old version and restore, or move the folder away"
            )


def _initialise(
    identity: Identity, data: Path, folder: Path, version: int, superuser_password: str, durable: bool
) -> None:
    if data.exists():  # an earlier attempt was cut short: there is no PG_VERSION
        shutil.rmtree(data)
    data.mkdir(mode=0o700, parents=True)
    identity.own(data)
    locale = ["--locale-provider=builtin", "--locale=C.UTF-8"] if version >= 17 else ["--locale=C.UTF-8"]
    password_file = identity.home / ".initial-password"
    try:
        password_file.touch(mode=0o600)
        password_file.write_text(superuser_password)
        identity.own(password_file)
        argv = [
            *identity.prefix,
            str(identity.binaries / "initdb"),
            f"--pgdata={data}",
            f"--username={SUPERUSER}",
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            f"--pwfile={password_file}",
            "--encoding=UTF8",
            *locale,
            "--no-instructions",
            *([] if durable else ["--no-sync"]),
        ]
        _run_tool(argv, identity)
    except EmbeddedError:
        (data / "PG_VERSION").unlink(missing_ok=True)
        raise
    finally:
        password_file.unlink(missing_ok=True)


def _run_tool(argv: list[str], identity: Identity) -> None:
    user = identity.run_as
    with tempfile.TemporaryFile("w+") as output:
        answer = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=_environment(identity.home),
            timeout=READY_TIMEOUT_S,
            check=False,
            user=None if user is None else user.uid,
            group=None if user is None else user.gid,
            extra_groups=None if user is None else [],
        )
        output.seek(0)
        text = output.read()
    if answer.returncode != 0:
        kind = DiskFullError if DISK_FULL_TEXT in text.lower() else EmbeddedError
        raise kind(f"initdb failed with status {answer.returncode}: {' | '.join(text.splitlines()[-4:])}")


def _environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": str(home)}


def _socket_folder(identity: Identity, folder: Path, recorded: str | None) -> Path:
    """A folder for the socket that only the server's user may enter, short enough for the kernel."""
    beside = identity.home / "socket"
    if len(os.fsencode(beside)) <= SOCKET_PATH_MAX:
        beside.mkdir(mode=0o700, exist_ok=True)
        identity.own(beside)
        return beside
    if recorded is not None and _is_private(Path(recorded), identity.uid):
        return Path(recorded)
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:6]
    made = Path(tempfile.mkdtemp(prefix=f"flexband-{digest}-", dir="/tmp"))  # 0700, and nobody can have made it before
    identity.own(made)
    return made


def _is_private(path: Path, uid: int) -> bool:
    with contextlib.suppress(OSError):
        status = path.lstat()
        return path.is_dir() and not path.is_symlink() and status.st_uid == uid and status.st_mode & 0o077 == 0
    return False


def _running(folder: Path, owner_creates_databases: bool | None) -> PostgresServer | None:
    """The server that runs on `folder` already; waits for one that is on its way up."""
    data = _data(folder)
    record, passwords = read_json(folder / "run.json"), read_json(folder / "secrets.json")
    pid = _postmaster(data)
    if pid is None or "port" not in record or not set(ROLES) <= passwords.keys():
        return None
    deadline = time.monotonic() + READY_TIMEOUT_S
    while process_alive(pid) and time.monotonic() < deadline:
        if _ready_postmaster(data) == pid:
            prepared = PreparedPostgres(
                command=Command((), {}),
                port=record["port"],
                version=int((data / "PG_VERSION").read_text()),
                folder=folder,
                data=data,
                socket_folder=Path(record["socket_folder"]),
                passwords=passwords,
                identity=Identity(Way.PLAIN if data.parent == folder else Way.RELOCATE, Path(), data.parent),
                owner_creates_databases=owner_creates_databases,
            )
            if prepared.accepts_connections():
                return prepared.server(pid)
        time.sleep(0.05)
    return None


def _start(prepared: PreparedPostgres, bound_to_parent: bool) -> int:
    prepared.await_release()
    start = prepared.log.stat().st_size if prepared.log.exists() else 0
    process = spawn_server(prepared.command, prepared.log, bound_to_parent=bound_to_parent, stop_signal=STOP_SIGNAL)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while process.poll() is None:
        if _ready_postmaster(prepared.data) == process.pid and prepared.accepts_connections():
            return process.pid
        if time.monotonic() >= deadline:
            end_process(process.pid, STOP_STEPS)
            break
        time.sleep(0.02)
    raise start_error(prepared, tail(prepared.log, start=start))


def start_error(prepared: PreparedPostgres, words: str) -> Exception:
    """The error that the server's last `words` tell of."""
    lower = words.lower()
    if DISK_FULL_TEXT in lower:
        return DiskFullError(f"the disk is full: PostgreSQL cannot write to {prepared.data}; free some space")
    if "address already in use" in lower:
        return PortTakenError(f"port {prepared.port} is in use by another program; stop it or choose another port")
    if any(sign in lower for sign in ("shared memory block", "postmaster.pid", "using socket file")):
        return _NotYetReleasedError(f"another server still uses {prepared.data}: {words}")
    return EmbeddedError(f"PostgreSQL did not start; {prepared.log} ends with:\n{words}")


def _pid_file(data: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return (data / "postmaster.pid").read_text().splitlines()
    return []


def _postmaster(data: Path) -> int | None:
    """The process that serves `data`, told from a later one with the same number by its command line."""
    lines = _pid_file(data)
    with contextlib.suppress(ValueError, IndexError):
        pid = int(lines[0])
        if process_alive(pid) and str(data) in command_line(pid):
            return pid
    return None


def _ready_postmaster(data: Path) -> int | None:
    lines = _pid_file(data)
    return _postmaster(data) if len(lines) > 7 and lines[7].strip() == "ready" else None


def _shared_memory_users(data: Path) -> int:
    """How many processes still use the shared memory of the last server on `data`; 0 too when that cannot be known."""
    lines = _pid_file(data)
    with contextlib.suppress(OSError, ValueError, IndexError):
        segment = int(lines[6].split()[1])
        for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
            columns = row.split()
            if int(columns[1]) == segment:
                return int(columns[6])
    return 0
