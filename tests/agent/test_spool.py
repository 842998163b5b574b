"""The journal at every byte at which a process can be killed."""

import errno
import resource
import shutil
import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.agent import reporting
from controlplane.agent.frames import HEADER, header, read_frames
from controlplane.agent.journal_entries import Begun, Closed, Cut, Mark, Opened, Turned, Verdict
from controlplane.agent.objectives import NEUTRAL
from controlplane.agent.reporting import cut_last_report
from controlplane.agent.spool import TOGETHER_MAX, EpochSpool, epoch_directory
from controlplane.agent.spool_store import SpoolStore
from controlplane.wire.report import LeaseSpend, Report, UsageRow

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


def framed(payloads: list[bytes]) -> bytes:
    data = b""
    for payload in payloads:
        data += header(payload, len(data)) + payload
    return data


def test_frames_survive_a_cut_at_every_byte():
    payloads = [b"", b"a", b"bb" * 40, bytes(range(256))]
    data = framed(payloads)
    ends = [sum(8 + len(payload) for payload in payloads[: n + 1]) for n in range(len(payloads))]
    for cut in range(len(data) + 1):
        read = read_frames(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert [payload for _, payload in read.entries] == payloads[:whole]
        assert read.valid_bytes == ([0, *ends])[whole]


def test_a_file_of_an_earlier_release_is_read_and_may_go_on():
    """Its checksums were of the payload alone; zeros after it are no entries either."""
    old = b"".join(HEADER.pack(len(word), zlib.crc32(word)) + word for word in (b"one", b"two"))
    new = header(b"three", len(old)) + b"three"
    assert [payload for _, payload in read_frames(old + new).entries] == [b"one", b"two", b"three"]
    assert read_frames(old + bytes(64)).valid_bytes == len(old)
    assert read_frames(new[:8]).entries == read_frames(b"").entries == []
    only_new = framed([b"one"])
    assert read_frames(only_new + old).valid_bytes == len(only_new), "old entries do not follow new ones"


def test_a_flipped_bit_ends_the_reading_there():
    data = bytearray(framed([b"one", b"two"]))
    data[8 + 3 + 9] ^= 1
    assert [payload for _, payload in read_frames(bytes(data)).entries] == [b"one"]


def paid(name: str, lease: int, spent: int) -> Closed:
    return Closed(row(name, outcome=1), [], lease_id=lease, lease_spent_nanos=spent)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([5, 6]), st.integers(0, 90)) | st.sampled_from(["report", "segment", "restart"]),
        max_size=20,
    )
)
def test_what_leases_spent_is_told_whenever_the_process_is_killed(tmp_path_factory, steps):
    """Requests are paid from leases 5 and 6, reports tell totals; the successor's last one tells what is missing."""
    root, totals, told = tmp_path_factory.mktemp("spool"), {5: 0, 6: 0}, {5: 0, 6: 0}
    spool = EpochSpool.create(root, 4, NOW_US)
    for number, step in enumerate(steps):
        if step == "report":
            told = dict(totals)
            spool.cut(Cut(spool.state.last_seq + 1, NOW_US, 1, False, b"{}"))
        elif step == "segment":
            spool.flush()
            spool._rotate(NOW_US)
        elif step == "restart":
            spool.close()
            spool = EpochSpool.reopen(root, 4)
        else:
            lease, nanos = step
            totals[lease] += nanos
            spool.append(paid(f"r{number}", lease, totals[lease]))
    spool.close()
    again = EpochSpool.reopen(root, 4)
    before = again.state.last_seq
    cut_last_report(again, NOW_US)
    for stored in [stored for stored in again.state.reports if stored.seq > before]:
        for spend in msgspec.json.decode(again.body_of(stored), type=Report).spends:
            assert spend.spent_nanos >= told[spend.lease_id] and not spend.reserved_nanos
            told[spend.lease_id] = spend.spent_nanos
    assert told == totals


