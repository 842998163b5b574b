"""Rows of PostgreSQL's COPY BINARY as arrays of fixed width, and the bytes around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

HEADER: Final = b"PGCOPY\n\xff\r\n\0" + b"\0" * 8
TRAILER: Final = b"\xff\xff"
PG_EPOCH_US: Final = 946_684_800_000_000
"""Timestamps count from here, in Unix microseconds."""
_TYPES: Final = {
    "uuid": ("V16", 16), "time": (">i8", 8), "int8": (">i8", 8), "int4": (">i4", 4), "int2": (">i2", 2)
}  # fmt: skip

Columns = Sequence[tuple[str, str]]
"""Name and kind: uuid, time, int8, int4 or int2."""


def row_template(columns: Columns, last_length: int | None = 0) -> NDArray[np.void]:
    """One row of these columns and a last one of `last_length` bytes called `last`, every length filled in.

    With None the bytes of the last column follow elsewhere, and its length is the field `last_length`.
    """
    fields: list[tuple[str, str]] = [("n", ">i2")]
    for name, kind in columns:
        fields += [(f"{name}_length", ">i4"), (name, _TYPES[kind][0])]
    fields += [("last_length", ">i4")]
    if last_length:
        fields += [("last", f"V{last_length}")]
    row = np.zeros(1, np.dtype(fields))
    row["n"] = len(columns) + 1
    for name, kind in columns:
        row[f"{name}_length"] = _TYPES[kind][1]
    row["last_length"] = last_length or 0
    return row


def rows_with_blobs(rows: NDArray[np.void], blobs: Sequence[bytes]) -> bytes:
    """The whole of COPY BINARY for rows of `row_template(..., None)` and the bytes of their last column."""
    rows["last_length"] = np.fromiter(map(len, blobs), dtype=np.int64, count=len(blobs))
    packed, width = rows.tobytes(), rows.dtype.itemsize
    parts = [HEADER]
    for at, blob in enumerate(blobs):
        parts += (packed[at * width : (at + 1) * width], blob)
    parts.append(TRAILER)
    return b"".join(parts)
