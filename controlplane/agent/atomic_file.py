"""Small files that are either the old or the new content, whatever is killed when."""

import os
from pathlib import Path


def write_atomic(path: Path, body: bytes, *, mode: int = 0o600) -> None:
    """Replace a file's content: written beside it, synced, renamed over it."""
    beside = path.with_name(path.name + ".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        view = memoryview(body)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    beside.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
