"""A backup, a fleet that goes on after it, a restore: agents come back, and what they kept is charged exactly once."""

import hashlib
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection, connections

from controlplane.core.generations import STEP
from controlplane.embedded.ports import free_port
from controlplane.exchange.database import close_pools
from controlplane.fleet.models import Slot
from controlplane.flex.models import Grant
from controlplane.policy import live_list, rollouts
from controlplane.policy.models import Rollout
from controlplane.tenants.actions import next_live_number
from controlplane.tenants.models import ApiKey, Installation
from tests.agent import control_planes as cp
from tests.agent.conftest import world
from tests.agent.test_kill import Process
from tests.agent.wire_client import WireClient, chat_body, post
from tests.operations.sessions import end_other_sessions

__all__ = ["world"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def fleet(world, settings, tmp_path: Path):
    """The world of the agents' tests; no session is left to stand in a restore's way."""
    settings.JOB_STORAGE, settings.USAGE_ARCHIVE = str(tmp_path / "jobs"), tmp_path / "archive"
    end_other_sessions()
    connections.close_all()
    return world


def command(name: str, *arguments: str) -> str:
    out = io.StringIO()
    call_command(name, *arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def restored(path: Path) -> dict:
    close_pools()
    with connection.cursor() as cursor:
        # The web process is this one: its threads have ended, their sessions go with the next collection of garbage.
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
    done = json.loads(command("restore", str(path), "--replace", "--json"))
    # What the worker does with the policy that is in force again.
    rollouts.run(Rollout.objects.get(revision_id=done["revision"]).pk, datetime.now(UTC))
    return done


async def serve(process: Process, requests: int) -> set[str]:
    client = await WireClient.connect(process.port)
    answers = [await client.ask(post(chat_body(max_tokens=4), key=cp.SECRET)) for _ in range(requests)]
    assert {answer.status for answer in answers} == {200}
    return {answer.headers["x-request-id"] for answer in answers}


async def told(process: Process, *path: str):
    seen = await process.health()
    for name in path:
        seen = seen[name]
    return seen


async def stored(ids: set[str]) -> bool:
    return ids <= {row[0] for row in await cp.records()}


def give(fence: int, action: str) -> None:
    """A word on the flex slot as the controller writes it."""
    slot = Slot.objects.filter(band="flex").first()
    state = "lent" if action == "lend" else "home"
    ends = datetime.now(UTC) + timedelta(seconds=600) if action == "lend" else None
    values = {"fence": fence, "action": action, "state": state, "ttl_us": 600_000_000, "expires_at": ends}
    Grant.objects.update_or_create(slot=slot, defaults=values)


@pytest.mark.parametrize("starts_again", [True, False], ids=["an epoch that is lost", "an epoch that is known"])
async def test_a_fleet_comes_back_to_a_restored_control_plane(fleet, tmp_path, starts_again):
    token, port, file = await cp.in_database(fleet.token)(), free_port(), tmp_path / "b.zip"
    up = cp.control_plane(port)
    url = await up.__aenter__()
    process = await Process.start(url, token, tmp_path / "state", "--sim-speed", "0")
    try:
        await cp.until(lambda: told(process, "epoch"))
        saved_revision = await cp.in_database(cp.push_policy)()
        await cp.until(lambda: told(process, "ready"))
        before = await serve(process, 3)
        await cp.until(lambda: stored(before))
        first_epoch = await told(process, "epoch")
        await cp.in_database(give)(6, "recall")
        await cp.until(lambda: flex(process, "home", 6))
        await cp.in_database(command)("backup", str(file))

        # After the backup: traffic, a start of the agent, more traffic, a key that is made, a push, a loan.
        after = await serve(process, 4)
        await cp.until(lambda: stored(after))
        if starts_again:
            assert await process.end() == 0
            process = await Process.start(url, "", tmp_path / "state", "--sim-speed", "0")
            await cp.until(lambda: told(process, "ready"))
        lost_key = await cp.in_database(later_key)(fleet)
        lost_revision = await cp.in_database(cp.push_policy)()
        await cp.in_database(give)(9, "lend")
        await cp.until(lambda: agent_has(process, lost_revision))
        await cp.until(lambda: flex(process, "lent", 9))
        answered = await cp.until(lambda: asked(process, lost_key))
        after |= await serve(process, 3) | answered
        await cp.until(lambda: stored(after))
        lost_epoch = await told(process, "epoch")
        assert (lost_epoch > first_epoch) == starts_again and lost_revision > saved_revision and answered

        await up.__aexit__(None, None, None)
        done = await cp.in_database(restored)(file)
        assert done["generation"] == 2 and done["revision"] > STEP
        assert not await stored(after), "what came after the backup is gone"
        during = await serve(process, 2)
        async with cp.control_plane(port):
            await cp.until(lambda: stored(after | during | before))
            await cp.until(lambda: agent_has(process, done["revision"]))
            await cp.until(lambda: flex(process, "home", 6 + STEP))
            assert await told(process, "epoch") > STEP, "above every epoch that was given out"
            assert not await asked(process, lost_key), "a key that the database does not have lets nobody in"
            again = await cp.in_database(cp.push_policy)()
            await cp.until(lambda: agent_has(process, again))
            after |= await serve(process, 1)
            await cp.until(lambda: nothing_waits(process))
            assert await process.end() == 0
    finally:
        if process.child.returncode is None:
            process.child.kill()
    ids = [row[0] for row in await cp.records()]
    assert len(ids) == len(set(ids)), "charged once"
    assert set(ids) == before | after | during
    assert await cp.quarantined() == []
    await cp.in_database(everything_adds_up)()


def later_key(fleet) -> str:
    key = ApiKey.objects.get(pk=fleet.key.pk)
    key.pk, key.public_id, key.prefix, key.name = None, "key-2", "fb_2", "second"
    Installation.objects.update(live_number=live_list.newest())  # the world's key has a number that nobody gave
    key.live_number = next_live_number()
    key.secret_hash = hashlib.sha256(b"fb_after_secret").hexdigest()
    key.save(force_insert=True)
    return "fb_after_secret"


async def asked(process: Process, secret: str) -> set[str]:
    """The id of a request under a key; none where it is refused."""
    client = await WireClient.connect(process.port)
    answer = await client.ask(post(chat_body(max_tokens=2), key=secret))
    return {answer.headers["x-request-id"]} if answer.status == 200 else set()


async def agent_has(process: Process, revision: int) -> bool:
    return await told(process, "revision") == revision


async def flex(process: Process, state: str, fence: int) -> bool:
    slots = await told(process, "slots")
    return any((slot["flex"], slot["fence"]) == (state, fence) for slot in slots.values())


async def nothing_waits(process: Process) -> bool:
    spool = (await process.health())["spool"]
    return not spool["epochs_unsealed"] and spool["reports_waiting"] <= 1


def everything_adds_up() -> None:
    usage = json.loads(command("usage", "verify", "--json"))
    assert usage["differences"] == [] and usage["records"] > 0
    assert "The chain holds" in command("audit", "verify")
    with connection.cursor() as cursor:
        cursor.execute("SELECT action FROM audit_auditentry WHERE action IN ('installation.restore', 'policy.repeat')")
        assert cursor.rowcount == 2
