"""Where files of jobs lie: a folder or an object store of the operator's choice, by `JOB_STORAGE`.

A name appears when its bytes are complete: the local store writes beside it and renames, an object store publishes a
finished multipart upload. Memory is bounded by one part, whatever the size of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import obstore
from django.conf import settings
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

PART_BYTES: Final = 5 * 1024 * 1024
READ_BYTES: Final = 1024 * 1024
RETRIES: Final = 5
RETRY_FOR: Final = timedelta(seconds=30)
"""Longer nobody waits on a connection; what a worker does is tried again by its sweep."""


class StorageError(Exception):
    """The file store cannot be used now: it is away, it refuses the key, the bucket is not there, the disk is full."""


LOST: Final = "The file store no longer has this file, though it should be kept. Tell your operator."


@contextmanager
def _told() -> Iterator[None]:
    """Faults of the store as StorageError, with what to look at; a file that is not there stays FileNotFoundError."""
    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchBucket" not in str(error):
            raise
        raise StorageError(_words("has no such bucket: make it, or correct FLEXBAND_JOB_STORAGE", error)) from error
    except (BaseError, OSError) as error:
        raise StorageError(_words(_fault(str(error)), error)) from error


# a writer tells every fault as an OSError with the answer's status in its text
_KEY_FAULTS: Final = ("status code: 401", "status code: 403", "<Code>ExpiredToken</Code>")


def _fault(text: str) -> str:
    if any(word in text for word in _KEY_FAULTS):
        return "refuses its credentials: they are wrong, expired, or may not write there"
    return "cannot be used now"


def _words(fault: str, error: Exception) -> str:
    code = str(error).partition("<Code>")[2].partition("</Code>")[0]
    detail = code or str(error).partition("Debug source:")[0].rpartition(" - ")[2]
    return f"The file store {settings.JOB_STORAGE} {fault} ({' '.join(detail.split())[:200]})."


@lru_cache(maxsize=8)
def _opened(place: str) -> ObjectStore:
    if "://" in place:
        # credentials, region and endpoint come from the environment, as the store's own tools read them
        return from_url(place, retry_config={"max_retries": RETRIES, "retry_timeout": RETRY_FOR})
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
    """A file that is being written; it can be read by its name after `finish`, and never before. Every step of it
    raises StorageError.

    Leaving the context without `finish` leaves nothing under the name.
    """

    def __init__(self, path: str) -> None:
        with _told():
            self._writer = obstore.open_writer(opened(), path, buffer_size=PART_BYTES, max_concurrency=2)
        self._digest = hashlib.sha256()
        self._size = 0
        self._lines = 0
        self._open_line = False

    @property
    def size_bytes(self) -> int:
        return self._size

    def write(self, data: bytes) -> None:
        with _told():
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
        with _told():
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
    """The bytes of a file from `start`, in pieces. Raises FileNotFoundError or StorageError."""
    with _told():
        if start:
            size = obstore.head(opened(), path)["size"]
            if start >= size:
                return
            found = obstore.get(opened(), path, options={"range": {"offset": start}})
        else:
            found = obstore.get(opened(), path)
        pieces = iter(found.stream(min_chunk_size=READ_BYTES))
    while True:
        with _told():
            piece = next(pieces, None)
        if piece is None:
            return
        yield bytes(piece)


def look_for(path: str) -> None:
    """Before the head of an answer is sent: whether the file is there. Raises FileNotFoundError or StorageError."""
    with _told():
        obstore.head(opened(), path)


async def stream(path: str) -> AsyncIterator[bytes]:
    """The bytes of a file as the web process sends them. Raises FileNotFoundError or StorageError."""
    with _told():
        found = await obstore.get_async(opened(), path)
    pieces = aiter(found.stream(min_chunk_size=READ_BYTES))
    while True:
        with _told():
            piece = await anext(pieces, None)
        if piece is None:
            return
        yield bytes(piece)


def erase(path: str) -> None:
    """Removes a file; one that is gone already is no error. Raises StorageError."""
    try:
        with _told():
            obstore.delete(opened(), path)
    except FileNotFoundError:
        return
