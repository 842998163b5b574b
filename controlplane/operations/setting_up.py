"""What a new installation needs before its first process serves: roles, schema, its own row, an administrator."""

from dataclasses import dataclass
from datetime import datetime

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import connection, transaction
from psycopg import sql

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.tenants.models import Installation, Member
from controlplane.tenants.roles import Role

APP, READER = "app", "reader"


@dataclass(frozen=True, slots=True)
class SetUp:
    """What was made; `administrator` is empty when one existed or none was asked for."""

    installation: str
    migrated: bool
    administrator: str


def ensure_roles(*, app_password: str | None, reader_password: str | None) -> None:
    """Makes the `app` and `reader` roles beside the owner that is connected, and gives them the owner's tables.

    Needs CREATEROLE; on the embedded server the roles exist already and only the grants are repeated.
    """
    with connection.cursor() as cursor:
        for role, password in ((APP, app_password), (READER, reader_password)):
            cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role])
            if cursor.fetchone() is None:
                if password is None:
                    continue
                cursor.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
            if password is not None:
                statement = sql.SQL("ALTER ROLE {} PASSWORD {}")
                cursor.execute(statement.format(sql.Identifier(role), sql.Literal(password)))
            rights = "SELECT, INSERT, UPDATE, DELETE" if role == APP else "SELECT"
            for grant in (
                "GRANT USAGE ON SCHEMA public TO {}",
                f"ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT {rights} ON TABLES TO {{}}",
                "ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT USAGE, SELECT ON SEQUENCES TO {}",
            ):
                cursor.execute(sql.SQL(grant).format(sql.Identifier(role)))


def set_up(
    *,
    name: str,
    billing_zone: str,
    currency: str,
    administrator: str | None,
    password: str | None,
    now: datetime,
    verbosity: int = 0,
) -> SetUp:
    """Migrates, and makes the installation's row and its first administrator where they are missing."""
    call_command("migrate", verbosity=verbosity, interactive=False)
    with transaction.atomic():
        row, made = Installation.objects.get_or_create(
            pk=1, defaults={"name": name, "billing_zone": billing_zone, "currency": currency}
        )
        if made:
            record(
                actor=Actor.system("set_up"),
                action="installation.create",
                noun="installation",
                object_id=row.uuid,
                now=now,
                after={"name": name, "billing_zone": billing_zone, "currency": currency},
            )
        created = _administrator(administrator, password, now) if administrator else ""
    return SetUp(installation=str(row.uuid), migrated=True, administrator=created)


def _administrator(username: str, password: str | None, now: datetime) -> str:
    users = get_user_model().objects
    if users.filter(username=username).exists():
        return ""
    if not password:
        raise ValidationError({"password": ["Give the first administrator a password."]})
    user = users.create_user(username=username, password=password)
    Member.objects.create(user=user, role=Role.ADMIN)
    record(
        actor=Actor.system("set_up"),
        action="member.create",
        noun="member",
        object_id=user.pk,
        now=now,
        after={"username": username, "role": Role.ADMIN.value},
    )
    return username
