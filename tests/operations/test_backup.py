"""A backup and what a restore refuses; what a fleet makes of one that is restored is in `test_restore`."""

import io
import json
import os
import stat
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from controlplane.core.generations import STEP
from controlplane.jobs.models import StoredFile
from controlplane.operations import backup_file
from controlplane.operations.database_programs import ProgramsMissing, fitting_programs, server_major
from controlplane.operations.settings_digest import COMPARED
from controlplane.policy.models import SigningKey
from controlplane.policy.signing import ensure_keys
from controlplane.tenants.models import Installation
from tests import factories
from tests.operations.sessions import end_other_sessions

pytestmark = pytest.mark.django_db(transaction=True)
NOW = datetime(2026, 11, 29, 20, 0, tzinfo=UTC)


@pytest.fixture
def home(transactional_db, settings, tmp_path: Path) -> Path:
    settings.SIGNING_KEY_DIR = tmp_path / "keys"
    settings.JOB_STORAGE = str(tmp_path / "jobs")
    settings.USAGE_ARCHIVE = tmp_path / "archive"
    factories.installation()
    ensure_keys(NOW)
    end_other_sessions()
    return tmp_path


def backup(path: Path, *more: str) -> dict:
    out = io.StringIO()
    call_command("backup", str(path), "--json", *more, stdout=out, stderr=io.StringIO())
    return json.loads(out.getvalue())


def restore(path: Path, *more: str) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    call_command("restore", str(path), *more, stdout=out, stderr=err)
    return out.getvalue(), err.getvalue()


def stored_file(home: Path, name: str, body: bytes | None) -> None:
    tenant = factories.tenant("acme")
    StoredFile.objects.create(
        tenant=tenant, purpose="batch", filename=name, path=f"acme/{name}", size_bytes=3, created_by="ada",
        created_at=NOW, ready_at=NOW, expires_at=NOW,
    )  # fmt: skip
    if body is not None:
        (home / "jobs/acme").mkdir(parents=True)
        (home / "jobs/acme" / name).write_bytes(body)


def test_a_backup_is_whole_private_and_says_what_is_in_it(home):
    stored_file(home, "in.jsonl", b"abc")
    saved = backup(home / "b.zip")
    file = home / "b.zip"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert saved["size_bytes"] == file.stat().st_size and saved["left_out"] == []
    assert [path.name for path in home.glob(".b.zip*")] == []
    with backup_file.opened(file) as reader:
        manifest = reader.manifest
        assert len(reader.names("signing-keys/")) == 3 and reader.names("job-files/") == ["job-files/acme/in.jsonl"]
        assert b"".join(reader.pieces("job-files/acme/in.jsonl")) == b"abc"
        for name in manifest.parts:
            reader.check(name)
        assert manifest.installation == str(Installation.objects.get().uuid)
        assert manifest.server_major == server_major() and "app" in manifest.roles
        assert set(manifest.settings) == set(COMPARED) and not any("SECRET" in name for name in COMPARED)


def test_files_that_are_elsewhere_or_gone_are_named(home, settings):
    stored_file(home, "gone.jsonl", None)
    (home / "keys").rename(home / "elsewhere")
    keys, gone = backup(home / "b.zip")["left_out"]
    assert "policy-" in keys and "signing keys in use" in keys
    assert "1 files that rows point to" in gone and "acme/gone.jsonl" in gone
    settings.JOB_STORAGE = "s3://bucket/prefix"
    assert "s3://bucket/prefix: save that store" in backup(home / "c.zip")["left_out"][1]


def test_a_file_that_is_there_is_replaced_only_by_force(home):
    file = home / "b.zip"
    file.write_bytes(b"mine")
    with pytest.raises(CommandError, match=r"b\.zip exists"):
        backup(file)
    assert file.read_bytes() == b"mine"
    backup(file, "--force")
    assert zipfile.is_zipfile(file)
    with pytest.raises(CommandError, match="is no folder"):
        backup(home / "no/b.zip")


def test_a_dump_that_fails_leaves_no_file(home, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "NAME", "none_of_this_name")
    with pytest.raises(CommandError, match="pg_dump ended with status 1"):
        backup(home / "b.zip")
    assert list(home.glob("*b.zip*")) == [] and list(home.glob(".b.zip*")) == []


def test_programs_of_another_version_are_not_used(home, monkeypatch):
    folder = home / "bin"
    folder.mkdir()
    for name in ("pg_dump", "pg_restore", "psql"):
        (folder / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) 9.6'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert fitting_programs().major == server_major() and fitting_programs().folder != folder
    monkeypatch.setattr("controlplane.operations.database_programs.server_major", lambda: 99)
    with pytest.raises(ProgramsMissing, match=r"PostgreSQL 99.*found: 9 in .*postgresql-client-99"):
        fitting_programs()


