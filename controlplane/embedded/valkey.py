"""An embedded Redis-compatible server: prepared, started, found again after a crash, stopped.

Every write is in an append-only file within a second, so a SIGKILL loses nothing and a power loss at most a second.
Nothing is ever evicted: a full memory is an error, not a silent loss. Port and password stay the same.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from controlplane.embedded.binaries import find_valkey
from controlplane.embedded.errors import DiskFullError, EmbeddedError, PortTakenError
from controlplane.embedded.ports import LOOPBACK, choose_port, preferred_port
from controlplane.embedded.processes import Command, command_line, end_process, process_alive, spawn_server
from controlplane.embedded.state import (
    DISK_FULL_TEXT,
    locked,
    make_folder,
    read_json,
    require_free_space,
    tail,
    write_json,
    write_private,
)

READY_TIMEOUT_S = 60.0
STOP_SIGNAL = signal.SIGTERM
STOP_STEPS = ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))
LOCK = ".lock"


class Answer(Enum):
    """What a server said to our password and a ping."""

    PONG = "pong"
    SILENT = "silent"
    LOADING = "loading"
    REFUSED = "refused"


@dataclass(frozen=True)
class ValkeyServer:
    """A running server; `url` holds the password."""

    url: str
    port: int
    pid: int
    log: Path


@dataclass(frozen=True)
class PreparedValkey:
    """A data folder with the command that serves it; the address is known before the start."""

    command: Command
    port: int
    password: str
    folder: Path

    @property
    def log(self) -> Path:
        """Where a detached server writes."""
        return self.folder / "server.log"

    @property
    def url(self) -> str:
        """Address with password, database 0."""
        return f"redis://:{self.password}@{LOOPBACK}:{self.port}/0"

    def await_release(self) -> None:
        """Stop a server that still runs on this data folder."""
        if (pid := _server_process(self.folder)) is not None:
            end_process(pid, STOP_STEPS)

    def accepts_connections(self) -> bool:
        """True once the server has loaded its data and takes our password. Made for a readiness check."""
        return ask(self.port, self.password) is Answer.PONG


def prepare_valkey(state_dir: Path, *, port: int | None = None, durable: bool = True) -> PreparedValkey:
    """Make the data folder under `state_dir` and choose the port; raises EmbeddedError."""
    with locked(state_dir / "valkey", LOCK):
        return _prepare(state_dir, port, durable)


def start_valkey(
    state_dir: Path, *, port: int | None = None, durable: bool = True, bound_to_parent: bool = False
) -> ValkeyServer:
    """Start the server of `state_dir`, or find it running, and return it when it takes connections.

    `bound_to_parent` makes it end when the calling thread's process dies; `durable=False` keeps nothing on disk
    (tests). Raises EmbeddedError.
    """
    with locked(state_dir / "valkey", LOCK):
        folder = _folder(state_dir)
        if (found := find_running_valkey(state_dir)) is not None:
            return found
        prepared = _prepare(state_dir, port, durable)
        prepared.await_release()
        start = prepared.log.stat().st_size if prepared.log.exists() else 0
        process = spawn_server(prepared.command, prepared.log, bound_to_parent=bound_to_parent, stop_signal=STOP_SIGNAL)
        if _becomes_ready(process.pid, prepared.port, prepared.password):
            return _server(prepared.port, prepared.password, process.pid, folder)
        end_process(process.pid, STOP_STEPS)
        raise _start_error(prepared, tail(prepared.log, start=start))


def stop_valkey(state_dir: Path) -> bool:
    """Stop the server of `state_dir` in order; True when one was running."""
    with locked(state_dir / "valkey", LOCK):
        folder = _folder(state_dir)
        pid = _server_process(folder)
        if pid is not None and not end_process(pid, STOP_STEPS):
            raise EmbeddedError(f"Valkey (pid {pid}) did not end; look at {folder / 'server.log'}")
        return pid is not None


def find_running_valkey(state_dir: Path) -> ValkeyServer | None:
    """The server that runs on `state_dir`, or None; starts nothing."""
    folder = _folder(state_dir)
    record = read_json(folder / "run.json")
    pid = _server_process(folder)
    if pid is not None and record and _becomes_ready(pid, record["port"], record["password"]):
        return _server(record["port"], record["password"], pid, folder)
    return None


def remove_valkey(state_dir: Path) -> None:
    """Stop the server of `state_dir` and remove its files."""
    stop_valkey(state_dir)
    shutil.rmtree(_folder(state_dir), ignore_errors=True)


def ask(port: int, password: str) -> Answer:
    """Give the server on `port` the password and ping it."""
    request = b"".join(_encode(*words) for words in (("AUTH", password), ("PING",)))
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1) as connection:
        connection.settimeout(2)
        connection.sendall(request)
        answer = b""
        while answer.count(b"\r\n") < 2 and (part := connection.recv(4096)):
            answer += part
        if answer.endswith(b"+PONG\r\n"):
            return Answer.PONG
        return Answer.LOADING if b"LOADING" in answer else Answer.REFUSED
    return Answer.SILENT


def _encode(*words: str) -> bytes:
    parts = [f"*{len(words)}\r\n".encode()]
    for word in words:
        raw = word.encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
    return b"".join(parts)


def _folder(state_dir: Path) -> Path:
    return state_dir.resolve() / "valkey"


def _server(port: int, password: str, pid: int, folder: Path) -> ValkeyServer:
    return ValkeyServer(f"redis://:{password}@{LOOPBACK}:{port}/0", port, pid, folder / "server.log")


def _prepare(state_dir: Path, port: int | None, durable: bool) -> PreparedValkey:
    folder = make_folder(_folder(state_dir), mode=0o700)
    require_free_space(folder)
    program = find_valkey()
    record = read_json(folder / "run.json")
    if _server_process(folder) is not None and record and port in (None, record["port"]):
        chosen = int(record["port"])  # our own server sits on it and is about to be replaced
    else:
        chosen = choose_port(
            explicit=port,
            recorded=record.get("port"),
            preferred=preferred_port(folder, "valkey"),
            settle_s=0.5,
        )
    password = record.get("password") or secrets.token_urlsafe(24)
    write_json(folder / "run.json", {"port": chosen, "password": password})
    config = folder / "valkey.conf"
    write_private(config, _config(folder, chosen, password, durable))
    command = Command(
        (str(program), str(config)), {"PATH": os.environ.get("PATH", os.defpath), "TZ": "UTC"}, cwd=folder
    )
    return PreparedValkey(command, chosen, password, folder)


def _config(folder: Path, port: int, password: str, durable: bool) -> str:
    settings = {
        "bind": LOOPBACK,
        "port": str(port),
        "requirepass": password,
        "dir": f'"{folder}"',
        "pidfile": f'"{folder / "server.pid"}"',
        "daemonize": "no",
        "appendonly": "yes" if durable else "no",
        "appendfsync": "everysec",
        "save": '""',
        "maxmemory-policy": "noeviction",
        "tcp-backlog": "128",
    }
    return "".join(f"{name} {value}\n" for name, value in settings.items())


def _server_process(folder: Path) -> int | None:
    """The process that serves `folder`, told from a later one with the same number by its working folder or name."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "server.pid").read_text())
        if process_alive(pid) and _serves(pid, folder):
            return pid
    return None


def _serves(pid: int, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cwd").resolve(strict=True) == folder
    return "-server" in command_line(pid)


def _becomes_ready(pid: int, port: int, password: str) -> bool:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while process_alive(pid) and time.monotonic() < deadline:
        if ask(port, password) is Answer.PONG:
            return process_alive(pid)
        time.sleep(0.02)
    return False


def _start_error(prepared: PreparedValkey, words: str) -> EmbeddedError:
    lower = words.lower()
    if DISK_FULL_TEXT in lower:
        return DiskFullError(f"the disk is full: Valkey cannot write to {prepared.folder}; free some space")
    if "address already in use" in lower:
        return PortTakenError(f"port {prepared.port} is in use by another program; stop it or choose another port")
    return EmbeddedError(f"Valkey did not start; {prepared.log} ends with:\n{words}")
