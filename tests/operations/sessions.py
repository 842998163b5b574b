"""Sessions of the test database that tests before left open in threads of theirs."""

from asgiref.sync import SyncToAsync
from django.db import connection, connections


def end_other_sessions() -> None:
    """Closes those of this thread and of the one that runs what is asked of the database by coroutines, which goes on
    to be used; then ends the others, whose threads are gone.
    """
    SyncToAsync.single_thread_executor.submit(connections.close_all).result(60)
    connections.close_all()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
