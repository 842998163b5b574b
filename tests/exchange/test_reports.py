"""Reports: exactly once, in order, whatever is doubled, lost or reordered on the way."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
import uuid
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from asgiref.sync import sync_to_async
from django.db import connection

from controlplane.contracts.models import ObjectiveMinute
from controlplane.core.period import from_us
from controlplane.exchange import group_commit
from controlplane.fleet.models import AgentLive
from controlplane.tenants.models import ApiKey
from controlplane.usage.models import (
    AgentCursor,
    DecisionSample,
    Quarantine,
    RefusalMinute,
    RollupDelta,
    SlotMinute,
    SlotUsageMinute,
    UsageRecord,
)
from controlplane.wire import report as wire
from tests import factories
from tests.usage_rows import usage_row

MINUTE_US = time.time_ns() // 60_000_000_000 * 60_000_000


def counted() -> int:
    return UsageRecord.objects.count()


async def stored() -> tuple[int, int, int]:
    """(records, requests in rollups, quarantined records)"""

    def read():
        deltas = sum(RollupDelta.objects.values_list("requests", flat=True))
        return counted(), deltas, sum(Quarantine.objects.values_list("records", flat=True))

    return await sync_to_async(read)()


def rows(world, n=3, **given):
    return [usage_row(world, prices=world.prices, **given) for _ in range(n)]


async def test_a_report_is_stored_and_acknowledged(agent, world):
    sent = rows(world)
    answer = await agent.report(records=sent)
    assert (answer.accepted_through, answer.repeat, answer.quarantined) == (1, False, 0)
    found = await sync_to_async(lambda: list(UsageRecord.objects.values()))()
    by_id = {str(row["request_id"]): row for row in found}
    assert set(by_id) == {row.request_id for row in sent}
    for row in sent:
        for name in ("queue_us", "gpu_us", "charge_output_nanos", "tenant_id", "flags", "ttft_us", "rate_version"):
            assert by_id[row.request_id][name] == getattr(row, name), name
        assert by_id[row.request_id]["ended_at"].timestamp() == pytest.approx(row.ended_us / 1e6, abs=1e-6)
    assert await stored() == (3, 3, 0)


async def test_the_same_bytes_again_store_nothing_and_answer_the_same(agent, world):
    report = agent.build(records=rows(world))
    first = (await agent.send(report)).read(wire.Answer)
    second = (await agent.send(report)).read(wire.Answer)
    assert (first.repeat, second.repeat) == (False, True)
    assert first.accepted_through == second.accepted_through == 1
    assert await stored() == (3, 3, 0)
    cursor = await AgentCursor.objects.aget(agent_id=agent.id, epoch=agent.epoch)
    assert (cursor.last_seq, cursor.records, cursor.repeats) == (1, 3, 1)


async def test_gzip_of_the_same_report_is_a_repeat(agent, world):
    report = agent.build(records=rows(world))
    await agent.send(report)
    packed = gzip.compress(msgspec.json.encode(report))
    answer = (await agent.send(packed, seq=1, headers={"content-encoding": "gzip"})).read(wire.Answer)
    assert answer.repeat


async def test_same_seq_with_other_content_is_a_conflict_and_kept(agent, world):
    await agent.send(agent.build(records=rows(world)))
    other = agent.build(records=rows(world, 1))
    for _ in range(2):
        response = await agent.send(other)
        assert (response.status, response.problem.code) == (409, "conflict")
    assert await stored() == (3, 3, 1)
    kept = await Quarantine.objects.aget()
    assert kept.reason == "conflict"
    assert kept.payload["report"]["records"][0][0] == other.records[0].request_id


async def test_a_gap_names_the_seq_that_is_expected(agent, world):
    response = await agent.send(agent.build(seq=5, records=rows(world)))
    assert (response.status, response.problem.code, response.problem.expected) == (409, "expected", 1)
    assert await stored() == (0, 0, 0)


async def test_reordered_and_doubled_messages_count_once(agent, world):
    reports = [agent.build(seq=seq, records=rows(world, seq)) for seq in (1, 2, 3)]
    order = [2, 0, 0, 2, 1, 0, 1, 2, 2, 0]
    answers = [await agent.send(reports[at]) for at in order]
    assert [answer.status for answer in answers] == [409, 200, 200, 409, 200, 200, 200, 200, 200, 200]
    assert (await stored())[:2] == (6, 6)
    assert answers[-1].read(wire.Answer).accepted_through == 3


async def test_two_processes_with_the_same_report_at_once(agent, world, process):
    other = process()
    for seq in range(1, 6):
        report = agent.build(seq=seq, records=rows(world, 20))
        answers = await asyncio.gather(*(agent.send(report, app=app) for app in (agent.app, other, agent.app, other)))
        read = [answer.read(wire.Answer) for answer in answers]
        assert sorted(answer.repeat for answer in read) == [False, True, True, True]
        assert {answer.accepted_through for answer in read} == {seq}
    assert await stored() == (100, 100, 0)


async def test_two_processes_with_different_reports_of_one_seq(agent, world, process):
    other = process()
    left, right = (agent.build(seq=1, records=rows(world, 2)) for _ in range(2))
    answers = await asyncio.gather(agent.send(left), agent.send(right, app=other))
    assert sorted(answer.status for answer in answers) == [200, 409]
    assert await stored() == (2, 2, 2)


async def test_a_process_killed_between_commit_and_answer(agent, world, process):
    report = agent.build(records=rows(world))

    class Killed(BaseException):
        pass

    real, committed = group_commit.store_group, threading.Event()

    def commit_then_die(group, now):
        real(group, now)
        committed.set()
        raise Killed

    agent.app._handlers._group_commit._work = commit_then_die
    task = asyncio.ensure_future(agent.send(report))
    assert await asyncio.to_thread(committed.wait, 60)
    done, _ = await asyncio.wait([task], timeout=0.5)
    assert not done or isinstance(task.exception(), BaseException) or task.result().status >= 500
    task.cancel()
    assert await stored() == (3, 3, 0)
    fresh = process()
    answer = (await agent.send(report, app=fresh)).read(wire.Answer)
    assert (answer.accepted_through, answer.repeat) == (1, True)
    assert await stored() == (3, 3, 0)


async def test_an_older_process_is_superseded(agent, world):
    old = agent.epoch
    await agent.hello()
    response = await agent.send(agent.build(epoch=old, seq=1, records=rows(world)), epoch=old)
    assert (response.status, response.problem.code) == (409, "superseded")
    assert (await agent.send(agent.build(epoch=99, seq=1), epoch=99)).problem.code == "unknown_epoch"


async def test_a_spooled_epoch_is_sent_by_its_owner_and_sealed(agent, world):
    old = agent.epoch
    await agent.report(records=rows(world, 1))
    helloed = await agent.hello(spooled=[old])
    assert helloed.accepted_through == {str(old): 1}
    assert helloed.epoch == old + 1
    # under its old number, signed with the present epoch; the process before may still run, and has no say any more
    replaced = await agent.send(agent.build(epoch=old, seq=2, records=rows(world, 1)), epoch=old)
    assert (replaced.status, replaced.problem.code) == (409, "superseded")
    assert (await stored())[0] == 1
    first = await agent.send(agent.build(epoch=old, seq=2, records=rows(world, 1)))
    last = await agent.send(agent.build(epoch=old, seq=3, records=rows(world, 1), seal=True))
    assert (first.status, last.status) == (200, 200)
    after = await agent.send(agent.build(epoch=old, seq=4, records=rows(world, 1)))
    assert (after.status, after.problem.code) == (409, "sealed")
    assert (await stored())[0] == 3
    live = await AgentLive.objects.filter(agent_id=agent.id).afirst()
    assert live.epoch == old, "what an old epoch says is not the agent's present word"


async def test_wrong_records_are_set_aside_with_their_reason(agent, world):
    now_us = time.time_ns() // 1000
    wrong = {
        "impossible_times": {"arrived_us": now_us, "ended_us": now_us - 5_000_000},
        "in_the_future": {"arrived_us": now_us, "ended_us": now_us + 3_600_000_000},
        "too_old": {"arrived_us": now_us - 15 * 86_400_000_000, "ended_us": now_us - 15 * 86_400_000_000 + 1},
        "negative_number": {"output_tokens": -1},
        "absurd_number": {"prompt_tokens": 2**40},
        "unknown_tenant": {"tenant_id": 999_999},
        "unknown_class": {"class_id": 999_999},
        "unknown_slot": {"slot_id": 999_999},
        "unknown_rate": {"rate_version": 999_999},
        "wrong_charge": {"charge_output_nanos": 1},
        "unreadable": {"request_id": "not-a-uuid"},
    }
    bad = []
    for given in wrong.values():
        row = usage_row(world, prices=world.prices)
        if "rate_version" in given or {"output_tokens", "prompt_tokens"} & set(given):
            row = msgspec.structs.replace(row, **given)
        else:
            row = usage_row(world, prices=world.prices, **given)
        bad.append(row)
    answer = await agent.report(records=[*rows(world, 2), *bad])
    assert answer.quarantined == len(wrong)
    assert await stored() == (2, 2, len(wrong))
    reasons = await sync_to_async(lambda: set(Quarantine.objects.values_list("reason", flat=True)))()
    assert reasons == set(wrong)


async def test_numbers_beyond_every_column_are_set_aside_alone(agent, world):
    good, bad = rows(world, 2)
    answer = await agent.report(records=[good, msgspec.structs.replace(bad, gpu_us=2**70)])
    assert answer.quarantined == 1
    assert await stored() == (1, 1, 1)


async def test_a_long_request_that_ends_now_is_legitimate(agent, world):
    ended = time.time_ns() // 1000
    answer = await agent.report(records=[usage_row(world, arrived_us=ended - 27 * 3_600_000_000, ended_us=ended)])
    assert answer.quarantined == 0


async def test_not_charged_records_must_not_carry_a_charge(agent, world):
    charged = usage_row(world, prices=world.prices, flags=wire.FLAG_NOT_CHARGED)
    free = usage_row(world, rate_version=world.card.pk, flags=wire.FLAG_NOT_CHARGED, outcome=8, status=502)
    answer = await agent.report(records=[charged, free])
    assert answer.quarantined == 1
    assert await sync_to_async(
        lambda: [str(i) for i in UsageRecord.objects.values_list("request_id", flat=True)]
    )() == [free.request_id]


@pytest.fixture
def refusing(transactional_db):
    """The database refuses a decision that passes every check of ours: what no check of ours thought of."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE usage_decisionsample ADD CONSTRAINT picky CHECK (decision <> 'refuse me')")
    yield
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE usage_decisionsample DROP CONSTRAINT picky")


