"""The embedded servers as supervised children."""

from __future__ import annotations

from controlplane.embedded.postgres import READY_TIMEOUT_S as POSTGRES_READY_TIMEOUT_S
from controlplane.embedded.postgres import STOP_SIGNAL as POSTGRES_STOP_SIGNAL
from controlplane.embedded.postgres import PreparedPostgres
from controlplane.embedded.valkey import STOP_SIGNAL as VALKEY_STOP_SIGNAL
from controlplane.embedded.valkey import PreparedValkey
from controlplane.supervisor.child import Child

LAST = 100  # servers stop after everything that talks to them
STOP_TIMEOUT_S = 30.0


def postgres_child(prepared: PreparedPostgres) -> Child:
    """PostgreSQL in the foreground; ready when it takes connections and its roles are in place."""
    command = prepared.command
    return Child(
        "postgres",
        command.argv,
        env=command.env,
        ready=prepared.accepts_connections,
        ready_timeout_s=POSTGRES_READY_TIMEOUT_S,
        before_start=prepared.await_release,
        stop_signal=POSTGRES_STOP_SIGNAL,
        stop_timeout_s=STOP_TIMEOUT_S,
        stop_order=LAST,
        cwd=command.cwd,
        run_as=command.run_as,
    )


def valkey_child(prepared: PreparedValkey) -> Child:
    """Valkey in the foreground; ready when it has loaded its data."""
    command = prepared.command
    return Child(
        "valkey",
        command.argv,
        env=command.env,
        ready=prepared.accepts_connections,
        before_start=prepared.await_release,
        stop_signal=VALKEY_STOP_SIGNAL,
        stop_timeout_s=STOP_TIMEOUT_S,
        stop_order=LAST,
        cwd=command.cwd,
    )
