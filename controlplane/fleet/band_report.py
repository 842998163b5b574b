"""What the flex band needs of a report, packed when it is taken: the controller reads every agent's each second.

The whole report is beside it as JSON. That is read instead where the packed form is missing, or belongs to another
report than the row's: written by a release before there was one, or by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from controlplane.core.histogram import INDEX_MAX, INDEX_MIN, ZERO_INDEX, quantile_index
from controlplane.wire.report import ClassLive, LiveFigures, SlotLive

NOT_PACKED = -1
NO_WAITS = -2


class ReportedSlot(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the flex band needs of `wire.report.SlotLive`."""

    slot_id: int
    flex: str
    fence: int
    running_batch: int
    running_batch_gpu_us: int
    stop_admit_us: int | None = None
    last_token_us: int | None = None
    home_us: int | None = None


class ReportedClass(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the flex band needs of `wire.report.ClassLive`; `direct` is nothing from older agents.

    `wait_60s` are counts by bucket: a dict is read in half the time of pairs. `p95_bucket` is theirs if packed:
    NO_WAITS where there are none, NOT_PACKED from a release that did not.
    """

    class_id: int
    admitted_per_s_60s: float
    wait_60s: dict[int, int]
    direct: list[tuple[str, int, int]] = []
    p95_bucket: int = NOT_PACKED


class BandReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One report: batch work in us of the slots that run any, by slot id; slots, unread; classes."""

    work: dict[int, int]
    slots: msgspec.Raw
    classes: list[ReportedClass]


class PackedSlots(Mapping[int, ReportedSlot]):
    """A report's slots by their id, read when the first is asked for: most seconds nobody does."""

    __slots__ = ("_packed", "_slots")

    def __init__(self, packed: msgspec.Raw) -> None:
        self._packed = packed
        self._slots: dict[int, ReportedSlot] | None = None

    def _read(self) -> dict[int, ReportedSlot]:
        if self._slots is None:
            self._slots = {slot.slot_id: slot for slot in _slots.decode(self._packed)}
        return self._slots

    def __getitem__(self, slot_id: int) -> ReportedSlot:
        return self._read()[slot_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


_encode = msgspec.msgpack.Encoder().encode
_slots = msgspec.msgpack.Decoder(list[ReportedSlot])
unpack = msgspec.msgpack.Decoder(BandReport).decode
"""Of `pack`; a `BandReport`."""


def pack(figures: LiveFigures) -> bytes | None:
    """The report as bytes; None where a number in it is beyond 64 bits, which JSON alone can say."""
    slots = [
        (
            slot.slot_id, slot.flex, slot.fence, slot.running_batch, slot.running_batch_gpu_us, slot.stop_admit_us,
            slot.last_token_us, slot.home_us,
        )
        for slot in figures.slots
    ]  # fmt: skip
    classes = [_packed(row) for row in figures.classes]
    try:
        return _encode((work_of(figures.slots), slots, classes))
    except OverflowError:
        return None


def _packed(row: ClassLive) -> tuple[int, float, dict[int, int], object, int]:
    counts = counts_of(row.wait_60s)
    return row.class_id, row.admitted_per_s_60s, counts, row.direct, p95_bucket_of(counts)


def p95_bucket_of(counts: dict[int, int]) -> int:
    """`ReportedClass.p95_bucket`; counts that no histogram has are left to whoever reads them."""
    if not counts:
        return NO_WAITS
    if max(counts) > INDEX_MAX or any(index < INDEX_MIN and index != ZERO_INDEX for index in counts):
        return NOT_PACKED
    p95 = quantile_index(counts, 0.95)
    return NO_WAITS if p95 is None else p95


def slots_of(said: str | None) -> dict[int, ReportedSlot]:
    """The slots of a report by their id, from its JSON; none where it said nothing."""
    rows: list[dict[str, Any]] = [] if said is None else msgspec.json.decode(said)
    names = ReportedSlot.__struct_fields__
    found = [ReportedSlot(**{name: row[name] for name in names if name in row}) for row in rows]
    return {slot.slot_id: slot for slot in found}


def classes_of(said: str | None) -> list[ReportedClass] | None:
    """The classes of a report, from its JSON; None where it had no figures."""
    if said is None:
        return None
    rows: list[dict[str, Any]] = msgspec.json.decode(said)
    return [
        ReportedClass(
            row["class_id"],
            row["admitted_per_s_60s"],
            counts_of(row["wait_60s"]),
            [tuple(work) for work in row.get("direct", ())],
        )
        for row in rows
    ]


def counts_of(pairs: Sequence[Sequence[int]]) -> dict[int, int]:
    """Counts by bucket of (bucket, count) pairs, in which a bucket may stand twice."""
    counts: dict[int, int] = dict(pairs)  # type: ignore[arg-type]
    if len(counts) != len(pairs):
        counts = {}
        for index, count in pairs:
            counts[index] = counts.get(index, 0) + count
    return counts


def work_of(slots: Iterable[ReportedSlot | SlotLive]) -> dict[int, int]:
    """`BandReport.work` of slots."""
    return {slot.slot_id: slot.running_batch_gpu_us for slot in slots if slot.running_batch_gpu_us > 0}