def test_left_over_rows_go_ahead_and_the_spends_with_the_first_of_them(tmp_path, monkeypatch):
    """If this process is killed as well, between two of these reports, the next finds a journal that has told them."""
    spool = EpochSpool.create(tmp_path, 4, NOW_US)
    for number in range(5):
        spool.append(paid(f"r{number}", 5, 10 * number + 1))
    monkeypatch.setattr(reporting, "RECORDS_MAX", 2)
    cut_last_report(spool, NOW_US, [LeaseSpend(5, 38, 0), LeaseSpend(6, 7, 0)])
    bodies = [msgspec.json.decode(spool.body_of(stored), type=Report) for stored in spool.state.reports]
    assert [len(body.records) for body in bodies] == [2, 2, 1] and bodies[-1].seal
    assert {tuple(body.spends) for body in bodies} == {(LeaseSpend(5, 41, 0), LeaseSpend(6, 7, 0))}


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
    assert spool.state.rewind(1) == 1, "a restored control plane gets an accepted report again"
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
    assert spool.state.reports[0].seq == store.reports_dropped + 1 > 1
    assert store.dropped == [f"epoch 1: reports 1 to {store.reports_dropped} with 0 records"]
    store.close()


@pytest.mark.parametrize("zeros", [1, 8, 64, 5_000])
def test_zeros_after_a_loss_of_power_are_no_entries(tmp_path, zeros):
    """A file system may have made the file longer and not written what was in it."""
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    spool.append(opened("r1"))
    spool.append(closed("r1"))
    spool.flush()
    spool.close()
    path = epoch_directory(tmp_path, 1) / "000001.log"
    whole = path.read_bytes()
    for cut in (len(whole), len(whole) - 3):
        path.write_bytes(whole[:cut] + bytes(zeros))
        again = EpochSpool.reopen(tmp_path, 1)
        assert len(again.state.closed) == (cut == len(whole))
        again.append(opened("r2"))
        again.close()
        third = EpochSpool.reopen(tmp_path, 1)
        assert "r2" in third.state.opened, "what is written after it is read"
        third.close()


def test_an_end_that_is_there_twice_counts_once(tmp_path):
    """Each possible tail of the file, written a second time behind it."""
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    spool.append(opened("r1"))
    spool.append(closed("r1"))
    spool.cut(Cut(1, NOW_US, 1, False, b"{}"))
    spool.append(opened("r2"))
    spool.append(closed("r2"))
    spool.append(Turned(NOW_US, 1, 1, 45, []))
    spool.flush()
    spool.close()
    path = epoch_directory(tmp_path, 1) / "000001.log"
    whole = path.read_bytes()
    for start in range(len(whole)):
        path.write_bytes(whole + whole[start:])
        again = EpochSpool.reopen(tmp_path, 1)
        state = again.state
        assert [entry.row.request_id for entry in state.closed] == ["r2"]
        assert (len(state.turned), [report.seq for report in state.reports]) == (1, [1])
        again.close()


def test_damage_before_the_last_segment_is_told_and_left_as_it_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("controlplane.agent.spool.SEGMENT_BYTES", 1_000)
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    for seq in (1, 2, 3):
        spool.cut(Cut(seq, NOW_US, 0, False, b"x" * 1_100))
    spool.append(opened("r1"))
    spool.close()
    path = epoch_directory(tmp_path, 1) / "000002.log"
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    again = EpochSpool.reopen(tmp_path, 1)
    assert [report.seq for report in again.state.reports] == [1, 3]
    assert list(again.state.opened) == ["r1"]
    assert "000002.log" in caplog.text and path.read_bytes() == damaged
    again.close()


