"""What the journal keeps: requests from admission to close, refusals, and reports as the bytes that were sent."""

from typing import Final

from msgspec import Struct, msgpack

from controlplane.wire.report import UsageRow


class Mark(Struct, array_like=True, frozen=True, gc=False):
    """A contract version that judges a request, with the minute of its arrival."""

    version_id: int
    minute_us: int


class Verdict(Struct, array_like=True, frozen=True, gc=False):
    """How one contract version judged a closed request: `good`, `neutral`, or the cause for which it is bad."""

    version_id: int
    minute_us: int
    successful: bool
    verdict: str


class Head(Struct, array_like=True, frozen=True, tag="H"):
    """First entry of a segment: nothing in older segments is needed but their reports.

    The next `kept` entries repeat what was open or unreported; without all of them the segment does not count.
    """

    epoch: int
    segment: int
    next_seq: int
    kept: int


class Opened(Struct, array_like=True, frozen=True, tag="O"):
    """A request was admitted. `row` is what it would be stored as if nothing more were heard of it: lost.

    `counted` says that a report has counted it as offered and admitted already.
    """

    row: UsageRow
    marks: list[Mark]
    counted: bool = False


class ItemEnd(Struct, array_like=True, frozen=True, gc=False):
    """What a request brought to the batch item that it ran for; outcome, status and id are those of its row.

    `response` is the JSON document that the engine sent, or `null`.
    """

    job_id: int
    line: int
    attempt: int
    fence: int
    response: bytes
    reason: str = ""


class Closed(Struct, array_like=True, frozen=True, tag="C"):
    """A request ended. `counted` says that a report has counted its verdicts already, though not carried its row.

    `item` goes with the row, in the same report. `lease_id` is the lease that paid for it, 0 for none, and
    `lease_spent_nanos` all that was spent of that lease with this request: if the process is killed before its next
    report, its successor tells the control plane.
    """

    row: UsageRow
    verdicts: list[Verdict]
    counted: bool = False
    item: ItemEnd | None = None
    lease_id: int = 0
    lease_spent_nanos: int = 0


class Moved(Struct, array_like=True, frozen=True, tag="M"):
    """Open requests that go on in the spool of the next epoch of the same process."""

    request_ids: list[str]


class Turned(Struct, array_like=True, frozen=True, tag="F"):
    """A request was refused."""

    at_us: int
    tenant_id: int
    class_id: int
    reason: int
    marks: list[Mark]


class Cut(Struct, array_like=True, frozen=True, tag="R"):
    """A report as it is sent, byte for byte.

    It carries the oldest `records` rows that were not carried before, and every count that was made before it.
    """

    seq: int
    at_us: int
    records: int
    seal: bool
    body: bytes


class Recut(Struct, array_like=True, frozen=True, tag="P"):
    """A report that was too large as it had been cut, under the same number; the control plane never stored it.

    It carries `records` rows; `rest` are rows that it had carried and that go with a later report. `lost` are requests
    that were open and that its rows, or the rest, end.
    """

    seq: int
    at_us: int
    records: int
    seal: bool
    body: bytes
    rest: list[Closed]
    lost: list[str]


class Accepted(Struct, array_like=True, frozen=True, tag="A"):
    """The control plane has taken every report up to `seq`."""

    seq: int
    at_us: int


class Sealed(Struct, array_like=True, frozen=True, tag="Z"):
    """Nothing of this epoch is ever sent again. `reason` is empty after an accepted seal."""

    at_us: int
    reason: str = ""


Entry = Head | Opened | Closed | Moved | Turned | Cut | Recut | Accepted | Sealed

encode: Final = msgpack.Encoder().encode
"""An entry as bytes."""
_decoder: "msgpack.Decoder[Entry]" = msgpack.Decoder(Entry)


def decode(payload: bytes) -> Entry:
    """Raises msgspec.DecodeError for anything else, which after a good checksum is another version's file."""
    return _decoder.decode(payload)
