"""One supervisor per folder: the lock, and whose it is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from controlplane.embedded.processes import process_alive

LEFTOVER_TIMEOUT_S = 60.0


class AlreadyRunningError(RuntimeError):
    """Another supervisor works on the same folder; the message names its pid."""


def lock_path(var_dir: Path) -> Path:
    """The file whose lock the supervisor of `var_dir` holds."""
    return var_dir / "run" / "supervisor.lock"


def acquire(var_dir: Path) -> int:
    """Take the lock of `var_dir` and return its descriptor, which holds it while open here or in the watchdog.

    When the owner is dead its watchdog is still stopping what it left, which is waited for. Raises
    AlreadyRunningError.
    """
    path = lock_path(var_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LEFTOVER_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            pid = owner(var_dir)
            if pid == 0 or not process_alive(pid):
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                os.close(descriptor)
                raise AlreadyRunningError(
                    f"processes of an earlier run on {var_dir} are still being stopped (lock {path})"
                ) from None
            os.close(descriptor)
            raise AlreadyRunningError(
                f"already running on {var_dir} (pid {pid}); stop it with Ctrl-C in its terminal or: kill {pid}"
            ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def owner(var_dir: Path) -> int:
    """The pid that wrote itself into the lock of `var_dir`; 0 when nobody did."""
    with contextlib.suppress(OSError, ValueError):
        return int(lock_path(var_dir).read_text())
    return 0
