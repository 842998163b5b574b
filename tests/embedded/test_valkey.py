"""The embedded Redis-compatible server, with real servers: life, crash, recovery, password."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from controlplane.embedded.errors import PortTakenError
from controlplane.embedded.processes import process_alive
from controlplane.embedded.valkey import find_running_valkey, remove_valkey, start_valkey, stop_valkey

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.processes


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    remove_valkey(tmp_path)


def test_values_port_and_password_survive_a_kill(state_dir):
    first = start_valkey(state_dir)
    with redis.Redis.from_url(first.url) as client:
        client.rpush("kept", *range(2000))
        client.execute_command("WAITAOF", 1, 0, 5000)
    os.kill(first.pid, signal.SIGKILL)
    second = start_valkey(state_dir)
    assert second.pid != first.pid
    assert second.url == first.url
    with redis.Redis.from_url(second.url) as client:
        assert client.llen("kept") == 2000
    assert stop_valkey(state_dir) is True
    assert stop_valkey(state_dir) is False
    assert not process_alive(second.pid)
    assert find_running_valkey(state_dir) is None


def test_a_wrong_password_is_refused(state_dir):
    server = start_valkey(state_dir)
    for password in ("wrong", None):
        with (
            redis.Redis(port=server.port, password=password, retry=Retry(NoBackoff(), 0)) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()
    assert (state_dir / "valkey").stat().st_mode & 0o077 == 0


def test_nothing_is_evicted_and_everything_is_logged(state_dir):
    with redis.Redis.from_url(start_valkey(state_dir).url, decode_responses=True) as client:
        names = ("maxmemory-policy", "appendonly", "appendfsync", "bind")
        assert [client.config_get(name)[name] for name in names] == ["noeviction", "yes", "everysec", "127.0.0.1"]


def test_two_starts_at_once_give_one_server(state_dir):
    program = "import sys; from pathlib import Path; from controlplane.embedded.valkey import start_valkey; "
    program += "print(start_valkey(Path(sys.argv[1])).pid)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(state_dir)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(4)]
    pids = {start.communicate(timeout=30)[0].strip() for start in starts}
    assert len(pids) == 1
    assert process_alive(int(pids.pop()))


def test_a_port_that_was_asked_for_and_is_taken_is_refused(state_dir):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} is in use by another program"):
            start_valkey(state_dir, port=port)
