"""Agent and exchange as the pair they are: enrol, hello, report, policy, live list, leases, grants, seal."""

import asyncio
import copy
import shutil
from datetime import timedelta

import openai
import pytest
from django.utils import timezone

from controlplane.agent.errors import Superseded
from controlplane.agent.identity import IDENTITY_FILE
from controlplane.agent.policy_state import LIVE_FILE
from controlplane.budgets.models import BudgetWindow
from controlplane.contracts.models import Contract, ContractVersion, ObjectiveMinute
from controlplane.fleet.models import Agent, AgentLive, Slot
from controlplane.policy import live_list, signing
from controlplane.policy.models import Delivery
from controlplane.tenants.actions import next_live_number
from controlplane.tenants.key_actions import rotate_key
from controlplane.tenants.models import ApiKey
from controlplane.usage.models import AgentCursor
from tests.agent import control_planes as cp
from tests.agent.wire_client import WireClient, chat_body, post

pytestmark = pytest.mark.django_db(transaction=True)


async def ask(process, n: int = 1, *, secret: str = cp.SECRET, **more):
    async with openai.AsyncOpenAI(
        api_key=secret, base_url=f"http://127.0.0.1:{process.port}/v1", max_retries=0, timeout=60
    ) as ai:
        fields = {"model": "llama-70b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, **more}
        return await asyncio.gather(*(ai.chat.completions.create(**fields) for _ in range(n)), return_exceptions=True)


async def test_from_enrolment_to_seal(world, tmp_path):
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        async with cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "50") as process:
            await cp.until(lambda: process.control.epoch_now())
            assert (tmp_path / "state" / IDENTITY_FILE).stat().st_mode & 0o077 == 0
            number = await cp.in_database(cp.push_policy)()
            await cp.until(lambda: process.engine.ready)
            assert process.engine.revision == number
            assert len(process.engine.slots) == await cp.in_database(Slot.objects.filter(agent__isnull=False).count)()

            answers = await ask(process, 12)
            assert all(answer.usage.completion_tokens for answer in answers), answers
            await cp.until(lambda: _count_is(12))

            delivered = cp.in_database(lambda: Delivery.objects.filter(state="acked").count())
            await cp.until(delivered)

            world.key.state = "revoked"
            world.key.live_number = 99
            await cp.in_database(world.key.save)()
            await cp.in_database(live_list.sign_changes)(timezone.now())
            await cp.until(lambda: process.engine.registry.keys[world.key.pk].live.state == "revoked")
            (refused,) = await ask(process)
            assert isinstance(refused, openai.AuthenticationError)
            assert refused.code == "key_revoked"
        cursor = await cp.in_database(AgentCursor.objects.get)()
        assert cursor.sealed_at is not None, "an orderly end seals its epoch"
        assert await cp.quarantined() == []
        rows = await cp.records()
        assert len(rows) == len({row[0] for row in rows}) == 12
        assert {row[1] for row in rows} == {1}
        assert all(row[2] == round(row[3] * 4400) for row in rows)


def many_keys_before(key, count: int) -> None:
    rows = []
    for number in range(count):
        row = copy.copy(key)
        row.pk, row.public_id, row.secret_hash, row.live_number = None, f"k{number}", f"{number:064x}", number + 1
        rows.append(row)
    key.live_number = count + 1
    key.save()
    ApiKey.objects.bulk_create(rows)


async def test_ready_means_that_the_keys_are_here_however_long_the_list(world, tmp_path):
    """A long list comes in parts, and this key with the last: nobody with a good key is told that it is unknown."""
    await cp.in_database(many_keys_before)(world.key, live_list.DELTA_LIMIT * 2)
    token = await cp.in_database(world.token)()
    state = tmp_path / "state"
    statuses: list[int] = []
    async with cp.control_plane() as url:
        async with cp.running_agent(url, token, state) as process:
            await cp.until(lambda: process.control.epoch_now())
        (state / LIVE_FILE).unlink(missing_ok=True)
        await cp.in_database(cp.push_policy)()
        async with cp.running_agent(url, token, state) as process:
            await cp.until(lambda: process.port)
            client = await WireClient.connect(process.port)

            async def served() -> bool:
                statuses.append((await client.ask(post(chat_body(max_tokens=1), key=cp.SECRET))).status)
                return statuses[-1] == 200

            await cp.until(served)
            assert process.control.live.number > 2 * live_list.DELTA_LIMIT
    assert set(statuses) == {200, 503}, statuses


async def _count_is(count: int) -> bool:
    return len(await cp.records()) == count


