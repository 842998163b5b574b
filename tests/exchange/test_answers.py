"""What a report is answered with: policy, grants, leases, shares, the live list; and the lease and policy endpoints."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from asgiref.sync import sync_to_async

from controlplane.budgets.models import Budget, BudgetWindow, Lease
from controlplane.budgets.shares import SILENCE
from controlplane.core.period import from_us
from controlplane.exchange.answers import interval_ms
from controlplane.exchange.database import connection
from controlplane.exchange.safe_rates import safe_rate_shares
from controlplane.fleet.models import Agent, AgentLive, Slot, SlotInterval
from controlplane.flex.models import Grant
from controlplane.policy.models import PolicyBundle, Revision, Rollout
from controlplane.wire import report as wire
from controlplane.wire.lease import LeaseRequest
from controlplane.wire.policy import SignedPolicy
from controlplane.wire.signing import digest_hex, from_text
from tests import factories
from tests.exchange.door import TestAgent
from tests.usage_rows import usage_row


def test_a_silent_agent_counts_for_three_of_the_longest_intervals_that_agents_are_told() -> None:
    assert timedelta(milliseconds=3 * max(interval_ms(flex=flex) for flex in (True, False))) == SILENCE


def hard_budget(world, limit=1_000_000, **values):
    return Budget.objects.create(
        tenant=world.tenant, name="plan", period="day", zone="UTC", limit_nanos=limit, created_at=factories.NOW,
        updated_at=factories.NOW, **values,
    )  # fmt: skip


async def test_hello_tells_how_to_go_on(agent, world):
    helloed = await agent.hello()
    assert (helloed.epoch, helloed.pool, helloed.interval_ms) == (2, "chat-70b", 1_000)
    assert helloed.accepted_through == {}
    assert abs(helloed.server_time_us - time.time_ns() // 1000) < 5_000_000


async def test_a_pool_without_a_flex_band_reports_less_often(agent, world):
    await sync_to_async(Slot.objects.filter(band="flex").update)(band="interactive")
    assert (await agent.report()).interval_ms == 2_000


async def test_a_lease_is_asked_for_spent_and_settled(agent, world):
    await sync_to_async(hard_budget)(world)
    lease = (await agent.lease(world.tenant.pk, 10_000)).leases[0]
    assert lease.amount_nanos == 10_000
    answer = await agent.report(spends=[wire.LeaseSpend(lease.lease_id, 3_000, 1_000)])
    assert lease in answer.leases
    window = await BudgetWindow.objects.aget()
    assert (window.settled_nanos, window.leased_nanos) == (3_000, 7_000)
    # the same total again changes nothing
    await agent.report(spends=[wire.LeaseSpend(lease.lease_id, 3_000, 0)])
    assert (await BudgetWindow.objects.aget()).settled_nanos == 3_000


async def test_a_used_lease_is_topped_up_in_the_answer(agent, world):
    await sync_to_async(hard_budget)(world)
    lease = (await agent.lease(world.tenant.pk, 10_000)).leases[0]
    answer = await agent.report(spends=[wire.LeaseSpend(lease.lease_id, 9_000, 0)])
    assert [one.lease_id == lease.lease_id for one in answer.leases] == [True, False]


async def test_an_exhausted_budget_is_named(agent, world):
    await sync_to_async(hard_budget)(world, limit=5_000)
    before = datetime.now(UTC)
    answer = await agent.lease(world.tenant.pk, 10_000)
    assert answer.leases == []
    assert answer.exhausted[0].budget.startswith("acme: plan (day from ")
    # asked on one day and answered on the next is possible
    midnights = {at.replace(hour=0, minute=0, second=0, microsecond=0) for at in (before, datetime.now(UTC))}
    assert from_us(answer.exhausted[0].ends_us) - timedelta(days=1) in midnights


async def test_leases_of_an_epoch_go_back_when_it_is_sealed(agent, world):
    await sync_to_async(hard_budget)(world)
    lease = (await agent.lease(world.tenant.pk, 10_000)).leases[0]
    old = agent.epoch
    await agent.hello(spooled=[old])
    assert (await agent.report()).leases == [], "a new epoch has no leases of the old"
    assert (await BudgetWindow.objects.aget()).leased_nanos == 10_000
    seal = agent.build(epoch=old, seq=1, spends=[wire.LeaseSpend(lease.lease_id, 2_500, 0)], seal=True)
    assert (await agent.send(seal)).status == 200
    window = await BudgetWindow.objects.aget()
    assert (window.settled_nanos, window.leased_nanos) == (2_500, 0)
    assert (await Lease.objects.aget()).state == "closed"


async def test_an_overspent_lease_is_told_and_cut(agent, world):
    from controlplane.usage.models import Quarantine

    await sync_to_async(hard_budget)(world)
    lease = (await agent.lease(world.tenant.pk, 10_000)).leases[0]
    await agent.report(spends=[wire.LeaseSpend(lease.lease_id, 10_001, 0)])
    assert (await BudgetWindow.objects.aget()).settled_nanos == 10_000
    assert (await Quarantine.objects.aget()).reason == "lease_overspent"


async def test_soft_budgets_follow_the_charges_of_records(agent, world):
    await sync_to_async(hard_budget)(world, hard=False)
    row = usage_row(world, prices=world.prices)
    await agent.report(records=[row, usage_row(world)])
    charge = row.charge_prompt_nanos + row.charge_cached_nanos + row.charge_output_nanos
    assert (await BudgetWindow.objects.aget()).settled_nanos == charge > 0


async def test_an_older_process_gets_no_lease(agent, world):
    old = agent.epoch
    await agent.hello()
    body = msgspec.json.encode(LeaseRequest(world.tenant.pk, 1))
    response = await agent.signed("POST", "/agent/v1/lease", body, epoch=old)
    assert (response.status, response.problem.code) == (409, "superseded")


async def test_shares_are_in_the_answer(agent, world):
    answer = await agent.report(demand=[wire.Demand("t", world.tenant.pk, 5, 100, 0)])
    by_scope = {(share.scope, share.id): share for share in answer.shares}
    assert by_scope["tenant", world.tenant.pk].concurrency == 32
    # six of eight slots serve interactive: the table says 24 requests/s
    assert by_scope["class", world.chat.pk].requests_per_s == pytest.approx(24.0)


async def going_by(agent, mark: str) -> wire.Answer:
    """The answer to the next report of an agent that goes by these shares."""
    response = await agent.send(agent.build(), headers={wire.SHARES_HEADER: mark})
    agent.seq += 1
    return response.read(wire.Answer)


async def test_shares_that_an_agent_goes_by_are_left_out_until_others_are_due(agent, world):
    told = await agent.report()
    assert told.shares and told.shares_mark
    same = await going_by(agent, told.shares_mark)
    assert (same.shares, same.shares_mark) == ([], told.shares_mark)
    assert (await going_by(agent, "0123456789abcdef")).shares == told.shares
    assert (await agent.report()).shares == told.shares, "an agent that says nothing is told all"

    world.tenant.max_concurrency = 7
    await sync_to_async(world.tenant.save)()
    end = asyncio.get_running_loop().time() + 60
    while not (moved := await going_by(agent, told.shares_mark)).shares:
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.2)
    assert moved.shares_mark != told.shares_mark
    assert {(share.scope, share.id): share.concurrency for share in moved.shares}["tenant", world.tenant.pk] == 7
    assert (await going_by(agent, moved.shares_mark)).shares == []


async def test_another_safe_rate_alone_is_another_mark(agent, world):
    told = await agent.report()
    entries = {slots: rate / 2 for slots, rate in world.pool.safe_rate["entries"].items()}
    world.pool.safe_rate = {**world.pool.safe_rate, "entries": entries}
    await sync_to_async(world.pool.save)()
    assert [share.requests_per_s for share in (await going_by(agent, told.shares_mark)).shares][-1] == 12.0


async def test_the_safe_rate_follows_lent_slots_and_is_split_by_slots(app, world):
    agents = []
    for number, slots in enumerate((6, 2)):
        one = TestAgent(app)
        await one.enrol(await sync_to_async(world.token)(), f"gpu-{number}", slots)
        agents.append(one)

    def rates():
        with connection() as held, held.cursor() as cursor:
            found = safe_rate_shares(cursor, [one.id for one in agents], datetime.now(UTC))
        return [found[one.id].requests_per_s for one in agents]

    def lend():
        slot = Slot.objects.filter(band="flex").order_by("name").first()
        SlotInterval.objects.filter(slot=slot, ended_at=None).update(state="lent", owner_class="bulk")

    assert await sync_to_async(rates)() == pytest.approx([24 * 4 / 6, 24 * 2 / 6])
    await sync_to_async(lend)()
    assert await sync_to_async(rates)() == pytest.approx([20 * 4 / 5, 20 * 1 / 5])


async def test_slots_of_agents_that_are_silent_or_drain_serve_nobody(app, world):
    """What the others may admit together is the rate that was tested for the slots that are left."""
    agents = []
    for number, slots in enumerate((6, 2)):
        one = TestAgent(app)
        await one.enrol(await sync_to_async(world.token)(), f"gpu-{number}", slots)
        agents.append(one)
    now = datetime.now(UTC)

    def rate_of_the_first(*, heard: datetime, drains: bool = False) -> float:
        Agent.objects.filter(pk=agents[1].id).update(drain_requested_at=now if drains else None)
        AgentLive.objects.update_or_create(
            agent_id=agents[1].id, defaults={"epoch": 1, "seq": 1, "reported_at": heard, "figures": {}}
        )
        with connection() as held, held.cursor() as cursor:
            return safe_rate_shares(cursor, [agents[0].id], now)[agents[0].id].requests_per_s

    rate = sync_to_async(rate_of_the_first)
    assert await rate(heard=now - timedelta(seconds=1)) == pytest.approx(24 * 4 / 6)
    assert await rate(heard=now - timedelta(seconds=5)) == pytest.approx(24 * 4 / 6), "counted for three intervals"
    assert await rate(heard=now - timedelta(seconds=7)) == pytest.approx(16.0)
    assert await rate(heard=now, drains=True) == pytest.approx(16.0)


async def test_every_grant_of_the_agents_flex_slots_is_answered(agent, world):
    def grant():
        for slot, action in zip(Slot.objects.filter(band="flex").order_by("name"), ("lend", "recall"), strict=True):
            Grant.objects.create(
                slot=slot, fence=3, action=action, reason="slack", ttl_us=15_000_000,
                expires_at=datetime.now(UTC) + timedelta(seconds=15),
            )  # fmt: skip

    await sync_to_async(grant)()
    answer = await agent.report()
    assert [(one.action, one.fence) for one in answer.grants] == [("lend", 3), ("recall", 3)]
    assert 10_000_000 < answer.grants[0].ttl_us <= 15_000_000


async def test_drain_is_asked_for(agent, world):
    assert (await agent.report()).drain is False
    await sync_to_async(Agent.objects.filter(pk=agent.id).update)(drain_requested_at=datetime.now(UTC))
    assert (await agent.report()).drain is True


def bundle(pool, body: bytes) -> str:
    now = datetime.now(UTC)
    revision = Revision.objects.create(
        created_at=now, created_by="admin", reason="", digest="d", configuration={}, not_before=now, accept_until=now
    )
    Rollout.objects.create(revision=revision, state="done", requested_at=now, requested_by="admin")
    PolicyBundle.objects.create(
        revision=revision, pool=pool, digest=digest_hex(body), body=body, kid="k", signature=b"s" * 64, signed_at=now
    )
    return digest_hex(body)


async def test_the_policy_of_the_own_pool_is_pulled_by_its_digest(agent, world):
    own = await sync_to_async(bundle)(world.pool, b'{"own":1}')
    foreign = await sync_to_async(lambda: bundle(factories.pool("other"), b'{"other":1}'))()
    answer = await agent.report()
    assert answer.digest == own and answer.revision > 0
    pulled = await agent.signed("GET", f"/agent/v1/policy/{own}")
    assert from_text(pulled.read(SignedPolicy).body) == b'{"own":1}'
    assert "immutable" in pulled.headers["cache-control"]
    again = await agent.signed("GET", f"/agent/v1/policy/{own}", headers={"if-none-match": pulled.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    for digest in (foreign, "0" * 64, "../../etc"):
        response = await agent.signed("GET", f"/agent/v1/policy/{digest}")
        assert (response.status, response.problem.code) == (404, "not_found")


async def test_the_live_list_comes_as_a_delta(agent, world, settings, tmp_path):
    from controlplane.policy.live_list import sign_changes

    settings.SIGNING_KEY_DIR = tmp_path
    await sync_to_async(sign_changes)(datetime.now(UTC))
    first = await agent.report(live_number=0)
    assert first.live.full and first.live.entries
    second = await agent.report(live_number=first.live.through)
    assert second.live is None


async def test_records_of_a_revision_count_only_for_its_tenants_and_classes(agent, world):
    def revise():
        other = factories.tenant("other")
        body = msgspec.json.encode({"tenants": [{"id": other.pk}], "classes": [{"id": world.chat.pk}]})
        bundle(world.pool, body)
        return other.pk, Revision.objects.latest("number").number

    other, number = await sync_to_async(revise)()
    rows = [usage_row(world, revision=number), usage_row(world, revision=number, tenant_id=other)]
    answer = await agent.report(records=rows)
    assert answer.quarantined == 1
