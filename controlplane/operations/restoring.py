"""Bringing an installation back from a backup: what would be done, and doing it.

Files come first: they change nothing that is there. Then the database, in one transaction of its owner: what is there
goes, what was saved comes, its numbers begin a new generation. So it is the old database or the new one, never a part.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath

from django.conf import settings
from django.core.management import call_command
from django.db import connection, transaction
from django.db.migrations.loader import MigrationLoader

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.core.generations import live_floor, next_generation
from controlplane.operations import backup_file as form
from controlplane.operations import database_programs as programs
from controlplane.operations.backup_file import BackupError, BackupReader
from controlplane.operations.database_restore import fill_database
from controlplane.operations.new_generation import statements
from controlplane.operations.settings_digest import differing
from controlplane.policy.actions import repeat_latest
from controlplane.policy.live_list import sign_changes
from controlplane.policy.models import LiveEntry, Revision
from controlplane.policy.signing import SigningKeyMissing

Say = Callable[[str], None]
SESSIONS_SHOWN = 10


@dataclass(frozen=True)
class Plan:
    """What a restore will do, why it must not, and what a person should look at."""

    generation: int
    steps: list[str]
    refusals: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class Restored:
    """`revision` is the policy in force under its new number; None where the backup's newest rollout was not over."""

    installation: str
    made_at: str
    generation: int
    revision: int | None
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _There:
    """What the database holds now."""

    name: str
    tables: int
    installation: str | None
    generation: int | None
    may_create: bool


def plan(reader: BackupReader, *, replace: bool, generation: int | None) -> Plan:
    """Looks at the backup's manifest, the database and the folders; changes nothing."""
    saved, there = reader.manifest, _look()
    refusals = [*_refusals(reader, there, replace=replace), *_sessions()]
    due = 0
    try:
        due = next_generation(saved.generation, there.generation)
        if generation is not None and generation < due:
            refusals.append(f"--generation {generation} is too low: {due} is the first that was not given out")
        due = max(due, generation or 0)
        next_generation(due - 1, None)
    except ValueError as error:
        refusals.append(str(error))
    verb = f"replace the {there.tables} tables of" if there.tables else "fill"
    files = len(saved.parts) - 1
    size = sum(part.size_bytes for part in saved.parts.values())
    steps = [
        f"backup of {saved.name} ({saved.installation}) of {saved.made_at}, code {saved.software}: "
        f"{size:,} bytes in {files + 1:,} parts",
        f"{verb} database {there.name}",
        f"put {len(reader.names(form.KEYS))} signing keys into {settings.SIGNING_KEY_DIR}",
        f"put {len(reader.names(form.JOB_FILES)):,} files of batch jobs into {settings.JOB_STORAGE}",
        f"put {len(reader.names(form.ARCHIVE)):,} days of usage records into {settings.USAGE_ARCHIVE}",
        f"begin generation {due}, {due - saved.generation} after the backup's {saved.generation}",
    ]
    warnings = [f"not in the backup: {sentence}" for sentence in saved.left_out]
    other = differing(saved.settings)
    if other:
        warnings.append(f"settings that are not those of the backup: {', '.join(other)}")
    return Plan(due, steps, refusals, warnings)


def _refusals(reader: BackupReader, there: _There, *, replace: bool) -> list[str]:
    saved = reader.manifest
    found = []
    if not there.may_create:
        found.append(
            f"database {there.name} is connected as a role that may not create tables: set FLEXBAND_AS_OWNER=true and "
            "DATABASE_OWNER_URL"
        )
    if there.tables and not replace:
        found.append(f"database {there.name} is not empty ({there.tables} tables): give --replace to replace it")
    if there.installation is not None and there.installation != saved.installation:
        found.append(
            f"database {there.name} holds another installation ({there.installation}, the backup is of "
            f"{saved.installation}): restore into an empty database"
        )
    major = programs.server_major()
    if major < saved.server_major:
        found.append(
            f"the backup is of PostgreSQL {saved.server_major}, this server is {major}: use that or a newer one"
        )
    known = {f"{app}.{name}" for app, name in MigrationLoader(None).disk_migrations}
    newer = [name for name in saved.migrations if name.split(".")[0] in _own_apps() and name not in known]
    if newer:
        found.append(f"the backup is of a newer release (it has {newer[-1]}): restore it with that one")
    with connection.cursor() as cursor:
        cursor.execute("SELECT rolname FROM pg_roles WHERE rolname = ANY(%s)", [saved.roles])
        missing = sorted(set(saved.roles) - {name for (name,) in cursor.fetchall()})
    if missing:
        found.append(
            f"the server lacks the roles {', '.join(missing)}: make them first (CREATE ROLE ... LOGIN PASSWORD)"
        )
    if "://" in str(settings.JOB_STORAGE) and reader.names(form.JOB_FILES):
        found.append("the backup holds files of batch jobs and FLEXBAND_JOB_STORAGE is no folder: set the folder")
    return [*found, *_refused_files(reader)]