def test_a_file_that_may_not_grow_loses_nothing_that_is_written_later(tmp_path):
    """The kernel refuses at every byte of the entries, in the middle of a write too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    refused = 0
    try:
        for number in range(60):
            size = epoch_directory(tmp_path, 1).joinpath("000001.log").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + number * 2, hard))
            spool.append(opened(f"r{number}"))
            spool.append(closed(f"r{number}"))
            try:
                spool.flush()
            except OSError as error:
                assert error.errno == errno.EFBIG
                refused += 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            spool.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused == 60
    spool.close()
    again = EpochSpool.reopen(tmp_path, 1)
    assert [entry.row.request_id for entry in again.state.closed] == [f"r{number}" for number in range(60)]
    again.close()


def test_a_segment_that_cannot_be_begun_leaves_the_one_before_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr("controlplane.agent.spool.SEGMENT_BYTES", 1_000)
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    directory = epoch_directory(tmp_path, 1)
    (directory / "000002.log").mkdir()
    with pytest.raises(OSError, match="directory"):
        spool.cut(Cut(1, NOW_US, 0, False, b"x" * 1_100))
    spool.append(opened("r1"))
    spool.flush()
    (directory / "000002.log").rmdir()
    spool.cut(Cut(2, NOW_US, 0, False, b"x"))
    spool.close()
    again = EpochSpool.reopen(tmp_path, 1)
    assert [report.seq for report in again.state.reports] == [1, 2] and list(again.state.opened) == ["r1"]
    again.close()


def test_old_epochs_give_up_their_oldest_reports_before_they_go_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("controlplane.agent.spool.SEGMENT_BYTES", 2_000)
    store = SpoolStore(tmp_path, bytes_max=9_000)
    store.recover()
    for epoch in (1, 2):
        spool = store.begin(epoch, NOW_US)
        for seq in range(1, 13):
            spool.cut(Cut(seq, NOW_US, 2, False, b"x" * 900))
    store.tidy(NOW_US)
    assert store.size_bytes() <= 9_000
    assert store.dropped[0].startswith("epoch 1: reports 1 to ")
    assert sorted(store.old) == [1], "its last report is still to come: it tells of those that are lost"
    state = store.old[1].state
    first = state.reports[0].seq if state.reports else state.last_seq + 1
    assert store.old[1].records_lost(1, first) == 2 * (first - 1)
    assert store.old[1].records_lost(1, first + 1) is None, "that one is not lost"
    store.close()


def begun(name: str) -> Begun:
    return Begun(name, NOW_US, 1, 11, 1, 1, 5, "", 1, 9, 6, 300, "mine", [Mark(41, NOW_US)])


@pytest.mark.parametrize("torn", range(0, 60, 7))
def test_what_is_written_as_one_is_read_as_one_or_not_at_all(tmp_path, torn):
    """Entries between two flushes share a frame; what was flushed before is there whatever happens to it."""
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    spool.begun(begun("first"))
    spool.flush()
    before = spool.size_bytes()
    for name in ("a", "b", "c"):
        spool.begun(begun(name))
    spool.closed(closed("first"))
    spool.closed(closed("a"))
    spool.flush()
    path = tmp_path / "epoch-000000001" / "000001.log"
    whole = path.read_bytes()
    assert len(read_frames(whole).entries) == len(read_frames(whole[:before]).entries) + 1
    spool.close()
    if torn:
        path.write_bytes(whole[:-torn])
    state = EpochSpool.reopen(tmp_path, 1).state
    expected = ["first"] if torn else ["b", "c"]
    assert list(state.opened) == expected
    assert [entry.row.request_id for entry in state.closed] == ([] if torn else ["first", "a"])
    lost = state.opened[expected[0]].row
    assert (lost.outcome, lost.status, lost.flags, lost.estimated_gpu_us) == (8, 502, 6, 300)
    assert (lost.arrived_us, lost.ended_us, lost.slot_id, lost.client_request_id) == (NOW_US, NOW_US, -1, "mine")


def test_many_entries_between_two_flushes_are_read_again(tmp_path):
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    names = [f"r{number}" for number in range(3 * TOGETHER_MAX + 5)]
    for name in names:
        spool.begun(begun(name))
    spool.cut(Cut(1, NOW_US, 0, False, b"{}"))
    spool.closed(closed("r1"))
    spool.close()
    again = EpochSpool.reopen(tmp_path, 1)
    assert list(again.state.opened) == [name for name in names if name != "r1"]
    assert all(entry.counted for entry in again.state.opened.values())
    assert again.body_of(again.state.reports[0]) == b"{}"
