"""Trace readers: exact times, bad lines named by number, good ones kept, unknown files refused."""

import pytest

from controlplane.lab.traces import TraceError, TraceRequest, read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2024-03-01 10:00:01.5000009,120,7\r\n"
    "2024-03-01 10:00:01.2500000,90,8\r\n"
    "2024-03-01 10:00:02,many,3\r\n"
    "not a time,10,3\r\n"
    "2024-03-01 10:00:03.0000000,-4,3"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 600, "output_length": 52, "hash_ids": [1, 2]}\n'
    '{"timestamp": 0, "input_length": 512, "output_length": 40, "hash_ids": [1]}\n'
    '{"timestamp": 0, "input_length": 512}\n'
    "{broken\n"
)


def written(tmp_path, text):
    path = tmp_path / "trace"
    path.write_bytes(text.encode())
    return path


def test_azure_times_are_microseconds_from_the_first_arrival(tmp_path):
    trace = read_trace(written(tmp_path, AZURE))
    assert trace.format == "azure"
    assert trace.requests == (TraceRequest(0, 90, 8), TraceRequest(250_000, 120, 7, tail_100ns=9))


def test_azure_bad_lines_are_named_and_good_ones_kept(tmp_path):
    refused = read_trace(written(tmp_path, AZURE)).refused
    assert [bad.line for bad in refused] == [4, 5, 6]
    assert "many" in refused[0].reason and "-4" in refused[2].reason


def test_mooncake_milliseconds_and_missing_columns(tmp_path):
    trace = read_trace(written(tmp_path, MOONCAKE))
    assert trace.requests == (TraceRequest(0, 512, 40), TraceRequest(3_000_000, 600, 52))
    assert [bad.line for bad in trace.refused] == [3, 4]
    assert "output_length" in trace.refused[0].reason


@pytest.mark.parametrize("text", ["", "a,b,c\n1,2,3\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n"])
def test_what_cannot_be_replayed_is_refused_with_a_reason(tmp_path, text):
    with pytest.raises(TraceError, match=r"header|no usable line"):
        read_trace(written(tmp_path, text))


def test_a_byte_order_mark_is_no_obstacle(tmp_path):
    assert len(read_trace(written(tmp_path, "\ufeff" + AZURE)).requests) == 2
