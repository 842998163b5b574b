"""Input that no sound agent sends: refused with what is wrong with it, and never at the cost of what is beside it."""

from __future__ import annotations

import json
import time
import uuid

import msgspec
import pytest
from asgiref.sync import sync_to_async

from controlplane.exchange.bounding import bounded
from controlplane.exchange.messages import ReportOfTuples
from controlplane.fleet.models import AgentLive, EnrolmentToken
from controlplane.usage.models import Quarantine, SlotMinute, UsageRecord
from controlplane.wire import report as wire
from controlplane.wire.signing import to_text
from tests.exchange.door import TestAgent, call
from tests.usage_rows import usage_row

MINUTE_US = time.time_ns() // 60_000_000_000 * 60_000_000
HUGE = 2**70
NESTED = b"[" * 20_000
DEEP = b'{"deep":' + NESTED + b"}"


def plain(app, token: str, **given):
    public_key = to_text(TestAgent(app).public_key)
    return {"token": token, "public_key": public_key, "name": "gpu-1", "software": "0.1.0", "slots": 8, **given}


async def enrol(app, token: str, **given):
    return await call(app, "POST", "/agent/v1/enrol", json.dumps(plain(app, token, **given)).encode())


@pytest.mark.parametrize("field", ["name", "software", "address"])
async def test_a_zero_character_at_enrolment_is_unreadable(app, world, field):
    token = await sync_to_async(world.token)()
    response = await enrol(app, token, **{field: "a\0b"})
    assert (response.status, response.problem.code) == (400, "unreadable")
    assert field in response.problem.detail
    assert (await enrol(app, token)).status == 200, "a refusal uses no token up"


@pytest.mark.parametrize("field", ["software", "address"])
async def test_a_zero_character_in_a_hello_is_unreadable(agent, field):
    body = json.dumps({"software": "0.1.0", "boot_id": "b", field: "a\0b"}).encode()
    response = await agent.signed("POST", "/agent/v1/hello", body, epoch=0)
    assert (response.status, response.problem.code) == (400, "unreadable")
    assert field in response.problem.detail
    assert (await agent.hello()).epoch == 2, "a refusal issues no epoch"


@pytest.mark.parametrize("key", [bytes(32), b"\1" + bytes(31), b"\2" + bytes(31), b"\xff" * 32])
async def test_a_key_that_is_none_is_refused(app, world, key):
    token = await sync_to_async(world.token)()
    response = await enrol(app, token, public_key=to_text(key))
    assert (response.status, response.problem.code) == (400, "unreadable")
    assert await sync_to_async(EnrolmentToken.objects.filter(used_at=None).count)() == 1


async def test_deep_nesting_is_unreadable_at_every_door(app, agent):
    answers = [
        await call(app, "POST", "/agent/v1/enrol", DEEP),
        await agent.signed("POST", "/agent/v1/hello", DEEP, epoch=0),
        await agent.signed("POST", "/agent/v1/lease", DEEP),
        await agent.send(DEEP, seq=1),
        await agent.send(b'{"layout":1,"records":' + NESTED, seq=1),
    ]
    assert {(answer.status, answer.problem.code) for answer in answers} == {(400, "unreadable")}
    assert all("nested too deeply" in answer.problem.detail for answer in answers[:4])


def body_of(agent, **parts) -> bytes:
    """JSON of a report whose numbers may be of any size, which the usual encoder does not write."""
    report = msgspec.to_builtins(agent.build(records=parts.pop("records")))
    return json.dumps({**report, **parts}).encode()


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("revision", HUGE),
        ("revision", -1),
        ("live_number", HUGE),
        ("refused_revision", HUGE),
        ("sent_us", HUGE),
        ("trips", [{"slot_id": HUGE, "fence": 1, "at_us": 1, "reason": "queue", "value": 1.0}]),
        ("trips", [{"slot_id": 1, "fence": HUGE, "at_us": 1, "reason": "queue", "value": 1.0}]),
        ("spends", [[HUGE, 1, 1]]),
        ("spends", [[1, 1, HUGE]]),
        ("demand", [["t\0", 1, 1, 1, 1]]),
        ("demand", [["t", 1, HUGE, 1, 1]]),
        ("demand", [["t", 1, 1, 1, 1, HUGE]]),
    ],
)
async def test_an_impossible_number_costs_no_record(agent, world, field, said):
    records = [usage_row(world, prices=world.prices) for _ in range(3)]
    response = await agent.send(body_of(agent, records=records, **{field: said}), seq=1)
    assert response.status == 200, response.body
    answer = response.read(wire.Answer)
    assert (answer.accepted_through, answer.quarantined) == (1, 0)

    def read():
        kept = Quarantine.objects.get()
        return UsageRecord.objects.count(), kept.reason, kept.records, list(kept.payload)

    assert await sync_to_async(read)() == (3, "impossible_number", 0, [field])
    agent.seq += 1
    assert (await agent.report()).accepted_through == 2


