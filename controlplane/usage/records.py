"""Usage records as columns: from the rows of reports to one matrix, and from there to the bytes of COPY BINARY."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from controlplane.usage.copy_binary import HEADER, PG_EPOCH_US, TRAILER, row_template
from controlplane.wire.packed import ROW_CODES, Texts, id_text
from controlplane.wire.report import UsageRow

FIELDS = UsageRow.__struct_fields__
# Literal, so that the type of each field of a row is known.
REQUEST_ID: Final = 0
JOB: Final = 10
CLIENT_ID: Final = 33
assert (FIELDS[REQUEST_ID], FIELDS[JOB], FIELDS[CLIENT_ID]) == ("request_id", "job", "client_request_id")
INTEGERS = tuple(name for name in FIELDS if name not in ("request_id", "job", "client_request_id"))
_pack_integers = struct.Struct(f"<{len(INTEGERS)}q").pack
_ROW_OF = {name: row for row, name in enumerate(INTEGERS)}
CLIENT_ID_MAX = 128

RecordTuple = tuple[
    str, int, int, int, int, int, int, int, int, int, str, int, int, int, int, int, int,
    int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, str,
]  # fmt: skip
"""`wire.report.UsageRow` as a tuple, which is what a report of many rows is decoded to."""

_CODE_TYPES = {"h": "<i2", "i": "<i4", "q": "<i8"}
_PACKED_ROW = np.dtype(
    [("request_id", "V16"), *((name, _CODE_TYPES[code]) for name, code in zip(INTEGERS, ROW_CODES, strict=True))]
)

COLUMNS = (
    ("request_id", "uuid"), ("received_at", "time"), ("arrived_at", "time"), ("ended_at", "time"), ("attempt", "int2"),
    ("agent_id", "int4"), ("pool_id", "int4"), ("slot_id", "int4"), ("tenant_id", "int4"), ("key_id", "int4"),
    ("class_id", "int4"), ("asked_class_id", "int4"), ("model_id", "int4"), ("job_id", "int8"), ("revision", "int4"),
    ("rate_version", "int4"), ("outcome", "int2"), ("status", "int2"), ("flags", "int2"), ("prompt_tokens", "int4"),
    ("cached_tokens", "int4"), ("output_tokens", "int4"), ("admission_us", "int8"), ("queue_us", "int8"),
    ("batch_wait_us", "int8"), ("preprocess_us", "int8"), ("prefill_us", "int8"), ("decode_us", "int8"),
    ("return_us", "int8"), ("ttft_us", "int8"), ("gpu_us", "int8"), ("estimated_gpu_us", "int8"),
    ("charge_prompt_nanos", "int8"), ("charge_cached_nanos", "int8"), ("charge_output_nanos", "int8"),
    ("charge_gpu_nanos", "int8"),
)  # fmt: skip
_AS_REPORTED = tuple(name for name, _ in COLUMNS if name in INTEGERS)
COPY_COLUMNS = "({}, client_request_id)".format(", ".join(name for name, _ in COLUMNS))

Ints = NDArray[np.int64]


class UnreadableRows(ValueError):
    """Some rows hold a request id or a number that no column can; `rows` are their positions."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(f"{len(rows)} rows cannot be read")
        self.rows = rows


@dataclass
class Records:
    """Columns of n records. `integers` is (len(INTEGERS), n); `source` numbers the report each came with."""

    request_ids: NDArray[np.uint8]
    integers: Ints
    jobs: Sequence[str]
    client_ids: Sequence[str]
    source: Ints
    agent_ids: Ints
    pool_ids: Ints
    job_ids: Ints

    def __len__(self) -> int:
        return int(self.integers.shape[1])

    def column(self, name: str) -> Ints:
        return self.integers[_ROW_OF[name]]

    def rows(self, first: str, last: str) -> Ints:
        """The adjacent columns from `first` to `last`, as (columns, n)."""
        return self.integers[_ROW_OF[first] : _ROW_OF[last] + 1]

    def only(self, keep: NDArray[np.bool_]) -> Records:
        """The records where `keep` is true."""
        chosen = np.flatnonzero(keep).tolist()
        return Records(
            request_ids=self.request_ids[keep],
            integers=self.integers[:, keep],
            jobs=[self.jobs[at] for at in chosen],
            client_ids=[self.client_ids[at] for at in chosen],
            source=self.source[keep],
            agent_ids=self.agent_ids[keep],
            pool_ids=self.pool_ids[keep],
            job_ids=self.job_ids[keep],
        )


