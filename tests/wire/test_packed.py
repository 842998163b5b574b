"""The packed form says what JSON says, refuses what it cannot hold, and its bytes are pinned."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.wire import packed
from controlplane.wire.report import Report, UsageRow
from tests.wire.messages import REPORT, USAGE_ROW, UUID
from tests.wire.packed_reports import reports

GOLDEN = Path(__file__).parent / "golden" / "report.packed"


def packed_report() -> bytes:
    """The golden report with a row of its own id and one without texts."""
    rows = [USAGE_ROW, msgspec.structs.replace(USAGE_ROW, job="", client_request_id="", queue_us=-1)]
    body = packed.pack(msgspec.structs.replace(REPORT, records=rows))
    assert body is not None
    return body


def test_the_bytes_are_those_of_the_golden_file():
    """A change here changes the protocol: write the new bytes with `python -m tests.wire.test_packed`."""
    assert packed_report() == GOLDEN.read_bytes()


def test_a_row_has_196_bytes_and_no_json_document_begins_like_the_form():
    assert packed.ROW.size == 196
    with pytest.raises(UnicodeDecodeError):
        packed.MAGIC.decode()
    assert packed.is_packed(packed_report()) and not packed.is_packed(msgspec.json.encode(REPORT))


@settings(max_examples=60, deadline=None)
@given(reports())
def test_what_is_packed_is_unpacked_unchanged(report):
    body = packed.pack(report)
    assert body is not None
    assert packed.unpack(body) == report == packed.read_report(body)
    before = {row.request_id: record for row in report.records[::2] if (record := packed.pack_row(row)) is not None}
    assert packed.pack(report, before) == body
    assert packed.as_json(body) == msgspec.json.encode(report)
    assert packed.as_json(packed.as_json(body)) == msgspec.json.encode(report)


@pytest.mark.parametrize(
    "given",
    [
        {"request_id": "1"},
        {"request_id": UUID.upper()},
        {"request_id": UUID.replace("-", "") + "----"},
        {"request_id": " " + UUID[1:]},
        {"request_id": "x" * 36},
        {"prompt_tokens": 2**31},
        {"arrived_us": 2**63},
        {"flags": -(2**15) - 1},
    ],
)
def test_a_record_that_fits_no_row_has_no_packed_form(given):
    assert packed.pack(msgspec.structs.replace(REPORT, records=[msgspec.structs.replace(USAGE_ROW, **given)])) is None


@pytest.mark.parametrize("cut", [0, 3, 15, 16, 200, -1])
def test_a_body_that_breaks_off_is_refused(cut):
    with pytest.raises(packed.Unpackable):
        packed.take_apart(packed_report()[:cut])


def test_a_body_with_more_than_it_announces_is_refused():
    with pytest.raises(packed.Unpackable, match="announce"):
        packed.take_apart(packed_report() + b"\0")


def test_another_version_is_told_from_a_broken_one():
    with pytest.raises(packed.OtherVersion, match="its form is 2, known is 1"):
        packed.take_apart(packed.FAMILY + b"\x02" + packed_report()[4:])


@pytest.mark.parametrize(
    "texts", [b'[[2,"a","b"]]', b'[[-1,"a","b"]]', b'[[1,"a","b"],[0,"a","b"]]', b"[[0]]", b"\xff["]
)
def test_texts_that_name_no_row_are_refused(texts):
    whole = packed_report()
    parts = packed.take_apart(whole)
    prefix = packed._PREFIX.pack(packed.MAGIC, len(parts.head), len(texts), parts.count)
    with pytest.raises(packed.Unpackable, match="texts"):
        packed.take_apart(b"".join((prefix, parts.head, texts, parts.rows)))


def test_a_report_without_records_is_its_head():
    report = Report(1, 2, 3, 4, 5, 6)
    body = packed.pack(report)
    assert body is not None and packed.unpack(body) == report


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1))
def test_the_widest_numbers_keep_their_value(number):
    row = msgspec.structs.replace(USAGE_ROW, charge_gpu_nanos=number)
    body = packed.pack(msgspec.structs.replace(REPORT, records=[row]))
    assert body is not None and packed.unpack(body).records == [row]


assert UsageRow.__struct_fields__[0] == "request_id"

if __name__ == "__main__":
    GOLDEN.write_bytes(packed_report())