async def test_an_impossible_slot_of_the_figures_costs_no_record(agent, world):
    slot = {
        "slot_id": HUGE, "state": "ready", "flex": "home", "fence": 1, "running": 0, "running_batch": 0,
        "running_batch_gpu_us": 0, "free_kv_tokens": 0, "total_kv_tokens": 0, "stop_admit_us": 5,
    }  # fmt: skip
    figures = {"at_us": 1, "slots": [slot], "classes": [], "tenants": []}
    response = await agent.send(body_of(agent, records=[usage_row(world)], figures=figures), seq=1)
    assert response.status == 200
    assert await sync_to_async(UsageRecord.objects.count)() == 1
    assert (await AgentLive.objects.aget()).figures == {}


async def test_an_impossible_warming_time_costs_no_record(agent, world):
    meters = [[world.slots[0].pk, MINUTE_US, 5, 6, HUGE, 0], [world.slots[1].pk, MINUTE_US, 5, 6, 0, 0]]
    await agent.send(body_of(agent, records=[usage_row(world)], slot_meters=meters), seq=1)
    assert await sync_to_async(UsageRecord.objects.count)() == 1
    assert await sync_to_async(lambda: list(SlotMinute.objects.values_list("slot_id", flat=True)))() == [
        world.slots[1].pk
    ]


async def test_a_lease_request_with_an_impossible_spend_is_unreadable(agent, world):
    body = json.dumps({"tenant_id": world.tenant.pk, "need_nanos": 1, "spends": [[HUGE, 1, 1]]}).encode()
    response = await agent.signed("POST", "/agent/v1/lease", body)
    assert (response.status, response.problem.code) == (400, "unreadable")


def test_what_is_possible_stays_the_same_object():
    report = ReportOfTuples(1, 1, 1, 5, 2**31 - 1, 2**63 - 1, spends=[wire.LeaseSpend(1, 0, -5)])
    same, impossible = bounded(report)
    assert same is report and impossible == {}


async def test_the_same_attempt_twice_in_a_report_counts_once(agent, world):
    row = usage_row(world, prices=world.prices)
    another = msgspec.structs.replace(row, attempt=2)
    wrong = usage_row(world, tenant_id=999_999)
    right = msgspec.structs.replace(wrong, tenant_id=world.tenant.pk)
    answer = await agent.report(records=[row, another, row, usage_row(world), row, wrong, right])
    assert answer.quarantined == 3

    def read():
        stored = sorted((str(r.request_id), r.attempt) for r in UsageRecord.objects.all())
        aside = dict(Quarantine.objects.values_list("reason", "records"))
        return stored, aside

    stored, aside = await sync_to_async(read)()
    assert len(stored) == len(set(stored)) == 4
    assert {(row.request_id, 1), (row.request_id, 2), (right.request_id, 1)} <= set(stored)
    assert aside == {"duplicate_in_report": 2, "unknown_tenant": 1}


async def test_ids_that_share_a_half_are_not_the_same(agent, world):
    ids = [f"{number:08d}-0000-4000-8000-{1:012d}" for number in range(3)]
    assert (await agent.report(records=[usage_row(world, request_id=one) for one in ids])).quarantined == 0
    same_start = [str(uuid.UUID(int=(7 << 64) + number)) for number in range(3)]
    assert (await agent.report(records=[usage_row(world, request_id=one) for one in same_start])).quarantined == 0