async def test_the_control_plane_goes_away_and_comes_back(world, tmp_path):
    """The agent works on; when it is back nothing is missing and nothing is there twice."""
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        port = int(url.rsplit(":", 1)[1])
        context = cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "0")
        process = await context.__aenter__()
        await cp.until(lambda: process.control.epoch_now())
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: process.engine.ready)
        await ask(process, 5)
    await ask(process, 5)
    await cp.until(lambda: not process.control.reachable)
    answers = await ask(process, 5)
    assert all(answer.usage.completion_tokens for answer in answers)
    async with cp.control_plane(port):
        await cp.until(lambda: _count_is(15))
        await context.__aexit__(None, None, None)
        rows = await cp.records()
        assert len({row[0] for row in rows}) == len(rows) == 15
    assert await cp.quarantined() == []


async def test_a_newer_process_fences_the_older_one(world, tmp_path):
    """Two processes of one agent (a copied state directory): the one that said hello last goes on."""
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url, cp.running_agent(url, token, tmp_path / "one") as older:
        await cp.until(lambda: older.control.epoch_now())
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        running = asyncio.create_task(older.control.run())
        async with cp.running_agent(url, "", tmp_path / "two") as newer:
            await cp.until(lambda: newer.control.epoch_now() == older.control.epoch_now() + 1)
            with pytest.raises(Superseded, match=r"this (one|process) stops"):
                await asyncio.wait_for(running, 60)
    assert await cp.in_database(Agent.objects.count)() == 1


async def test_a_hard_budget_is_leased_spent_and_named_when_it_is_used_up(world, tmp_path):
    """The agent asks when a request needs it, admits what the lease covers, and never spends more than the limit."""
    limit_nanos = 3_000_000
    await cp.in_database(cp.hard_budget)(world.tenant, limit_nanos)
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        async with cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "0") as process:
            await cp.until(lambda: process.control.epoch_now())
            await cp.in_database(cp.push_policy)()
            await cp.until(lambda: process.engine.ready)
            codes: set[str] = set()
            for _ in range(60):
                for answer in await ask(process, 4, max_tokens=40):
                    codes.add("ok" if not isinstance(answer, Exception) else str(answer.code))
                if "insufficient_quota" in codes:
                    break
            assert {"ok", "insufficient_quota"} <= codes, codes
            assert process.engine.leases.reserved_nanos == 0
        rows = await cp.records()
        spent = await cp.charged()
        assert 0 < spent <= limit_nanos
        assert {row[1] for row in rows} == {1}
    assert await cp.quarantined() == []


async def test_a_new_secret_of_a_key_that_is_over_its_budget_is_refused_like_the_old_one(
    world, tmp_path, long_lease_wait
):
    """Rotating the secret clears no budget window, since the budget belongs to who the key is."""
    world.key.live_number = await cp.in_database(next_live_number)()
    await cp.in_database(world.key.save)()
    await cp.in_database(cp.hard_budget)(world.tenant, 1_500_000)
    async with cp.serving_agent(world, tmp_path / "state") as process:

        async def code_of(secret: str) -> str:
            (answer,) = await ask(process, secret=secret, max_tokens=40)
            return str(getattr(answer, "code", "ok"))

        codes = [await code_of(cp.SECRET)]
        while codes[-1] == "ok" and len(codes) < 60:
            codes.append(await code_of(cp.SECRET))
        assert codes[0] == "ok" and codes[-1] == "insufficient_quota", codes
        await cp.until(lambda: _count_is(codes.count("ok")))
        await cp.until(_all_is_settled)
        before = await cp.in_database(_settled)()
        new = await cp.in_database(_rotated)(world.key.pk)
        await cp.until(lambda: process.engine.registry.key_of(new.encode(), process.engine.clock.now_us()))
        assert [await code_of(new) for _ in range(3)] == ["insufficient_quota"] * 3
        assert await code_of(cp.SECRET) == "invalid_api_key"
        assert await cp.in_database(_settled)() == before == await cp.charged()


def _rotated(key_id: int) -> str:
    now = timezone.now()
    issued = rotate_key(
        key_id=key_id, rotation_id="leaked-1", overlap=timedelta(), reason="leaked", actor=cp.ACTOR, now=now
    )
    live_list.sign_changes(now)
    return issued.secret


def _settled() -> int:
    return BudgetWindow.objects.get().settled_nanos


async def _all_is_settled() -> bool:
    return 0 < await cp.charged() == await cp.in_database(_settled)()


