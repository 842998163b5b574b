"""A report counts the same whatever form it comes in: rows, rollups and quarantine are equal to the last bit."""

from __future__ import annotations

import gzip
import sys
import time
import uuid
from datetime import UTC, datetime

import msgspec
import pytest
from asgiref.sync import sync_to_async
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.exchange.bounding import bounded
from controlplane.exchange.composition import commit_group
from controlplane.exchange.database import connection
from controlplane.exchange.messages import Incoming, read_report
from controlplane.exchange.problems import Refusal
from controlplane.fleet.models import Agent, Slot
from controlplane.usage.cursors import Envelope, Verdict
from controlplane.usage.models import AgentCursor, Quarantine, UsageRecord
from controlplane.usage.partitions import ensure_day
from controlplane.wire import packed
from controlplane.wire.report import ItemDone, Report
from tests.usage_rows import usage_row
from tests.wire.messages import REPORT

NOW = datetime.now(UTC)
NOW_US = time.time_ns() // 1000
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "tenant_id": st.sampled_from([1, 9_999]),
        "queue_us": st.sampled_from([-2, -1, 0, 77_000]),
        "prompt_tokens": st.integers(200, 2**31 - 1),
        "charge_gpu_nanos": st.sampled_from([0, 1, 2**62]),
        "ended_us": st.sampled_from([NOW_US, NOW_US + 3_600_000_000, 1, -(2**62), 2**62]),
        "outcome": st.sampled_from([1, 2, 31, 32_000]),
        "flags": st.sampled_from([0, 1, 4, 32_767, -1]),
        "job": st.sampled_from(["", "no uuid", str(uuid.uuid4())]),
        "client_request_id": st.text(st.characters(exclude_categories=["Cs"]), max_size=150),
        "request_id": st.sampled_from([str(uuid.UUID(int=n)) for n in range(3)]),
    },
)


def as_msgpack(report: Report) -> bytes:
    return msgspec.msgpack.encode(report)


LANES = {
    "json": (msgspec.json.encode, b"application/json"),
    "packed": (packed.pack, packed.CONTENT_TYPE.encode()),
    "msgpack": (as_msgpack, b"application/msgpack"),
}


def stored_by(lane: str, agents, reports) -> dict[str, list]:
    """What a transaction of these reports, each in the lane, writes; it is rolled back afterwards."""
    encode, content_type = LANES[lane]
    group = []
    for agent, report in zip(agents, reports, strict=True):
        read, rows = read_report(encode(report), content_type)
        read, impossible = bounded(read)
        envelope = Envelope(agent.pk, 1, report.seq, b"d" * 32, 1, 0)
        group.append(Incoming(envelope, agent.pool_id, read, NOW_US, impossible, rows))
    found: dict[str, list] = {}
    with connection() as held, held.transaction(force_rollback=True):
        results = commit_group(held, group, NOW)
        found["results"] = [(result.verdict, result.set_aside) for result in results]
        for table, columns in (
            ("usage_record", "*"),
            ("usage_rollupdelta", "minute, pool_id, tenant_id, class_id, model_id, rate_version, outcome, requests,"
             " prompt_tokens, gpu_us, charge_gpu_nanos, charge_prompt_nanos, stages"),
            ("usage_quarantine", "agent_id, epoch, seq, reason, payload::text, records"),
        ):  # fmt: skip
            rows_found = held.execute(f"SELECT {columns} FROM {table}").fetchall()
            found[table] = sorted(rows_found, key=repr)
    return found


@pytest.fixture(autouse=True)
def present(monkeypatch):
    """The instant of the test: rows are made by the clock, and a suite may import this file long before it runs."""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "NOW", datetime.now(UTC))
    monkeypatch.setattr(here, "NOW_US", time.time_ns() // 1000)


@pytest.fixture
def two_agents(world):
    made = []
    for number in range(2):
        agent = Agent.objects.create(
            name=f"lane-{number}", pool=world.pool, state="active", public_key=bytes([number]) * 32, epoch=1,
            enrolled_at=NOW,
        )  # fmt: skip
        AgentCursor.objects.create(agent_id=agent.pk, epoch=1, updated_at=NOW)
        made.append(agent)
    assert Slot.objects.exists()
    with connection() as held:
        ensure_day(held.cursor(), NOW)
    return made


def test_every_lane_stores_the_same(world, two_agents):
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.lists(CHANGES, max_size=4), min_size=2, max_size=2))
    def holds(changes):
        reports = [
            Report(1, 1, 1, NOW_US, 0, 0, records=[usage_row(world, prices=world.prices, **row) for row in rows])
            for rows in changes
        ]
        seen = {lane: stored_by(lane, two_agents, reports) for lane in LANES}
        assert seen["packed"] == seen["json"]
        assert seen["msgpack"] == seen["json"]
        rows, aside = len(seen["json"]["usage_record"]), sum(count for _, count in seen["json"]["results"])
        assert rows + aside == sum(map(len, changes))

    holds()


