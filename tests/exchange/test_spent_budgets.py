"""A budget that is spent stays spent: a key's new secret, its limits or another agent give nothing back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest_asyncio
from asgiref.sync import sync_to_async

from controlplane.audit.actors import Actor
from controlplane.budgets.models import BudgetWindow
from controlplane.tenants.key_actions import edit_key, rotate_key
from controlplane.tenants.models import ApiKey
from controlplane.wire import report as wire
from tests.exchange.door import TestAgent
from tests.exchange.test_answers import hard_budget

ADA = Actor(id=None, name="ada", role="admin")
LIMIT = 8_000


@pytest_asyncio.fixture
async def spent(agent, world):
    """The agent has leased and spent everything that the day's budget had."""
    await sync_to_async(hard_budget)(world, limit=LIMIT)
    for _ in range(40):
        answer = await agent.lease(world.tenant.pk, 1_000)
        if answer.exhausted:
            break
        spends = [wire.LeaseSpend(lease.lease_id, lease.amount_nanos, 0) for lease in answer.leases]
        await agent.lease(world.tenant.pk, 1_000, spends)
    window = await BudgetWindow.objects.aget()
    assert window.settled_nanos + window.leased_nanos > LIMIT - 1_000
    return await standing()


async def standing() -> list[tuple[int, int, int]]:
    rows = BudgetWindow.objects.order_by("id").values_list("settled_nanos", "leased_nanos", "limit_nanos")
    return await sync_to_async(list)(rows)


def rotate(world, number: int) -> ApiKey:
    return rotate_key(
        key_id=world.key.pk, rotation_id=f"rotation-{number}", overlap=timedelta(), reason="leaked", actor=ADA,
        now=datetime.now(UTC),
    ).key  # fmt: skip


async def test_a_rotated_key_meets_the_same_refusal_and_the_same_counter(agent, world, spent):
    """The counter is of who the key is, not of its secret."""
    before = (await agent.lease(world.tenant.pk, 1_000)).exhausted
    assert before and before[0].budget.startswith("acme: plan")
    for number in range(3):
        key = await sync_to_async(rotate)(world, number)
        assert key.pk == world.key.pk and key.public_id == "key-1", (
            "the budget belongs to who the key is, not its secret"
        )
        again = (await agent.lease(world.tenant.pk, 1_000)).exhausted
        assert [(row.budget, row.ends_us) for row in again] == [(row.budget, row.ends_us) for row in before]
    assert await standing() == spent


async def test_edited_limits_of_a_key_give_no_money_back(agent, world, spent):
    def edit():
        key = ApiKey.objects.get()
        edit_key(key_id=key.pk, version=key.version, changes={"requests_per_s": 500}, actor=ADA, now=datetime.now(UTC))

    await sync_to_async(edit)()
    assert (await agent.lease(world.tenant.pk, 1_000)).exhausted and await standing() == spent


async def test_a_new_agent_finds_the_budget_spent(app, agent, world, spent):
    other = TestAgent(app)
    assert (await other.enrol(await sync_to_async(world.token)(), name="gpu-2")).status == 200
    await other.hello()
    assert (await other.lease(world.tenant.pk, 1_000)).exhausted and await standing() == spent
