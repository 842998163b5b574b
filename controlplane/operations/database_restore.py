"""A dump into the database in one transaction: what is there goes, the dump comes, closing statements, commit.

`pg_restore` writes the dump as SQL, `psql` runs it. The commit is sent only after `pg_restore` ended well: whatever
breaks before leaves the database as it was.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Final

from controlplane.operations import database_programs as programs
from controlplane.operations.backup_file import PIECE_BYTES, BackupError

log = logging.getLogger(__name__)

ERROR_BYTES: Final = 2_000
# Who came in meanwhile holds locks: said after that time instead of waited for.
_BEGIN: Final = """
SET client_min_messages = warning;
SET lock_timeout = '15s';
BEGIN;
"""
#: Everything of the schema but what belongs to extensions. The schema itself and the rights to it stay.
_EMPTY: Final = """
DO $$ DECLARE o record; BEGIN
    FOR o IN SELECT c.relname AS name, c.relkind AS kind FROM pg_class c
             WHERE c.relnamespace = 'public'::regnamespace
               AND c.relkind IN ('r', 'p', 'v', 'm') AND NOT c.relispartition
               AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'e') LOOP
        EXECUTE format('DROP %s IF EXISTS public.%I CASCADE',
            CASE o.kind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW' ELSE 'TABLE' END, o.name);
    END LOOP;
    FOR o IN SELECT c.relname AS name FROM pg_class c
             WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'S'
               AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'e') LOOP
        EXECUTE format('DROP SEQUENCE IF EXISTS public.%I CASCADE', o.name);
    END LOOP;
    FOR o IN SELECT p.oid::regprocedure AS name FROM pg_proc p
             WHERE p.pronamespace = 'public'::regnamespace
               AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e') LOOP
        EXECUTE format('DROP ROUTINE IF EXISTS %s CASCADE', o.name);
    END LOOP;
END $$;
"""
#: What new tables give to roles by themselves. The dump takes nothing of that away and sets it itself at its end: with
#: it in force, `app` could change rows of tables that are only ever added to.
_WITHOUT_DEFAULTS: Final = """
DO $$ DECLARE o record; BEGIN
    FOR o IN SELECT DISTINCT CASE d.defaclobjtype WHEN 'r' THEN 'TABLES' WHEN 'S' THEN 'SEQUENCES'
                    WHEN 'f' THEN 'FUNCTIONS' WHEN 'T' THEN 'TYPES' END AS kind, r.rolname AS name
             FROM pg_default_acl d, aclexplode(d.defaclacl) g JOIN pg_roles r ON r.oid = g.grantee
             WHERE d.defaclnamespace = 'public'::regnamespace AND d.defaclrole = current_user::regrole
               AND r.rolname <> current_user LOOP
        EXECUTE format('ALTER DEFAULT PRIVILEGES IN SCHEMA public REVOKE ALL ON %s FROM %I', o.kind, o.name);
    END LOOP;
END $$;
"""
_END: Final = "\nCOMMIT;\n"


def fill_database(found: programs.Programs, dump: Iterator[bytes], closing: str) -> None:
    """Replaces what the schema `public` holds by a dump. Raises BackupError; then nothing has changed."""
    with tempfile.TemporaryFile() as errors:
        shell = subprocess.Popen(
            [found.path(programs.SHELL), "--no-psqlrc", "--quiet", "--no-password", "--set=ON_ERROR_STOP=1"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=programs.environment(),
        )  # fmt: skip
        assert shell.stdin is not None
        try:
            shell.stdin.write((_BEGIN + _EMPTY + _WITHOUT_DEFAULTS).encode())
            _pour(found, dump, shell.stdin, errors)
            shell.stdin.write(f"\nSET search_path TO public;\n{closing}{_END}".encode())
            shell.stdin.close()
            code = shell.wait()
        except BrokenPipeError:
            code = shell.wait()
        finally:
            if shell.poll() is None:
                shell.kill()
                shell.wait()
        if code:
            raise BackupError(f"the database was not restored and is as it was: {_said(errors)}")


def _pour(found: programs.Programs, dump: Iterator[bytes], target: IO[bytes], errors: IO[bytes]) -> None:
    """The dump as SQL into `target`. Raises BackupError where it does not come to its end."""
    reading = subprocess.Popen(
        [found.path(programs.RESTORE), "--file=-", "--no-owner", "--exit-on-error"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
    )  # fmt: skip
    assert reading.stdin is not None and reading.stdout is not None
    feeding = _Feeder(dump, reading.stdin)
    feeding.start()
    try:
        while piece := reading.stdout.read(PIECE_BYTES):
            target.write(piece)
        code = reading.wait()
    finally:
        reading.stdout.close()
        if reading.poll() is None:
            reading.kill()
            reading.wait()
        feeding.join()
    if feeding.fault is not None:
        raise feeding.fault
    if code:
        raise BackupError(f"the database was not restored and is as it was: {_said(errors)}")


class _Feeder(threading.Thread):
    """Writes a dump to a program that is read from meanwhile."""

    def __init__(self, dump: Iterator[bytes], target: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._dump = dump
        self._target = target
        self.fault: BackupError | None = None

    def run(self) -> None:
        try:
            for piece in self._dump:
                self._target.write(piece)
        except BackupError as error:
            self.fault = error
        except BrokenPipeError:
            log.debug("pg_restore ended before its dump: its status says why")
        finally:
            with contextlib.suppress(BrokenPipeError):
                self._target.close()


def _said(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read(ERROR_BYTES).decode(errors="replace").strip() or "its programs did not say why"