async def test_a_report_that_the_database_refuses_fails_alone(refusing, agent, world):
    """The report is kept whole, the others count."""
    bad = agent.build(
        samples=[
            wire.DecisionSample(str(uuid.uuid4()), time.time_ns() // 1000, world.tenant.pk, world.key.pk, world.chat.pk,
                                "refuse me", 0, [])
        ],
        records=rows(world, 2),
    )  # fmt: skip
    answer = (await agent.send(bad)).read(wire.Answer)
    agent.seq += 1
    assert (answer.accepted_through, answer.quarantined) == (1, 2)
    kept = await Quarantine.objects.aget()
    assert (kept.reason, kept.records) == ("refused_by_database", 2)
    assert (await agent.report(records=rows(world, 1))).accepted_through == 2
    assert (await stored())[0] == 1


async def test_a_database_that_is_away_is_an_answer_to_try_again(agent, world, monkeypatch):
    from contextlib import contextmanager

    import psycopg

    @contextmanager
    def away():
        raise psycopg.OperationalError("gone")
        yield

    report = agent.build(records=rows(world))
    with monkeypatch.context() as patched:
        patched.setattr(group_commit, "connection", away)
        response = await agent.send(report)
    assert (response.status, response.problem.code) == (503, "busy")
    assert response.headers["retry-after"] == "1"
    assert (await agent.send(report)).read(wire.Answer).repeat is False


