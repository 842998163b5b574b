"""The journal at every byte at which a process can be killed."""

import shutil

import msgspec
import pytest

from controlplane.agent.frames import header, read_frames
from controlplane.agent.journal_entries import Closed, Cut, Mark, Opened, Turned, Verdict
from controlplane.agent.objectives import NEUTRAL
from controlplane.agent.reporting import cut_last_report
from controlplane.agent.spool import EpochSpool, epoch_directory
from controlplane.agent.spool_store import SpoolStore
from controlplane.wire.report import Report, UsageRow

NOW_US = 1_800_000_000_000_000


def row(name: str, outcome: int = 8, ended_us: int = NOW_US) -> UsageRow:
    # fmt: off
    return UsageRow(name, NOW_US, ended_us, 1, -1, 1, 11, 1, 1, 5, "", 1, 9, outcome, 200, 0, 10, 0, 5,
                    0, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0)
    # fmt: on


def opened(name: str) -> Opened:
    return Opened(row(name), [Mark(41, NOW_US)])


def closed(name: str, verdict: str = "good") -> Closed:
    return Closed(row(name, outcome=1), [Verdict(41, NOW_US, verdict == "good", verdict)])


def report_of(spool: EpochSpool) -> Report:
    return msgspec.json.decode(spool.body_of(spool.state.reports[-1]), type=Report)


