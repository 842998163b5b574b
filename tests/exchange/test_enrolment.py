"""Enrolment: a token makes one agent, a lost answer costs nothing, slots are bound floors first."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import msgspec
from asgiref.sync import sync_to_async
from django.db import transaction
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.core.generations import STEP
from controlplane.exchange.database import connection as exchange_connection
from controlplane.exchange.enrolment import hello
from controlplane.fleet.models import Agent, Slot, SlotInterval, SlotTenure
from controlplane.tenants.models import Installation
from controlplane.usage.models import AgentCursor
from controlplane.wire.enrolment import Enrolled, Hello, Helloed
from tests import factories
from tests.exchange.door import TestAgent


async def test_binds_slots_floors_first_and_opens_their_tenure(app, world):
    one, two = TestAgent(app), TestAgent(app)
    await one.enrol(await sync_to_async(world.token)(), "gpu-1", slots=6)
    await two.enrol(await sync_to_async(world.token)(), "gpu-2", slots=8)

    def state():
        bound = {
            agent_id: list(Slot.objects.filter(agent_id=agent_id).order_by("name").values_list("band", flat=True))
            for agent_id in (one.id, two.id)
        }
        owners = dict(SlotInterval.objects.filter(ended_at=None).values_list("slot__band", "owner_class"))
        return bound, owners, SlotTenure.objects.filter(ended_at=None).count(), AuditEntry.objects.count()

    bound, owners, tenures, entries = await sync_to_async(state)()
    assert sorted(bound[one.id]) == ["batch"] * 2 + ["interactive"] * 4
    assert bound[two.id] == ["flex", "flex"]
    assert owners == {"interactive": "chat", "batch": "bulk", "flex": "chat"}
    assert (tenures, entries) == (8, 2)


async def test_same_token_and_key_answer_the_same(app, world):
    one = TestAgent(app)
    token = await sync_to_async(world.token)()
    first = (await one.enrol(token)).read(Enrolled)
    again = (await one.enrol(token)).read(Enrolled)
    assert again == first
    assert await sync_to_async(Agent.objects.count)() == 1


async def test_another_key_with_a_used_token_is_refused(app, world):
    token = await sync_to_async(world.token)()
    await TestAgent(app).enrol(token)
    response = await TestAgent(app).enrol(token, "gpu-2")
    assert (response.status, response.problem.code) == (409, "token_used")


async def test_expired_unknown_and_malformed(app, world):
    expired = await sync_to_async(world.token)(lives=timedelta(seconds=-1))
    assert (await TestAgent(app).enrol(expired)).problem.code == "token_expired"
    assert (await TestAgent(app).enrol("nothing")).problem.code == "token_unknown"
    token = await sync_to_async(world.token)()
    assert (await TestAgent(app).enrol(token, "")).problem.code == "unreadable"
    # a refusal uses no token up
    assert (await TestAgent(app).enrol(token, "gpu-1")).status == 200


async def test_a_name_in_use_is_refused_and_the_token_stays_good(app, world):
    await sync_to_async(factories.agent)(world.pool, "gpu-1")
    token = await sync_to_async(world.token)()
    assert (await TestAgent(app).enrol(token, "gpu-1")).problem.code == "conflict"
    assert (await TestAgent(app).enrol(token, "gpu-2")).status == 200


async def test_an_agent_that_waits_for_approval_may_not_say_hello(app, world, settings):
    settings.AGENT_APPROVAL = True
    one = TestAgent(app)
    enrolled = (await one.enrol(await sync_to_async(world.token)())).read(Enrolled)
    assert enrolled.approved is False
    response = await one.signed("POST", "/agent/v1/hello", b'{"software":"0.1.0","boot_id":"b"}', epoch=0)
    assert (response.status, response.problem.code) == (403, "unknown_agent")


async def test_a_hello_that_arrives_again_gives_no_second_epoch(app, agent):
    """Whoever recorded one could stop the agent with it: a newer epoch ends the process that holds the older."""
    body = msgspec.json.encode(Hello("0.1.0", "boot"))
    stamp = time.time_ns() // 1000
    one, other = [
        (await agent.signed("POST", "/agent/v1/hello", body, epoch=0, stamp=stamp)).read(Helloed) for _ in range(2)
    ]
    assert (one.epoch, other.epoch) == (2, 2)
    agent.epoch, agent.seq = 2, 0
    assert (await agent.report()).accepted_through == 1
    assert (await agent.hello()).epoch == 3
    replayed = await agent.signed("POST", "/agent/v1/hello", body, epoch=0, stamp=stamp)
    assert (replayed.status, replayed.problem.code) == (409, "superseded")
    assert (await agent.report()).accepted_through == 1
    assert (await sync_to_async(AgentCursor.objects.count)()) == 3


async def test_hellos_that_arrive_again_at_once_give_one_epoch(app, agent):
    body, stamp = msgspec.json.encode(Hello("0.1.0", "boot")), time.time_ns() // 1000
    replies = await asyncio.gather(
        *(agent.signed("POST", "/agent/v1/hello", body, epoch=0, stamp=stamp) for _ in range(8))
    )
    assert {reply.read(Helloed).epoch for reply in replies} == {2}


async def test_a_hello_lets_rows_that_name_the_agent_be_committed(agent, world):
    """A push commits a delivery for each agent while agents say hello: with a full lock they waited for each other."""

    def other_connection_names_it() -> list[tuple[int]]:
        with transaction.atomic():
            hello(agent.id, Hello("1", "boot"), b"m" * 32, now=timezone.now())
            with exchange_connection() as other, other.transaction(), other.cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '2s'")
                cursor.execute("SELECT 1 FROM fleet_agent WHERE id = %s FOR KEY SHARE", [agent.id])
                return cursor.fetchall()

    assert await sync_to_async(other_connection_names_it)() == [(1,)]


async def test_after_a_restore_epochs_are_above_all_before_and_lost_ones_begin_anew(agent, world):
    """The database was restored from a backup of epoch 1; the agent began 2 and 3 after it."""
    await sync_to_async(Installation.objects.update)(generation=3)
    unknown = await agent.send(agent.build(epoch=3, seq=1), epoch=3)
    assert (unknown.status, unknown.problem.code) == (409, "unknown_epoch")
    helloed = await agent.hello([1, 2, 3, 2, 10**9])
    assert (helloed.epoch, helloed.generation) == (2 * STEP + 1, 3)
    assert helloed.accepted_through == {"1": 0, "2": 0, "3": 0}
    assert (await agent.send(agent.build(epoch=3, seq=1), epoch=helloed.epoch)).status == 200
    assert (await agent.send(agent.build(epoch=3, seq=3), epoch=helloed.epoch)).problem.expected == 2
    assert (await agent.hello([3])).epoch == 2 * STEP + 2


async def test_without_a_restore_an_epoch_that_was_never_issued_stays_unknown(agent):
    helloed = await agent.hello([77])
    assert (helloed.epoch, helloed.accepted_through, helloed.generation) == (2, {}, 1)
    stranger = await agent.hello([1, 77])
    assert stranger.accepted_through == {"1": 0}
