"""The blob in `stages` of every rollup: one histogram per stage and the end-to-end stage stack, versioned.

Layout 1, little-endian: a byte 1, the number of entries of each histogram (uint16, in the order of `HISTOGRAMS`) and
of the stack, then the histograms' entries (`core.histogram`, 6 bytes each) and the stack's (`core.stage_stack`). Many
records are sketched and many blobs merged in one pass of numpy; the rules are those of the core.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.core.histogram import BUCKETS_PER_OCTAVE, ZERO_INDEX, Histogram
from controlplane.core.stage_stack import STACK_STAGES, STAGES, UPSTREAM, StageStack

VERSION = 1
TTFT = "ttft"
HISTOGRAMS = (*STACK_STAGES, TTFT)
EMPTY = b""

_HEADER = struct.Struct(f"<B{len(HISTOGRAMS) + 1}H")
_HEADERS = np.dtype([("version", "u1"), ("counts", "<u2", (len(HISTOGRAMS) + 1,))])
_WIDTH = len(STACK_STAGES)
_ENTRY = np.dtype([("index", "<i2"), ("count", "<u4")])
_ROW = np.dtype([("index", "<i2"), ("count", "<u4"), ("sums", "<i8", (_WIDTH,))])
_PREFILL, _DECODE, _UPSTREAM = (STACK_STAGES.index(name) for name in ("prefill", "decode", UPSTREAM))
# Codes put the bucket of zero first and every other bucket after it: 0 is zero, index + 2 the rest (index >= -1). They
# are under 1,026; a power of two is taken apart without a division.
_SHIFT = 11
_CODE = 2**_SHIFT - 1

Ints = NDArray[np.int64]


@dataclass
class Sketch:
    """Histograms by name of `HISTOGRAMS` and the stack."""

    histograms: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram() for name in HISTOGRAMS})
    stack: StageStack = field(default_factory=StageStack)

    def merge(self, other: "Sketch") -> None:
        for name, histogram in other.histograms.items():
            self.histograms[name].merge(histogram)
        self.stack.merge(other.stack)

    def to_bytes(self) -> bytes:
        packed = [self.histograms[name].to_bytes() for name in HISTOGRAMS]
        stack = self.stack.to_bytes()
        counts = [len(part) // _ENTRY.itemsize for part in packed]
        return _HEADER.pack(VERSION, *counts, len(stack) // _ROW.itemsize) + b"".join(packed) + stack

    @classmethod
    def from_bytes(cls, blob: bytes) -> "Sketch":
        """Raises ValueError for a blob of another version or of a wrong length; empty bytes are an empty sketch."""
        sketch = cls()
        if not blob:
            return sketch
        counts, entries, stack = _split(bytes(blob))
        at = 0
        for name, count in zip(HISTOGRAMS, counts, strict=True):
            end = at + count * _ENTRY.itemsize
            sketch.histograms[name] = Histogram.from_bytes(entries[at:end])
            at = end
        sketch.stack = StageStack.from_bytes(stack)
        return sketch


def _split(blob: bytes) -> tuple[tuple[int, ...], bytes, bytes]:
    if blob[0] != VERSION or len(blob) < _HEADER.size:
        raise ValueError(f"a stage sketch of version {blob[0]} cannot be read: this release knows version {VERSION}")
    _, *counts, rows = _HEADER.unpack_from(blob)
    middle = _HEADER.size + sum(counts) * _ENTRY.itemsize
    if len(blob) != middle + rows * _ROW.itemsize:
        raise ValueError(f"a stage sketch of {len(blob)} bytes does not hold what its header says")
    return tuple(counts), blob[_HEADER.size : middle], blob[middle:]


def bucket_codes(us: Ints) -> Ints:
    """Bucket of each duration as a code that sorts: 0 for zero, else `core.histogram.bucket_index` + 2."""
    positive = np.maximum(us, 1)
    wide = positive.astype(np.float64)
    codes = np.ceil(np.log2(wide) * BUCKETS_PER_OCTAVE)
    # the bound of a bucket is in it, whatever the logarithm of a power of two is rounded to
    np.copyto(codes, (np.frexp(wide)[1] - 1) * BUCKETS_PER_OCTAVE, where=(positive & (positive - 1)) == 0)
    return np.where(us == 0, 0, codes.astype(np.int64) + 1)


def _indexes(codes: Ints) -> NDArray[np.int16]:
    return np.where(codes == 0, ZERO_INDEX, codes - 2).astype("<i2")


def sketch_groups(group: Ints, groups: int, stages_us: Ints, ttft_us: Ints, streamed: NDArray[np.bool_]) -> list[bytes]:
    """One blob per group. `group` (n) numbers each record's group, `stages_us` is (len(STAGES), n), -1 is unknown.

    An unknown time is no sample of its histogram and adds nothing to the stack.
    """
    measured = np.concatenate([stages_us, np.where(streamed, -1, 0)[None, :], ttft_us[None, :]])
    known = np.maximum(stages_us, 0)
    upstream = known[_PREFILL] + known[_DECODE]
    measured[_UPSTREAM] = np.where(streamed, -1, upstream)
    measured[_PREFILL] = np.where(streamed, measured[_PREFILL], -1)
    measured[_DECODE] = np.where(streamed, measured[_DECODE], -1)
    counts, entries = _pack_histograms(group, groups, measured)
    sums = np.concatenate([known, np.where(streamed, 0, upstream)[None, :]])
    sums[_PREFILL] = np.where(streamed, known[_PREFILL], 0)
    sums[_DECODE] = np.where(streamed, known[_DECODE], 0)
    row_counts, rows = _pack_stacks(group, groups, np.ones_like(group), bucket_codes(known.sum(axis=0)), sums)
    return _join(counts, entries, row_counts, rows)


def merge_groups(group: Ints, groups: int, blobs: Sequence[bytes]) -> list[bytes]:
    """One blob per group: the sum of the blobs whose number in `group` is its own."""
    width = len(HISTOGRAMS)
    slots, stack_groups, entries, rows = [], [], [], []
    for number, blob in zip(group.tolist(), blobs, strict=True):
        if not blob:
            continue
        lengths, packed, stack = _split(bytes(blob))
        entries.append(packed)
        rows.append(stack)
        slots.append(np.repeat(np.arange(width) + number * width, lengths))
        stack_groups.append(np.full(len(stack) // _ROW.itemsize, number))
    if not slots:
        return [EMPTY] * groups
    flat = np.frombuffer(b"".join(entries), _ENTRY)
    counts, packed_entries = _sum_entries(
        np.concatenate(slots).astype(np.int64), groups, _codes(flat["index"]), flat["count"].astype(np.int64)
    )
    stack_rows = np.frombuffer(b"".join(rows), _ROW)
    row_counts, packed_rows = _pack_stacks(
        np.concatenate(stack_groups).astype(np.int64),
        groups,
        stack_rows["count"].astype(np.int64),
        _codes(stack_rows["index"]),
        np.ascontiguousarray(stack_rows["sums"].T),
    )
    return _join(counts, packed_entries, row_counts, packed_rows)


def _codes(index: NDArray[np.int16]) -> Ints:
    wide = index.astype(np.int64)
    return np.where(wide == ZERO_INDEX, 0, wide + 2)


def _pack_histograms(group: Ints, groups: int, measured: Ints) -> tuple[Ints, NDArray[np.void]]:
    width = len(HISTOGRAMS)
    slot = group[None, :] * width + np.arange(width)[:, None]
    seen = measured >= 0
    key = (slot[seen] << _SHIFT) | bucket_codes(measured[seen])
    if groups * width << _SHIFT <= 8 * len(key) + 65_536:
        dense = np.bincount(key, minlength=groups * width << _SHIFT)
        distinct = np.flatnonzero(dense)
        return _entries(distinct, dense[distinct], groups)
    key = key[_sorting(key)]
    starts = _starts(key)
    return _entries(key[starts], np.diff(starts, append=len(key)), groups)


def _sum_entries(slot: Ints, groups: int, codes: Ints, counts: Ints) -> tuple[Ints, NDArray[np.void]]:
    """Entries in the order (group, histogram, bucket) and how many each (group, histogram) has."""
    key = (slot << _SHIFT) | codes
    order = _sorting(key)
    key = key[order]
    starts = _starts(key)
    return _entries(key[starts], _sums(counts[None, order], starts)[0], groups)


def _entries(distinct: Ints, counts: Ints, groups: int) -> tuple[Ints, NDArray[np.void]]:
    width = len(HISTOGRAMS)
    entries = np.empty(len(distinct), _ENTRY)
    entries["index"] = _indexes(distinct & _CODE)
    entries["count"] = counts
    return np.bincount(distinct >> _SHIFT, minlength=groups * width).reshape(groups, width), entries


def _pack_stacks(group: Ints, groups: int, counts: Ints, codes: Ints, sums: Ints) -> tuple[Ints, NDArray[np.void]]:
    key = (group << _SHIFT) | codes
    order = _sorting(key)
    key = key[order]
    starts = _starts(key)
    distinct = key[starts]
    rows = np.empty(len(distinct), _ROW)
    rows["index"] = _indexes(distinct & _CODE)
    rows["count"] = _sums(counts[None, order], starts)[0]
    rows["sums"] = _sums(sums[:, order], starts).T
    return np.bincount(distinct >> _SHIFT, minlength=groups), rows


def _sorting(key: Ints) -> Ints:
    """The order that sorts keys of a number and a code. Sixteen bits are sorted by radix, in half the time."""
    if not len(key) or int(key.max()) >> _SHIFT >= 2**16:
        return np.argsort(key)
    by_code = np.argsort((key & _CODE).astype(np.uint16), kind="stable")
    return by_code[np.argsort((key >> _SHIFT)[by_code].astype(np.uint16), kind="stable")]


def _starts(ordered: Ints) -> Ints:
    """Where each run of equal values begins."""
    begins = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
    return np.flatnonzero(begins)


def _sums(ordered: Ints, starts: Ints) -> Ints:
    """Exact sums of each run of the columns (rows, n): (rows, runs)."""
    if not len(starts):
        return ordered
    through = np.cumsum(ordered, axis=1)[:, np.append(starts[1:], ordered.shape[1]) - 1]
    through[:, 1:] -= through[:, :-1].copy()
    return through


def _join(counts: Ints, entries: NDArray[np.void], row_counts: Ints, rows: NDArray[np.void]) -> list[bytes]:
    packed_entries, packed_rows = entries.tobytes(), rows.tobytes()
    headers = np.empty(len(counts), _HEADERS)
    headers["version"], headers["counts"][:, :-1], headers["counts"][:, -1] = VERSION, counts, row_counts
    packed_headers, width = headers.tobytes(), _HEADER.size
    ends = np.cumsum(counts.sum(axis=1) * _ENTRY.itemsize).tolist()
    row_ends = np.cumsum(row_counts * _ROW.itemsize).tolist()
    blobs, head, at, row_at = [], 0, 0, 0
    for end, row_end in zip(ends, row_ends, strict=True):
        blobs.append(packed_headers[head : head + width] + packed_entries[at:end] + packed_rows[row_at:row_end])
        head, at, row_at = head + width, end, row_end
    return blobs


assert len(STAGES) + 1 == _WIDTH
