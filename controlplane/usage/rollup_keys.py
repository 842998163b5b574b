"""Grouping records and deltas by the key of rollups: minute, pool, tenant, class, model, rate version, outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

KEY_COLUMNS = ("pool_id", "tenant_id", "class_id", "model_id", "rate_version", "outcome")
SUM_COLUMNS = (
    "requests", "prompt_tokens", "cached_tokens", "output_tokens", "gpu_us",
    "charge_prompt_nanos", "charge_cached_nanos", "charge_output_nanos", "charge_gpu_nanos",
)  # fmt: skip
ROLLUP_COLUMNS = (*KEY_COLUMNS, *SUM_COLUMNS, "stages")


@dataclass(frozen=True)
class Groups:
    """Groups of equal keys: `keys` is (columns, groups) in ascending order, `of` numbers each row's group."""

    keys: Ints
    of: Ints

    def __len__(self) -> int:
        return int(self.keys.shape[1])


def group_by(columns: Sequence[Ints]) -> Groups:
    """Groups of the rows of equal columns, ordered by the columns from left to right."""
    if not len(columns[0]):
        return Groups(np.zeros((len(columns), 0), dtype=np.int64), np.zeros(0, dtype=np.int64))
    code = np.zeros(len(columns[0]), dtype=np.int64)
    room = 1
    for column in columns:
        low = int(column.min())
        span = int(column.max()) - low + 1
        if room * span >= 2**62:
            code = np.unique(code, return_inverse=True)[1].astype(np.int64)
            room = int(code.max()) + 1
        if room * span >= 2**62:
            values, column = np.unique(column, return_inverse=True)
            low, span = 0, len(values)
        code = code * span + (column - low)
        room *= span
    distinct, inverse = numbered(code, room)
    first = np.empty(len(distinct), dtype=np.int64)
    first[inverse[::-1]] = np.arange(len(code) - 1, -1, -1)
    return Groups(np.stack([column[first] for column in columns]), inverse)


def numbered(code: Ints, room: int) -> tuple[Ints, Ints]:
    """The distinct codes in order and each row's position among them; codes are in [0, room)."""
    if room > 16 * len(code) + 65_536:
        distinct, inverse = np.unique(code, return_inverse=True)
        return distinct, inverse.astype(np.int64, copy=False)
    seen = np.zeros(room, dtype=np.bool_)
    seen[code] = True
    distinct = np.flatnonzero(seen)
    number = np.empty(room, dtype=np.int64)
    number[distinct] = np.arange(len(distinct))
    return distinct, number[code]


def in_order(groups: Ints, count: int) -> tuple[Ints, Ints]:
    """The order that brings rows of the same group together, and where each of `count` groups starts in it."""
    # sixteen bits are sorted by radix
    order = np.argsort(groups.astype(np.uint16) if count <= 2**16 else groups, kind="stable")
    sizes = np.bincount(groups, minlength=count)
    return order, np.concatenate(([0], np.cumsum(sizes)[:-1]))


def sum_groups(groups: Groups, values: Ints) -> Ints:
    """Exact integer sums of `values` (rows, n) by group: (rows, groups)."""
    if not len(groups):
        return np.zeros((len(values), 0), dtype=np.int64)
    order, starts = in_order(groups.of, len(groups))
    return np.add.reduceat(values[:, order], starts, axis=1)
