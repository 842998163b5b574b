"""Saving an installation: database, signing keys and the files that rows point to, as of one instant."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from django.conf import settings
from django.db import connection, transaction

from controlplane.experiments.running import code_version
from controlplane.jobs.models import StoredFile
from controlplane.operations import backup_file as form
from controlplane.operations import database_programs as programs
from controlplane.operations.backup_file import BackupError, BackupWriter, Manifest
from controlplane.operations.settings_digest import overall, setting_digests
from controlplane.policy.models import SigningKey
from controlplane.tenants.models import Installation
from controlplane.usage.models import RetiredDay

Say = Callable[[str], None]
SHOWN_MISSING = 5
ERROR_BYTES = 2_000


@dataclass(frozen=True)
class Saved:
    """What was written. `left_out` are sentences about what is not in the file."""

    path: str
    size_bytes: int
    parts: int
    generation: int
    left_out: list[str]


def make_backup(path: Path, *, force: bool, now: datetime, say: Say) -> Saved:
    """Writes a backup; the database goes on meanwhile. Raises BackupError or ProgramsMissing.

    The dump and the lists of files see the same snapshot: a file that rows point to is in the backup, or named as
    missing where it was removed while the dump ran.
    """
    found = programs.fitting_programs()
    with form.written(path, force=force) as writer, transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            cursor.execute("SELECT pg_export_snapshot()")
            snapshot = cursor.fetchone()[0]
        row = Installation.objects.filter(pk=1).first()
        if row is None:
            raise BackupError("the database holds no installation yet: there is nothing to save")
        say(f"database {connection.settings_dict['NAME']} with {found.path(programs.DUMP)} ({found.major})")
        part = writer.add(form.DATABASE, _dump(found, snapshot))
        say(f"database: {part.size_bytes:,} bytes")
        left_out = [*_add_keys(writer, say), *_add_job_files(writer, say), *_add_archive(writer, say)]
        digests = setting_digests()
        writer.end(
            Manifest(
                form=form.FORM,
                made_at=now.isoformat(timespec="seconds"),
                software=code_version(),
                server_major=found.major,
                installation=str(row.uuid),
                name=row.name,
                generation=row.generation,
                live_number=row.live_number,
                migrations=_migrations(),
                roles=_roles(),
                settings=digests,
                settings_digest=overall(digests),
                left_out=left_out,
                parts=writer.parts,
            )
        )
    return Saved(str(path), path.stat().st_size, len(writer.parts), row.generation, left_out)


def _dump(found: programs.Programs, snapshot: str) -> Iterator[bytes]:
    """The dump as it comes. What a crash of the database would empty is rebuilt by the next reports: left out."""
    arguments = ["--format=custom", "--no-owner", "--no-comments", "--no-unlogged-table-data", "--no-password"]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [found.path(programs.DUMP), *arguments, f"--snapshot={snapshot}"],
            stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=programs.environment(),
        )  # fmt: skip
        assert child.stdout is not None
        try:
            while piece := child.stdout.read(form.PIECE_BYTES):
                yield piece
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            child.stdout.close()
        if code:
            errors.seek(0)
            said = errors.read(ERROR_BYTES).decode(errors="replace").strip()
            raise BackupError(f"{programs.DUMP} ended with status {code}: {said}")


def _add_keys(writer: BackupWriter, say: Say) -> list[str]:
    folder = Path(settings.SIGNING_KEY_DIR)
    files = sorted(folder.glob("*.pem")) if folder.is_dir() else []
    for file in files:
        writer.add(form.KEYS + file.name, [file.read_bytes()])
    say(f"signing keys: {len(files)} of {folder}")
    there = {file.name for file in files}
    rows = SigningKey.objects.filter(revoked_at__isnull=True).order_by("use", "kid")
    missing = [f"{row.use}-{row.kid}.pem" for row in rows if f"{row.use}-{row.kid}.pem" not in there]
    if not missing:
        return []
    return [
        f"the signing keys in use {', '.join(missing)} are not in {folder} on this machine: run the backup where "
        "worker and controller run, or save that folder too"
    ]


def _add_job_files(writer: BackupWriter, say: Say) -> list[str]:
    rows = StoredFile.objects.filter(ready_at__isnull=False, erased_at__isnull=True).order_by("path")
    if "://" in str(settings.JOB_STORAGE):
        return [f"{rows.count()} files of batch jobs lie in {settings.JOB_STORAGE}: save that store by its own means"]
    return _add_files(writer, form.JOB_FILES, Path(settings.JOB_STORAGE), rows.values_list("path", flat=True), say)


def _add_archive(writer: BackupWriter, say: Say) -> list[str]:
    paths = RetiredDay.objects.order_by("day").values_list("path", flat=True)
    return _add_files(writer, form.ARCHIVE, Path(settings.USAGE_ARCHIVE), paths, say)


def _add_files(writer: BackupWriter, prefix: str, folder: Path, paths: Iterable[str], say: Say) -> list[str]:
    missing: list[str] = []
    count = size = 0
    for path in paths:
        try:
            with (folder / path).open("rb") as file:
                size += writer.add(prefix + path, _pieces(file)).size_bytes
        except FileNotFoundError:
            missing.append(path)
            continue
        count += 1
        if count % 1_000 == 0:
            say(f"{prefix.rstrip('/')}: {count:,} files, {size:,} bytes")
    say(f"{prefix.rstrip('/')}: {count:,} files, {size:,} bytes of {folder}")
    if not missing:
        return []
    named = ", ".join(missing[:SHOWN_MISSING]) + (" and others" if len(missing) > SHOWN_MISSING else "")
    return [f"{len(missing)} files that rows point to are not in {folder}: {named}"]


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(form.PIECE_BYTES):
        yield piece


def _migrations() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT app || '.' || name FROM django_migrations ORDER BY 1")
        return [name for (name,) in cursor.fetchall()]


def _roles() -> list[str]:
    """Roles beside the owner that tables, functions or defaults give rights to: they have to exist for a restore."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT DISTINCT r.rolname FROM pg_roles r JOIN (
                SELECT (aclexplode(relacl)).grantee FROM pg_class WHERE relnamespace = 'public'::regnamespace
                UNION SELECT (aclexplode(proacl)).grantee FROM pg_proc WHERE pronamespace = 'public'::regnamespace
                UNION SELECT (aclexplode(defaclacl)).grantee FROM pg_default_acl
            ) given ON given.grantee = r.oid WHERE r.rolname <> current_user ORDER BY 1
            """
        )
        return [name for (name,) in cursor.fetchall()]
