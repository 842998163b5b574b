"""The agent's side of a key rotation, against the real exchange: lost answers, and kill -9 at every step."""

import asyncio
import json

import pytest
from asgiref.sync import sync_to_async
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.utils import timezone

from controlplane.agent import identity as identities
from controlplane.agent.client import ControlPlane
from controlplane.agent.errors import Unreachable
from controlplane.agent.identity import KEY_FILE, NEXT_KEY_FILE
from controlplane.agent.key_rotation import KeyRotation
from controlplane.audit.actors import Actor
from controlplane.fleet import keys
from controlplane.fleet.models import Agent
from controlplane.wire.enrolment import Hello
from tests.agent import control_planes as cp

pytestmark = pytest.mark.django_db(transaction=True)
ADA = Actor(id=None, name="ada", role="admin")


@sync_to_async
def ask_for_new_key() -> None:
    keys.ask_for_new_key(agent_id=Agent.objects.get().pk, actor=ADA, now=timezone.now(), reason="yearly")


@sync_to_async
def known_keys() -> tuple[bytes, bytes | None]:
    """(the key, the next key) of the only agent, as the control plane has them."""
    agent = Agent.objects.get()
    return bytes(agent.public_key), None if agent.next_public_key is None else bytes(agent.next_public_key)


def raw(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


async def rotated_from(old: bytes) -> bool:
    key, following = await known_keys()
    return key != old and following is None


async def test_a_running_agent_changes_its_key_and_starts_again_with_it(world, tmp_path):
    token = await cp.in_database(world.token)()
    state_dir = tmp_path / "state"
    async with cp.control_plane() as url:
        async with cp.running_agent(url, token, state_dir) as process:
            await cp.until(lambda: process.control.epoch_now() and process.control.reachable)
            old, _ = await known_keys()
            await ask_for_new_key()
            await cp.until(lambda: rotated_from(old))
            await cp.until(lambda: not process.control.keys.under_way)
            assert not (state_dir / NEXT_KEY_FILE).exists()
            assert (state_dir / KEY_FILE).stat().st_mode & 0o077 == 0
            assert raw(identities.load(state_dir).key) == (await known_keys())[0]
            taken = process.control.last_answer_us
            await cp.until(lambda: process.control.last_answer_us > taken), "it reports on"
        async with cp.running_agent(url, "", state_dir) as again:
            await cp.until(lambda: again.control.epoch_now() == 2)
    assert await cp.quarantined() == []


async def enrolled(world, url: str, state_dir) -> None:
    """An agent that has enrolled and ended."""
    token = await cp.in_database(world.token)()
    async with cp.running_agent(url, token, state_dir) as process:
        await cp.until(lambda: process.control.epoch_now() and process.control.reachable)


@pytest.mark.parametrize(
    "step",
    ["written down", "posted, answer lost", "posted", "reported, answer lost", "reported", "never reported, 24 h"],
)
async def test_a_kill_at_any_step_leaves_a_key_that_is_good(world, tmp_path, step):
    """What is on disk after each step starts again, is known, and ends the rotation."""
    state_dir = tmp_path / "state"
    async with cp.control_plane() as url:
        await enrolled(world, url, state_dir)
        old, _ = await known_keys()
        await ask_for_new_key()
        await run_until(step, url, state_dir)
        if step == "never reported, 24 h":
            long_ago = timezone.now() - keys.KEY_OVERLAP
            await sync_to_async(Agent.objects.update)(next_key_at=long_ago)
        async with cp.running_agent(url, "", state_dir) as again:
            await cp.until(lambda: again.control.reachable)
            await cp.until(lambda: rotated_from(old))
            await cp.until(lambda: not again.control.keys.under_way)
        new, _ = await known_keys()
        assert raw(identities.load(state_dir).key) == new
        assert not (state_dir / NEXT_KEY_FILE).exists()


async def run_until(step: str, url: str, state_dir) -> None:
    """One step after the other as the agent does them, with its own parts, and then no more."""
    identity = identities.load(state_dir)
    client = ControlPlane(url, identity.key, identity.stored.agent, lambda: cp_now_us())
    epoch = [0]
    rotation = KeyRotation(state_dir, client, lambda: epoch[0])
    try:
        epoch[0] = (await client.hello(Hello("test", "boot"))).epoch
        if step == "written down":
            identities.make_next_key(state_dir)
            return
        if step == "posted, answer lost":
            client.rekey = losing(client.rekey)
        rotation.asked()
        await rotation._posting
        if step.startswith(("posted", "never")):
            return
        body = json.dumps({"layout": 1, "epoch": epoch[0], "seq": 1, "sent_us": cp_now_us(), "revision": 0,
                           "live_number": 0, "seal": True}).encode()  # fmt: skip
        await client.report(body, epoch=epoch[0], seq=1)
        if step == "reported, answer lost":
            return
        rotation.report_taken()
    finally:
        await client.close()


def losing(call):
    """The message arrives; its answer does not."""

    async def lost(*arguments, **named):
        await call(*arguments, **named)
        raise Unreachable("the connection broke")

    return lost


def cp_now_us() -> int:
    return int(timezone.now().timestamp() * 1_000_000)


async def test_a_withdrawn_key_is_posted_again(world, tmp_path):
    """An admin asks once more while the new key has signed nothing: the agent falls back to the old one and goes on."""
    state_dir = tmp_path / "state"
    async with cp.control_plane() as url:
        await enrolled(world, url, state_dir)
        old, _ = await known_keys()
        await ask_for_new_key()
        await run_until("posted", url, state_dir)
        assert (await known_keys())[1] is not None
        await ask_for_new_key()
        assert await known_keys() == (old, None)
        async with cp.running_agent(url, "", state_dir):
            await cp.until(lambda: rotated_from(old))


async def test_a_full_disk_leaves_the_old_key_in_use(world, tmp_path):
    state_dir = tmp_path / "state"
    async with cp.control_plane() as url:
        await enrolled(world, url, state_dir)
        (state_dir / (NEXT_KEY_FILE + ".new")).mkdir()  # the file beside cannot be written
        old, _ = await known_keys()
        async with cp.running_agent(url, "", state_dir) as process:
            await cp.until(lambda: process.control.epoch_now() and process.control.reachable)
            await ask_for_new_key()
            taken = process.control.last_answer_us
            await cp.until(lambda: process.control.last_answer_us > taken + 2_000_000)
            assert await known_keys() == (old, None)
            (state_dir / (NEXT_KEY_FILE + ".new")).rmdir()
            await cp.until(lambda: rotated_from(old))


async def test_many_rotations_with_traffic_between_lose_no_report(world, tmp_path):
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url, cp.running_agent(url, token, tmp_path / "state") as process:
        await cp.until(lambda: process.control.epoch_now() and process.control.reachable)
        seen = set()
        for _ in range(5):
            old, _ = await known_keys()
            seen.add(old)
            await asyncio.gather(*(ask_for_new_key() for _ in range(3)))
            await cp.until(lambda old=old: rotated_from(old))
        assert len(seen) == 5
        spool = process.control.store.current
        await cp.until(lambda: not spool.state.reports)
    assert await cp.quarantined() == []
