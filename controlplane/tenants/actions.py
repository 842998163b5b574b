"""What may be done to tenants, people and keys: lock, load, decide, apply, audit, in one transaction."""

from django.db import connection


class Stale(Exception):
    """Somebody changed the row since it was read; `current` is the row as it is now."""

    def __init__(self, current: object) -> None:
        super().__init__("Somebody changed this since you read it.")
        self.current = current


def next_live_number() -> int:
    """The number of a change that acts at once. Holds the installation's row until the transaction ends, so that
    numbers become visible in the order in which they were given.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE tenants_installation SET live_number = live_number + 1 WHERE id = 1 RETURNING live_number"
        )
        row = cursor.fetchone()
    if row is None:
        raise RuntimeError("the installation is not set up: run `manage.py demo` or create its row first")
    return int(row[0])