async def test_live_figures_and_shares_come_and_go(world, tmp_path):
    world.tenant.max_concurrency = 3
    await cp.in_database(world.tenant.save)()
    token = await cp.in_database(world.token)()
    agent = ("--sim-speed", "1")
    async with cp.control_plane() as url, cp.running_agent(url, token, tmp_path / "state", *agent) as process:
        await cp.until(lambda: process.control.epoch_now())
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: process.engine.ready)
        await cp.until(lambda: ("tenant", world.tenant.pk) in process.engine.registry.shares)
        answers = await ask(process, 6, max_tokens=60, extra_body={"ignore_eos": True})
        refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
        assert len(refused) == 3
        assert {answer.code for answer in refused} == {"concurrency_limit"}
        figures = await cp.until(lambda: _figures(world.chat.pk))
        assert figures["refused_60s"] == {"concurrency_limit": 3}
        health = cp.health(process)
        assert health["control_plane"]["reachable"]
        assert health["requests"]["offered"] == 6


@cp.in_database
def _figures(class_id: int):
    live = AgentLive.objects.first()
    classes = live.figures["classes"] if live is not None and live.figures else []
    return next((row for row in classes if row["class_id"] == class_id and row["departures"] >= 3), None)


async def test_a_report_that_is_too_large_is_sent_again_smaller(world, tmp_path, settings, caplog):
    """Every row arrives once, and the agent is not stuck behind the report for ever."""
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        async with cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "0") as process:
            await cp.until(lambda: process.control.epoch_now())
            await cp.in_database(cp.push_policy)()
            await cp.until(lambda: process.engine.ready)
            await cp.until(lambda: process.engine.revision)
            settings.REPORT_BODY_LIMIT_BYTES = 4_000
            await ask(process, 40)
            await cp.until(lambda: _count_is(40))
            await cp.until(lambda: process.control.reachable)
            settings.REPORT_BODY_LIMIT_BYTES = 8 * 1024 * 1024
        cursor = await cp.in_database(AgentCursor.objects.get)()
        assert cursor.sealed_at is not None
    rows = await cp.records()
    assert len(rows) == len({row[0] for row in rows}) == 40
    assert await cp.quarantined() == []
    said = [line for line in caplog.messages if "too_large" in line]
    assert said and len(said) == len(set(said)), "once for each report"


def _promise(world) -> None:
    """A contract of the interactive class: every request is counted by it."""
    before = timezone.now() - timedelta(days=1)
    contract = Contract.objects.create(slug="wait", name="wait", workload_class=world.chat, created_at=before)
    ContractVersion.objects.create(
        contract=contract,
        number=1,
        effective_from=before,
        objective="latency",
        metric="queue_wait",
        threshold_ms=700,
        target_ppm=990_000,
        created_by="ada",
        created_at=before,
    )


async def test_signing_keys_are_rotated_without_a_restart(world, tmp_path):
    """A bundle and a live list under new keys: the agent asks for the keys, refuses nothing and counts all once."""
    await cp.in_database(_promise)(world)
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        async with cp.running_agent(url, token, tmp_path / "state", "--sim-speed", "20") as process:
            await cp.until(lambda: process.control.epoch_now())
            await cp.in_database(cp.push_policy)()
            await cp.until(lambda: process.engine.ready)
            epoch = process.control.epoch_now()
            running = asyncio.create_task(ask(process, 1, max_tokens=200, extra_body={"ignore_eos": True}))
            await ask(process, 5)

            await cp.in_database(signing.rotate)("policy", timezone.now())
            number = await cp.in_database(cp.push_policy)()
            await cp.until(lambda: process.engine.revision == number)
            assert process.control.epoch_now() == epoch + 1

            await cp.in_database(signing.rotate)("live", timezone.now())
            world.key.state = "revoked"
            world.key.live_number = 99
            await cp.in_database(world.key.save)()
            await cp.in_database(live_list.sign_changes)(timezone.now())
            await cp.until(lambda: process.engine.registry.keys[world.key.pk].live.state == "revoked")
            assert process.control.epoch_now() == epoch + 2
            (answer,) = await running
            assert answer.usage.completion_tokens == 200
            await cp.until(lambda: _count_is(6))
            await cp.until(lambda: all(spool.state.sealed for spool in process.store.old.values()))
        states = await cp.in_database(lambda: set(Delivery.objects.values_list("state", flat=True)))()
        assert "nacked" not in states
        sealed = await cp.in_database(lambda: AgentCursor.objects.filter(sealed_at__isnull=True).count())()
        assert sealed == 0
    rows = await cp.records()
    assert len(rows) == len({row[0] for row in rows}) == 6
    assert {row[1] for row in rows} == {1}
    counted = await cp.in_database(lambda: sum(ObjectiveMinute.objects.values_list("offered", flat=True)))()
    assert counted == 6
    assert await cp.quarantined() == []