def test_a_group_of_all_lanes_keeps_each_report_with_its_agent(world, two_agents):
    """Packed and plain reports in one transaction: agents, order and faults stay with their own."""
    good, bad = usage_row(world, prices=world.prices), usage_row(world, prices=world.prices, tenant_id=9_999)
    late = usage_row(world, prices=world.prices, client_request_id="c", job="j")
    lanes = (("packed", [bad, good, late]), ("json", [late, bad]))
    group = []
    for (lane, rows), agent in zip(lanes, two_agents, strict=True):
        encode, content_type = LANES[lane]
        read, packed_rows = read_report(encode(Report(1, 1, 1, NOW_US, 0, 0, records=rows)), content_type)
        group.append(Incoming(Envelope(agent.pk, 1, 1, b"d" * 32, 1, 0), agent.pool_id, read, NOW_US, {}, packed_rows))
    with connection() as held:
        results = commit_group(held, group, NOW)
    assert [(result.verdict, result.set_aside) for result in results] == [(Verdict.TAKEN, 1), (Verdict.TAKEN, 1)]
    stored = list(UsageRecord.objects.order_by("agent_id", "client_request_id").values_list("agent_id", "request_id"))
    first, second = (agent.pk for agent in two_agents)
    assert [(a, str(r)) for a, r in stored] == [
        (first, good.request_id),
        (first, late.request_id),
        (second, late.request_id),
    ]
    aside = dict(Quarantine.objects.values_list("agent_id", "payload"))
    assert aside[first]["records"] == aside[second]["records"] == [list(msgspec.structs.astuple(bad))]


async def test_the_packed_lane_is_taken_at_the_door_with_and_without_gzip(agent, world):
    rows = [usage_row(world, prices=world.prices, client_request_id=f"c-{n}") for n in range(3)]
    for coding in (None, "gzip"):
        report = agent.build(records=rows)
        body = packed.pack(report)
        headers = {"content-type": packed.CONTENT_TYPE} | ({"content-encoding": coding} if coding else {})
        response = await agent.send(gzip.compress(body) if coding else body, seq=report.seq, headers=headers)
        assert response.status == 200, response.body
        agent.seq += 1
    assert await sync_to_async(UsageRecord.objects.count)() == 6


async def test_a_repeat_in_the_packed_form_stores_nothing_and_another_content_is_a_conflict(agent, world):
    report = agent.build(records=[usage_row(world, prices=world.prices)])
    body = packed.pack(report)
    for _ in range(2):
        assert (await agent.send(body, seq=report.seq)).status == 200
    other = msgspec.structs.replace(report, records=[usage_row(world, prices=world.prices)])
    refused = await agent.send(packed.pack(other), seq=report.seq)
    assert (refused.status, refused.problem.code) == (409, "conflict")
    kept = await sync_to_async(Quarantine.objects.get)()
    assert kept.reason == "conflict" and kept.records == 1
    assert kept.payload["report"]["records"] == [list(msgspec.structs.astuple(other.records[0]))]
    assert await sync_to_async(UsageRecord.objects.count)() == 1


async def test_an_unknown_form_is_refused_so_that_the_agent_sends_json(agent):
    body = packed.FAMILY + b"\x09" + bytes(12)
    refused = await agent.send(body, seq=1)
    assert (refused.status, refused.problem.code) == (415, "unreadable")
    assert "Send JSON" in refused.problem.detail


async def test_hello_names_the_form(agent):
    assert (await agent.hello()).report_forms == [packed.FORM]


@pytest.mark.parametrize(
    "body",
    [
        packed.MAGIC,
        packed.MAGIC + bytes(12),
        packed.MAGIC + b"\xff" * 12,
        b"\xc1",
        b"\x81\xa6layout\x02",
    ],
)
def test_broken_bodies_are_refused_with_a_reason(body):
    for content_type in (b"", b"application/msgpack"):
        with pytest.raises(Refusal) as refused:
            read_report(body, content_type)
        assert refused.value.problem.code in ("unreadable", "must_upgrade")


def test_records_in_the_head_of_a_packed_report_are_refused():
    head = msgspec.json.encode(REPORT)
    body = packed._PREFIX.pack(packed.MAGIC, len(head), 0, 0) + head
    with pytest.raises(Refusal, match="rows"):
        read_report(body)


def test_a_response_in_msgpack_is_kept_as_json():
    done = ItemDone(1, 2, 3, 4, str(uuid.uuid4()), 1, 200, msgspec.Raw(msgspec.msgpack.encode({"a": [1, "x"]})))
    body = msgspec.msgpack.encode(Report(1, 1, 1, NOW_US, 0, 0, items_done=[done]))
    read, _ = read_report(body, b"application/msgpack; charset=binary")
    assert bytes(read.items_done[0].response) == b'{"a":[1,"x"]}'