class Origin(Struct, frozen=True):
    """Whose rows these are."""

    agent_id: int
    pool_id: int


class PackedRows(Struct, frozen=True):
    """The records of a packed report (`wire.packed`): `rows` are `count` of fixed width, texts stand where there are
    any.
    """

    rows: memoryview
    count: int
    texts: Sequence[Texts] = ()

    def __len__(self) -> int:
        return self.count


Rows = Sequence[RecordTuple] | PackedRows
Batch = tuple[Origin, Rows]


def to_columns(reports: Sequence[Batch]) -> Records:
    """Columns of the rows of several reports; those of one report stand in its order.

    Raises UnreadableRows when a row fits no column; its positions are among the rows that are not packed.
    """
    packed = [(at, rows) for at, (_, rows) in enumerate(reports) if isinstance(rows, PackedRows)]
    plain = [(at, rows) for at, (_, rows) in enumerate(reports) if not isinstance(rows, PackedRows)]
    if not packed:
        return _with_origins(reports, _of_tuples(plain))
    read = _of_packed(packed)
    if any(rows for _, rows in plain):
        read = _joined(_of_tuples(plain), read)
    return _with_origins(reports, read)


@dataclass(frozen=True)
class _ReadRows:
    """Rows before it is known whose they are: `source` numbers the reports."""

    request_ids: NDArray[np.uint8]
    integers: Ints
    jobs: list[str]
    client_ids: list[str]
    source: Ints


def _with_origins(reports: Sequence[Batch], read: _ReadRows) -> Records:
    agent_ids = np.array([origin.agent_id for origin, _ in reports], dtype=np.int64)
    pool_ids = np.array([origin.pool_id for origin, _ in reports], dtype=np.int64)
    return Records(
        request_ids=read.request_ids,
        integers=read.integers,
        jobs=read.jobs,
        client_ids=read.client_ids,
        source=read.source,
        agent_ids=agent_ids[read.source],
        pool_ids=pool_ids[read.source],
        job_ids=np.zeros(len(read.source), dtype=np.int64),
    )


def _joined(first: _ReadRows, second: _ReadRows) -> _ReadRows:
    return _ReadRows(
        request_ids=np.concatenate([first.request_ids, second.request_ids]),
        integers=np.concatenate([first.integers, second.integers], axis=1),
        jobs=first.jobs + second.jobs,
        client_ids=first.client_ids + second.client_ids,
        source=np.concatenate([first.source, second.source]),
    )


def _sources(counted: Sequence[tuple[int, Any]]) -> Ints:
    numbers = np.array([at for at, _ in counted], dtype=np.int64)
    return np.repeat(numbers, [len(rows) for _, rows in counted])


def _of_packed(batches: Sequence[tuple[int, PackedRows]]) -> _ReadRows:
    table = np.frombuffer(b"".join([rows.rows for _, rows in batches]), dtype=_PACKED_ROW)
    integers = np.empty((len(INTEGERS), len(table)), dtype=np.int64)
    for number, name in enumerate(INTEGERS):
        integers[number] = table[name]
    jobs, client_ids = [""] * len(table), [""] * len(table)
    begin = 0
    for _, rows in batches:
        for text in rows.texts:
            jobs[begin + text.row], client_ids[begin + text.row] = text.job, text.client_request_id
        begin += rows.count
    request_ids = np.ascontiguousarray(table["request_id"]).view(np.uint8).reshape(len(table), 16)
    return _ReadRows(request_ids, integers, jobs, client_ids, _sources(batches))


def _of_tuples(batches: Sequence[tuple[int, Sequence[RecordTuple]]]) -> _ReadRows:
    rows = [row for _, records in batches for row in records]
    try:
        integers = _integers(rows)
        request_ids = _request_ids([row[REQUEST_ID] for row in rows])
    except (struct.error, ValueError):
        raise UnreadableRows([at for at, row in enumerate(rows) if not _is_readable(row)]) from None
    jobs, client_ids = [row[JOB] for row in rows], [row[CLIENT_ID] for row in rows]
    return _ReadRows(request_ids, integers, jobs, client_ids, _sources(batches))


def _integers(rows: Sequence[RecordTuple]) -> Ints:
    # packing row by row is four times as fast as handing columns of Python integers to numpy
    packed = b"".join([_pack_integers(*row[1:JOB], *row[JOB + 1 : CLIENT_ID]) for row in rows])
    return np.ascontiguousarray(np.frombuffer(packed, dtype="<i8").reshape(len(rows), len(INTEGERS)).T, dtype=np.int64)


