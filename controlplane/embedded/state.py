"""The folder in which an embedded server keeps its data, port and secrets, and the lock that guards a start."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controlplane.embedded.errors import DiskFullError, EmbeddedError

FREE_BYTES_MIN = 300 * 1024 * 1024
LOCK_TIMEOUT_S = 180.0
DISK_FULL_TEXT = "no space left on device"


def make_folder(folder: Path, *, mode: int) -> Path:
    """Create `folder` with its parents and set its mode; raises EmbeddedError when that is not allowed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid() and folder.stat().st_mode & 0o777 != mode:
            folder.chmod(mode)
    except OSError as error:
        raise EmbeddedError(f"cannot create {folder}: {error.strerror}; make its parent folder writable") from error
    return folder


def require_free_space(folder: Path) -> None:
    """Raise DiskFullError when the disk that holds `folder` has too little room to start a database on."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < FREE_BYTES_MIN:
        raise DiskFullError(
            f"the disk is full: {free_bytes // 2**20} MiB free under {folder}, "
            f"at least {FREE_BYTES_MIN // 2**20} MiB are needed; free some space and start again"
        )


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the exclusive lock `name` in `folder`, so that of two starts at once the second finds the first's server."""
    make_folder(folder, mode=0o755)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with open(folder / name, "w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise EmbeddedError(
                        f"another process has been starting or stopping the server in {folder} for "
                        f"{LOCK_TIMEOUT_S:.0f} s (lock {folder / name})"
                    ) from None
                time.sleep(0.05)
        yield


def read_json(path: Path) -> dict[str, Any]:
    """The object stored at `path`; empty when there is none or it was cut short by a crash."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text())
        if isinstance(value, dict):
            return value
    return {}


def write_private(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step, readable by its owner only."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        scratch.replace(path)
    except OSError as error:
        raise (DiskFullError if error.errno == 28 else EmbeddedError)(
            f"cannot write {path}: {error.strerror}"
        ) from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace `path` by the JSON of `value` in one step, readable by its owner only."""
    write_private(path, json.dumps(value, indent=1) + "\n")


def tail(path: Path, *, start: int = 0, lines: int = 8, bytes_max: int = 16_384) -> str:
    """The last `lines` lines that were written to the log at `path` after offset `start`."""
    try:
        with open(path, "rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(start if start <= size else 0, size - bytes_max))
            text = handle.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
