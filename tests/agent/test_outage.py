"""Neither control plane nor lease: a tenant's posture decides, and a slice that was leased before is all there is."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import openai
import pytest
from django.db.models import F

from controlplane.agent import front_desk
from controlplane.agent.metrics import render
from controlplane.agent.outage_log import OutageLog
from controlplane.budgets.models import BudgetWindow
from controlplane.budgets.models import Lease as LeaseRow
from controlplane.budgets.sweep import sweep
from controlplane.wire.report import FLAG_OUTAGE, Lease
from tests.agent import control_planes as cp
from tests.agent import worlds
from tests.agent.wire_client import WireClient, chat_body, post

SLICE = 400_000


def doc(posture: str = "open"):
    return worlds.document(tenants=[worlds.tenant_policy(hard_budget=True, outage_posture=posture)])


async def cut_off(make_agent, posture: str = "open", slice_nanos: int = SLICE):
    """An agent that holds a slice and whose questions nobody answers."""
    agent = await make_agent(doc(posture))
    told(agent, [Lease(5, 1, slice_nanos, agent.engine.clock.now_us() + 60_000_000, outage=True)])
    return agent


def told(agent, leases, exhausted=()):
    """An answer of the control plane arrives."""
    now_us = agent.engine.clock.now_us()
    agent.engine.leases.apply(list(leases), list(exhausted), asked_us=now_us, now_us=now_us)
    agent.engine.desk.lease_answered(1)


async def ask(agent, **fields):
    client = await WireClient.connect(agent.port)
    return await client.ask(post(chat_body(max_tokens=20, ignore_eos=True, **fields)))


def spent(agent, lease_id: int = 5) -> int:
    return next(row.spent_nanos for row in agent.engine.leases.spends() if row.lease_id == lease_id)


async def test_an_open_tenant_goes_on_until_its_slice_is_spent(make_agent, caplog):
    agent = await cut_off(make_agent)
    loop = asyncio.get_running_loop()
    began = loop.time()
    first = await ask(agent)
    assert first.status == 200
    assert loop.time() - began > 0.2, "the first one waits for an answer, 250 ms"
    answers = [first]
    while answers[-1].status == 200:
        answers.append(await ask(agent))
        assert len(answers) < 100, "the slice ends"
    assert (answers[-1].status, answers[-1].json["error"]["code"]) == (503, "no_lease")
    rows = agent.closed_rows()
    assert 0 < sum(row.charge_prompt_nanos + row.charge_output_nanos for row in rows) == spent(agent) <= SLICE
    assert all(row.flags & FLAG_OUTAGE for row in rows)
    assert agent.engine.desk.outage.totals == {"admitted": len(answers) - 1, "refused": 1}
    assert "neither the control plane nor a lease is there" in caplog.text
    agent.assert_nothing_held()


async def test_while_cut_off_nobody_waits_for_an_answer_again(make_agent, monkeypatch):
    agent = await cut_off(make_agent)
    await ask(agent)
    monkeypatch.setattr(front_desk, "LEASE_WAIT_US", 3_600_000_000)
    assert (await ask(agent)).status == 200, "who waited would wait for an hour"


async def test_a_closed_tenant_is_refused_though_a_slice_is_there(make_agent):
    agent = await cut_off(make_agent, "closed")
    answer = await ask(agent)
    assert (answer.status, answer.json["error"]["code"]) == (503, "no_lease")
    assert spent(agent) == 0
    assert agent.engine.desk.outage.totals == {"admitted": 0, "refused": 1}


async def test_a_slice_is_no_lease_while_the_control_plane_answers(make_agent):
    agent = await cut_off(make_agent)
    slice_now = Lease(5, 1, SLICE, agent.engine.clock.now_us() + 60_000_000, outage=True)
    agent.engine.desk.ask_lease = lambda tenant_id, need_nanos, job: asyncio.get_running_loop().call_later(
        0.01, told, agent, [slice_now], [worlds.Exhausted(1, "acme monthly", 1 << 60)]
    )
    answer = await ask(agent)
    assert (answer.status, answer.json["error"]["code"]) == (429, "insufficient_quota")
    assert spent(agent) == 0


async def test_an_answer_ends_the_outage(make_agent):
    agent = await cut_off(make_agent)
    await ask(agent)
    before = spent(agent)
    expires_us = agent.engine.clock.now_us() + 60_000_000
    told(agent, [Lease(5, 1, SLICE, expires_us, outage=True), Lease(6, 1, 10**9, expires_us)])
    assert (await ask(agent)).status == 200
    assert (spent(agent), spent(agent, 6) > 0) == (before, True)


async def test_an_ended_slice_is_not_spent(make_agent):
    agent = await make_agent(doc())
    told(agent, [Lease(5, 1, SLICE, agent.engine.clock.now_us(), outage=True)])
    assert (await ask(agent)).json["error"]["code"] == "no_lease"
    assert spent(agent) == 0


def test_the_log_says_it_once_a_minute(caplog):
    log = OutageLog()
    for at_s in (0, 1, 59, 61, 62):
        log.admitted(1, "acme", at_s * 1_000_000)
    assert caplog.text.count("tenant acme") == 2
    assert "4 requests were admitted" in caplog.text


@pytest.mark.django_db(transaction=True)
class TestWithTheControlPlane:
    async def clients(self, process, count: int, **more):
        """Requests at once; the answers, or the errors' codes."""
        async with openai.AsyncOpenAI(
            api_key=cp.SECRET, base_url=f"http://127.0.0.1:{process.port}/v1", max_retries=0, timeout=60
        ) as ai:
            fields = {
                "model": "llama-70b",
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 40,
                **more,
            }
            said = await asyncio.gather(
                *(ai.chat.completions.create(**fields) for _ in range(count)), return_exceptions=True
            )
        return [str(one.code) if isinstance(one, openai.APIStatusError) else "ok" for one in said]

    def invariant(self) -> bool:
        rows = BudgetWindow.objects.filter(hard=True)
        return rows.exists() and not rows.filter(limit_nanos__lt=F("settled_nanos") + F("leased_nanos")).exists()

    async def test_an_outage_is_lived_through_on_the_slice_and_settled_after_it(
        self, world, tmp_path, settings, monkeypatch
    ):
        settings.OUTAGE_SLICE_PERCENT = 10
        limit_nanos = 30_000_000
        await cp.in_database(cp.hard_budget)(world.tenant, limit_nanos)
        world.tenant.outage_posture = "open"
        await cp.in_database(world.tenant.save)()
        token = await cp.in_database(world.token)()
        async with cp.control_plane() as url:
            port = int(url.rsplit(":", 1)[1])
            context = cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "0")
            process = await context.__aenter__()
            await cp.until(lambda: process.control.epoch_now())
            await cp.in_database(cp.push_policy)()
            await cp.until(lambda: process.engine.ready)
            assert (await cp.in_database(sweep)(datetime.now(UTC))).slices == 1
            await cp.until(lambda: process.engine.leases.slices_nanos(process.engine.clock.now_us()))
            assert await cp.in_database(self.invariant)()
        codes: list[str] = []
        while "no_lease" not in codes:
            codes += await self.clients(process, 8)
            assert len(codes) < 400, "a cut off agent can spend no more than its slice"
        assert "ok" in codes
        outage = cp.health(process)["outage"][world.tenant.slug]
        assert (outage["admitted"], outage["refused"]) == (codes.count("ok"), codes.count("no_lease"))
        assert outage["slice_left_nanos"] < limit_nanos // 10
        page = render(process.engine, process.store)[0].decode()
        for decision in ("admitted", "refused"):
            assert f'flexband_outage_requests_total{{decision="{decision}"}} {outage[decision]}' in page
        async with cp.control_plane(port):
            await cp.until(lambda: process.control.reachable, 60)
            monkeypatch.setattr(front_desk, "LEASE_WAIT_US", 60_000_000)
            assert await self.clients(process, 1) == ["ok"], "the control plane leases again"
            await context.__aexit__(None, None, None)
        rows = await cp.in_database(lambda: list(LeaseRow.objects.filter(outage=True)))()
        assert [row.amount_nanos for row in rows] == [limit_nanos // 10]
        assert 0 < rows[0].spent_nanos <= limit_nanos // 10
        assert await cp.in_database(self.invariant)()
        settled = await cp.in_database(lambda: BudgetWindow.objects.get(hard=True).settled_nanos)()
        assert settled == await cp.charged()
        assert await cp.quarantined() == []

    async def spend_all(self, process) -> list[str]:
        """Requests until there is no money left here: three rounds in a row are refused whole."""
        codes: list[str] = []
        while codes[-12:].count("no_lease") < 12:
            codes += await self.clients(process, 4)
            assert codes.count("ok") < 1_000, "a cut off agent can spend no more than it holds"
        return codes

    async def served(self, process):
        """Until a request ends well: the second of a pair has no share of a limit before the first gives some back."""
        for _ in range(300):
            if "ok" in await self.clients(process, 4):
                return
            await asyncio.sleep(0.2)
        pytest.fail("no request was served within 60 s")

    async def test_two_agents_cut_off_together_charge_no_more_than_the_limit(self, world, tmp_path, settings):
        """All of the budget is out, in leases and slices of both: each spends what it holds, and that is the limit."""
        settings.OUTAGE_SLICE_PERCENT = 100
        limit_nanos = 12_000_000
        await cp.in_database(cp.hard_budget)(world.tenant, limit_nanos)
        world.tenant.outage_posture = "open"
        await cp.in_database(world.tenant.save)()
        tokens = [await cp.in_database(world.token)() for _ in range(2)]
        async with AsyncExitStack() as agents:
            async with cp.control_plane() as url:
                port = int(url.rsplit(":", 1)[1])
                arguments = [
                    ("--sim-speed", "0", "--slots", "6"),
                    ("--sim-speed", "0", "--name", "gpu-2", "--slots", "2"),
                ]
                pair = [
                    await agents.enter_async_context(cp.running_agent(url, token, tmp_path / f"agent-{at}", *more))
                    for at, (token, more) in enumerate(zip(tokens, arguments, strict=True))
                ]
                for process in pair:
                    await cp.until(lambda process=process: process.control.epoch_now())
                await cp.in_database(cp.push_policy)()
                for process in pair:
                    await cp.until(lambda process=process: process.engine.ready)
                    await self.served(process)
                await cp.in_database(sweep)(datetime.now(UTC))
                for process in pair:
                    await cp.until(lambda now=process.engine: now.leases.slices_nanos(now.clock.now_us()))
            spent = await asyncio.gather(*(self.spend_all(process) for process in pair))
            assert all("ok" in codes for codes in spent)
            outages = [cp.health(process)["outage"][world.tenant.slug] for process in pair]
            assert all(outage["admitted"] > 0 and outage["refused"] > 0 for outage in outages)
            async with cp.control_plane(port):
                for process in pair:
                    await cp.until(lambda process=process: process.control.reachable, 60)
                await agents.aclose()
        charged = await cp.charged()
        print(f"two agents cut off: {charged:,} of {limit_nanos:,} nanos charged")
        assert limit_nanos // 2 < charged <= limit_nanos
        window = await cp.in_database(BudgetWindow.objects.get)(hard=True)
        assert (window.settled_nanos, window.leased_nanos) == (charged, 0)
        assert await cp.quarantined() == []

    async def test_many_first_requests_at_once_are_leased_for_together(self, world, tmp_path, long_lease_wait):
        """Forty requests of a tenant nobody leased for yet: what waits is asked for, not one request."""
        await cp.in_database(cp.hard_budget)(world.tenant, 10_000_000_000)
        world.tenant.max_concurrency = 64
        await cp.in_database(world.tenant.save)()
        async with cp.serving_agent(world, tmp_path / "state") as process:
            desk, ask_lease = process.engine.desk, process.engine.desk.ask_lease

            def once_all_wait(tenant_id: int, need_nanos: int, job: str) -> None:
                if len(desk.waiting[tenant_id]) == 40:
                    desk.ask_lease = ask_lease
                    ask_lease(tenant_id, need_nanos, job)

            desk.ask_lease = once_all_wait
            assert await self.clients(process, 40) == ["ok"] * 40
            assert await cp.in_database(self.invariant)()
        assert await cp.in_database(LeaseRow.objects.count)() == 1
