"""Workers that are killed leave nothing on the broker: their number over the years is not what it holds."""

import os
import subprocess
from pathlib import Path

import pytest
import redis

from controlplane.demo.settings import python
from controlplane.embedded.valkey import remove_valkey, start_valkey
from tests.chaos.job_system import wait_until

CHURN = 3


@pytest.fixture
def valkey(tmp_path):
    server = start_valkey(tmp_path, durable=False, bound_to_parent=True)
    yield server
    remove_valkey(tmp_path)


def killed_at_work(url: str, log: Path) -> None:
    argv = python("-m", "celery", "-A", "controlplane.config", "worker", "--pool", "solo", "--loglevel", "INFO")
    with log.open("wb") as out:
        worker = subprocess.Popen(argv, env={**os.environ, "CELERY_BROKER_URL": url}, stdout=out, stderr=out)
    try:
        wait_until(lambda: b" ready." in log.read_bytes(), log.read_text, 60)
    finally:
        worker.kill()
        worker.wait()


def held(broker: redis.Redis) -> dict[bytes, int]:
    """Every key with how much is in it."""
    size = {b"set": broker.scard, b"zset": broker.zcard, b"list": broker.llen, b"hash": broker.hlen}
    return {key: size[kind](key) if (kind := broker.type(key)) in size else 1 for key in broker.scan_iter()}


def test_the_broker_holds_as_much_after_many_killed_workers_as_after_one(valkey, tmp_path):
    broker = redis.Redis.from_url(valkey.url)
    killed_at_work(valkey.url, tmp_path / "0.log")
    first = held(broker)
    assert first and not [key for key in first if b"celeryev" in key or b"pidbox" in key]
    for number in range(1, CHURN):
        killed_at_work(valkey.url, tmp_path / f"{number}.log")
    assert held(broker) == first
