"""Latency sketches over microseconds: the OpenTelemetry base-2 exponential histogram at scale 4.

Bucket i holds durations in (2^(i/16), 2^((i+1)/16)] microseconds, 16 buckets per octave, ratio 1.0443; a duration of 0
has a bucket of its own. Sketches merge by addition, so a percentile always comes from merged counts and is the upper
edge of its bucket. Scheme: OpenTelemetry metrics data model, "ExponentialHistogram".

Packed form: little-endian (int16 index, uint32 count) per bucket, 6 bytes each and nothing else, so that joining two
packed sketches end to end is their merge.
"""

import struct
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, log, log2
from typing import Any, Final

SCALE: Final = 4
BUCKETS_PER_OCTAVE: Final = 1 << SCALE
ZERO_INDEX: Final = -32_768
"""Index of the bucket of zero in the packed and the sparse form."""
INDEX_MIN: Final = -1
INDEX_MAX: Final = 64 * BUCKETS_PER_OCTAVE - 1
COUNT_MAX_PACKED: Final = 2**32 - 1
NEAR_US: Final = 2**28
BUCKETS_PER_E: Final = BUCKETS_PER_OCTAVE / log(2)
EDGE_TOLERANCE: Final = 1e-12
NOTED_AT: Final = 1_024
"""So many samples are counted at the latest, however fast they come."""

_ENTRY: Final = struct.Struct("<hI")


def bucket_index(us: int) -> int:
    """Bucket of a duration in microseconds; ZERO_INDEX for 0, ValueError below 0. Exact up to 2^48 us (8 years)."""
    if 0 < us < NEAR_US:
        # Compiled code has a logarithm of its own, which is not exact for powers of two, the only integers that lie
        # on an edge: all others are further from the next one than what is taken off here.
        place = log(float(us)) * BUCKETS_PER_E - EDGE_TOLERANCE
        above = int(place)
        return above if above < place else above - 1
    if us > 0:
        # log2 is exact for powers of two, the only integers that lie on an edge
        return ceil(log2(us) * BUCKETS_PER_OCTAVE) - 1
    if us == 0:
        return ZERO_INDEX
    raise ValueError(f"a duration is never negative: {us} us")


def upper_edge_us(index: int) -> int:
    """Largest whole number of microseconds in a bucket: its upper edge, rounded down because durations are integers."""
    if index == ZERO_INDEX:
        return 0
    octave, step = divmod(index + 1, BUCKETS_PER_OCTAVE)
    return int(2 ** (step / BUCKETS_PER_OCTAVE) * 2**octave)


def lower_edge_us(index: int) -> float:
    """Exclusive lower edge of a bucket in microseconds."""
    return 0.0 if index == ZERO_INDEX else float(2 ** (index / BUCKETS_PER_OCTAVE))


def _checked_index(index: int) -> int:
    if index != ZERO_INDEX and not INDEX_MIN <= index <= INDEX_MAX:
        raise ValueError(f"bucket index {index} is outside {INDEX_MIN} to {INDEX_MAX}")
    return index


def rank_of(q: float, count: int) -> int:
    """Rank (1-based) of the sample that is quantile q (0 < q <= 1) of `count` samples, nearest-rank rule."""
    if not 0 < q <= 1:
        raise ValueError(f"a quantile is over 0 and at most 1, not {q}")
    # the small term undoes the error of products such as 0.07 * 100
    return max(1, ceil(q * count - 1e-9))


def quantile_index(counts: dict[int, int], q: float) -> int | None:
    """Bucket that holds quantile q of non-empty sparse counts; None when there is no sample."""
    total = sum(counts.values())
    if not total:
        return None
    index = max(counts)
    above = total - rank_of(q, total)
    while True:
        above -= counts.get(index, 0)
        if above < 0:
            return index
        if index == ZERO_INDEX:
            raise AssertionError("a rank lies inside its counts")
        # Buckets lie close together, but that of zero lies far below them.
        index = index - 1 if index > INDEX_MIN else ZERO_INDEX


