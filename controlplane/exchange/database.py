"""The exchange's own connections: a saturated pool of pages leaves the acknowledgements of reports unchanged."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final

import msgspec
from django.db import connections
from psycopg import Connection
from psycopg.abc import Buffer
from psycopg.conninfo import make_conninfo
from psycopg.types.array import ListDumper
from psycopg.types.json import Jsonb, set_json_loads
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


class ColumnDumper(ListDumper):
    """Lists of one plain type in one step: value by value, as psycopg writes them, is a tenth of a small report."""

    def dump(self, obj: list[Any]) -> Buffer | None:
        """The text of an array."""
        kinds = set(map(type, obj))
        write = _WRITERS.get(kinds.pop()) if len(kinds) == 1 else None
        written = None if write is None else write(obj)
        return super().dump(obj) if written is None else written


def _of_integers(values: list[int]) -> bytes:
    return ("{" + ",".join(map(str, values)) + "}").encode()


def _of_booleans(values: list[bool]) -> bytes:
    return ("{" + ",".join(["t" if value else "f" for value in values]) + "}").encode()


def _of_bytes(values: list[bytes]) -> bytes:
    return ('{"\\\\x' + '","\\\\x'.join([value.hex() for value in values]) + '"}').encode()


def _of_texts(values: list[str]) -> bytes | None:
    """None where one of them has to be escaped, or cannot be told to the database."""
    joined = '","'.join(values)
    plain = joined.count('"') == 2 * (len(values) - 1) and "\\" not in joined and "\0" not in joined
    return ('{"' + joined + '"}').encode() if plain else None


def _of_documents(values: list[Jsonb]) -> bytes | None:
    """None where one of them is written in a way of its own."""
    if any(value.dumps is not None for value in values):
        return None
    texts = ["[]" if value.obj == [] else json.dumps(value.obj) for value in values]
    escaped = [text.replace("\\", "\\\\").replace('"', '\\"') for text in texts]
    return ('{"' + '","'.join(escaped) + '"}').encode()


def _of_nothing(values: list[None]) -> bytes:
    return ("{" + ",".join(["NULL"] * len(values)) + "}").encode()


_WRITERS: Final[dict[type, Callable[[Any], bytes | None]]] = {
    int: _of_integers,
    bool: _of_booleans,
    bytes: _of_bytes,
    str: _of_texts,
    Jsonb: _of_documents,
    type(None): _of_nothing,
}


def read_json(document: str | bytes) -> Any:
    """What `json.loads` reads, at a tenth of its work: each second the demand of all agents is read."""
    try:
        return msgspec.json.decode(document)
    except (msgspec.DecodeError, RecursionError):
        # a number that fits no float, or a deep nest
        return json.loads(document)


def _configure(connection: Connection[Any]) -> None:
    connection.adapters.register_dumper(list, ColumnDumper)
    set_json_loads(read_json, connection)


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
