"""Agents for tests: real engine, real sockets, simulated GPUs; and a fleet in the database for the real pair."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop
from django.db import connection
from django.utils import timezone

from controlplane.agent import front_desk
from controlplane.exchange.catalogue import catalogue
from controlplane.exchange.database import close_pools
from controlplane.ledger.models import RateCard
from controlplane.policy.signing import ensure_keys
from tests import factories
from tests.agent import control_planes, worlds
from tests.world import World, build_world


def pytest_asyncio_loop_factories(config, item):
    """The loop that agents run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def make_agent(tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    made: list[worlds.Agent] = []

    async def make(doc=None, keys=None, speed: float = 0.0, backend=None) -> worlds.Agent:
        state_dir = tmp_path / f"agent-{len(made)}"
        state_dir.mkdir()
        keys = keys if keys is not None else [worlds.live_key(), worlds.batch_key()]
        agent = worlds.Agent(state_dir, backend or worlds.sim(speed), doc or worlds.document(), keys)
        made.append(agent)
        return await agent.listen()

    yield make
    for agent in made:
        await agent.close()


@pytest.fixture
def long_lease_wait(monkeypatch) -> None:
    """A request waits for its lease as long as a busy machine takes to grant one, where 250 ms is the promise."""
    monkeypatch.setattr(front_desk, "LEASE_WAIT_US", 60_000_000)


@pytest.fixture
def world(transactional_db, settings, tmp_path: Path) -> World:
    """Pool, slots, tenant, key with a known secret, rate cards and signing keys; no broker."""
    settings.SIGNING_KEY_DIR = tmp_path / "keys"
    settings.AGENT_BROKER_URL = ""
    catalogue.forget()
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE usage_record")
    world = build_world()
    earlier = datetime.now(UTC) - timedelta(days=1)
    RateCard.objects.update(effective_from=earlier)
    RateCard.objects.create(
        class_slug="bulk",
        model=world.pool.model,
        effective_from=earlier,
        prompt_nanos_per_mtok=500_000_000,
        cached_nanos_per_mtok=100_000_000,
        output_nanos_per_mtok=1_000_000_000,
        created_at=factories.NOW,
        created_by="finance",
    )
    control_planes.know_secret(world.key)
    ensure_keys(timezone.now())
    yield world
    close_pools()
