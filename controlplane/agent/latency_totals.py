"""How long requests took since the start, by class and stage: what histograms of /metrics are made of.

A closed record is only put aside on a request's way; it is counted when somebody looks, or when enough of them wait.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from controlplane.core.histogram import BUCKETS_PER_OCTAVE, INDEX_MIN, ZERO_INDEX, Histogram, upper_edge_us
from controlplane.wire.report import FLAG_STREAMED, UsageRow

EDGES_US: Final = tuple(upper_edge_us(index) for index in range(INDEX_MIN, 48 * BUCKETS_PER_OCTAVE))
"""Upper edges of all buckets up to 8 years; what is longer counts in the last."""
LAST: Final = len(EDGES_US) - 1
WAITING_MAX: Final = 4_096
"""Records that may wait to be counted."""


class Total:
    """A histogram over microseconds and the exact sum of its samples."""

    __slots__ = ("_counts", "_zeros", "sum_us")

    def __init__(self) -> None:
        self._counts = [0] * len(EDGES_US)
        self._zeros = 0
        self.sum_us = 0

    def record(self, us: int) -> None:
        if us > 0:
            # Half the time of a logarithm, and as exact.
            self._counts[bisect_left(EDGES_US, us, 0, LAST)] += 1
            self.sum_us += us
        else:
            self._zeros += 1

    @property
    def histogram(self) -> Histogram:
        counts = [(INDEX_MIN + at, count) for at, count in enumerate(self._counts) if count]
        return Histogram([(ZERO_INDEX, self._zeros), *counts])


class ClassTotals:
    """Everything that ended in one class since the start."""

    __slots__ = (
        "admission", "batch_wait", "cached_tokens", "decode", "e2e", "inference", "output_tokens", "prefill",
        "prompt_tokens", "queue", "tpot", "ttft",
    )  # fmt: skip

    def __init__(self) -> None:
        self.admission, self.queue, self.inference = Total(), Total(), Total()
        self.batch_wait, self.prefill, self.decode = Total(), Total(), Total()
        self.ttft, self.tpot, self.e2e = Total(), Total(), Total()
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0

    def take(self, row: UsageRow) -> None:
        """Count one closed record. A stage that was not reached is no sample; nor is a TTFT that was not streamed."""
        self.e2e.record(max(0, row.ended_us - row.arrived_us))
        self.admission.record(row.admission_us)
        self.queue.record(row.queue_us)
        self.prompt_tokens += row.prompt_tokens
        self.cached_tokens += row.cached_tokens
        self.output_tokens += row.output_tokens
        if row.slot_id < 0:
            return
        self.inference.record(row.prefill_us + row.decode_us)
        if row.batch_wait_us > 0:
            self.batch_wait.record(row.batch_wait_us)
        if not row.flags & FLAG_STREAMED or row.ttft_us < 0:
            return
        self.ttft.record(row.ttft_us)
        self.prefill.record(row.prefill_us)
        self.decode.record(row.decode_us)
        if row.output_tokens > 1:
            self.tpot.record(row.decode_us // (row.output_tokens - 1))


class LatencyTotals:
    """Totals of all classes that were ever served by this process, by class id: policy bounds how many there are."""

    def __init__(self) -> None:
        self._waiting: list[UsageRow] = []
        self._classes: dict[int, ClassTotals] = {}

    def note(self, row: UsageRow) -> None:
        """A record was closed."""
        self._waiting.append(row)
        if len(self._waiting) >= WAITING_MAX:
            self.by_class()

    def by_class(self) -> dict[int, ClassTotals]:
        """Totals up to now."""
        waiting, self._waiting = self._waiting, []
        for row in waiting:
            totals = self._classes.get(row.class_id)
            if totals is None:
                totals = self._classes[row.class_id] = ClassTotals()
            totals.take(row)
        return self._classes
