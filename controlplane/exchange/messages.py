"""What arrives, parsed once: a report whose rows are tuples, with who sent it and when."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from controlplane.exchange.problems import Refusal
from controlplane.usage.cursors import Envelope
from controlplane.usage.records import Origin, PackedRows, RecordTuple, Rows, as_rows, to_columns
from controlplane.wire.packed import OtherVersion, Unpackable, is_packed, take_apart
from controlplane.wire.report import LAYOUT, ItemDone, Report


class ReportOfTuples(Report, frozen=True):
    """`wire.report.Report` with its records left as tuples: a third of the time of decoding them to rows."""

    records: list[RecordTuple] = []  # type: ignore[assignment]


class Incoming(Struct, frozen=True):
    """A verified report on its way into a transaction."""

    envelope: Envelope
    pool_id: int
    report: ReportOfTuples
    received_us: int
    impossible: dict[str, Any] = field(default_factory=dict)
    """What the report said that cannot be true, by field: it is not in `report` any more."""
    packed: PackedRows | None = None
    """The records, where they came packed; `report.records` is empty then."""
    dropped: frozenset[bytes] = frozenset()
    """Requests, as the bytes of their ids, whose item's result is among what cannot be true."""
    shares_mark: str = ""
    """Which shares its agent goes by."""

    @property
    def rows(self) -> Rows:
        """The records as they came."""
        return self.report.records if self.packed is None else self.packed

    def as_json(self) -> dict[str, Any]:
        """The report as JSON says it, whatever form it came in."""
        # through JSON, because items hold documents that were left as they came
        document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.report))
        if self.packed is not None:
            columns = to_columns([(Origin(self.envelope.agent_id, self.pool_id), self.packed)])
            document["records"] = as_rows(columns, range(len(columns)))
        return {**document, **self.impossible}


T = TypeVar("T")


class _Layout(msgspec.Struct):
    layout: int


_decoder = msgspec.json.Decoder(ReportOfTuples)
_msgpack_decoder = msgspec.msgpack.Decoder(ReportOfTuples)
_layout_decoder = msgspec.json.Decoder(_Layout)


def decode(decoder: msgspec.json.Decoder[T], body: bytes, what: str) -> T:
    """Raises Refusal: unreadable with the place of the fault.

    Nothing that agents say nests deeply: the decoder's own limit of depth bounds what a field nobody knows may hold.
    """
    try:
        return decoder.decode(body)
    except RecursionError:
        raise Refusal("unreadable", f"{what} cannot be read: it is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal("unreadable", f"{what} cannot be read: {error}") from None


MSGPACK_TYPES = (b"application/msgpack", b"application/x-msgpack", b"application/vnd.msgpack")


def read_report(body: bytes, content_type: bytes = b"") -> tuple[ReportOfTuples, PackedRows | None]:
    """A report and, where they came packed, its records. The packed form is told by its first bytes, JSON is the rest.

    Raises Refusal: unreadable with the place of the fault, with status 415 for a form that is not known; must_upgrade.
    """
    if is_packed(body):
        return _read_packed(body)
    if content_type.split(b";")[0].strip().lower() in MSGPACK_TYPES:
        return _decode_msgpack(body), None
    return decode_report(body), None


def _read_packed(body: bytes) -> tuple[ReportOfTuples, PackedRows]:
    try:
        parts = take_apart(body)
    except OtherVersion as error:
        raise Refusal("unreadable", f"This packed report cannot be read: {error}. Send JSON.", status=415) from None
    except Unpackable as error:
        raise Refusal("unreadable", f"The packed report cannot be read: {error}.") from None
    report = decode_report(bytes(parts.head))
    if report.records:
        raise Refusal("unreadable", "A packed report has its records in rows, not in its head.")
    return report, PackedRows(parts.rows, parts.count, parts.texts)


def _decode_msgpack(body: bytes) -> ReportOfTuples:
    try:
        report = _msgpack_decoder.decode(body)
        done = [_with_json_response(row) for row in report.items_done]
    except RecursionError:
        raise Refusal("unreadable", "The report cannot be read: it is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise Refusal("unreadable", f"The report cannot be read: {error}") from None
    if report.layout != LAYOUT:
        raise _other_layout(report.layout)
    return msgspec.structs.replace(report, items_done=done) if done else report


def _with_json_response(row: ItemDone) -> ItemDone:
    """What is stored of a response is JSON, whatever it came in."""
    document = msgspec.msgpack.decode(row.response)
    return msgspec.structs.replace(row, response=msgspec.Raw(msgspec.json.encode(document)))


def decode_report(body: bytes) -> ReportOfTuples:
    """A report in JSON.

    Raises Refusal: must_upgrade for another layout, unreadable with the place of the fault otherwise.
    """
    try:
        report = decode(_decoder, body, "The report")
    except Refusal:
        _check_layout(body)
        raise
    if report.layout != LAYOUT:
        _check_layout(body)
    return report


def _check_layout(body: bytes) -> None:
    try:
        layout = decode(_layout_decoder, body, "The layout").layout
    except Refusal:
        return
    if layout != LAYOUT:
        raise _other_layout(layout)


def _other_layout(layout: int) -> Refusal:
    return Refusal(
        "must_upgrade",
        f"This control plane reads layout {LAYOUT}, the report has layout {layout}. Upgrade the agent.",
    )