async def test_body_limits(agent, world, settings):
    settings.REPORT_BODY_LIMIT_BYTES = 2_000
    assert (await agent.send(b"x" * 2_001, seq=1)).problem.code == "too_large"
    bomb = gzip.compress(b" " * 100_000)
    assert len(bomb) < 2_000
    response = await agent.send(bomb, seq=1, headers={"content-encoding": "gzip"})
    assert (response.status, response.problem.code) == (413, "too_large")
    cut = gzip.compress(msgspec.json.encode(agent.build()))[:-9]
    assert (await agent.send(cut, seq=1, headers={"content-encoding": "gzip"})).problem.code == "unreadable"
    assert (await agent.send(b"{}", seq=1, headers={"content-encoding": "br"})).status == 415


async def test_unreadable_and_newer_layouts(agent, world):
    assert (await agent.send(b"{", seq=1)).problem.code == "unreadable"
    newer = msgspec.json.encode({"layout": 2, "epoch": agent.epoch, "seq": 1})
    assert (await agent.send(newer, seq=1)).problem.code == "must_upgrade"


async def test_slot_minutes_add_up_and_never_pass_a_minute(agent, world):
    slot = world.slots[0].pk
    tenant, chat = world.tenant.pk, world.chat.pk

    async def send(gpu_us):
        return await agent.report(
            slot_usage=[wire.SlotUsage(slot, MINUTE_US, tenant, chat, True, gpu_us)],
            slot_meters=[wire.SlotMeter(slot, MINUTE_US, gpu_us, gpu_us)],
        )

    await send(20_000_000)
    await send(25_000_000)
    await send(20_000_000)

    def read():
        return (
            list(SlotUsageMinute.objects.values_list("gpu_us", flat=True)),
            list(SlotMinute.objects.values_list("busy_us", "observed_us")),
            list(Quarantine.objects.values_list("reason", flat=True)),
        )

    assert await sync_to_async(read)() == ([45_000_000], [(45_000_000, 45_000_000)], ["slot_minute_over_a_minute"])


