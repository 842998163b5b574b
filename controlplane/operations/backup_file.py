"""The file of a backup: a zip with the manifest as its last part, each part with its size and SHA-256.

Parts are streamed both ways, so memory does not grow with them. Whoever holds the file holds the installation's signing
keys: only its owner may read it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

FORM: Final = 1
MANIFEST: Final = "manifest.json"
DATABASE: Final = "database.dump"
KEYS, JOB_FILES, ARCHIVE = "signing-keys/", "job-files/", "usage-archive/"
PIECE_BYTES: Final = 1024 * 1024
FILE_MODE: Final = 0o600
MANIFEST_MOST_BYTES: Final = 256 * 1024 * 1024


class BackupError(Exception):
    """The backup cannot be made or used; says why and what to do."""


@dataclass(frozen=True)
class Part:
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a backup holds.

    `software` is a digest of the code, `settings` name -> SHA-256 of the value, no secret among them.
    `migrations` are "app.name" of all that were applied, `roles` those that the database gives rights to. `left_out`
    says in sentences what belongs to the installation and is not in the file.
    """

    form: int
    made_at: str
    software: str
    server_major: int
    installation: str
    name: str
    generation: int
    live_number: int
    migrations: list[str]
    roles: list[str]
    settings: dict[str, str]
    settings_digest: str
    left_out: list[str] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)


class BackupWriter:
    """Writes the parts of one backup."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self.parts: dict[str, Part] = {}

    def add(self, name: str, pieces: Iterable[bytes]) -> Part:
        """One part, stored as it is: a dump and Parquet are compressed already."""
        digest, size = hashlib.sha256(), 0
        with self._archive.open(_entry(name), "w", force_zip64=True) as target:
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                target.write(piece)
        part = self.parts[name] = Part(size, digest.hexdigest())
        return part

    def end(self, manifest: Manifest) -> None:
        document = json.dumps(asdict(manifest), indent=1, sort_keys=True)
        self._archive.writestr(_entry(MANIFEST), document)


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = FILE_MODE << 16
    return entry


@contextmanager
def written(path: Path, *, force: bool) -> Iterator[BackupWriter]:
    """A backup under its name once it is whole and on the disk; until then beside it. Raises BackupError."""
    if path.exists() and not force:
        raise BackupError(f"{path} exists: give another name, or --force to replace it")
    if not path.parent.is_dir():
        raise BackupError(f"{path.parent} is no folder: make it first")
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
        with os.fdopen(descriptor, "w+b") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                yield BackupWriter(archive)
            file.flush()
            os.fsync(file.fileno())
        if path.exists() and not force:
            raise BackupError(f"{path} exists: another backup took the name meanwhile")
        beside.replace(path)
    except OSError as error:
        raise BackupError(f"{path} cannot be written: {error}") from error
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class BackupReader:
    """A backup as it is read: the manifest at once, parts as streams."""

    def __init__(self, archive: zipfile.ZipFile, manifest: Manifest) -> None:
        self._archive = archive
        self.manifest = manifest

    def names(self, folder: str) -> list[str]:
        return sorted(name for name in self.manifest.parts if name.startswith(folder))

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of a part. Raises BackupError where they are not what the manifest says, at the end."""
        part, digest, size = self.manifest.parts[name], hashlib.sha256(), 0
        try:
            with self._archive.open(name) as source:
                while piece := source.read(PIECE_BYTES):
                    digest.update(piece)
                    size += len(piece)
                    yield piece
        except (OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise BackupError(f"the backup is damaged: {name} cannot be read ({error}); use another") from error
        if (size, digest.hexdigest()) != (part.size_bytes, part.sha256):
            raise BackupError(f"the backup is damaged: {name} is not what its manifest says; use another")

    def check(self, name: str) -> None:
        """Reads a part to its end. Raises BackupError."""
        for _ in self.pieces(name):
            pass


@contextmanager
def opened(path: Path) -> Iterator[BackupReader]:
    """A backup whose manifest can be read and whose parts are all there. Raises BackupError."""
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = _manifest(archive, path)
            listed = {info.filename for info in archive.infolist()} - {MANIFEST}
            if listed != set(manifest.parts) or DATABASE not in listed:
                raise BackupError(f"{path} is damaged: its parts are not those of its manifest; use another backup")
            yield BackupReader(archive, manifest)
    except (OSError, zipfile.BadZipFile) as error:
        raise BackupError(f"{path} is no whole backup: {error}") from error


def _manifest(archive: zipfile.ZipFile, path: Path) -> Manifest:
    try:
        with archive.open(MANIFEST) as source:
            document: dict[str, Any] = json.loads(_at_most(source))
        parts = {name: Part(**part) for name, part in document.pop("parts").items()}
        manifest = Manifest(**document, parts=parts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BackupError(f"{path} is no backup of Flexband: its manifest cannot be read") from error
    if manifest.form != FORM:
        raise BackupError(f"{path} has form {manifest.form}, this release reads {FORM}: use the release that made it")
    return manifest


def _at_most(source: IO[bytes]) -> bytes:
    document = source.read(MANIFEST_MOST_BYTES + 1)
    if len(document) > MANIFEST_MOST_BYTES:
        raise ValueError("too long")
    return document
