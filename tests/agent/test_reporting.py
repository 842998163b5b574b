"""Reports stay within what a control plane takes, and everything gets told, once."""

import msgspec
import pytest

from controlplane.agent import reporting
from controlplane.agent.journal_entries import Cut
from controlplane.agent.reporting import cut_last_report, cut_report, recut
from controlplane.agent.spool import EpochSpool
from controlplane.wire.packed import read_report
from controlplane.wire.report import Check, DecisionSample, Demand, LiveFigures, Report, UsageRow
from tests.agent.test_spool import NOW_US, closed, opened
from tests.agent.wire_client import WireClient, chat_body, post

KIB = 1024


def wide(name: str):
    """A closed request whose row is about 1.3 kB."""
    entry = closed(name)
    return msgspec.structs.replace(entry, row=msgspec.structs.replace(entry.row, client_request_id="\x01" * 170))


def sample(number: int, size: int = 1_000) -> DecisionSample:
    return DecisionSample(f"s{number}", NOW_US, 1, 11, 1, "admit", 0, [Check("model", "m" * size, "", True)])


def body_of(spool: EpochSpool, at: int = -1) -> bytes:
    return spool.body_of(spool.state.reports[at])


def reports_of(spool: EpochSpool) -> list[Report]:
    return [msgspec.json.decode(spool.body_of(report), type=Report) for report in spool.state.reports]


def rows_of(reports: list[Report]) -> list[UsageRow]:
    return [row for report in reports for row in report.records]


def cut(agent, *, seal: bool = False) -> None:
    cut_report(agent.engine, agent.spool, agent.policy, agent.live, seal=seal)


@pytest.fixture
def small(monkeypatch) -> int:
    monkeypatch.setattr(reporting, "BODY_BYTES_MAX", 64 * KIB)
    monkeypatch.setattr(reporting, "ROOM_BYTES_MIN", 8 * KIB)
    return 64 * KIB


async def test_a_report_is_bounded_by_its_bytes_and_the_rest_goes_with_the_next(make_agent):
    agent = await make_agent()
    for number in range(reporting.RECORDS_MAX):
        agent.spool.append(wide(f"r{number}"))
    samples = [sample(number) for number in range(1_000)]
    for one in samples:
        agent.engine.desk.log.keep(one)
    while agent.spool.state.closed or len(agent.spool.state.reports) < 3:
        cut(agent)
    reports = reports_of(agent.spool)
    assert all(len(body_of(agent.spool, at)) <= reporting.BODY_BYTES_MAX for at in range(len(reports)))
    assert len(body_of(agent.spool, 0)) > reporting.BODY_BYTES_MAX - 4 * KIB, "as full as may be"
    assert [row.request_id for row in rows_of(reports)] == [f"r{n}" for n in range(reporting.RECORDS_MAX)]
    assert [one for report in reports for one in report.samples] == samples
    assert [report.seq for report in reports] == list(range(1, len(reports) + 1))
    assert agent.engine.desk.log.samples_dropped == 0


async def test_what_was_made_ready_is_told_and_what_came_meanwhile_is_told_once(make_agent):
    """Records that ended after the rest was made ready go with the report, their time with the next one."""
    agent = await make_agent(speed=200.0)
    agent.spool.packs = True
    client = await WireClient.connect(agent.port)

    async def ask(times: int) -> None:
        for _ in range(times):
            assert (await client.ask(post(chat_body(max_tokens=20)))).status == 200
        await agent.until(lambda: not agent.engine.calls)

    await ask(3)
    seen = await reporting.look_around(agent.engine, agent.spool)
    assert len(seen.rows) == 3 and msgspec.json.decode(seen.figures, type=LiveFigures).slots
    ready_us = sum(row.gpu_us for row in agent.closed_rows())
    await ask(2)
    rows = agent.closed_rows()
    cut_report(agent.engine, agent.spool, agent.policy, agent.live, seen=seen)
    cut(agent)
    first, second = (read_report(body_of(agent.spool, at)) for at in (0, 1))
    assert first.records == rows and not second.records
    assert sum(used.gpu_us for used in first.slot_usage) == ready_us > 0
    told_us = sum(used.gpu_us for report in (first, second) for used in report.slot_usage)
    busy_us = sum(meter.busy_us for report in (first, second) for meter in report.slot_meters)
    assert told_us == busy_us == sum(row.gpu_us for row in rows) > ready_us


async def test_samples_that_alone_are_too_many_go_from_the_oldest_on(make_agent, small):
    agent = await make_agent()
    for number in range(200):
        agent.engine.desk.log.keep(sample(number))
    cut(agent)
    cut(agent)
    told = [one.request_id for report in reports_of(agent.spool) for one in report.samples]
    dropped = agent.engine.desk.log.samples_dropped
    assert 0 < dropped < 200
    assert told == [f"s{number}" for number in range(dropped, 200)]