class Histogram:
    """Sparse, mergeable counts by bucket. Equal when all counts are equal."""

    __slots__ = ("counts",)

    def __init__(self, counts: Iterable[Sequence[int]] = ()) -> None:
        """From (index, count) pairs; an index may repeat. Raises ValueError for a bad index or a negative count."""
        self.counts: dict[int, int] = {}
        for index, count in counts:
            if count < 0:
                raise ValueError(f"bucket {index} has a negative count {count}")
            if count:
                self.counts[_checked_index(index)] = self.counts.get(index, 0) + count

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(self.counts.values())

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self.counts == other.counts

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Histogram({self.to_sparse()!r})"

    def record(self, us: int, count: int = 1) -> None:
        """Add samples of one duration in microseconds."""
        index = bucket_index(us)
        counts = self.counts
        counts[index] = counts.get(index, 0) + count

    def record_all(self, durations_us: Iterable[int]) -> None:
        """Add one sample of each duration; cheap where many in a row are alike, as the ages of those who wait are."""
        counts, last, alike = self.counts, ZERO_INDEX, 0
        for us in durations_us:
            index = bucket_index(us)
            if index != last:
                if alike:
                    counts[last] = counts.get(last, 0) + alike
                last, alike = index, 0
            alike += 1
        if alike:
            counts[last] = counts.get(last, 0) + alike

    def merge(self, other: "Histogram") -> None:
        """Add the counts of another histogram to this one."""
        counts = self.counts
        if not counts:
            counts.update(other.counts)
            return
        for index, count in other.counts.items():
            counts[index] = counts.get(index, 0) + count

    def copy(self) -> "Histogram":
        """An independent histogram with the same counts."""
        twin = Histogram()
        twin.counts = dict(self.counts)
        return twin

    def quantile_us(self, q: float) -> int | None:
        """Upper edge of the bucket of quantile q (0.95 is p95) in microseconds; None when there is no sample."""
        index = quantile_index(self.counts, q)
        return None if index is None else upper_edge_us(index)

    def count_at_most(self, us: int) -> int:
        """Samples in buckets whose upper edge is at most `us`: a lower bound of the samples that took at most `us`."""
        return sum(count for index, count in self.counts.items() if upper_edge_us(index) <= us)

    def to_sparse(self) -> list[list[int]]:
        """[[index, count], ...] in index order, for JSON; the bucket of zero has ZERO_INDEX."""
        return [[index, self.counts[index]] for index in sorted(self.counts)]

    @classmethod
    def from_sparse(cls, pairs: Iterable[Sequence[int]]) -> "Histogram":
        """From [[index, count], ...]; ValueError when a pair is malformed."""
        return cls(pairs)

    def to_bytes(self) -> bytes:
        """Packed form, 6 bytes per bucket."""
        return b"".join(_ENTRY.pack(*entry) for entry in _packable(self.counts))

    @classmethod
    def from_bytes(cls, packed: bytes) -> "Histogram":
        """From the packed form, or several joined end to end; ValueError when the length is not whole entries."""
        if len(packed) % _ENTRY.size:
            raise ValueError(f"a packed histogram has {_ENTRY.size} bytes per bucket, not {len(packed)} in all")
        return cls(_ENTRY.iter_unpack(packed))

    def to_otel(self) -> dict[str, Any]:
        """The fields of an OpenTelemetry ExponentialHistogram data point (dense positive range, no sum)."""
        indexes = sorted(index for index in self.counts if index != ZERO_INDEX)
        dense = [self.counts.get(index, 0) for index in range(indexes[0], indexes[-1] + 1)] if indexes else []
        positive = {"offset": indexes[0] if indexes else 0, "bucket_counts": dense}
        return {"scale": SCALE, "count": self.count, "zero_count": self.counts.get(ZERO_INDEX, 0), "positive": positive}


