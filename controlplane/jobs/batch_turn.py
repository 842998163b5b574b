"""One process at a time works on a batch; a second one leaves it. It saves work: correctness is in the rows."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection


@contextmanager
def alone(batch_id: int) -> Iterator[bool]:
    """Whether this process has the turn; it ends with the block, or with the process."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(hashtext('jobs_batch'), %s)", (batch_id % 2**31,))
        got = bool(cursor.fetchone()[0])
    try:
        yield got
    finally:
        if got:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(hashtext('jobs_batch'), %s)", (batch_id % 2**31,))