def _own_apps() -> set[str]:
    return {label for label, _ in MigrationLoader(None).disk_migrations}


def _refused_files(reader: BackupReader) -> list[str]:
    """Parts whose name leads out of its folder, and keys that are there with other content."""
    found = []
    for name in sorted(reader.manifest.parts):
        if name == form.DATABASE:
            continue
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not name.startswith((form.KEYS, form.JOB_FILES, form.ARCHIVE)):
            found.append(f"the backup has a part of a name that none has: {name[:200]}")
        elif name.startswith(form.KEYS):
            target = _target(name)
            if target.exists() and target.read_bytes() != b"".join(reader.pieces(name)):
                found.append(f"{target} is there with other content: move it away")
    return found


def _target(name: str) -> Path:
    folders = {
        form.KEYS: settings.SIGNING_KEY_DIR,
        form.JOB_FILES: settings.JOB_STORAGE,
        form.ARCHIVE: settings.USAGE_ARCHIVE,
    }
    prefix = next(prefix for prefix in folders if name.startswith(prefix))
    return Path(folders[prefix]) / name.removeprefix(prefix)


def _look() -> _There:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT current_database(), has_schema_privilege('public', 'CREATE'), to_regclass('tenants_installation'),"
            " (SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p'))"
        )
        name, may_create, table, tables = cursor.fetchone()
        installation = generation = None
        if table is not None:
            cursor.execute("SELECT uuid::text, generation FROM tenants_installation")
            installation, generation = cursor.fetchone() or (None, None)
    return _There(name, tables, installation, generation, may_create)


def _sessions() -> list[str]:
    """Who else is connected, in words; PostgreSQL shows the owner their role and address, not always their name."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid, usename, application_name, client_addr::text FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            " ORDER BY pid"
        )
        rows = cursor.fetchall()
    if not rows:
        return []
    named = [
        f"{pid} ({user}{f', {name}' if name else ''}{f', {host}' if host else ''})" for pid, user, name, host in rows
    ]
    more = f" and {len(rows) - SESSIONS_SHOWN} more" if len(rows) > SESSIONS_SHOWN else ""
    return [
        f"{len(rows)} other sessions are connected: {', '.join(named[:SESSIONS_SHOWN])}{more}: "
        "stop web, worker, beat and controller first"
    ]


def restore(reader: BackupReader, chosen: Plan, *, now: datetime, say: Say) -> Restored:
    """Does what `plan` said, which had no refusals. Raises BackupError; the database is then as it was."""
    saved = reader.manifest
    found = programs.fitting_programs()
    for name in sorted(saved.parts):
        if name != form.DATABASE:
            _put(reader, name)
    say(f"{len(saved.parts) - 1:,} files are in place")
    fill_database(
        found,
        reader.pieces(form.DATABASE),
        statements(saved=saved.generation, generation=chosen.generation),
    )
    say(f"the database is restored, generation {chosen.generation}")
    call_command("migrate", verbosity=0, interactive=False)
    revision = _begin(reader, chosen, now)
    warnings = [*chosen.warnings, *_sign(chosen.generation, now)]
    if revision is None and Revision.objects.exists():
        warnings.append(
            "the newest policy of the backup was not on all agents: push or roll back, which they then take"
        )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return Restored(saved.installation, saved.made_at, chosen.generation, revision, warnings)


def _put(reader: BackupReader, name: str) -> None:
    """One file, whole or not at all; one that is there with the saved size and content stays."""
    target = _target(name)
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, form.FILE_MODE)
            with os.fdopen(descriptor, "wb") as file:
                for piece in reader.pieces(name):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise BackupError(f"{target} cannot be written: {error}") from error


def _begin(reader: BackupReader, chosen: Plan, now: datetime) -> int | None:
    """The restore's own entry of the audit, and the policy in force again under a number that agents accept."""
    saved, actor = reader.manifest, Actor.system("restore")
    reason = f"Restored from the backup of {saved.made_at}"
    with transaction.atomic():
        record(
            actor=actor,
            action="installation.restore",
            noun="installation",
            object_id=saved.installation,
            now=now,
            before={"generation": saved.generation},
            after={
                "generation": chosen.generation,
                "made_at": saved.made_at,
                "database_sha256": saved.parts[form.DATABASE].sha256,
                "warnings": chosen.warnings,
            },
            reason=reason,
        )
        revision = repeat_latest(actor=actor, reason=reason, now=now)
    return None if revision is None else revision.number


def _sign(generation: int, now: datetime) -> list[str]:
    """The live list under its new numbers, before the first agent asks; those of before are gone then."""
    try:
        sign_changes(now)
    except SigningKeyMissing as error:
        return [f"the live list is not signed yet, agents keep the one they have: {error}"]
    LiveEntry.objects.filter(number__lte=live_floor(generation)).delete()
    return []
