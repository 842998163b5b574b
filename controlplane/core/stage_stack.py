"""Where the slow requests spend their time: a joint sketch of end-to-end latency and per-stage sums.

Percentiles of stages do not add up. The stack keeps, per bucket of end-to-end time, how many requests there were and
how long they spent in each stage, so that the mean per stage of the slowest requests adds up exactly to their mean.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from controlplane.core.histogram import Histogram, bucket_index, quantile_index
from controlplane.core.money import distribute, round_ratio

STAGES = ("admission", "queue", "batch_wait", "preprocess", "prefill", "decode", "return_")
"""What is measured of each request, in the order of its path."""
UPSTREAM = "upstream"
STACK_STAGES = (*STAGES, UPSTREAM)
"""What a stack shows: a request that is not streamed has one stage `upstream` in place of prefill and decode."""

_PREFILL, _DECODE = STAGES.index("prefill"), STAGES.index("decode")
_WIDTH = len(STACK_STAGES)
_ENTRY = struct.Struct(f"<hI{_WIDTH}q")


@dataclass(frozen=True, slots=True)
class TailStack:
    """Mean time per stage of the requests of a tail; the stages add up to `mean_us` exactly."""

    count: int
    sum_us: int
    mean_us: int
    stage_sums_us: dict[str, int]
    stage_means_us: dict[str, int]


class StageStack:
    """Sparse, mergeable sums per end-to-end bucket: [count, one sum in microseconds per stage of STACK_STAGES]."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StageStack) and self.rows == other.rows

    __hash__ = None  # type: ignore[assignment]

    def record(self, stages_us: Sequence[int], *, streamed: bool = True) -> None:
        """Add one request by its time in each of STAGES; ValueError for a wrong length or a negative time."""
        if len(stages_us) != len(STAGES) or min(stages_us) < 0:
            raise ValueError(f"a request has {len(STAGES)} stage times of zero or more, not {list(stages_us)!r}")
        row = self.rows.setdefault(bucket_index(sum(stages_us)), [0] * (1 + _WIDTH))
        row[0] += 1
        for position, us in enumerate(stages_us, start=1):
            row[position] += us
        if not streamed:
            upstream_us = stages_us[_PREFILL] + stages_us[_DECODE]
            row[1 + _PREFILL] -= stages_us[_PREFILL]
            row[1 + _DECODE] -= stages_us[_DECODE]
            row[_WIDTH] += upstream_us

    def merge(self, other: "StageStack") -> None:
        """Add the sums of another stack to this one."""
        for index, row in other.rows.items():
            self._add(index, row)

    def _add(self, index: int, row: Sequence[int]) -> None:
        mine = self.rows.get(index)
        self.rows[index] = list(row) if mine is None else [left + right for left, right in zip(mine, row, strict=True)]

    @property
    def count(self) -> int:
        """Number of requests."""
        return sum(row[0] for row in self.rows.values())

    def histogram(self) -> Histogram:
        """The end-to-end histogram inside the stack."""
        return Histogram((index, row[0]) for index, row in self.rows.items())

    def tail(self, percentile: float) -> TailStack | None:
        """Stages of the requests at or above an end-to-end percentile (0.5: the slower half); None without requests.

        The tail begins at the bucket that holds the percentile and takes that bucket whole: every request in it lies
        within one bucket ratio of the percentile, and nothing is interpolated.
        """
        edge = quantile_index({index: row[0] for index, row in self.rows.items()}, percentile)
        if edge is None:
            return None
        rows = [row for index, row in self.rows.items() if index >= edge]
        count = sum(row[0] for row in rows)
        sums_us = {stage: sum(row[1 + at] for row in rows) for at, stage in enumerate(STACK_STAGES)}
        sum_us = sum(sums_us.values())
        mean_us = round_ratio(sum_us, count)
        means_us = distribute(mean_us, {stage: Fraction(us, count) for stage, us in sums_us.items()})
        in_order = {stage: means_us[stage] for stage in STACK_STAGES}
        return TailStack(count, sum_us, mean_us, sums_us, in_order)

    def to_bytes(self) -> bytes:
        """Packed rows; joining two packed stacks end to end is their merge."""
        return b"".join(_ENTRY.pack(index, *self.rows[index]) for index in sorted(self.rows))

    @classmethod
    def from_bytes(cls, packed: bytes) -> "StageStack":
        """From the packed form; ValueError when the length is not whole rows or a number is negative."""
        if len(packed) % _ENTRY.size:
            raise ValueError(f"a packed stage stack has {_ENTRY.size} bytes per bucket, not {len(packed)} in all")
        stack = cls()
        for index, *row in _ENTRY.iter_unpack(packed):
            if min(row) < 0:
                raise ValueError(f"bucket {index} of a packed stage stack has a negative number")
            stack._add(index, row)
        return stack
