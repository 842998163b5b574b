"""The database `flexband` and its three roles: owner (migrations), app (rows, no DDL), reader (looks only).

Everything here can be run again at any time; it also gives the roles the passwords of the secrets file again.
"""

from __future__ import annotations

import psycopg
from psycopg import sql

DATABASE = "flexband"
SUPERUSER = "postgres"
OWNER, APP, READER = "owner", "app", "reader"
ROLES = (OWNER, APP, READER)

APP_TABLES = sql.SQL("SELECT, INSERT, UPDATE, DELETE")
READER_TABLES = sql.SQL("SELECT")


def ensure_roles(unix_dsn: str, passwords: dict[str, str], *, owner_creates_databases: bool | None = False) -> None:
    """Create what is missing of the roles and the database, through the superuser's socket.

    `passwords` maps each name of ROLES, and SUPERUSER, to its password. `owner_creates_databases` is for test servers;
    None leaves it as it is.
    """
    with psycopg.connect(f"{unix_dsn} dbname=postgres", autocommit=True) as server:
        for role in ROLES:
            if not server.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone():
                server.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        for role, password in passwords.items():
            server.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(password)))
        if owner_creates_databases is not None:
            may_create = sql.SQL("CREATEDB" if owner_creates_databases else "NOCREATEDB")
            server.execute(sql.SQL("ALTER ROLE {} {}").format(sql.Identifier(OWNER), may_create))
        server.execute(sql.SQL("ALTER ROLE {} SET default_transaction_read_only = on").format(sql.Identifier(READER)))
        if not server.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone():
            # The grants stand in the template, so that a test's own database has them too.
            with psycopg.connect(f"{unix_dsn} dbname=template1", autocommit=True) as template:
                _grant(template)
            server.execute(
                sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(DATABASE), sql.Identifier(OWNER))
            )
            server.execute(sql.SQL("REVOKE CONNECT ON DATABASE {} FROM PUBLIC").format(sql.Identifier(DATABASE)))
        server.execute(
            sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(
                sql.Identifier(DATABASE), sql.SQL(", ").join(map(sql.Identifier, ROLES))
            )
        )
    with psycopg.connect(f"{unix_dsn} dbname={DATABASE}", autocommit=True) as database:
        _grant(database)


def _grant(database: psycopg.Connection[tuple[object, ...]]) -> None:
    owner, app, reader = map(sql.Identifier, ROLES)
    defaults = sql.SQL("ALTER DEFAULT PRIVILEGES FOR ROLE {} IN SCHEMA public GRANT ").format(owner)
    with database.transaction():
        for statement in (
            sql.SQL("REVOKE CREATE ON SCHEMA public FROM PUBLIC"),
            sql.SQL("GRANT ALL ON SCHEMA public TO {}").format(owner),
            sql.SQL("GRANT USAGE ON SCHEMA public TO {}, {}").format(app, reader),
            defaults + sql.SQL("{} ON TABLES TO {}").format(APP_TABLES, app),
            defaults + sql.SQL("USAGE, SELECT ON SEQUENCES TO {}").format(app),
            defaults + sql.SQL("{} ON TABLES TO {}").format(READER_TABLES, reader),
            defaults + sql.SQL("SELECT ON SEQUENCES TO {}").format(reader),
        ):
            database.execute(statement)
