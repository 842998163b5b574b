"""One day of records as a Parquet file: written from the table, and read back.

The rows pass through text of one form (integers, ids, the client's id in hexadecimal), so that the SHA-256 of that text
is the same whether it comes out of PostgreSQL or out of the file: that is how a file is known to hold the day.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import duckdb
from django.db.backends.utils import CursorWrapper

from controlplane.usage.records import COLUMNS

MEMORY_LIMIT = "512MB"
ROW_GROUP = 250_000
_DUCK_TYPES = {"uuid": "UUID", "time": "BIGINT", "int8": "BIGINT", "int4": "INTEGER", "int2": "SMALLINT"}
_CLIENT_ID = "client_request_id"

# a time as microseconds, exactly: extract gives a numeric
_TABLE_TEXT = ", ".join(
    f"(extract(epoch FROM {name}) * 1000000)::bigint" if kind == "time" else name for name, kind in COLUMNS
)
_FILE_TEXT = ", ".join(f"epoch_us({name})" if kind == "time" else name for name, kind in COLUMNS)
# an empty text is nothing in both, and would be quotes in one of them
_HEX = f"nullif(encode(convert_to({_CLIENT_ID}, 'UTF8'), 'hex'), '')"
_TABLE_SQL = f"COPY (SELECT {_TABLE_TEXT}, {_HEX} FROM {{table}}) TO STDOUT CSV"  # noqa: S608 - names are constants
_FILE_SQL = f"SELECT {_FILE_TEXT}, lower(hex(encode({_CLIENT_ID}))) FROM read_parquet(?)"  # noqa: S608 - names are constants
_WRITE_SQL = """
COPY (SELECT {columns}, decode(unhex(coalesce({client_id}, ''))) AS {client_id}
      FROM read_csv('{source}', header = false, auto_detect = false, delim = ',', columns = {types}))
TO '{target}' (FORMAT parquet, PARQUET_VERSION v2, COMPRESSION zstd, ROW_GROUP_SIZE {row_group})
"""


@dataclass(frozen=True)
class RecordFile:
    """A written file: `content_digest` is of its rows as text, `file_digest` of its bytes."""

    records: int
    file_bytes: int
    content_digest: bytes
    file_digest: bytes


def file_name(day: date) -> str:
    """Where a day lies in the archive."""
    return f"{day:%Y}/usage-{day:%Y-%m-%d}.parquet"


@contextmanager
def _duckdb(folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    config: dict[str, Any] = {"threads": 1, "memory_limit": MEMORY_LIMIT, "temp_directory": str(folder)}
    with duckdb.connect(":memory:", config=config) as database:
        yield database


def write_day(cursor: CursorWrapper, table: str, target: Path) -> RecordFile:
    """Writes the rows of a partition to a file beside `target` and puts it in its place when it is whole and durable.

    Raises ValueError when the file, read back, does not hold the rows of the table.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".retiring-", dir=target.parent) as temporary:
        text, file = Path(temporary) / "rows.csv", Path(temporary) / "rows.parquet"
        digest, count = _write_text(cursor, table, text)
        with _duckdb(Path(temporary)) as database:
            database.execute(_write_sql(text, file))
        text.unlink()
        written = read_back(file)
        if (written.records, written.content_digest) != (count, digest):
            raise ValueError(
                f"the file of {table} was read back with {written.records} records where {count} were written, or"
                " other ones: nothing was changed"
            )
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        file.replace(target)
    _sync_folder(target.parent)
    return written


def _write_text(cursor: CursorWrapper, table: str, path: Path) -> tuple[bytes, int]:
    digest, count = hashlib.sha256(), 0
    with path.open("wb") as file, cursor.copy(_TABLE_SQL.format(table=table).encode()) as copy:
        for chunk in copy:
            data = bytes(chunk)
            digest.update(data)
            count += data.count(b"\n")
            file.write(data)
    return digest.digest(), count


def _write_sql(source: Path, target: Path) -> str:
    types = {name: _DUCK_TYPES[kind] for name, kind in COLUMNS} | {_CLIENT_ID: "VARCHAR"}
    return _WRITE_SQL.format(
        columns=", ".join(f"make_timestamp({name}) AS {name}" if kind == "time" else name for name, kind in COLUMNS),
        client_id=_CLIENT_ID,
        source=_quoted(source),
        types="{" + ", ".join(f"'{name}': '{kind}'" for name, kind in types.items()) + "}",
        target=_quoted(target),
        row_group=ROW_GROUP,
    )


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_back(path: Path) -> RecordFile:
    """What a file holds. Raises duckdb.Error, OSError for one that cannot be read."""
    digest, count = hashlib.sha256(), 0
    with _duckdb(path.parent) as database:
        found = database.execute(_FILE_SQL, [str(path)])
        while rows := found.fetchmany(20_000):
            count += len(rows)
            digest.update("".join([",".join(map(str, row)) + "\n" for row in rows]).encode())
    return RecordFile(count, path.stat().st_size, digest.digest(), file_digest(path))


def file_digest(path: Path) -> bytes:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def rows_between(
    paths: Sequence[Path], columns: Sequence[str], since: datetime | None, until: datetime | None, chunk: int
) -> Iterator[list[tuple[Any, ...]]]:
    """Rows of files that ended in [since, until), `chunk` at a time; times as Unix microseconds."""
    times = {name for name, kind in COLUMNS if kind == "time"}
    names = ", ".join(f"epoch_us({name})" if name in times else name for name in columns)
    sql = f"SELECT {names} FROM read_parquet(?) WHERE (ended_at >= ? OR ? IS NULL) AND (ended_at < ? OR ? IS NULL)"  # noqa: S608 - names are constants
    begin, end = (None if at is None else at.astimezone(UTC).replace(tzinfo=None) for at in (since, until))
    for path in paths:
        with _duckdb(path.parent) as database:
            found = database.execute(sql, [str(path), begin, begin, end, end])
            while rows := found.fetchmany(chunk):
                yield rows


def rows_where(path: Path, columns: Sequence[str], condition: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
    """The rows of one file that meet a condition; times as Unix microseconds. Few: they are held as a whole.

    `columns` and `condition` are constants of the caller, `values` its parameters.
    """
    times = {name for name, kind in COLUMNS if kind == "time"}
    names = ", ".join(f"epoch_us({name})" if name in times else name for name in columns)
    with _duckdb(path.parent) as database:
        return database.execute(
            f"SELECT {names} FROM read_parquet(?) WHERE {condition}",  # noqa: S608 - constants
            [str(path), *values],
        ).fetchall()
