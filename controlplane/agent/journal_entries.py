"""What the journal keeps: requests from admission to close, refusals, and reports as the bytes that were sent."""

from typing import Final

from msgspec import Struct, msgpack

from controlplane.core.reasons import Outcome, answer_for
from controlplane.wire.report import UsageRow

UNKNOWN: Final = -1
LOST_CODE: Final = Outcome.LOST.code
LOST_STATUS: Final = answer_for(Outcome.LOST).status


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
    `admitted` are marks of requests that were admitted and closed since the last report, which no entry repeats: a
    repeated end says nothing of its admission. An earlier release wrote none and passes over them.
    """

    epoch: int
    segment: int
    next_seq: int
    kept: int
    admitted: list[Mark] = []


class Opened(Struct, array_like=True, frozen=True, tag="O"):
    """A request was admitted. `row` is what it would be stored as if nothing more were heard of it: lost.

    `counted` says that a report has counted it as offered and admitted already. Journals of earlier releases have it.
    """

    row: UsageRow
    marks: list[Mark]
    counted: bool = False

    @property
    def request_id(self) -> str:
        return self.row.request_id


class Begun(Struct, array_like=True, frozen=True, tag="B"):
    """A request was admitted, as `Opened`: what its record has at admission that is not the same for all of them."""

    request_id: str
    arrived_us: int
    tenant_id: int
    key_id: int
    class_id: int
    asked_class_id: int
    model_id: int
    job: str
    revision: int
    rate_version: int
    flags: int
    estimated_gpu_us: int
    client_request_id: str
    marks: list[Mark]
    counted: bool = False

    @property
    def row(self) -> UsageRow:
        """The record if nothing more is heard of the request: it was lost."""
        return UsageRow(
            self.request_id, self.arrived_us, self.arrived_us, 1, UNKNOWN, self.tenant_id, self.key_id,
            self.class_id, self.asked_class_id, self.model_id, self.job, self.revision, self.rate_version,
            LOST_CODE, LOST_STATUS, self.flags, 0, 0, 0,
            UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN,
            0, self.estimated_gpu_us, 0, 0, 0, 0, self.client_request_id,
        )  # fmt: skip


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


Entry = Head | Opened | Begun | Closed | Moved | Turned | Cut | Recut | Accepted | Sealed

encode: Final = msgpack.Encoder().encode
"""An entry, or a list of entries that were written together, as bytes."""
_decoder: "msgpack.Decoder[Entry]" = msgpack.Decoder(Entry)
_several: "msgpack.Decoder[list[Entry]]" = msgpack.Decoder(list[Entry])
_ARRAY_HEADS: Final = {0xDC: 3, 0xDD: 5}
"""Bytes of the heads of long arrays; those of short ones have one."""


def decode(payload: bytes) -> Entry:
    """Raises msgspec.DecodeError for anything else, which after a good checksum is another version's file."""
    return _decoder.decode(payload)


def entries_of(payload: bytes) -> list[Entry]:
    """The entries of a payload, one or several; raises as `decode`."""
    # An entry is an array that begins with its tag, several are an array of arrays.
    first = payload[_ARRAY_HEADS.get(payload[0], 1) :][:1]
    one = first == b"\xa1"
    return [_decoder.decode(payload)] if one else _several.decode(payload)
