"""The real exchange on a real port, and real agents in front of it."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

import uvicorn
from asgiref.sync import sync_to_async
from django.db import connection

from controlplane.agent import identity
from controlplane.agent.agent_process import AgentProcess
from controlplane.agent.health import health_details
from controlplane.agent.options import parse
from controlplane.audit.actors import Actor
from controlplane.budgets.models import Budget
from controlplane.embedded.ports import free_port
from controlplane.exchange.asgi import ExchangeApplication
from controlplane.policy import live_list, rollouts
from controlplane.policy.actions import push
from tests.exchange.door import ended, nowhere

ACTOR = Actor(id=None, name="ada", role="admin")
SECRET = "fb_chat_secret"


def push_policy() -> int:
    """Everything saved is compiled, signed and open to all agents; what the worker does is done here."""
    now = datetime.now(UTC)
    revision = push(actor=ACTOR, reason="test", now=now)
    rollouts.run(revision.rollout.pk, now)
    live_list.sign_changes(now)
    return revision.number


def know_secret(key, secret: str = SECRET) -> None:
    key.secret_hash = hashlib.sha256(secret.encode()).hexdigest()
    key.live_number += 1
    key.save()


@asynccontextmanager
async def control_plane(port: int = 0):
    """The exchange behind uvicorn; yields its address."""
    application = ExchangeApplication(fallback=nowhere)
    config = uvicorn.Config(application, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.capture_signals = _no_signals  # the test runner keeps its own
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port or free_port()))
    task = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        bound.close()
        ended(application)


def _no_signals():
    return nullcontext()


def arguments(url: str, token: str, state_dir: Path, *more: str) -> list[str]:
    # fmt: off
    return ["--control-plane", url, "--enrol-token", token, "--name", "gpu-1", "--state-dir", str(state_dir),
            "--slots", "8", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *more]
    # fmt: on


@asynccontextmanager
async def running_agent(*args, **kwargs):
    """An agent as its command line starts it, on this event loop."""
    options = parse(arguments(*args, **kwargs))
    process = AgentProcess(options, identity.load(options.state_dir))
    task = asyncio.create_task(process.serve())
    try:
        yield process
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await process.end(orderly=True)


@asynccontextmanager
async def serving_agent(world, state_dir: Path):
    """An agent of `world` beside a control plane of its own, with the policy as it is now: it takes requests."""
    token = await in_database(world.token)()
    async with control_plane() as url, running_agent(url, token, state_dir, "--sim-speed", "0") as process:
        await until(lambda: process.control.epoch_now())
        await in_database(push_policy)()
        await until(lambda: process.engine.ready and process.engine.registry.keys)
        yield process


async def until(condition, within_s: float = 60.0):
    """Wait for something that is asked of the event loop or the database."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert loop.time() < end, "it did not happen in time"
        await asyncio.sleep(0.03)


in_database = sync_to_async


@in_database
def records() -> list[tuple[str, int, int, int]]:
    """(request id, outcome, output charge, output tokens) of everything stored."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT request_id::text, outcome, charge_output_nanos, output_tokens FROM usage_record")
        return cursor.fetchall()


@in_database
def quarantined() -> list[tuple[str, str]]:
    """What was set aside, and why."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT reason, payload::text FROM usage_quarantine")
        return cursor.fetchall()


@in_database
def charged() -> int:
    """Nanos of all records."""
    with connection.cursor() as cursor:
        lines = "charge_prompt_nanos + charge_cached_nanos + charge_output_nanos + charge_gpu_nanos"
        cursor.execute(f"SELECT coalesce(sum({lines}), 0) FROM usage_record")
        return int(cursor.fetchone()[0])


def hard_budget(tenant, limit_nanos: int) -> None:
    """A daily limit that cannot be overspent."""
    now = datetime.now(UTC)
    Budget.objects.create(
        tenant=tenant,
        name="acme daily",
        period="day",
        limit_nanos=limit_nanos,
        hard=True,
        created_at=now,
        updated_at=now,
    )


def health(process: AgentProcess) -> dict:
    """What the admin listener tells."""
    return health_details(process.engine, process.store, process.control)
