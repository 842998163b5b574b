"""Sessions of the test database that tests before left open in threads of theirs."""

from django.db import connection, connections


def end_other_sessions() -> None:
    """Ends every session but one that this thread opens anew; a thread that comes back gets another."""
    connections.close_all()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
