"""kill -9 of a real agent process under load: what was answered is recorded, what was in flight is lost once."""

import asyncio
import json
import random
import signal
import sys
from pathlib import Path

import pytest

from controlplane.budgets.models import BudgetWindow
from tests.agent import control_planes as cp
from tests.agent.wire_client import WireClient, chat_body, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


class Process:
    """`python -m controlplane.agent` as an operator starts it."""

    def __init__(self, child: asyncio.subprocess.Process, port: int, admin_port: int) -> None:
        self.child = child
        self.port = port
        self.admin_port = admin_port

    @classmethod
    async def start(cls, url: str, token: str, state_dir: Path, *more: str):
        command = [sys.executable, "-m", "controlplane.agent", *cp.arguments(url, token, state_dir, *more)]
        child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        async with asyncio.timeout(90):
            while b"listening on" not in (line := await child.stderr.readline()):
                assert line, f"the agent ended with {await child.wait()}"
        words = line.decode().split()
        ports = [int(word.rstrip(",").rsplit(":", 1)[1]) for word in words if word.startswith("127.0.0.1:")]
        process = cls(child, *ports)
        process.drain = asyncio.create_task(child.stderr.read())
        return process

    async def health(self) -> dict:
        client = await WireClient.connect(self.admin_port)
        answer = await client.ask(b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        return json.loads(answer.body)

    async def ready(self) -> bool:
        return (await self.health())["ready"]

    async def end(self, number: int = signal.SIGTERM) -> int:
        self.child.send_signal(number)
        async with asyncio.timeout(60):
            code = await self.child.wait()
        await self.drain
        return code


async def load(port: int, answered: set[str], rng: random.Random) -> None:
    """One client in a loop; an answer counts when its last byte is here."""
    while True:
        try:
            client = await WireClient.connect(port)
            while True:
                stream = rng.random() < 0.5
                answer = await client.ask(post(chat_body(max_tokens=rng.randint(1, 12), stream=stream), key=cp.SECRET))
                if answer.status == 200:
                    answered.add(answer.headers["x-request-id"])
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
            await asyncio.sleep(0.05)


async def test_nothing_answered_is_lost_and_nothing_is_counted_twice(world, tmp_path):
    rng = random.Random(7)
    token = await cp.in_database(world.token)()
    world.tenant.max_concurrency, world.pool.safe_rate = 1000, {"entries": {"1": 10_000.0, "8": 80_000.0}}
    await cp.in_database(world.tenant.save)()
    await cp.in_database(world.pool.save)()
    await cp.in_database(cp.hard_budget)(world.tenant, 10**12)
    answered: set[str] = set()
    async with cp.control_plane() as url:
        process = await Process.start(url, token, tmp_path / "state", "--sim-speed", "20")
        await cp.until(lambda: _epoch(process))
        await cp.in_database(cp.push_policy)()
        for _ in range(4):
            await cp.until(process.ready)
            clients = [asyncio.create_task(load(process.port, answered, rng)) for _ in range(6)]
            await asyncio.sleep(0.6 + rng.random())
            long = await WireClient.connect(process.port)
            long.send(post(chat_body(max_tokens=2000, ignore_eos=True), key=cp.SECRET))
            await asyncio.sleep(0.2)
            await process.end(signal.SIGKILL)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            process = await Process.start(url, "", tmp_path / "state", "--sim-speed", "20")
        await cp.until(process.ready)
        await cp.until(lambda: _nothing_waits(process))
        assert await process.end() == 0
    rows = await cp.records()
    ids = [row[0] for row in rows]
    outcomes = {row[0]: row[1] for row in rows}
    assert len(answered) > 50
    assert len(ids) == len(set(ids))
    assert answered <= set(ids), f"{len(answered - set(ids))} answered requests have no record"
    assert {outcomes[request_id] for request_id in answered} == {1}
    assert list(outcomes.values()).count(8) >= 4, "what was in flight at each kill is lost, and recorded as that"
    assert await cp.quarantined() == []
    settled, leased = await _budget()
    assert settled == await cp.charged() > 0, "what was spent just before a kill is counted by the hard budget"
    assert leased == 0


@cp.in_database
def _budget() -> tuple[int, int]:
    """Nanos settled and out on lease."""
    return BudgetWindow.objects.values_list("settled_nanos", "leased_nanos").get()


async def _epoch(process: Process) -> int:
    return (await process.health())["epoch"]


async def _nothing_waits(process: Process) -> bool:
    health = await process.health()
    return not health["spool"]["epochs_unsealed"] and health["spool"]["reports_waiting"] <= 1


async def test_mistakes_on_the_command_line_have_one_clear_line(tmp_path):
    for arguments, said in [
        (["--control-plane", "http://10.1.2.3:8000"], "use https, or --insecure"),
        (["--control-plane", "flexband"], "must be a URL"),
        (["--slots", "0"], "--slots must be 1 or more"),
        (["--listen", "9001"], "HOST:PORT"),
        (["--backend", "openai"], "needs --upstream"),
        (["--slots", "many"], "argument --slots: invalid int value: 'many'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--control-plane", "http://127.0.0.1:9", "--enrol-token", ""], "give it --enrol-token"),
    ]:
        base = cp.arguments("http://127.0.0.1:9", "t", tmp_path / "state")
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "controlplane.agent", *base, *arguments, cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            _, stderr = await child.communicate()
        lines = stderr.decode().strip().splitlines()
        assert said in lines[-1] and lines[-1].startswith("error: "), stderr
        assert len(lines) == 1 or "enrol" in said, stderr
        assert child.returncode == (1 if "enrol" in said else 2)