async def test_the_seal_comes_with_the_last_of_it(make_agent, small):
    agent = await make_agent()
    for number in range(120):
        agent.spool.append(wide(f"r{number}"))
    agent.engine.desk.log.keep(sample(1))
    cut(agent, seal=True)
    reports = reports_of(agent.spool)
    assert [report.seal for report in reports] == [False] * (len(reports) - 1) + [True]
    assert len(rows_of(reports)) == 120
    assert sum(len(report.samples) for report in reports) == 1


def test_what_a_process_left_is_bounded_too(tmp_path, small):
    spool = EpochSpool.create(tmp_path, 4, NOW_US)
    for number in range(120):
        spool.append(wide(f"r{number}"))
    spool.append(opened("lost"))
    cut_last_report(spool, NOW_US)
    reports = reports_of(spool)
    assert len(reports) > 2
    assert all(len(body_of(spool, at)) <= small for at in range(len(reports)))
    assert [row.request_id for row in rows_of(reports)] == [*(f"r{n}" for n in range(120)), "lost"]
    spool.close()


def test_a_report_that_was_too_large_is_made_smaller_under_its_number(tmp_path):
    """First what is only looked at goes, then half of the rows; the rows come later, also after a restart."""
    spool = EpochSpool.create(tmp_path, 4, NOW_US)
    entries = [closed(f"r{number}") for number in range(5)]
    for entry in entries:
        spool.append(entry)
    rows = [entry.row for entry in entries]
    first = Report(1, 4, 1, NOW_US, 0, 0, records=rows, samples=[sample(1)], demand=[Demand("t", 1, 1, 1, 0)])
    spool.cut(Cut(1, NOW_US, 5, False, msgspec.json.encode(first)))
    second = Report(1, 4, 2, NOW_US, 0, 0)
    spool.cut(Cut(2, NOW_US, 0, False, msgspec.json.encode(second)))

    assert recut(spool, spool.state.reports[0], NOW_US)
    assert reports_of(spool) == [msgspec.structs.replace(first, samples=[], demand=[]), second]
    assert recut(spool, spool.state.reports[0], NOW_US)
    spool.close()

    spool = EpochSpool.reopen(tmp_path, 4)
    assert [len(report.records) for report in reports_of(spool)] == [2, 0]
    assert [entry.row.request_id for entry in spool.state.closed] == ["r2", "r3", "r4"]
    assert all(entry.counted for entry in spool.state.closed), "their verdicts were counted already"
    assert recut(spool, spool.state.reports[0], NOW_US)
    assert not recut(spool, spool.state.reports[0], NOW_US), "one row is the least"
    cut_last_report(spool, NOW_US)
    reports = reports_of(spool)
    assert [report.seq for report in reports] == [1, 2, 3]
    assert sorted(row.request_id for row in rows_of(reports)) == [f"r{number}" for number in range(5)]
    assert reports[-1].objectives == []
    spool.close()


def test_the_seal_of_a_report_that_was_too_large_comes_after_its_rest(tmp_path):
    spool = EpochSpool.create(tmp_path, 4, NOW_US)
    spool.append(closed("r1"))
    spool.append(opened("lost"))
    cut_last_report(spool, NOW_US)
    before = reports_of(spool)[0]
    assert before.seal
    assert recut(spool, spool.state.reports[0], NOW_US)
    spool.close()
    spool = EpochSpool.reopen(tmp_path, 4)
    cut_last_report(spool, NOW_US)
    reports = reports_of(spool)
    assert [report.seal for report in reports] == [False, True]
    assert rows_of(reports) == before.records, "what was lost is told once"
    assert reports[0].objectives == before.objectives
    assert reports[1].objectives == []
    spool.close()


def test_giving_up_reports_takes_only_those_whose_segment_goes(tmp_path, monkeypatch):
    monkeypatch.setattr("controlplane.agent.spool.SEGMENT_BYTES", 2_000)
    spool = EpochSpool.create(tmp_path, 1, NOW_US)
    body = msgspec.json.encode(Report(1, 1, 1, NOW_US, 0, 0, samples=[sample(1, 10)]))
    spool.cut(Cut(1, NOW_US, 0, False, body))
    for seq in range(2, 8):
        spool.cut(Cut(seq, NOW_US, 0, False, b"x" * 900))
    assert recut(spool, spool.state.reports[0], NOW_US)
    spool.cut(Cut(8, NOW_US, 0, False, b"x" * 2_000))
    assert spool.drop_oldest_unaccepted(0)
    assert all(report.path.exists() for report in spool.state.reports)
    spool.close()