def _request_ids(texts: Sequence[str]) -> NDArray[np.uint8]:
    joined = "".join(texts)
    letters = np.frombuffer(joined.encode("ascii"), dtype=np.uint8)
    if set(map(len, texts)) - {36}:
        raise ValueError("a request id is a UUID of 36 characters")
    grid = letters.reshape(len(texts), 36)
    if (grid[:, (8, 13, 18, 23)] != ord("-")).any():
        raise ValueError("a request id has its hyphens elsewhere")
    raw = bytes.fromhex(joined.replace("-", ""))
    if len(raw) != 16 * len(texts):
        raise ValueError("a request id has more hyphens than a UUID")
    return np.frombuffer(raw, dtype=np.uint8).reshape(len(texts), 16)


def _is_readable(row: RecordTuple) -> bool:
    try:
        _integers([row])
        _request_ids([row[REQUEST_ID]])
    except (struct.error, ValueError):
        return False
    return True


def to_copy(records: Records, received_us: int) -> bytearray:
    """The bytes of COPY BINARY for `COPY_COLUMNS`. Client ids are cut at CLIENT_ID_MAX bytes.

    Rows are written in groups of equal length of the client's id, so that each group is one array of fixed width.
    """
    if not any(records.client_ids):
        return _copy_of(records, [(slice(None), [])], received_us)
    texts = [_client_id(text) for text in records.client_ids]
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    groups: list[Group] = []
    for length in np.unique(lengths).tolist():
        chosen = np.flatnonzero(lengths == length)
        groups.append((chosen, [texts[at] for at in chosen.tolist()]))
    return _copy_of(records, groups, received_us)


Group = tuple[slice | Ints, list[bytes]]
"""Which records, and their client ids of one length; no ids are empty ones."""


def _copy_of(records: Records, groups: Sequence[Group], received_us: int) -> bytearray:
    templates = [_template(len(texts[0]) if texts else 0) for _, texts in groups]
    counts = [len(texts) or len(records) for _, texts in groups]
    size = sum(row.dtype.itemsize * count for row, count in zip(templates, counts, strict=True))
    # filled in place: the rows are megabytes, and every copy of them counts
    out = bytearray(len(HEADER) + size + len(TRAILER))
    out[: len(HEADER)], out[-len(TRAILER) :] = HEADER, TRAILER
    at = len(HEADER)
    for (chosen, texts), template, count in zip(groups, templates, counts, strict=True):
        rows = np.frombuffer(out, template.dtype, count, at)
        # as bytes: numpy would go through every field of every row
        whole = f"V{template.dtype.itemsize}"
        rows.view(whole)[:] = template.view(whole)
        _fill(rows, records, chosen, received_us)
        if texts and texts[0]:
            rows["last"] = np.frombuffer(b"".join(texts), dtype=f"V{len(texts[0])}")
        at += rows.nbytes
    return out


def _client_id(text: str) -> bytes:
    if not text:
        return b""
    clean = text.replace("\x00", "").encode("utf-8", "replace")
    return clean if len(clean) <= CLIENT_ID_MAX else clean[:CLIENT_ID_MAX].decode("utf-8", "ignore").encode()


@lru_cache(maxsize=CLIENT_ID_MAX + 1)
def _template(text_length: int) -> NDArray[np.void]:
    return row_template(COLUMNS, text_length)


def _fill(rows: NDArray[np.void], records: Records, chosen: slice | Ints, received_us: int) -> None:
    rows["request_id"] = np.ascontiguousarray(records.request_ids[chosen]).view("V16")[:, 0]
    rows["received_at"] = received_us - PG_EPOCH_US
    rows["arrived_at"] = records.column("arrived_us")[chosen] - PG_EPOCH_US
    rows["ended_at"] = records.column("ended_us")[chosen] - PG_EPOCH_US
    rows["agent_id"] = records.agent_ids[chosen]
    rows["pool_id"] = records.pool_ids[chosen]
    rows["job_id"] = records.job_ids[chosen]
    for name in _AS_REPORTED:
        rows[name] = records.column(name)[chosen]


def as_rows(records: Records, chosen: Iterable[int]) -> list[list[object]]:
    """Rows in the layout of the wire again, for the quarantine."""
    rows = []
    for at in chosen:
        numbers = dict(zip(INTEGERS, records.integers[:, at].tolist(), strict=True))
        given = {
            "request_id": id_text(records.request_ids[at].tobytes()),
            "job": records.jobs[at],
            "client_request_id": records.client_ids[at],
        }
        rows.append([given[name] if name in given else numbers[name] for name in FIELDS])
    return rows
