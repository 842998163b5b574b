"""Asking for leases between reports: never more than is needed, and only for tenants that the pool serves."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import msgspec
from asgiref.sync import sync_to_async

from controlplane.budgets.models import BudgetWindow, Lease
from controlplane.policy.models import Revision
from controlplane.wire import report as wire
from controlplane.wire.lease import LeaseRequest
from tests import factories
from tests.exchange.test_answers import bundle, hard_budget

OPEN_MAX = 4


async def test_asking_again_and_again_takes_what_four_requests_need(agent, world):
    await sync_to_async(hard_budget)(world)
    for _ in range(20):
        answer = await agent.lease(world.tenant.pk, 1_000)
    assert len(answer.leases) == OPEN_MAX and not answer.exhausted
    assert (await BudgetWindow.objects.aget()).leased_nanos == 4_000


async def test_asking_at_once_takes_no_more(agent, world):
    await sync_to_async(hard_budget)(world)
    await asyncio.gather(*(agent.lease(world.tenant.pk, 1_000) for _ in range(30)))
    assert await sync_to_async(Lease.objects.filter(state="open").count)() <= OPEN_MAX
    assert (await BudgetWindow.objects.aget()).leased_nanos <= 4_000


async def test_what_is_spent_is_added_to_the_newest_lease(agent, world):
    await sync_to_async(hard_budget)(world, limit=10**15)
    for _ in range(6):
        leases = (await agent.lease(world.tenant.pk, 1_000)).leases
        spends = [wire.LeaseSpend(lease.lease_id, lease.amount_nanos, 0) for lease in leases]
        answer = await agent.lease(world.tenant.pk, 1_000, spends)
        assert len(answer.leases) <= OPEN_MAX
        held = sum(lease.amount_nanos for lease in answer.leases)
        assert held >= sum(lease.amount_nanos for lease in leases) + 1_000, "there is money for the next request"
    window = await BudgetWindow.objects.aget()
    assert window.settled_nanos + window.leased_nanos == held


async def test_a_need_over_every_lease_is_answered_with_a_larger_one(agent, world):
    await sync_to_async(hard_budget)(world)
    for _ in range(5):
        await agent.lease(world.tenant.pk, 1_000)
    answer = await agent.lease(world.tenant.pk, 50_000)
    assert len(answer.leases) == OPEN_MAX
    assert max(lease.amount_nanos for lease in answer.leases) >= 50_000


async def test_a_tenant_that_the_pool_does_not_serve_gets_no_lease(agent, world):
    await sync_to_async(hard_budget)(world)

    def revise(*tenants):
        rows = [{"id": tenant.pk} for tenant in tenants]
        bundle(world.pool, msgspec.json.encode({"tenants": rows, "classes": [{"id": world.chat.pk}]}))
        return Revision.objects.latest("number").number

    async def ask():
        body = msgspec.json.encode(LeaseRequest(world.tenant.pk, 1_000))
        return await agent.signed("POST", "/agent/v1/lease", body)

    serving = await sync_to_async(revise)(world.tenant)
    assert (await ask()).status == 200
    other = await sync_to_async(factories.tenant)("other")
    await sync_to_async(revise)(other)
    refused = await ask()
    assert (refused.status, refused.problem.code) == (403, "not_served")
    assert f"tenant {world.tenant.pk}" in refused.problem.detail
    # while it still runs the revision before, it serves the tenant
    await agent.report(revision=serving)
    assert (await ask()).status == 200


async def test_a_window_about_to_end_gives_no_more_leases_either(agent, world, monkeypatch):
    from controlplane.exchange import handlers

    class Late(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(UTC).replace(hour=23, minute=59, second=30)

    await sync_to_async(hard_budget)(world)
    monkeypatch.setattr(handlers, "datetime", Late)
    for _ in range(12):
        answer = await agent.lease(world.tenant.pk, 1_000)
    assert len(answer.leases) == OPEN_MAX


async def test_a_question_settles_but_ends_no_lease(agent, world):
    """By whose clock a lease is over its agent's reports say: after our end it may still reserve some of it."""
    await sync_to_async(hard_budget)(world)
    (lease,) = (await agent.lease(world.tenant.pk, 1_000)).leases
    await sync_to_async(Lease.objects.update)(expires_at=datetime.now(UTC) - timedelta(seconds=5))
    await agent.lease(world.tenant.pk, 1_000, [wire.LeaseSpend(lease.lease_id, 300, 0)])
    row = await Lease.objects.aget(pk=lease.lease_id)
    assert (row.state, row.spent_nanos) == ("open", 300)
    await agent.report(spends=[wire.LeaseSpend(lease.lease_id, 400, 0)])
    assert (await Lease.objects.aget(pk=lease.lease_id)).state == "closed"
    assert (await BudgetWindow.objects.aget()).settled_nanos == 400


async def test_an_agent_whose_clock_is_an_hour_ahead_loses_no_lease(agent, world):
    await sync_to_async(hard_budget)(world)
    (lease,) = (await agent.lease(world.tenant.pk, 1_000)).leases
    hour_us = 3_600_000_000
    ahead = {"sent_us": time.time_ns() // 1000 + hour_us, "spends": [wire.LeaseSpend(lease.lease_id, 10, 0)]}
    await agent.report(clock=wire.ClockReading(hour_us, 2_000), **ahead)
    assert (await Lease.objects.aget(pk=lease.lease_id)).state == "open"
    await agent.report(**ahead)
    assert (await Lease.objects.aget(pk=lease.lease_id)).state == "closed", "an older agent does not tell its offset"
