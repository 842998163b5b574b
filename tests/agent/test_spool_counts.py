"""What the journal counts of objectives, through segments that begin and processes that end at any point."""

import shutil

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controlplane.agent.journal_entries import Cut, Head, Mark, Recut, decode
from controlplane.agent.reporting import cut_last_report
from controlplane.agent.spool import EpochSpool, epoch_directory
from tests.agent.test_spool import NOW_US, closed, opened, report_of


@settings(max_examples=80, deadline=None)
@example(["report", "admit", "end", "recut", "restart"])
@example(["admit", "end", "segment", "admit", "end", "segment"])
@given(st.lists(st.sampled_from(["admit", "end", "end", "report", "recut", "segment", "restart"]), max_size=24))
def test_each_admission_and_each_end_is_counted_once_wherever_a_segment_begins(tmp_path_factory, steps):
    """Reports count all that came before; the successor of a killed process counts the rest, recut or not."""
    spool = EpochSpool.create(tmp_path_factory.mktemp("spool"), 4, NOW_US)
    running: list[str] = []
    uncounted = {"offered": 0, "admitted": 0, "good": 0}
    for number, step in enumerate(steps):
        if step == "admit":
            running.append(f"r{number}")
            spool.append(opened(running[-1]))
            uncounted["offered"] += 1
            uncounted["admitted"] += 1
        elif step == "end" and running:
            spool.append(closed(running.pop(0)))
            uncounted["good"] += 1
        elif step == "report":
            spool.cut(Cut(spool.state.last_seq + 1, NOW_US, min(1, len(spool.state.closed)), False, b"{}"))
            uncounted = dict.fromkeys(uncounted, 0)
        elif step == "recut" and spool.state.reports:
            with pytest.MonkeyPatch.context() as full:
                full.setattr("controlplane.agent.spool.SEGMENT_BYTES", 1)
                stored = spool.state.reports[-1]
                spool.recut(Recut(stored.seq, NOW_US, stored.records, False, b"{}", [], []))
        elif step == "segment":
            spool.flush()
            spool._rotate(NOW_US)
        elif step == "restart":
            spool.close()
            spool = EpochSpool.reopen(spool.directory.parent, 4)
    spool.close()
    again = EpochSpool.reopen(spool.directory.parent, 4)
    cut_last_report(again, NOW_US)
    counts = report_of(again).objectives
    assert {name: sum(getattr(count, name) for count in counts) for name in uncounted} == uncounted
    assert sum(count.bad.get("lost", 0) for count in counts) == len(running)
    again.close()


@pytest.mark.parametrize("torn", [False, True])
def test_a_recut_in_a_full_segment_keeps_admissions_that_nobody_counted(tmp_path, monkeypatch, torn):
    """The agent dies just after it, or while the new segment is begun: at every byte of that."""
    root = tmp_path / "a"
    spool = EpochSpool.create(root, 1, NOW_US)
    spool.cut(Cut(1, NOW_US, 0, False, b"x" * 100))
    for name in ("r1", "r2"):
        spool.append(opened(name))
        spool.append(closed(name))
    spool.append(opened("r3"))
    monkeypatch.setattr("controlplane.agent.spool.SEGMENT_BYTES", 1)
    spool.recut(Recut(1, NOW_US, 0, False, b"x", [], []))
    monkeypatch.undo()
    spool.close()
    second = epoch_directory(root, 1) / "000002.log"
    data = second.read_bytes()
    for size in range(len(data)) if torn else [len(data)]:
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(root, tmp_path / "b")
        (epoch_directory(tmp_path / "b", 1) / second.name).write_bytes(data[:size])
        again = EpochSpool.reopen(tmp_path / "b", 1)
        cut_last_report(again, NOW_US)
        (count,) = report_of(again).objectives
        assert (count.offered, count.admitted, count.good, count.bad) == (3, 3, 2, {"lost": 1})
        again.close()


def test_a_segment_of_an_earlier_release_begins_with_no_admissions():
    """And that release passes over those that this one writes."""
    written = msgspec.msgpack.encode(Head(4, 2, 7, 0, [Mark(41, NOW_US)]))
    assert decode(msgspec.msgpack.encode(["H", 4, 2, 7, 0])) == Head(4, 2, 7, 0)
    assert msgspec.msgpack.decode(written)[:5] == ["H", 4, 2, 7, 0]
