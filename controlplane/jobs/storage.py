"""Where files of jobs lie: a folder or an object store of the operator's choice, by `JOB_STORAGE`.

A name appears when its bytes are complete: the local store writes beside it and renames, an object store publishes a
finished multipart upload. Memory is bounded by one part, whatever the size of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import obstore
from django.conf import settings
from obstore.store import LocalStore, ObjectStore, from_url

PART_BYTES: Final = 5 * 1024 * 1024
READ_BYTES: Final = 1024 * 1024


@lru_cache(maxsize=8)
def _opened(place: str) -> ObjectStore:
    if "://" in place:
        # credentials, region and endpoint come from the environment, as the store's own tools read them
        return from_url(place)
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return LocalStore(folder, automatic_cleanup=True)


def opened() -> ObjectStore:
    """The store of this installation. Raises ValueError or obstore's errors for a place that cannot be used."""
    return _opened(settings.JOB_STORAGE)


@dataclass(frozen=True, slots=True)
class Written:
    """A complete file: its size, the SHA-256 of its bytes and how many lines have something in them."""

    size_bytes: int
    digest: str
    lines: int


class Writing:
    """A file that is being written; it can be read by its name after `finish`, and never before.

    Leaving the context without `finish` leaves nothing under the name.
    """

    def __init__(self, path: str) -> None:
        self._writer = obstore.open_writer(opened(), path, buffer_size=PART_BYTES, max_concurrency=2)
        self._digest = hashlib.sha256()
        self._size = 0
        self._lines = 0
        self._open_line = False

    @property
    def size_bytes(self) -> int:
        return self._size

    def write(self, data: bytes) -> None:
        self._writer.write(data)
        self._digest.update(data)
        self._size += len(data)
        self._count_lines(data)

    def _count_lines(self, data: bytes) -> None:
        # the common file has no empty lines: counting its ends is enough
        if b"\n\n" not in data and b"\r" not in data and not (data.startswith(b"\n") and not self._open_line):
            self._lines += data.count(b"\n")
            self._open_line = not data.endswith(b"\n") if data else self._open_line
            return
        for part in data.splitlines(keepends=True):
            self._open_line = self._open_line or bool(part.strip())
            if part.endswith(b"\n"):
                self._lines += self._open_line
                self._open_line = False

    def finish(self) -> Written:
        """Publishes the file under its name."""
        self._writer.close()
        return Written(self._size, self._digest.hexdigest(), self._lines + self._open_line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # the writer of an unfinished file is dropped, which publishes nothing
        del self._writer


def read(path: str, start: int = 0) -> Iterator[bytes]:
    """The bytes of a file from `start`, in pieces. Raises FileNotFoundError."""
    if start:
        size = obstore.head(opened(), path)["size"]
        if start >= size:
            return
        found = obstore.get(opened(), path, options={"range": {"offset": start}})
    else:
        found = obstore.get(opened(), path)
    for piece in found.stream(min_chunk_size=READ_BYTES):
        yield bytes(piece)


async def stream(path: str) -> AsyncIterator[bytes]:
    """The bytes of a file as the web process sends them. Raises FileNotFoundError."""
    found = await obstore.get_async(opened(), path)
    async for piece in found.stream(min_chunk_size=READ_BYTES):
        yield bytes(piece)


def erase(path: str) -> None:
    """Removes a file; one that is gone already is no error."""
    try:
        obstore.delete(opened(), path)
    except FileNotFoundError:
        return
