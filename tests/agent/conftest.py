"""Agents for tests: real engine, real sockets, simulated GPUs."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio

from tests.agent import worlds


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
