"""What arrives, parsed once: a report whose rows are tuples, with who sent it and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from controlplane.exchange.problems import Refusal
from controlplane.usage.cursors import Envelope
from controlplane.usage.records import RecordTuple
from controlplane.wire.report import LAYOUT, Report


class ReportOfTuples(Report, frozen=True):
    """`wire.report.Report` with its records left as tuples: a third of the time of decoding them to rows."""

    records: list[RecordTuple] = []  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A verified report on its way into a transaction."""

    envelope: Envelope
    pool_id: int
    report: ReportOfTuples
    received_us: int
    impossible: dict[str, Any] = field(default_factory=dict)
    """What the report said that cannot be true, by field: it is not in `report` any more."""


T = TypeVar("T")


class _Layout(msgspec.Struct):
    layout: int


_decoder = msgspec.json.Decoder(ReportOfTuples)
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


def decode_report(body: bytes) -> ReportOfTuples:
    """Raises Refusal: must_upgrade for another layout, unreadable with the place of the fault otherwise."""
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
        raise Refusal(
            "must_upgrade",
            f"This control plane reads layout {LAYOUT}, the report has layout {layout}. Upgrade the agent.",
        )