def _changed(source: Path, target: Path, name: str, change) -> None:
    """A copy in which one entry is another."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.namelist():
            body = old.read(entry)
            new.writestr(entry, change(body) if entry == name else body)


def _manifest(**fields):
    return lambda body: json.dumps({**json.loads(body), **fields})


def test_a_damaged_backup_is_refused_before_anything_is_done(home):
    good, bad = home / "b.zip", home / "bad.zip"
    backup(good)
    _changed(good, bad, "database.dump", lambda body: body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(CommandError, match=r"damaged: database.dump is not what its manifest says"):
        restore(bad, "--replace")
    bad.write_bytes(good.read_bytes()[:-100])
    with pytest.raises(CommandError, match="no whole backup"):
        restore(bad, "--replace")
    data = bytearray(good.read_bytes())
    data[len(data) // 3] ^= 1
    bad.write_bytes(data)
    with pytest.raises(CommandError, match="damaged"):
        restore(bad, "--replace")
    _changed(good, bad, "manifest.json", _manifest(form=2))
    with pytest.raises(CommandError, match="has form 2"):
        restore(bad)
    with zipfile.ZipFile(bad, "w") as other:
        other.writestr("a", "b")
    with pytest.raises(CommandError, match="no backup of Flexband"):
        restore(bad)


def test_a_database_with_something_in_it_another_installation_and_newer_releases_are_refused(home):
    good, other = home / "b.zip", home / "other.zip"
    backup(good)
    with pytest.raises(CommandError, match=r"is not empty \(\d+ tables\): give --replace"):
        restore(good)
    uuid = "00000000-0000-4000-8000-000000000000"
    _changed(
        good, other, "manifest.json",
        _manifest(installation=uuid, server_major=99, migrations=["tenants.9999_later"], roles=["nobody_here"]),
    )  # fmt: skip
    with pytest.raises(CommandError) as refused:
        restore(other, "--replace")
    said = str(refused.value)
    assert f"holds another installation ({Installation.objects.get().uuid}, the backup is of {uuid})" in said
    assert "the backup is of PostgreSQL 99" in said and "lacks the roles nobody_here" in said
    assert "newer release (it has tenants.9999_later)" in said
    assert Installation.objects.get().generation == 1


def test_parts_cannot_leave_their_folders_and_keys_are_not_overwritten(home):
    good, other = home / "b.zip", home / "other.zip"
    backup(good)
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(other, "w") as new:
        manifest = json.loads(old.read("manifest.json"))
        for entry in set(old.namelist()) - {"manifest.json"}:
            new.writestr(entry, old.read(entry))
        new.writestr("job-files/../../x", b"")
        manifest["parts"]["job-files/../../x"] = {
            "size_bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        }  # fmt: skip
        new.writestr("manifest.json", json.dumps(manifest))
    with pytest.raises(CommandError, match="a part of a name that none has"):
        restore(other, "--replace")
    key = next((home / "keys").iterdir())
    key.write_text("another")
    with pytest.raises(CommandError, match="is there with other content"):
        restore(good, "--replace")


def test_other_sessions_are_named(home):
    backup(home / "b.zip")
    where = connection.settings_dict
    address = {"host": where["HOST"], "port": where["PORT"], "user": where["USER"], "password": where["PASSWORD"]}
    with (
        psycopg.connect(dbname=where["NAME"], application_name="flexband-somebody", **address) as held,
        pytest.raises(CommandError, match=rf"{held.info.backend_pid} \({where['USER']}, flexband-somebody"),
    ):
        restore(home / "b.zip", "--replace")


def test_a_plan_says_everything_and_changes_nothing(home, settings):
    backup(home / "b.zip")
    settings.HISTORY_DAYS = 7
    out, err = restore(home / "b.zip", "--replace", "--plan")
    assert out == "nothing was changed\n" and "begin generation 2, 1 after the backup's 1" in err
    assert "settings that are not those of the backup: HISTORY_DAYS" in err
    assert Installation.objects.get().generation == 1


def test_a_restore_that_breaks_leaves_the_database_as_it_was(home, monkeypatch):
    backup(home / "b.zip")
    factories.tenant("later")
    monkeypatch.setattr("controlplane.operations.restoring.statements", lambda **_: "SELECT 1 / 0;")
    with pytest.raises(CommandError, match=r"is as it was: .*division by zero"):
        restore(home / "b.zip", "--replace")
    assert Installation.objects.get().generation == 1
    with connection.cursor() as cursor:
        cursor.execute("SELECT slug FROM tenants_tenant")
        assert ("later",) in cursor.fetchall()


def rights_to_tables() -> set[tuple]:
    """What roles may do, and what they get of tables that are made later."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT relname, relacl::text FROM pg_class WHERE relnamespace = 'public'::regnamespace")
        given = set(cursor.fetchall())
        cursor.execute("SELECT defaclobjtype, defaclacl::text FROM pg_default_acl")
        given |= set(cursor.fetchall())
        cursor.execute("SELECT 'app', has_table_privilege('app', 'audit_auditentry', 'UPDATE')")
        assert cursor.fetchone() == ("app", False)
        cursor.execute("SELECT tgname, tgenabled FROM pg_trigger WHERE NOT tgisinternal")
        return given | set(cursor.fetchall())


def test_a_restore_brings_files_back_and_moves_every_number(home, settings):
    stored_file(home, "in.jsonl", b"abc")
    backup(home / "b.zip")
    (home / "jobs/acme/in.jsonl").unlink()
    rights = rights_to_tables()
    (home / "keys").rename(home / "lost")
    last = SigningKey.objects.count()
    out, _ = restore(home / "b.zip", "--replace", "--generation", "4")
    assert out.startswith("restored, generation 4, ")
    assert (home / "jobs/acme/in.jsonl").read_bytes() == b"abc"
    assert len(list((home / "keys").iterdir())) == last
    assert rights_to_tables() == rights
    row = Installation.objects.get()
    assert row.generation == 4 and row.live_number >= 3 * 2**40
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT sequencename FROM pg_sequences WHERE schemaname = 'public' AND last_value < %s", [3 * STEP]
        )
        assert cursor.fetchall() == []
    assert factories.tenant("new").pk > 3 * STEP
    with pytest.raises(CommandError, match="--generation 4 is too low: 5 is the first"):
        restore(home / "b.zip", "--replace", "--generation", "4")
    for what in ("audit", "usage"):
        call_command(what, "verify", stdout=io.StringIO())
