"""Suspend, revoke and freeze while a rollout is stuck in its first wave: in force within 2 s of the click.

The clock starts before the action's transaction and stops when the agent's own gateway answers differently.
"""

import asyncio
import hashlib
import statistics
import time
from datetime import UTC, datetime
from functools import partial

import aiohttp
import pytest
from django.db import transaction

from controlplane.audit.actors import Actor
from controlplane.contracts.actions import resume_class, suspend_class
from controlplane.flex.actions import freeze, unfreeze
from controlplane.policy import rollouts, tasks
from controlplane.policy.actions import push
from controlplane.policy.models import PolicyBundle, Rollout
from controlplane.policy.queries import bundle as bundle_of
from controlplane.policy.signing import rotate
from controlplane.policy.wave_plan import Gates, WavePlan
from controlplane.tenants.actions import next_live_number, resume_tenant, suspend_tenant
from controlplane.tenants.key_actions import revoke_key
from controlplane.tenants.models import Installation
from tests import factories
from tests.agent import control_planes as cp
from tests.agent.conftest import world
from tests.policy.conftest import api_key, use_broker

__all__ = ["world"]

pytestmark = pytest.mark.django_db(transaction=True)

ADA = Actor(id=None, name="ada", role="oncall")
IN_FORCE_WITHIN_S = 2.0
ATTEMPTS = 5
ASK = {"model": "llama-70b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def stuck_rollout(world) -> Rollout:
    """A revision whose first wave is an agent that nobody hears: the wave waits, and with it everybody else."""
    # The world's key was numbered by hand: what is changed from here on gets numbers past it.
    Installation.objects.update(live_number=1_000)
    silent = factories.agent(world.pool, "gpu-silent")
    world.tenant.weight = 7
    world.tenant.save(update_fields=["weight"])
    now = datetime.now(UTC)
    waves = (WavePlan(agents=(silent.name,)), 100)
    revision = push(actor=ADA, reason="stuck", now=now, waves=waves, gates=Gates(hold_s=3_600))
    rollouts.run(revision.rollout.pk, now)
    return revision.rollout


def more_keys(world) -> dict[str, int]:
    """Secret -> id of keys beside the world's; each can be revoked once."""
    keys = {}
    for number in range(ATTEMPTS):
        secret = f"fb_chat_secret_{number}"
        hashed = hashlib.sha256(secret.encode()).hexdigest()
        with transaction.atomic():
            row = api_key(world.tenant, 900 + number, secret_hash=hashed, live_number=next_live_number())
        keys[secret] = row.pk
    tasks.sign_live()
    return keys


def act(function, **values) -> None:
    """What a click does, and then what the worker does when it hears the doorbell."""
    function(actor=ADA, now=datetime.now(UTC), reason="incident", **values)
    tasks.sign_live()


async def test_what_acts_at_once_acts_within_2_s_beside_a_stuck_rollout(world, tmp_path, settings, capsys):
    settings.AGENT_BROKER_URL = settings.REDIS_URL
    with use_broker(settings.REDIS_URL):
        async with cp.serving_agent(world, tmp_path / "state") as process, aiohttp.ClientSession() as session:
            rollout = await cp.in_database(stuck_rollout)(world)
            address = f"http://127.0.0.1:{process.port}/v1/chat/completions"

            async def status(secret: str = cp.SECRET) -> int:
                headers = {"authorization": f"Bearer {secret}"}
                async with session.post(address, json=ASK, headers=headers) as answer:
                    await answer.read()
                    return answer.status

            def frozen() -> bool:
                entry = process.control.live.freezes.get(world.pool.pk)
                return entry is not None and entry.frozen_until_us is not None

            async def took(holds, function, **values) -> float:
                began = time.perf_counter()
                acting = asyncio.create_task(cp.in_database(act)(function, **values))
                while not await holds():
                    if acting.done():
                        acting.result()
                    assert time.perf_counter() - began < 20, function.__name__
                    await asyncio.sleep(0.01)
                await acting
                return time.perf_counter() - began

            async def answers(code: int, secret: str = cp.SECRET) -> bool:
                return await status(secret) == code

            async def freezes(wanted: bool) -> bool:
                return frozen() is wanted

            tenant, pool = {"tenant_id": world.tenant.pk}, {"pool_id": world.pool.pk}
            keys = await cp.in_database(more_keys)(world)

            async def all_are_served() -> bool:
                return all([await answers(200, secret) for secret in keys])

            await cp.until(all_are_served, within_s=60)
            assert await status() == 200
            found: dict[str, list[float]] = {"suspend tenant": [], "suspend class": [], "freeze lending": []}
            found["revoke key"] = []
            for secret, key in keys.items():
                found["suspend tenant"].append(await took(lambda: answers(403), suspend_tenant, **tenant))
                await took(lambda: answers(200), resume_tenant, **tenant)
                found["suspend class"].append(await took(lambda: answers(403), suspend_class, slug="chat"))
                await took(lambda: answers(200), resume_class, slug="chat")
                found["freeze lending"].append(await took(lambda: freezes(True), freeze, **pool))
                await took(lambda: freezes(False), unfreeze, **pool)
                gone = partial(answers, 401, secret)
                found["revoke key"].append(await took(gone, revoke_key, key_id=key))
            state = await cp.in_database(lambda: Rollout.objects.get(pk=rollout.pk).state)()
            waves = await cp.in_database(
                lambda: list(rollout.waves.order_by("number").values_list("state", flat=True))
            )()
            applied = process.engine.registry.revision if hasattr(process.engine.registry, "revision") else None
    assert (state, waves) == ("running", ["sent", "pending"]), "the rollout was not stuck"
    assert applied is None or applied < rollout.revision_id
    with capsys.disabled():
        print(
            f"\n  rollout of revision {rollout.revision_id} stuck in wave 1; seconds from click to effect at the agent:"
        )
        for name, seconds in found.items():
            print(f"    {name:15} median {statistics.median(seconds):.2f}, worst {max(seconds):.2f}")
    # The promise is the limit. Of several attempts the one in the middle counts: on a machine with other work one of
    # them may be kept waiting by what is not the product. The worst is printed.
    assert all(statistics.median(seconds) <= IN_FORCE_WITHIN_S for seconds in found.values()), found


async def test_a_revoked_policy_key_is_refused_without_a_restart_and_its_successor_taken(world, tmp_path):
    """Nothing is pushed: the next report alone tells that the keys are others."""
    async with cp.serving_agent(world, tmp_path / "state") as process:
        trusted = process.control.trust.signing_keys
        bundle, digest = await cp.in_database(newest_bundle)()
        before = process.control.policy.revision
        successor = await cp.in_database(rotate)("policy", datetime.now(UTC))
        began = time.perf_counter()
        await cp.until(lambda: f"policy:{successor}" in process.control.trust.signing_keys, within_s=60)
        took = time.perf_counter() - began
        now_known = process.control.trust.signing_keys
        assert [name for name in trusted if name.startswith("policy:") and name in now_known] == []
        # what the old key signed is not taken any more, however genuine it is
        assert process.control.policy.consider(bundle, digest, process.control.trust, now_us=0) is None
        assert "not known here" in process.control.policy.refused_reason
        process.control.policy.forget_refusal()
        revision = await cp.in_database(cp.push_policy)()
        await cp.until(lambda: process.control.policy.revision == revision, within_s=60)
    assert revision > before
    print(f"successor trusted {took:.2f} s after the rotation")


def newest_bundle() -> tuple[bytes, str]:
    row = PolicyBundle.objects.order_by("-revision_id").first()
    return bundle_of(row.pool_id, row.digest), row.digest