async def test_refusals_objectives_samples_and_live_figures(agent, world):
    from controlplane.contracts.models import Contract, ContractVersion
    from tests import factories

    def contract():
        row = Contract.objects.create(slug="c", name="c", workload_class=world.chat, created_at=factories.NOW)
        return ContractVersion.objects.create(
            contract=row, number=1, effective_from=factories.NOW, target_ppm=990_000, created_by="a",
            created_at=factories.NOW,
        ).pk  # fmt: skip

    version = await sync_to_async(contract)()
    sample = wire.DecisionSample(
        str(uuid.uuid4()), time.time_ns() // 1000, world.tenant.pk, world.key.pk, world.chat.pk, "reject", 45,
        [wire.Check("queue", "64", "64", False)],
    )  # fmt: skip
    figures = wire.LiveFigures(time.time_ns() // 1000, [], [], [])
    for _ in range(2):
        await agent.report(
            objectives=[wire.ObjectiveCount(version, MINUTE_US, 10, 8, 7, 6, 1, {"queue_timeout": 1, "slow": 2})],
            refusals=[wire.RefusalCount(MINUTE_US, world.tenant.pk, world.chat.pk, 45, 4)],
            samples=[sample],
            figures=figures,
        )

    def read():
        objective = ObjectiveMinute.objects.get()
        return (
            (objective.offered, objective.good, objective.bad),
            RefusalMinute.objects.get().count,
            DecisionSample.objects.get().checks,
            AgentLive.objects.get().figures["at_us"],
            AgentLive.objects.get().seq,
        )

    assert await sync_to_async(read)() == (
        (20, 12, {"queue_timeout": 2, "slow": 4}),
        8,
        [{"name": "queue", "value": "64", "limit": "64", "held": False}],
        figures.at_us,
        2,
    )


async def test_a_job_counts_its_items_and_finishes(agent, world):
    from controlplane.jobs.models import Job

    def job(items, **values):
        given = {"tenant": world.tenant, "workload_class": world.bulk, "pool": world.pool, "items": items}
        return Job.objects.create(
            **{**given, **values}, prompt_tokens=10, expected_output_tokens=10, created_by="a", created_at=factories.NOW
        )

    own = await sync_to_async(job)(3)
    foreign = await sync_to_async(lambda: job(3, tenant=factories.tenant("other")))()
    bulk = {"class_id": world.bulk.pk, "asked_class_id": world.bulk.pk}
    sent = [
        usage_row(world, job=str(own.uuid), gpu_us=10, **bulk),
        usage_row(world, job=str(own.uuid), gpu_us=10, outcome=7, status=502, **bulk),
        usage_row(world, job=str(foreign.uuid), **bulk),
        usage_row(world, job="nonsense", **bulk),
    ]
    await agent.report(records=sent)
    await agent.report(records=[usage_row(world, job=str(own.uuid), gpu_us=10, **bulk)])
    row = await Job.objects.aget(pk=own.pk)
    # its client sends the one that failed again
    assert (row.items_completed, row.items_failed, row.state, row.finished_at) == (2, 1, "running", None)
    again = {"job": str(own.uuid), "gpu_us": 10, **bulk}
    failures = [usage_row(world, outcome=7, status=503, **again) for _ in range(5)]
    await agent.report(records=[*failures, usage_row(world, **again)])
    row = await Job.objects.aget(pk=own.pk)
    assert (row.items_completed, row.items_failed, row.gpu_us_done, row.state) == (3, 6, 90, "completed")
    assert row.finished_at is not None and row.first_attempt_at is not None
    other = await Job.objects.aget(pk=foreign.pk)
    assert (other.items_completed, other.first_attempt_at) == (0, None)
    numbered = await sync_to_async(lambda: UsageRecord.objects.filter(job_id=own.pk).count())()
    assert (numbered, (await stored())[0]) == (9, 11)


async def test_a_key_in_use_says_when_it_was_used_last(agent, world):
    idle = await ApiKey.objects.acreate(
        public_id="key-2", tenant=world.tenant, name="idle", prefix="fb_2", secret_hash="1" * 64,
        default_class="chat", created_at=factories.NOW,
    )  # fmt: skip

    async def used():
        return (await ApiKey.objects.aget(pk=world.key.pk)).last_used_at

    base_us = time.time_ns() // 1000 - 600_000_000

    async def use(*after_s):
        await agent.report(records=[usage_row(world, prices=world.prices, ended_us=at(s) + 600_000) for s in after_s])
        return await used()

    def at(after_s):
        return base_us + after_s * 1_000_000

    assert await used() is None
    assert await use(10, 30, 20) == from_us(at(30)), "the newest of a report"
    assert await use(-300) == from_us(at(30)), "a late report moves nothing backwards"
    assert await use(90) == from_us(at(30)), "within a minute the row is left alone"
    assert await use(91) == from_us(at(91))
    now = datetime.now(UTC)
    await use(630)
    assert now - timedelta(seconds=1) <= await used() <= datetime.now(UTC), "no agent's clock puts a use in the future"
    assert (await ApiKey.objects.aget(pk=idle.pk)).last_used_at is None


async def test_many_agents_in_one_group(app, world):
    from tests.exchange.door import TestAgent

    agents = []
    for number in range(6):
        one = TestAgent(app)
        await one.enrol(await sync_to_async(world.token)(), f"gpu-{number}", slots=1)
        await one.hello()
        agents.append(one)
    for _ in range(4):
        await asyncio.gather(*(one.report(records=rows(world, 7)) for one in agents))
    assert await stored() == (168, 168, 0)

    def transactions():
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(DISTINCT received_at) FROM usage_record")
            return cursor.fetchone()[0]

    assert await sync_to_async(transactions)() < 24


def test_rows_that_every_report_overwrites_have_room_in_their_pages(world):
    tables = ["usage_agentcursor", "fleet_agentlive", "budgets_agentdemand", "jobs_itemholder"]
    with connection.cursor() as cursor:
        cursor.execute("SELECT relname, reloptions FROM pg_class WHERE relname = ANY(%s)", [tables])
        assert dict(cursor.fetchall()) == {table: ["fillfactor=20"] for table in tables}