def test_frames_survive_a_cut_at_every_byte():
    payloads = [b"", b"a", b"bb" * 40, bytes(range(256))]
    data = b"".join(header(payload) + payload for payload in payloads)
    ends = [sum(8 + len(payload) for payload in payloads[: n + 1]) for n in range(len(payloads))]
    for cut in range(len(data) + 1):
        read = read_frames(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert [payload for _, payload in read.entries] == payloads[:whole]
        assert read.valid_bytes == ([0, *ends])[whole]


def test_a_flipped_bit_ends_the_reading_there():
    data = bytearray(b"".join(header(word) + word for word in (b"one", b"two")))
    data[8 + 3 + 9] ^= 1
    assert [payload for _, payload in read_frames(bytes(data)).entries] == [b"one"]


def test_every_request_is_closed_once_wherever_the_file_is_cut(tmp_path):
    """r1 is reported, r2 closed, r3 open, one refusal: whatever is left of them is told exactly once."""
    spool = EpochSpool.create(tmp_path / "a", 4, NOW_US)
    spool.append(opened("r1"))
    spool.append(opened("r2"))
    spool.append(closed("r1"))
    spool.cut(Cut(1, NOW_US, 1, False, b'{"seq":1}'))
    spool.append(closed("r2", NEUTRAL))
    spool.append(opened("r3"))
    spool.append(Turned(NOW_US, 1, 1, 45, [Mark(41, NOW_US)]))
    spool.flush()
    spool.close()
    path = epoch_directory(tmp_path / "a", 4) / "000001.log"
    data = path.read_bytes()
    entries = read_frames(data).entries
    for size in range(len(data) + 1):
        root = tmp_path / "b"
        shutil.rmtree(root, ignore_errors=True)
        directory = epoch_directory(root, 4)
        directory.mkdir(parents=True)
        (directory / path.name).write_bytes(data[:size])
        again = EpochSpool.reopen(root, 4)
        survived = sum(offset + len(payload) <= size for offset, payload in entries)
        reported = survived >= 5
        cut_last_report(again, NOW_US)
        final = report_of(again)
        assert final.seal
        assert final.seq == (2 if reported else 1)
        outcomes = {record.request_id: record.outcome for record in final.records}
        assert len(outcomes) == len(final.records)
        expected = {"r1": 8} if survived >= 2 else {}
        if survived >= 3:
            expected["r2"] = 8
        if survived >= 4:
            expected["r1"] = 1
        if reported:
            del expected["r1"]
        if survived >= 6:
            expected["r2"] = 1
        if survived >= 7:
            expected["r3"] = 8
        assert outcomes == expected
        assert sum(count.count for count in final.refusals) == (survived >= 8)
        _check_counts(final, survived)
        again.close()
        # killed again right after: the same bytes are sent, nothing is closed twice
        third = EpochSpool.reopen(root, 4)
        assert third.body_of(third.state.reports[-1]) == msgspec.json.encode(final)
        third.close()


def _check_counts(final: Report, survived: int) -> None:
    """Admissions before the report were counted by it; what came after, and every end, is counted here."""
    totals = {"offered": 0, "admitted": 0, "good": 0, "neutral": 0, "bad": 0}
    for count in final.objectives:
        totals["offered"] += count.offered
        totals["admitted"] += count.admitted
        totals["good"] += count.good
        totals["neutral"] += count.neutral
        totals["bad"] += sum(count.bad.values())
    if survived >= 8:
        assert totals == {"offered": 2, "admitted": 1, "good": 0, "neutral": 1, "bad": 2}
    elif survived == 5:
        assert totals == {"offered": 0, "admitted": 0, "good": 0, "neutral": 0, "bad": 1}
    elif survived == 4:
        assert totals == {"offered": 2, "admitted": 2, "good": 1, "neutral": 0, "bad": 1}


def test_reports_are_kept_as_exact_bytes_until_accepted(tmp_path):
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    bodies = [b"\x00first\xff", b"second"]
    for seq, body in enumerate(bodies, start=1):
        spool.cut(Cut(seq, NOW_US, 0, False, body))
    spool.close()
    spool = EpochSpool.reopen(tmp_path, 1)
    assert [spool.body_of(report) for report in spool.state.reports] == bodies
    spool.accept(1, NOW_US)
    spool.close()
    spool = EpochSpool.reopen(tmp_path, 1)
    assert [report.seq for report in spool.state.reports] == [2]
    assert spool.state.rewind(1), "a restored control plane gets an accepted report again"
    assert [spool.body_of(report) for report in spool.state.reports] == bodies
    spool.close()


def test_numbers_are_strict(tmp_path):
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    with pytest.raises(ValueError, match="does not follow"):
        spool.cut(Cut(2, NOW_US, 0, False, b""))
    spool.close()


def test_a_segment_repeats_what_is_open_and_old_ones_go_a_day_after_acceptance(tmp_path, monkeypatch):
    monkeypatch.setattr("controlplane.agent.spool.SEGMENT_BYTES", 2_000)
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    spool.append(opened("long"))
    for seq in range(1, 11):
        spool.append(opened(f"r{seq}"))
        spool.append(closed(f"r{seq}"))
        spool.cut(Cut(seq, NOW_US, 1, False, b"x" * 500))
    directory = epoch_directory(tmp_path, 1)
    assert len(list(directory.glob("*.log"))) > 3
    spool.accept(10, NOW_US)
    assert spool.drop_accepted(NOW_US + 1_000_000) == 0
    assert spool.drop_accepted(NOW_US + 25 * 3_600_000_000) > 0
    assert len(list(directory.glob("*.log"))) == 1
    spool.close()
    again = EpochSpool.reopen(tmp_path, 1)
    assert list(again.state.opened) == ["long"]
    assert again.state.last_seq == 10
    again.close()


def test_killed_while_a_segment_is_begun(tmp_path, monkeypatch):
    """Cut anywhere in the new segment's beginning, the old one still says everything."""
    monkeypatch.setattr("controlplane.agent.spool.SEGMENT_BYTES", 1_000)
    root = tmp_path / "a"
    spool = EpochSpool.create(root, 1, NOW_US)
    spool.append(opened("o1"))
    spool.append(opened("o2"))
    spool.append(closed("c1"))
    spool.cut(Cut(1, NOW_US, 0, False, b"x" * 1_000))
    spool.close()
    second = epoch_directory(root, 1) / "000002.log"
    data = second.read_bytes()
    for size in range(len(data) + 1):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(root, tmp_path / "b")
        (epoch_directory(tmp_path / "b", 1) / "000002.log").write_bytes(data[:size])
        again = EpochSpool.reopen(tmp_path / "b", 1)
        assert sorted(again.state.opened) == ["o1", "o2"]
        assert [entry.row.request_id for entry in again.state.closed] == ["c1"]
        assert again.state.last_seq == 1
        again.close()


def test_a_full_disk_loses_nothing_that_is_written_later(tmp_path, monkeypatch):
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    import os

    real, calls = os.write, []

    def short_then_full(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(descriptor, data[:5])
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", short_then_full)
    spool.append(opened("r1"))
    with pytest.raises(OSError, match="space"):
        spool.flush()
    spool.append(closed("r1"))
    spool.flush()
    spool.close()
    again = EpochSpool.reopen(tmp_path, 1)
    assert [entry.row.request_id for entry in again.state.closed] == ["r1"]
    again.close()


def test_open_requests_move_to_the_next_epoch_of_the_same_process(tmp_path):
    store = SpoolStore(tmp_path)
    store.recover()
    first = store.begin(1, NOW_US)
    first.append(opened("r1"))
    second = store.begin(2, NOW_US)
    second.append(closed("r1"))
    store.close()
    again = SpoolStore(tmp_path)
    again.recover()
    assert not again.old[1].state.opened
    assert [entry.row.request_id for entry in again.old[2].state.closed] == ["r1"]
    again.close()


def test_past_its_bound_the_spool_names_what_it_drops(tmp_path, monkeypatch):
    monkeypatch.setattr("controlplane.agent.spool.SEGMENT_BYTES", 2_000)
    store = SpoolStore(tmp_path, bytes_max=6_000)
    store.recover()
    spool = store.begin(1, NOW_US)
    for seq in range(1, 21):
        spool.cut(Cut(seq, NOW_US, 0, False, b"x" * 900))
    store.tidy(NOW_US)
    assert store.size_bytes() <= 6_000
    assert spool.gap
    assert store.dropped and store.dropped[0].startswith("epoch 1: reports 1 to ")
    store.close()