def _packable(counts: dict[int, int]) -> Iterator[tuple[int, int]]:
    for index in sorted(counts):
        left = counts[index]
        while left > COUNT_MAX_PACKED:
            yield index, COUNT_MAX_PACKED
            left -= COUNT_MAX_PACKED
        yield index, left


def merge_all(histograms: Iterable[Histogram]) -> Histogram:
    """Sum of histograms."""
    total = Histogram()
    for histogram in histograms:
        total.merge(histogram)
    return total


class WindowHistogram:
    """Histogram of the last `window_us`, sliding in steps of `step_us`; instants are passed in and never go back.

    A sample counts for at least the window and at most one step longer.
    """

    __slots__ = ("_counts", "_order", "_quantiles", "_recent", "_step_end_us", "_step_us", "_steps", "_whole")

    def __init__(self, window_us: int = 60_000_000, step_us: int = 1_000_000) -> None:
        if step_us <= 0 or window_us <= 0 or window_us % step_us:
            raise ValueError(f"the window ({window_us} us) must be a positive multiple of the step ({step_us} us)")
        self._step_us = step_us
        self._steps = window_us // step_us
        self._order: deque[tuple[int, Counter[int]]] = deque()
        """Steps with something in them, the present one last."""
        self._step_end_us = 0
        self._counts: Counter[int] = Counter()
        """Of the present step."""
        self._whole: Counter[int] = Counter()
        """Of all steps together."""
        self._recent: list[int] = []
        """Buckets of the samples that are in neither yet: the library counts many at a time for less."""
        self._quantiles: dict[float, int | None] = {}

    def _slide(self, now_us: int) -> None:
        """Begin the step of that instant, unless it is the present one."""
        if now_us < self._step_end_us:
            return
        self._note()
        step = now_us // self._step_us
        if self._order and not self._counts:
            self._order.pop()
        while self._order and self._order[0][0] < step - self._steps:
            self._forget(self._order.popleft()[1])
        self._step_end_us = (step + 1) * self._step_us
        self._counts = Counter()
        self._order.append((step, self._counts))

    def _forget(self, counts: Counter[int]) -> None:
        whole = self._whole
        for index, count in counts.items():
            left = whole[index] - count
            if left:
                whole[index] = left
            else:
                del whole[index]
        self._quantiles.clear()

    def _note(self) -> None:
        if self._recent:
            self._counts.update(self._recent)
            self._whole.update(self._recent)
            self._recent.clear()
            self._quantiles.clear()

    def record(self, us: int, now_us: int) -> None:
        """Add one sample that was observed now."""
        index = ZERO_INDEX if not us else bucket_index(us)
        if now_us >= self._step_end_us:
            self._slide(now_us)
        recent = self._recent
        recent.append(index)
        if len(recent) >= NOTED_AT:
            self._note()

    def merge(self, histogram: Histogram, now_us: int) -> None:
        """Add the samples of a histogram, as observed now."""
        self._slide(now_us)
        self._counts.update(histogram.counts)
        self._whole.update(histogram.counts)
        self._quantiles.clear()

    def snapshot(self, now_us: int) -> Histogram:
        """Independent histogram of the window that ends now."""
        self._slide(now_us)
        histogram = Histogram()
        histogram.counts = self._total()
        return histogram

    def _total(self) -> dict[int, int]:
        """Counts of the window up to the present step."""
        self._note()
        return dict(self._whole)

    def quantile_us(self, q: float, now_us: int, waiting_us: Iterable[int] = ()) -> int | None:
        """Quantile of the window that ends now, with ages of those still waiting as further samples."""
        self._slide(now_us)
        extra = [bucket_index(age) for age in waiting_us]
        if not extra:
            self._note()
            if q not in self._quantiles:
                index = quantile_index(self._total(), q)
                self._quantiles[q] = None if index is None else upper_edge_us(index)
            return self._quantiles[q]
        counts = self._total()
        for index in extra:
            counts[index] = counts.get(index, 0) + 1
        found = quantile_index(counts, q)
        return None if found is None else upper_edge_us(found)
