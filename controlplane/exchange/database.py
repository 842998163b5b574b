"""The exchange's own connections: a saturated pool of pages leaves the acknowledgements of reports unchanged."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from django.db import connections
from psycopg import Connection
from psycopg.abc import Buffer
from psycopg.conninfo import make_conninfo
from psycopg.types.array import ListDumper
from psycopg_pool import ConnectionPool

POOL_MAX = 8
WAIT_S = 5.0

_pools: dict[str, ConnectionPool[Connection[Any]]] = {}
_lock = Lock()


def _conninfo() -> str:
    settings = connections["default"].settings_dict
    return make_conninfo(
        dbname=settings["NAME"],
        user=settings["USER"] or None,
        password=settings["PASSWORD"] or None,
        host=settings["HOST"] or None,
        port=settings["PORT"] or None,
        application_name="flexband-exchange",
        connect_timeout=5,
        options="-c statement_timeout=30000 -c lock_timeout=10000 -c TimeZone=UTC",
    )


class IntegersDumper(ListDumper):
    """Lists of integers in one step: number by number, as psycopg writes them, is a tenth of a small report."""

    def dump(self, obj: list[Any]) -> Buffer | None:
        """The text of an array."""
        if obj and set(map(type, obj)) == {int}:
            return ("{" + ",".join(map(str, obj)) + "}").encode()
        return super().dump(obj)


def _configure(connection: Connection[Any]) -> None:
    connection.adapters.register_dumper(list, IntegersDumper)


def _pool() -> ConnectionPool[Connection[Any]]:
    conninfo = _conninfo()
    pool = _pools.get(conninfo)
    if pool is None:
        with _lock:
            pool = _pools.get(conninfo)
            if pool is None:
                pool = ConnectionPool(
                    conninfo,
                    min_size=1,
                    max_size=POOL_MAX,
                    timeout=WAIT_S,
                    kwargs={"autocommit": True},
                    check=ConnectionPool.check_connection,
                    configure=_configure,
                    name="exchange",
                    open=True,
                )
                _pools[conninfo] = pool
    return pool


@contextmanager
def connection() -> Iterator[Connection[Any]]:
    """A checked connection in autocommit mode. Raises psycopg.OperationalError when the database cannot be reached."""
    with _pool().connection() as held:
        yield held


def close_pools() -> None:
    """Closes every connection; the next use opens new ones."""
    with _lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()
