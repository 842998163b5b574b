"""A control plane of real processes, agents beside it, and ways to cut the one off from the other."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from django.conf import settings
from django.db import connection

from controlplane.embedded.ports import free_port
from controlplane.jobs.models import Job
from tests.agent import control_planes as cp
from tests.agent.test_kill import Process
from tests.agent.wire_client import WireClient, chat_body, post

ROOT = Path(__file__).parents[2]
TTL_S, DRAIN_BOUND_S, CANCEL_BOUND_S = 5, 4, 10
HOME_WITHIN_S = TTL_S + DRAIN_BOUND_S + CANCEL_BOUND_S


def lend_soon(world) -> None:
    """The rules of every day with times that a test can wait for, and a backlog that wants every flex slot."""
    pool = world.pool
    pool.lend_hold_s = pool.decision_interval_s = pool.cooldown_s = 1
    pool.drain_bound_s, pool.grant_ttl_s, pool.min_hold_s, pool.return_hold_s = DRAIN_BOUND_S, TTL_S, 0, 1
    pool.spillover_per_week = 1000
    pool.safe_rate = {"entries": {"1": 1000.0, "8": 8000.0}}
    pool.save()
    world.bulk.retry_safe, world.bulk.overload, world.bulk.max_output_tokens = True, "queue", 20_000
    world.bulk.max_queue, world.bulk.stage_timeout_s = 64, 600
    world.bulk.save()
    now = datetime.now(UTC)
    Job.objects.create(
        tenant=world.tenant, workload_class=world.bulk, pool=pool, items=1_000_000, prompt_tokens=1000,
        expected_output_tokens=200, deadline=now + timedelta(hours=1), created_by="ada", created_at=now,
    )  # fmt: skip


@dataclass
class ControlPlane:
    """Web and controller as an operator starts them, on the database of the test; with a broker a worker too."""

    var: Path
    broker: str = ""
    port: int = field(default_factory=free_port)
    children: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _environment(self) -> dict[str, str]:
        own = connection.settings_dict["NAME"]
        address = urlsplit(os.environ["DATABASE_URL"])
        return {
            **os.environ,
            "DATABASE_URL": urlunsplit(address._replace(path=f"/{own}")),
            "FLEXBAND_SIGNING_KEYS": str(settings.SIGNING_KEY_DIR),
            "FLEXBAND_VAR_DIR": str(self.var),
            **({"FLEXBAND_AGENT_BROKER_URL": self.broker, "CELERY_BROKER_URL": self.broker} if self.broker else {}),
        }

    async def start(self, *names: str) -> None:
        commands = {
            "web": ["-m", "uvicorn", "controlplane.config.asgi:application", "--host", "127.0.0.1", "--port",
                    str(self.port), "--http", "controlplane.config.asgi:HttpProtocol",
                    "--ws", "controlplane.config.asgi:WebSocketProtocol",
                    "--no-access-log", "--log-level", "warning"],
            "controller": ["manage.py", "controller"],
        }  # fmt: skip
        if self.broker:
            commands["worker"] = ["-m", "celery", "--skip-checks", "-A", "controlplane.config.celery", "worker",
                                  "--pool", "threads", "--concurrency", "4", "--loglevel", "WARNING"]  # fmt: skip
        for name in names or commands:
            log = (self.var / f"{name}.log").open("ab")
            self.children[name] = await asyncio.create_subprocess_exec(
                sys.executable, *commands[name], cwd=ROOT, env=self._environment(), stdout=log, stderr=log
            )
            log.close()
        async with asyncio.timeout(60):
            while not await self._answers():
                await asyncio.sleep(0.1)

    async def _answers(self) -> bool:
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(2):
                client = await WireClient.connect(self.port)
                answer = await client.ask(b"GET /agent/v1/nothing HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                return answer.status == 404
        return False

    async def cut(self, number: int, *names: str) -> None:
        """Stops or kills children that this object started."""
        for name in names:
            self.children[name].send_signal(number)
        if number == signal.SIGKILL:
            for name in names:
                await self.children.pop(name).wait()

    async def mend(self, number: int, *names: str) -> None:
        """Undoes a cut: what was stopped goes on, what was killed is started again."""
        if number == signal.SIGKILL:
            await self.start(*names)
        else:
            await self.cut(signal.SIGCONT, *names)

    async def end(self) -> None:
        for child in self.children.values():
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()


@dataclass
class Fleet:
    """Agents as real processes with batch that is longer than any drain."""

    url: str
    folder: Path
    agents: dict[str, Process] = field(default_factory=dict)
    feeders: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self, name: str, token: str, slots: int) -> Process:
        self.agents[name] = process = await Process.start(
            self.url, token, self.folder / name, "--name", name, "--slots", str(slots), "--sim-speed", "0.5"
        )
        return process

    def feed(self, name: str, count: int) -> None:
        """So many clients with batch for an agent; what is refused or broken off is sent again."""
        self.feeders += [asyncio.create_task(self._feed(name)) for _ in range(count)]

    async def _feed(self, name: str) -> None:
        """Requests of 20,000 tokens: minutes at this speed, so a drain ends by its bound."""
        body = chat_body(max_tokens=20_000, ignore_eos=True)
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
                client = await WireClient.connect(self.agents[name].port)
                try:
                    client.send(post(body, key=cp.SECRET, headers="x-flexband-class: bulk\r\n"))
                    await client.answer(600)
                finally:
                    client.abort()
            await asyncio.sleep(0.3)

    async def flex(self) -> dict[str, dict]:
        """Name -> state, fence and number running of every flex slot, as its agent tells."""
        seen = {}
        for process in self.agents.values():
            slots = (await process.health())["slots"]
            seen |= {name: slot for name, slot in slots.items() if name.startswith("f")}
        return seen

    async def all_lent_and_busy(self) -> bool:
        seen = await self.flex()
        return len(seen) == 2 and all(slot["flex"] == "lent" and slot["running"] for slot in seen.values())

    async def end(self) -> None:
        for feeder in self.feeders:
            feeder.cancel()
        await asyncio.gather(*self.feeders, return_exceptions=True)
        for process in self.agents.values():
            if process.child.returncode is None:
                await process.end(signal.SIGKILL)


async def lent_fleet(world, plane: ControlPlane, folder) -> Fleet:
    """Two agents, a flex slot each, both lent and busy with batch."""
    await cp.in_database(lend_soon)(world)
    await plane.start()
    fleet = Fleet(plane.url, folder)
    await fleet.start("gpu-1", await cp.in_database(world.token)(), 7)
    await cp.until(lambda: told(fleet, "gpu-1", "epoch"), 60)
    await fleet.start("gpu-2", await cp.in_database(world.token)(), 1)
    await cp.until(lambda: told(fleet, "gpu-2", "epoch"), 60)
    await cp.in_database(cp.push_policy)()
    for name in fleet.agents:
        await cp.until(lambda name=name: told(fleet, name, "ready"), 60)
    fleet.feed("gpu-1", 12)
    fleet.feed("gpu-2", 4)
    return fleet


async def told(fleet: Fleet, name: str, what: str):
    return (await fleet.agents[name].health())[what]
