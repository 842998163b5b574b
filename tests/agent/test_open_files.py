"""Clients that only connect do not take the files that the agent itself needs."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.agent.open_files import CLIENTS_MAX, UNBOUNDED, clients_max
from tests.agent import control_planes as cp
from tests.agent.test_kill import Process
from tests.agent.wire_client import WireClient, chat_body, post

ROOT = Path(__file__).parents[2]
FILES = 128


@pytest.mark.parametrize(("files", "clients"), [(1, 1), (1024, 512), (20_000, CLIENTS_MAX), (UNBOUNDED, CLIENTS_MAX)])
def test_clients_get_half_of_the_files(files, clients):
    assert clients_max(files) == clients


def test_the_soft_limit_is_raised():
    script = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 256));"
        "from controlplane.agent.open_files import raise_limit;"
        "print(raise_limit(), r.getrlimit(r.RLIMIT_NOFILE))"
    )
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["256", "(256,", "256)"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.processes
@pytest.mark.slow
async def test_idle_connections_stop_neither_reports_nor_requests(world, tmp_path, monkeypatch):
    """A process with few files and twice as many clients: it goes on to serve, to journal and to report."""
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -n {FILES}\nexec "{sys.executable}" "$@"\n')
    limited.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(limited))
    token = await cp.in_database(world.token)()
    async with cp.control_plane() as url:
        process = await Process.start(url, token, tmp_path / "state", "--sim-speed", "0")
        await cp.until(lambda: _epoch(process))
        await cp.in_database(cp.push_policy)()
        await cp.until(process.ready, 60)
        idle = [await WireClient.connect(process.port) for _ in range(2 * FILES)]
        await asyncio.sleep(1.0)
        served = await WireClient.connect(process.port)  # the idlest of the others makes room for it
        for _ in range(3):
            assert (await served.ask(post(chat_body(), key=cp.SECRET))).status == 200
        await cp.until(_three_records, 60)
        health = await process.health()
        assert health["control_plane"]["reachable"] and not health["spool"]["dropped"]
        for client in idle:
            client.abort()
        assert await process.end() == 0


async def _epoch(process: Process) -> int:
    return (await process.health())["epoch"]


async def _three_records() -> bool:
    return len(await cp.records()) == 3
